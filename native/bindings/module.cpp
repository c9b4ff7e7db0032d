// The compiled module: kvxfer/_native.pyi is its reference.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstring>

#include "bindings/command_ring.h"
#include "bindings/gil.h"
#include "bindings/lifetime.h"
#include "bindings/transfer.h"
#include "bindings/transports.h"
#include "bindings/trigger.h"
#include "core/control/sha256.h"
#include "core/control/siphash.h"
#include "core/control/wire.h"
#include "core/copy/crc32c.h"
#include "core/copy/executor.h"
#include "core/tls/kernel_channel.h"
#include "gpu/gpu_part.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

constexpr Code kCodes[] = {
    Code::kOk,
    Code::kAgain,
    Code::kInvalidArgument,
    Code::kOutOfRange,
    Code::kDuplicateBlock,
    Code::kLengthMismatch,
    Code::kLayoutMismatch,
    Code::kUnknownRegion,
    Code::kUnsupported,
    Code::kExhausted,
    Code::kNotPermitted,
    Code::kLeaseEnded,
    Code::kRegionGone,
    Code::kCancelled,
    Code::kDeadline,
    Code::kIntegrity,
    Code::kRefused,
    Code::kNoPath,
    Code::kRailFailed,
    Code::kPeerLost,
    Code::kPeerSilent,
    Code::kPeerRestarted,
    Code::kAuthFailed,
    Code::kProtocol,
    Code::kUnreachable,
    Code::kNoAnswer,
    Code::kClosed,
    Code::kForked,
    Code::kSystem,
    Code::kInternal,
};

std::string decode_frame(const nb::bytes& frame) {
  const wire::Bytes bytes = to_bytes(frame);
  const wire::Header header = take(wire::decode_header(bytes, wire::kMaxBody));
  if (bytes.size() != header.frame_nbytes())
    raise({Code::kProtocol, "the frame's length differs from the length in its header"});
  (void)take(wire::decode(header, wire::ByteSpan(bytes).subspan(wire::kHeaderNbytes, header.body_nbytes)));
  return std::string(wire::name_of(header.type));
}

}  // namespace

#define PyInit__native PyInit__native_of_nanobind  // which the function below calls
NB_MODULE(_native, m) {
  define_error(m);
  define_lifetime(m);
  m.attr("__version__") = KVXFER_VERSION;
  m.attr("BUILD") = KVXFER_BUILD;
  m.attr("COPY_KERNEL") = std::string(copy_kernel_name());
  m.attr("COPY_LOOP_NBYTES") = sizeof(CopyLoop);
  m.attr("MIN_STAGING_NBYTES") = GpuPart::kLeastStagingNbytes;
  nb::dict codes;
  for (const Code code : kCodes) codes[nb::cast(std::string(name_of(code)))] = static_cast<int>(code);
  m.attr("CODES") = codes;

  define_pool_memory(m);
  define_page_files(m);
  define_trigger(m);
  define_command_ring(m);
  define_transfer(m);
  define_transports(m);
  define_agent_core(m);
  define_raw_agent(m);
  define_execution(m);
  define_gpu(m);
  define_gpu_pool(m);
  define_gpu_stores(m);

  m.def("to_seconds", &to_seconds, "value"_a.none(), "name"_a);
  m.def("to_count", &to_count, "value"_a.none(), "name"_a, "low"_a, "high"_a, "what"_a = "");
  m.def(
      "crc32c",
      [](const nb::bytes& data) {
        return crc32c(0, reinterpret_cast<const std::byte*>(data.c_str()), data.size());
      },
      "data"_a);
  m.def("sha256", [](const nb::bytes& data) { return from_bytes(sha256({to_bytes(data)})); }, "data"_a);
  m.def(
      "siphash128",
      [](const nb::bytes& key, const nb::bytes& data) {
        SipHashKey native{};
        if (key.size() != native.size()) raise({Code::kInvalidArgument, "a SipHash key has 16 bytes"});
        std::memcpy(native.data(), key.c_str(), native.size());
        return from_bytes(siphash128(native, to_bytes(data)));
      },
      "key"_a, "data"_a);
  m.def("decode_frame", &decode_frame, "frame"_a);
  m.def("kernel_tls", [] {
    const tls::KernelTls& kernel = [&]() -> const tls::KernelTls& {
      const WithoutGil released;
      return tls::KernelTls::get();
    }();
    using Offer = tls::KernelTls::Offer;
    const char* const offer = kernel.offer == Offer::kNothing  ? "nothing"
                              : kernel.offer == Offer::kOneKey ? "one-key"
                                                               : "new-keys";
    return nb::make_tuple(offer, kernel.why);
  });
}

#undef PyInit__native

// A second interpreter that loads the module would take nanobind's types away from the first.
extern "C" NB_EXPORT PyObject* PyInit__native() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__native_of_nanobind();
  PyErr_SetString(PyExc_ImportError,
                  "kvxfer works only in a process's main interpreter, whose threads and libraries it shares: "
                  "start a process instead of a sub-interpreter");
  return nullptr;
}

}  // namespace kvxfer::python
