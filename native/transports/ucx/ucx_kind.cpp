#include <utility>

#include "kvxfer/transport_kind.h"
#include "transports/fabric/fabric_rail.h"
#include "transports/ucx/ucx_fabric.h"

namespace kvxfer {
namespace {

using Rails = std::vector<std::unique_ptr<Transport>>;

constexpr TransportOption kOptions[] = {
    {"library", "file of libucp; empty: the system's, else that of the wheel libucx", ""},
    {"transports", "UCX's transports, separated by commas, as UCX_TLS; empty: as the environment says", ""},
    {"devices", "devices, separated by commas, as UCX_NET_DEVICES; empty: as the environment says", ""},
    {"config", "more of UCX's settings, without the prefix UCX_, as \"MAX_RMA_RAILS=2 RC_RX_QUEUE_LEN=1024\"",
     ""},
    {"way",
     "how pages come: read, send (UCX then serves no peer's reads), write (over RDMA, where both ends say "
     "so), "
     "or empty: read if UCX's transports read memory by themselves, as over RDMA; else send",
     ""},
    {"requests", "reads, writes and sends under way for each peer, at most", std::int64_t{64}, 1, 4096},
};

Result<Rails> make(const RailParts& parts, const OptionValues& values) {
  ucx::Options options;
  options.library = values.text("library");
  options.transports = values.text("transports");
  options.devices = values.text("devices");
  options.config = values.text("config");
  options.num_requests = static_cast<std::uint32_t>(values.number("requests"));
  const std::string& way = values.text("way");
  if (way == "read") options.way = fabric::Way::kRead;
  if (way == "send") options.way = fabric::Way::kSend;
  if (way == "write") options.way = fabric::Way::kWrite;
  if (way != "" && !options.way)
    return Status(Code::kInvalidArgument, "ucx.way is \"" + way + "\": use read, send, write or nothing");
  const Result<const ucx::Library*> library = ucx::Library::load(options.library);
  if (!library.ok()) return library.status();
  if (!parts.gpus.empty()) {
    auto gpu = fabric::GpuContext::create(parts.gpus.front());
    if (!gpu.ok()) return gpu.status();
    options.gpu = std::move(gpu).value();
  }
  auto fabric = ucx::UcxFabric::create(*library.value(), options);
  if (!fabric.ok()) return fabric.status();
  auto made = FabricRail::create(parts.reactor, parts.fences, std::move(fabric).value());
  if (!made.ok()) return made.status();
  Rails rails;
  rails.push_back(std::move(made).value());
  return rails;
}

}  // namespace

extern const TransportKind ucx_transport;
constinit const TransportKind ucx_transport{
    .name = "ucx",
    .purpose = "moves pages between hosts through UCX, over the UCX transports that both hosts have",
    .remedy = "it needs UCX's libucp, 1.12 or newer: the package ucx or libucx0, or the wheel libucx-cu12",
    .options = kOptions,
    .memory = MemoryKind::kHost,
    .reach = Reach::kNetwork,
    .socket = RailSocket::kTcp,
    .rank = 3,
    .is_partial = true,  // converting programs need another rail
    .is_default = false,  // only for agents that name it
    // Nothing is opened before an agent names it.
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .describe = [] { return std::vector<std::string>{ucx::Library::describe()}; },
    .make = make,
};

}  // namespace kvxfer
