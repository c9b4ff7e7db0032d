#include "transports/verbs/topology.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "transports/verbs/sysfs.h"

namespace kvxfer::verbs {
namespace {

// PCI numbers that identify NVIDIA GPUs. A server's GPUs are 3D controllers, a workstation's are VGA
// controllers.
constexpr std::int64_t kNvidia = 0x10de;
constexpr std::int64_t kVga = 0x0300, k3d = 0x0302;

// Takes a hexadecimal number off the front of the text, with the separator that must follow it ('\0': the
// end).
bool take_hex(std::string_view& text, char separator, unsigned& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, 16);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (separator == '\0') return text.empty();
  if (!text.starts_with(separator)) return false;
  text.remove_prefix(1);
  return true;
}

struct PciNumbers { unsigned domain, bus, device, function; };

bool parse_address(std::string_view text, PciNumbers& numbers) {
  return take_hex(text, ':', numbers.domain) && take_hex(text, ':', numbers.bus) &&
         take_hex(text, '.', numbers.device) && take_hex(text, '\0', numbers.function);
}

bool is_address(std::string_view text) {
  PciNumbers unused;
  return parse_address(text, unused);
}

// Matches "pci0000:15". Behind Hyper-V and volume management devices the bridge does not stand at the root of
// the tree.
bool is_host_bridge(std::string_view text) {
  unsigned unused;
  if (!text.starts_with("pci")) return false;
  text.remove_prefix(3);
  return take_hex(text, ':', unused) && take_hex(text, '\0', unused);
}

// `parts` may continue behind the device, for a sub-function or a net device.
PciPath pci_path(const std::vector<std::string>& parts) {
  PciPath path;
  for (const std::string& part : parts) {
    if (is_host_bridge(part)) {
      path = {part, {}};
    } else if (!path.host_bridge.empty() && is_address(part)) {
      path.functions.push_back(part);
    }
  }
  if (!path.known()) path.host_bridge.clear();
  return path;
}

std::vector<NumaNode> read_nodes(const std::string& root) {
  std::vector<NumaNode> nodes;
  const std::string folder = root + "/devices/system/node/";
  for (const std::string& name : sysfs::names_in(folder)) {
    const auto number = name.starts_with("node") ? sysfs::index_of(name.substr(4)) : std::nullopt;
    if (!number) continue;
    NumaNode node;
    node.number = *number;
    const std::string distances = sysfs::read_line(folder + name + "/distance");
    const char* at = distances.c_str();
    for (char* after = nullptr;; at = after) {
      const long distance = std::strtol(at, &after, 10);
      if (after == at) break;
      node.distances.push_back(static_cast<int>(std::clamp(distance, 0L, long{Topology::kFar})));
    }
    nodes.push_back(std::move(node));
  }
  return nodes;
}

// Reads one machine.
class Reader {
 public:
  explicit Reader(const std::string& root) : root_(root), nodes_(read_nodes(root)) {}

  Topology read(std::span<const std::string> gpus) {
    Topology topology;
    for (const std::string& name : sysfs::names_in(root_ + "/class/infiniband"))
      topology.nics.push_back(read_nic(name));
    if (gpus.empty()) {
      for (const std::string& address : sysfs::names_in(root_ + "/bus/pci/devices"))
        if (is_gpu(address)) topology.gpus.push_back({address, place_of(pci_device(address))});
    } else {
      for (const std::string& text : gpus) {
        const std::string address = pci_address(text);
        topology.gpus.push_back({address, place_of(pci_device(address))});
      }
      std::sort(topology.gpus.begin(), topology.gpus.end(), [](const Gpu& left, const Gpu& right) {
        return sysfs::natural_less(left.address, right.address);
      });
    }
    topology.nodes = std::move(nodes_);
    return topology;
  }

 private:
  std::string pci_device(const std::string& address) const { return root_ + "/bus/pci/devices/" + address; }

  std::string net(const std::string& device) const { return root_ + "/class/net/" + device; }

