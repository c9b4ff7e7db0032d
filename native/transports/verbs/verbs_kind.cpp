#include "kvxfer/transport_kind.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "transports/verbs/rail_choice.h"
#include "transports/verbs/verbs_transport.h"

namespace kvxfer {
namespace {

using Rails = std::vector<std::unique_ptr<Transport>>;

constexpr TransportOption kOptions[] = {
    {"devices", "names of RDMA devices, separated by commas; empty: all with an active port", ""},
    {"queue_pairs", "queue pairs per rail and peer; the lower number of both ends counts", std::int64_t{4}, 1,
     verbs::kMostPairs},
    {"send_queue", "requests in flight per queue pair", std::int64_t{256}, 16, 8192},
    {"chain", "requests posted with one doorbell", std::int64_t{verbs::kMostChained}, 1, verbs::kMostChained},
    {"scatter", "entries of a request's scatter list, up to what the device supports",
     std::int64_t{verbs::kMostEntries}, 1, verbs::kMostEntries},
    {"reads", "READs in flight per queue pair; 0: as many as the device supports", std::int64_t{0}, 0, 255},
    {"gid_index", "index of the port's GID in its table; -1: chosen by the rail", std::int64_t{-1}, -1, 255},
    {"pkey_index", "index of the partition's key in the port's table", std::int64_t{0}, 0, 65535},
    {"service_level", "service level of packets on InfiniBand", std::int64_t{0}, 0, 15},
    {"traffic_class", "traffic class of packets on RoCE and between subnets", std::int64_t{0}, 0, 255},
    {"classes",
     "classes of priorities with their own queue pairs, the same at both ends, e.g. \"0-63: pairs=2 "
     "traffic_class=104; 64-255: pairs=2 traffic_class=26 service_level=1 rate_gbps=100\"; a key that a "
     "class does not name has the general setting; empty: one class",
     ""},
    {"hop_limit", "routers that a packet may pass", std::int64_t{64}, 1, 255},
    {"mtu", "largest packet in bytes; 0: the port's setting", std::int64_t{0}, 0, 4096},
    {"timeout", "time to wait for an acknowledgement: 4.096 us times two to this power", std::int64_t{14}, 1,
     31},
    {"retries", "how often a packet is sent again before the rail is lost", std::int64_t{6}, 0, 6},
    {"ways",
     "how pages come: read (this end READs them), or write (the source WRITEs them, if it has this setting "
     "too); such peers can then write all of this end's regions",
     "read"},
    {"relaxed_ordering", "lets a device write pages in any order, if it supports that", true},
};

Result<verbs::Options> options_of(const OptionValues& values) {
  verbs::Options options;
  const std::string& ways = values.text("ways");
  if (ways != "read" && ways != "write")
    return Status(Code::kInvalidArgument, "verbs.ways is \"" + ways + "\": it must be read or write");
  options.writes = ways == "write";
  options.devices = values.text("devices");
  options.num_pairs = static_cast<std::uint32_t>(values.number("queue_pairs"));
  options.num_requests = static_cast<std::uint32_t>(values.number("send_queue"));
  options.num_chained = static_cast<std::uint32_t>(values.number("chain"));
  options.num_entries = static_cast<std::uint32_t>(values.number("scatter"));
  options.num_reads = static_cast<std::uint32_t>(values.number("reads"));
  options.gid_index = static_cast<int>(values.number("gid_index"));
  options.pkey_index = static_cast<std::uint16_t>(values.number("pkey_index"));
  options.service_level = static_cast<std::uint8_t>(values.number("service_level"));
  options.traffic_class = static_cast<std::uint8_t>(values.number("traffic_class"));
  Result<std::vector<verbs::PairClass>> classes =
      verbs::parse_classes(values.text("classes"), options.only_class());
  if (!classes.ok()) return classes.status();
  options.classes = std::move(classes).value();
  options.hop_limit = static_cast<std::uint8_t>(values.number("hop_limit"));
  options.mtu = static_cast<std::uint32_t>(values.number("mtu"));
  options.timeout = static_cast<std::uint8_t>(values.number("timeout"));
  options.num_retries = static_cast<std::uint8_t>(values.number("retries"));
  options.relaxed_ordering = values.flag("relaxed_ordering");
  return options;
}

// A rail for each active port, those near the agent's GPU first. Which ports are near its host memory depends
// on the region.
Result<Rails> make(const RailParts& parts, const OptionValues& values) {
  const Result<const verbs::Library*> library = verbs::Library::load();
  if (!library.ok()) return library.status();
  const Result<verbs::Options> wished = options_of(values);
  if (!wished.ok()) return wished.status();
  const verbs::Options& options = wished.value();
  const auto devices = verbs::Device::open_all(*library.value(), options);
  if (!devices.ok()) return devices.status();
  std::shared_ptr<const verbs::GpuMemory> gpu;
  if (!parts.gpus.empty()) {
    auto made = verbs::GpuMemory::create(parts.gpus.front());
    if (!made.ok()) return made.status();
    gpu = std::move(made).value();
  }
  std::vector<verbs::PortName> opened;
  for (const std::shared_ptr<verbs::Device>& device : devices.value())
    opened.push_back({device->device_name(), device->port()});
  const verbs::Topology topology = verbs::read_topology();
  const verbs::RailChoice choice = verbs::rails_for(
      topology, gpu == nullptr ? verbs::MemoryPlace() : verbs::MemoryPlace::on_gpu(gpu->pci_address()));
  const bool are_named = !options.devices.empty();
  Rails rails;
  for (const verbs::PortUse& use : verbs::ports_to_use(choice, opened, are_named)) {
    MemoryPlaces far;
    if (!use.is_near) far.add(gpu == nullptr ? MemoryKind::kHost : MemoryKind::kGpu);
    if (!are_named)
      for (const int node : verbs::nodes_far_from(topology, opened[use.index]))
        far.add(MemoryKind::kHost, node);
    Result<std::unique_ptr<VerbsTransport>> made =
        VerbsTransport::create(parts.reactor, parts.fences, devices.value()[use.index], gpu, far);
    if (!made.ok()) return made.status();
    rails.push_back(std::move(made).value());
  }
  if (rails.empty()) return Status(Code::kUnsupported, verbs::why_no_rail(topology));
  return rails;
}

}  // namespace

extern const TransportKind verbs_transport;
constinit const TransportKind verbs_transport{
    .name = "verbs",
    .purpose = "moves pages between hosts by RDMA: the destination's NIC reads the source's memory",
    .remedy =
        "it needs an RDMA device (InfiniBand, RoCE), libibverbs with the device's driver, and the right to "
        "lock memory: ulimit -l unlimited",
    .options = kOptions,
    .memory = MemoryKind::kHost,
    .reach = Reach::kNetwork,
    .socket = RailSocket::kTcp,
    .rank = 2,
    .is_partial = true,  // memory that cannot be registered and converting programs need another rail
    .is_default = false,  // only for agents that name it, until it has run on more than Soft-RoCE
    .why_off = [](const std::vector<GpuPart>&) { return verbs::Library::why_off(); },
    .describe = [] { return verbs::describe(verbs::read_topology()); },
    .make = make,
};

}  // namespace kvxfer
