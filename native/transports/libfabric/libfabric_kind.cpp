#include <utility>

#include "kvxfer/transport_kind.h"
#include "transports/fabric/fabric_rail.h"
#include "transports/libfabric/libfabric_fabric.h"

namespace kvxfer {
namespace {

using Rails = std::vector<std::unique_ptr<Transport>>;

constexpr TransportOption kOptions[] = {
    {"library", "file of libfabric; empty: the system's", ""},
    {"provider",
     "libfabric's provider, as `fi_info` names it; empty: the first that is there of efa, cxi, "
     "verbs;ofi_rxm, "
     "net (what releases before 1.18 call their lean tcp) and tcp",
     ""},
    {"devices", "domains, separated by commas, as `fi_info` names them; empty: all of the provider's", ""},
    {"way",
     "how pages come: read, or write where both ends say so (a peer may then write into every region of this "
     "agent)",
     "read"},
    {"requests", "reads and writes under way for each peer, at most", std::int64_t{64}, 1, 4096},
};

Result<Rails> make(const RailParts& parts, const OptionValues& values) {
  libfabric::Options options;
  options.library = values.text("library");
  options.provider = values.text("provider");
  options.devices = values.text("devices");
  options.num_requests = static_cast<std::uint32_t>(values.number("requests"));
  const std::string& way = values.text("way");
  if (way != "read" && way != "write")
    return Status(Code::kInvalidArgument, "libfabric.way is \"" + way + "\": use read or write");
  options.writes = way == "write";
  if (!parts.gpus.empty()) {
    auto gpu = fabric::GpuContext::create(parts.gpus.front());
    if (!gpu.ok()) return gpu.status();
    options.gpu = std::move(gpu).value();
  }
  if (options.provider == "shm")
    return Status(
        Code::kUnsupported,
        "libfabric's provider shm is refused: a reader that is killed or stopped within a read keeps a "
        "lock in the source's memory, and the source then spins forever. Use kvxfer's transport shm");
  const Result<const libfabric::Library*> library = libfabric::Library::load(options.library);
  if (!library.ok()) return library.status();
  auto fabrics = libfabric::LibfabricFabric::create(*library.value(), options);
  if (!fabrics.ok()) return fabrics.status();
  Rails rails;
  for (auto& fabric : fabrics.value()) {
    auto made = FabricRail::create(parts.reactor, parts.fences, std::move(fabric));
    if (!made.ok()) return made.status();
    rails.push_back(std::move(made).value());
  }
  return rails;
}

}  // namespace

extern const TransportKind libfabric_transport;
constinit const TransportKind libfabric_transport{
    .name = "libfabric",
    .purpose = "moves pages between hosts through libfabric: EFA on AWS, Slingshot, verbs, tcp",
    .remedy =
        "it needs libfabric, 1.17 or newer: the package libfabric or libfabric1, or AWS's EFA installer",
    .options = kOptions,
    .memory = MemoryKind::kHost,
    .reach = Reach::kNetwork,
    .socket = RailSocket::kTcp,
    .rank = 3,
    .is_partial = true,  // converting programs need another rail
    .is_default = false,  // only for agents that name it
    // Nothing is opened before an agent names it.
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .describe = [] { return std::vector<std::string>{libfabric::Library::describe()}; },
    .make = make,
};

}  // namespace kvxfer