  bool is_gpu(const std::string& address) const {
    const auto vendor = sysfs::read_number(pci_device(address) + "/vendor", 0);
    // With the programming interface.
    const auto kind = sysfs::read_number(pci_device(address) + "/class", 0);
    return vendor == kNvidia && kind && (*kind >> 8 == kVga || *kind >> 8 == k3d);
  }

  Place place_of(const std::string& folder) const {
    Place place{pci_path(sysfs::resolve(folder)), kNoNode};
    const std::int64_t node = sysfs::read_number(folder + "/numa_node").value_or(kNoNode);
    if (node >= 0 && node <= INT16_MAX) place.numa_node = static_cast<int>(node);
    // Firmware that reports nothing leaves -1, even on a machine with one node, where nothing needs
    // reporting.
    if (place.numa_node == kNoNode && place.pci.known() && nodes_.size() == 1)
      place.numa_node = nodes_.front().number;
    return place;
  }

  // Soft-RoCE names its underlying net device.
  static bool is_software(const std::string& folder) {
    const std::vector<std::string> parts = sysfs::resolve(folder);
    const std::string_view virtual_devices[] = {"devices", "virtual"};
    return sysfs::exists(folder + "/parent") ||
           std::search(parts.begin(), parts.end(), std::begin(virtual_devices), std::end(virtual_devices)) !=
               parts.end();
  }

  Nic read_nic(const std::string& name) const {
    const std::string folder = root_ + "/class/infiniband/" + name;
    Nic nic;
    nic.name = name;
    nic.place = place_of(folder + "/device");
    nic.is_software = is_software(folder);
    if (nic.is_software) nic.place = {};  // some kernels give it the place of its net device
    nic.node_type = sysfs::read_line(folder + "/node_type");
    nic.physical_function = pci_path(sysfs::resolve(folder + "/device/physfn")).address();
    for (const std::string& number : sysfs::names_in(folder + "/ports"))
      if (const auto index = sysfs::index_of(number); index && *index > 0)
        nic.ports.push_back(read_port(folder, *index));
    return nic;
  }

  Port read_port(const std::string& device, int number) const {
    const std::string folder = device + "/ports/" + std::to_string(number);
    Port port;
    port.number = number;
    port.state_words = sysfs::read_line(folder + "/state");
    const std::int64_t state = sysfs::read_number(folder + "/state").value_or(0);
    // State 5 is ACTIVE_DEFER: the link is failing.
    if (state > 0) port.state = state <= 4 ? static_cast<PortState>(state) : PortState::kDown;
    port.physical_words = sysfs::read_line(folder + "/phys_state");
    const std::string layer = sysfs::read_line(folder + "/link_layer");
    if (layer == "InfiniBand") port.link_layer = LinkLayer::kInfiniBand;
    if (layer == "Ethernet") port.link_layer = LinkLayer::kEthernet;
    port.rate_gbps = std::max(0.0, std::strtod(sysfs::read_line(folder + "/rate").c_str(), nullptr));
    port.net_device = net_device_of(device, folder, port);
    port.bond = bond_of(port.net_device);
    return port;
  }

  // The GID table names the net devices that have addresses, a bond or a VLAN among them. The PCI device
  // lists the port's own net device beside those of switched virtual functions.
  std::string net_device_of(const std::string& device, const std::string& folder, const Port& port) const {
    std::string named;
    if (port.link_layer != LinkLayer::kInfiniBand) {
      for (const std::string& index : sysfs::names_in(folder + "/gid_attrs/ndevs"))
        if (named = sysfs::read_line(folder + "/gid_attrs/ndevs/" + index); !named.empty()) break;
    }
    std::vector<std::string> own;
    for (const std::string& name : sysfs::names_in(device + "/device/net")) {
      const std::string path = device + "/device/net/" + name;
      if (sysfs::read_number(path + "/dev_port").value_or(port.number - 1) != port.number - 1) continue;
      if (sysfs::read_line(path + "/phys_port_name").find("pf") == std::string::npos) own.push_back(name);
    }
    if (std::find(own.begin(), own.end(), named) != own.end()) return named;
    if (!own.empty()) return own.front();
    return named.empty() ? sysfs::read_line(device + "/parent") : named;  // Soft-RoCE has this file
  }

