#include "bindings/runtime_options.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <utility>

#include "bindings/convert.h"
#include "bindings/lifetime.h"
#include "bindings/transports.h"

namespace kvxfer::python {
namespace {

constexpr std::uint32_t kMostCopyThreads = 64;

std::uint32_t to_num_ctas(nb::handle number) {
  const auto num = nb::cast<std::uint32_t>(number);
  if (num < 1 || num > 65535) raise({Code::kInvalidArgument, "a kernel has 1 to 65535 CTAs"});
  return num;
}

GpuPart to_gpu_part(const nb::dict& described) {
  GpuPart part;
  part.device = nb::cast<int>(described["device"]);
  const auto kernels = nb::cast<std::array<std::uint64_t, gpu::kNumKernels>>(described["kernels"]);
  for (std::size_t k = 0; k < gpu::kNumKernels; ++k)
    part.kernels.functions[k] = reinterpret_cast<gpu::Function>(kernels[k]);
  part.keepalive = held(described["owner"]);
  part.stream.num_ctas = to_num_ctas(described["ipc_ctas"]);
  part.staging_ctas = to_num_ctas(described["staging_ctas"]);
  part.staging_nbytes = nb::cast<std::uint64_t>(described["staging_nbytes"]);
  part.stream.calibration = to_calibration(described["way_samples"]);
  part.driver = take(gpu::Driver::load());
  return part;
}

}  // namespace

// A Python object that the core keeps alive; any thread may release it.
std::shared_ptr<const void> held(nb::object owner) {
  return {new nb::object(std::move(owner)),
          [](const void* object) { destroy_with_gil(static_cast<const nb::object*>(object)); }};
}

tls::CredentialFiles to_credential_files(const nb::dict& files) {
  const auto kernel = to_text(files["kernel"], "Tls.kernel");
  using Use = tls::KernelUse;
  return {to_text(files["certificate"], "Tls.certificate"),
          to_text(files["key"], "Tls.key"),
          to_text(files["authorities"], "Tls.authorities"),
          to_text(files["revoked"], "Tls.revoked"),
          to_texts(files["allow"], "Tls.allow"),
          kernel == "always"  ? Use::kAlways
          : kernel == "never" ? Use::kNever
                              : Use::kAuto};
}

// Reads files, so it lets other threads run meanwhile.
std::shared_ptr<const tls::Credentials> load_credentials(const tls::CredentialFiles& files) {
  auto loaded = [&] {
    const WithoutGil released;
    return tls::Credentials::load(files);
  }();
  return take(std::move(loaded));
}

std::string to_secret(nb::handle given) {
  const auto secret = nb::cast<nb::bytes>(given);
  return {secret.c_str(), secret.size()};
}

RuntimeOptions to_runtime_options(const std::string& name, const nb::dict& options) {
  RuntimeOptions native;
  native.name = name;
  native.listen = to_text(options["listen"], "option listen");
  native.secret = to_secret(options["secret"]);
  native.second_secret = to_secret(options["second_secret"]);
  native.secret_file = to_text(options["secret_file"], "option secret_file");
  native.user_secret = to_secret(options["user_secret"]);
  if (options.contains("tls")) {
    native.credential_files = to_credential_files(nb::cast<nb::dict>(options["tls"]));
    native.credentials = load_credentials(native.credential_files);
  }
  if (native.credentials == nullptr && native.secret.empty() && native.user_secret.empty())
    raise({Code::kInvalidArgument, "an agent needs a secret, its own or its user's"});
  native.shares_with_all = to_text(options["shm_peers"], "option shm_peers") == "secret";
  native.transports = to_texts(options["transports"], "option transports");
  native.require = to_texts(options["require"], "option require");
  native.transport_options = to_named_options(nb::cast<nb::dict>(options["transport_options"]));
  for (const nb::handle part : nb::cast<nb::list>(options["gpus"]))
    native.gpus.push_back(to_gpu_part(nb::cast<nb::dict>(part)));
  native.silent_ns = to_ns(nb::cast<double>(options["silent_timeout_s"]));
  native.heartbeat_ns = to_ns(nb::cast<double>(options["heartbeat_interval_s"]));
  native.handshake_ns = to_ns(nb::cast<double>(options["handshake_timeout_s"]));
  native.lease_margin_ns = to_ns(nb::cast<double>(options["lease_margin_s"]));
  native.spin_ns = Time{nb::cast<std::uint32_t>(options["spin_us"])} * 1000;
  native.max_transfers_per_peer = nb::cast<std::uint32_t>(options["max_transfers_per_peer"]);
  native.eager_nbytes = nb::cast<std::uint32_t>(options["eager_nbytes"]);
  native.copy_threads = nb::cast<std::uint32_t>(options["copy_threads"]);
  if (native.copy_threads < 1 || native.copy_threads > kMostCopyThreads)
    raise({Code::kInvalidArgument, "an agent copies with 1 to 64 threads"});
  native.faults = to_text(options["faults"], "option faults");
  native.meter_gate = nb::cast<bool>(options["meter_gate"]);
  if (name.empty() || name.size() > wire::kMaxName)
    raise({Code::kInvalidArgument, "an agent's name has 1 to " + std::to_string(wire::kMaxName) + " bytes"});
  return native;
}

}  // namespace kvxfer::python
