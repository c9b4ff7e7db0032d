#include "transports/cuda_ipc/cuda_ipc_transport.h"

#include "gpu/gpu_part.h"
#include "kvxfer/transport_kind.h"

namespace kvxfer {
namespace {

using Rails = std::vector<std::unique_ptr<Transport>>;

// A rail for each GPU of the agent.
Result<Rails> make(const RailParts& parts, const OptionValues&) {
  Rails rails;
  for (const GpuPart& part : parts.gpus) {
    Result<std::unique_ptr<CudaIpcTransport>> made =
        CudaIpcTransport::create(parts.reactor, parts.fences, *part.driver,
                                 {.device = part.device, .kernels = part.kernels, .stream = part.stream});
    if (!made.ok()) return made.status();
    rails.push_back(std::move(made).value());
  }
  return rails;
}

}  // namespace

extern const TransportKind cuda_ipc_transport;
constinit const TransportKind cuda_ipc_transport{
    .name = "cuda_ipc",
    .purpose =
        "moves pages between caches on GPUs of one host, for agents that name it among their transports",
    .remedy = "create the agent with a GPU that can run kernels",
    .options = {},
    .memory = MemoryKind::kGpu,
    .reach = Reach::kHost,
    .socket = RailSocket::kUnix,
    .rank = 0,
    .is_default = false,  // it starts CUDA, so only for agents that ask for it
    .why_off =
        [](const std::vector<GpuPart>& gpus) {
          return std::string(gpus.empty() ? "the agent has no GPU on which kernels run" : "");
        },
    .make = make,
};

}  // namespace kvxfer