  Bond bond_of(const std::string& net_device) const {
    Bond bond;
    if (net_device.empty()) return bond;
    const std::vector<std::string> master = sysfs::resolve(net(net_device) + "/master");
    if (master.empty()) return bond;
    const std::string folder = net(master.back()) + "/bonding";
    // A bridge, a team, or a virtual machine's synthetic device has no such folder.
    if (!sysfs::exists(folder)) return bond;
    bond.name = master.back();
    const std::string mode = sysfs::read_line(folder + "/mode");  // "active-backup 1"
    bond.mode = mode.substr(0, mode.find(' '));
    bond.active_member = sysfs::read_line(folder + "/active_slave");
    const std::string members = sysfs::read_line(folder + "/slaves");
    for (std::size_t from = 0; from < members.size();) {
      const std::size_t end = std::min(members.find(' ', from), members.size());
      const PciPath path = pci_path(sysfs::resolve(net(members.substr(from, end - from)) + "/device"));
      if (end > from) bond.member_addresses.emplace_back(path.address());
      from = end + 1;
    }
    return bond;
  }

  const std::string root_;
  std::vector<NumaNode> nodes_;
};

}  // namespace

std::string_view name_of(Distance distance) noexcept {
  switch (distance) {
    case Distance::kPix: return "PIX";
    case Distance::kPxb: return "PXB";
    case Distance::kPhb: return "PHB";
    case Distance::kNode: return "NODE";
    case Distance::kSys: return "SYS";
    case Distance::kUnknown: break;
  }
  return "unknown";
}

std::string_view meaning_of(Distance distance) noexcept {
  switch (distance) {
    case Distance::kPix: return "at most one PCIe switch";
    case Distance::kPxb: return "several PCIe switches and no host bridge";
    case Distance::kPhb: return "a PCIe host bridge";
    case Distance::kNode: return "the interconnect within a NUMA node";
    case Distance::kSys: return "the interconnect between NUMA nodes";
    case Distance::kUnknown: break;
  }
  return "what cannot be read";
}

const Gpu* Topology::find_gpu(std::string_view address) const {
  const std::string wanted = pci_address(address);
  const auto found =
      std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& gpu) { return gpu.address == wanted; });
  return found == gpus.end() ? nullptr : &*found;
}

int Topology::node_distance(int from, int to) const noexcept {
  if (from == to) return 10;
  for (const NumaNode& node : nodes) {
    if (node.number != from) continue;
    for (std::size_t i = 0; i < nodes.size() && i < node.distances.size(); ++i)
      if (nodes[i].number == to) return node.distances[i];
  }
  return kFar;
}

Topology read_topology(const std::string& root, std::span<const std::string> gpus) {
  return Reader(root).read(gpus);
}

std::string pci_address(std::string_view text) {
  PciNumbers numbers;
  if (!parse_address(text, numbers)) return std::string(text);
  char words[40];
  std::snprintf(words, sizeof(words), "%04x:%02x:%02x.%x", numbers.domain, numbers.bus, numbers.device,
                numbers.function);
  return words;
}

Distance distance_between(const Place& one, const Place& other) {
  if (one.pci.known() && other.pci.known() && one.pci.host_bridge == other.pci.host_bridge) {
    const std::vector<std::string>&left = one.pci.functions, &right = other.pci.functions;
    std::size_t num_common = 0;
    while (num_common < left.size() && num_common < right.size() && left[num_common] == right[num_common])
      ++num_common;
    if (num_common == 0) return Distance::kPhb;
    // A switch has an upstream port, and a downstream port for each device. So two devices with one switch
    // between them share the switch's upstream port, and at most one bridge each is its own.
    const std::size_t num_devices = 1;
    const bool is_one_switch =
        left.size() <= num_common + num_devices + 1 && right.size() <= num_common + num_devices + 1;
    return is_one_switch ? Distance::kPix : Distance::kPxb;
  }
  if (one.numa_node == kNoNode || other.numa_node == kNoNode) return Distance::kUnknown;
  return one.numa_node == other.numa_node ? Distance::kNode : Distance::kSys;
}

}  // namespace kvxfer::verbs
