#include "transports/verbs/rail_choice.h"

#include <algorithm>
#include <tuple>

#include "transports/verbs/sysfs.h"

namespace kvxfer::verbs {
namespace {

bool is_channel_adapter(const Nic& nic) { return nic.node_type.empty() || nic.node_type.starts_with("1:"); }

// Judges the port by itself, without its bond and its siblings.
std::string why_not_up(const Port& port) {
  if (port.state == PortState::kActive || port.state == PortState::kUnknown) return {};
  std::string words = "its port is not active: " + port.state_words;
  if (!port.physical_words.empty()) words += ", " + port.physical_words;
  if (port.link_layer != LinkLayer::kEthernet) {
    if (port.state == PortState::kInit || port.state == PortState::kArmed)
      return words + "; no subnet manager has configured it, start one (opensm, or the switch's)";
    return words + "; check its cable and the device at the other end";
  }
  const std::string device = port.net_device.empty() ? "its net device" : port.net_device;
  return words + "; check its cable, and bring it up: ip link set " + device + " up";
}

// "0000:5e:00.0" and "0000:5e:00.1" are one card.
std::string_view card_of(std::string_view address) { return address.substr(0, address.rfind('.')); }

// Decides which ports are rails at all.
class Judge {
 public:
  explicit Judge(const Topology& topology) : topology_(topology) {}

  // "": the port is a rail.
  std::string why_not(const Nic& nic, const Port& port) const {
    if (std::string why = why_not_itself(nic, port); !why.empty()) return why;
    return why_not_beside_physical(nic);
  }

 private:
  std::string why_not_itself(const Nic& nic, const Port& port) const {
    if (!is_channel_adapter(nic)) {
      const bool is_iwarp = nic.node_type.starts_with("4:");
      return "agents cannot connect its queue pairs themselves (node type " + nic.node_type +
             (is_iwarp ? ", iWARP, which connects by rdma_cm alone)" : ")");
    }
    if (std::string why = why_not_up(port); !why.empty()) return why;
    return why_not_in_bond(nic, port);
  }

  // A card whose two ports are bonded may have one device for both (RoCE LAG); that device is a rail. Else
  // each port has a device, and the switch may send packets for the bond's address to the port whose device
  // does not know the queue pair. Where one port is active and the others wait, the switch has no choice, so
  // the active one is a rail.
  std::string why_not_in_bond(const Nic& nic, const Port& port) const {
    const Bond& bond = port.bond;
    if (bond.name.empty() || bond.mode.empty()) return {};
    const std::string_view own = nic.place.pci.address();
    const bool is_one_card =
        std::all_of(bond.member_addresses.begin(), bond.member_addresses.end(),
                    [&](const std::string& address) { return card_of(address) == card_of(own); });
    const auto num_devices =
        std::count_if(topology_.nics.begin(), topology_.nics.end(), [&](const Nic& other) {
          return std::count(bond.member_addresses.begin(), bond.member_addresses.end(),
                            other.place.pci.address()) != 0;
        });
    if (is_one_card && num_devices == 1) return {};
    const std::string part = "its net device " + port.net_device + " is a member of " + bond.name;
    if (bond.mode != "active-backup")
      return part + " (mode " + bond.mode +
             "), whose bytes may arrive at another member; take it out of the bond, or bond the ports of one "
             "card alone";
    if (bond.active_member == port.net_device) return {};
    return part + ", which uses " + (bond.active_member.empty() ? "another member" : bond.active_member) +
           " now";
  }

  // The functions share a wire; two rails would not make it wider.
  std::string why_not_beside_physical(const Nic& nic) const {
    if (nic.physical_function.empty()) return {};
    for (const Nic& other : topology_.nics) {
      if (other.place.pci.address() != nic.physical_function) continue;
      for (const Port& port : other.ports)
        if (why_not_itself(other, port).empty())
          return "it is a virtual function of " + other.name + ", which is a rail itself: they share a wire";
    }
    return {};
  }

  const Topology& topology_;
};

// A port that is a rail, and how far it is from some memory.
struct Candidate {
  const Nic* nic;
  const Port* port;
  Distance distance;
  int node_distance;

  auto nearness() const { return std::tuple(port->state == PortState::kUnknown, distance, node_distance); }
  bool operator<(const Candidate& other) const {
    if (nearness() != other.nearness()) return nearness() < other.nearness();
    if (nic != other.nic) return sysfs::natural_less(nic->name, other.nic->name);
    return port->number < other.port->number;
  }
};

// Nearest first.
std::vector<Candidate> candidates_for(const Topology& topology, const Place& memory) {
  const Judge judge(topology);
  std::vector<Candidate> candidates;
  for (const Nic& nic : topology.nics) {
    const Distance distance = distance_between(nic.place, memory);
    const int node_distance =
        distance == Distance::kSys ? topology.node_distance(memory.numa_node, nic.place.numa_node) : 0;
    for (const Port& port : nic.ports)
      if (judge.why_not(nic, port).empty()) candidates.push_back({&nic, &port, distance, node_distance});
  }
  std::sort(candidates.begin(), candidates.end());
  return candidates;
}

std::vector<const Port*> near_ports(const std::vector<Candidate>& candidates) {
  std::vector<const Port*> ports;
  for (const Candidate& candidate : candidates)
    if (candidate.nearness() == candidates.front().nearness()) ports.push_back(candidate.port);
  return ports;
}

Place place_of(const Topology& topology, const MemoryPlace& memory) {
  if (memory.gpu.empty()) return {{}, memory.numa_node};
  const Gpu* const gpu = topology.find_gpu(memory.gpu);
  return gpu == nullptr ? Place() : gpu->place;
}

std::size_t turn_of(const Topology& topology, const Gpu* own, const std::vector<const Port*>& near) {
  std::size_t num_before = 0;
  for (const Gpu& gpu : topology.gpus) {
    if (&gpu == own) return num_before % near.size();
    num_before += near_ports(candidates_for(topology, gpu.place)) == near;
  }
  return 0;
}

std::string node_words(int node) {
  return node == kNoNode ? "an unknown NUMA node" : "NUMA node " + std::to_string(node);
}

std::string why_there(const Topology& topology, const MemoryPlace& memory, const Candidate& candidate) {
  const Place& place = candidate.nic->place;
  const std::string what = memory.gpu.empty() ? "the memory" : "GPU " + pci_address(memory.gpu);
  std::string words(name_of(candidate.distance));
  if (candidate.distance <= Distance::kPhb)
    words += ": " + std::string(meaning_of(candidate.distance)) + " between it and " + what;
  else if (candidate.nic->is_software)
    words += ": it is a software device, which is on no PCI bus";
  else if (!memory.gpu.empty() && topology.find_gpu(memory.gpu) == nullptr)
    words += ": " + what + " is not on the PCI bus that this process sees";
  else if (candidate.distance == Distance::kNode)
    words += ": it is on " + node_words(place.numa_node) + ", as " + what + " is";
  else
    words += ": it is on " + node_words(place.numa_node) + ", " + what + " on " +
             node_words(place_of(topology, memory).numa_node);
  if (candidate.port->state == PortState::kUnknown) words += "; the state of its port cannot be read";
  return words;
}

}  // namespace

RailChoice rails_for(const Topology& topology, const MemoryPlace& memory) {
  RailChoice choice;
  choice.left_out = left_out(topology);
  const std::vector<Candidate> candidates = candidates_for(topology, place_of(topology, memory));
  if (candidates.empty()) return choice;
  const std::vector<const Port*> near = near_ports(candidates);
  choice.num_near = near.size();
  if (!memory.gpu.empty()) choice.turn = turn_of(topology, topology.find_gpu(memory.gpu), near);
  for (const Candidate& candidate : candidates) {
    const bool is_near = choice.rails.size() < choice.num_near;
    std::string why = why_there(topology, memory, candidate);
    if (!is_near) why += "; used when the nearer ones are lost";
    choice.rails.push_back({candidate.nic->name, candidate.port->number, candidate.distance,
                            candidate.node_distance, is_near, std::move(why)});
  }
  return choice;
}

std::vector<PortUse> ports_to_use(const RailChoice& choice, std::span<const PortName> opened,
                                  bool are_named) {
  struct Ranked {
    std::size_t place;  // in the order of use; an unknown one comes behind the near ones
    PortUse use;
  };
  std::vector<Ranked> ranked;
  for (std::size_t index = 0; index < opened.size(); ++index) {
    const PortName& port = opened[index];
    const auto rail = std::find_if(choice.rails.begin(), choice.rails.end(), [&](const Rail& each) {
      return each.device == port.device && each.port == port.port;
    });
    if (rail != choice.rails.end()) {
      const auto place = static_cast<std::size_t>(rail - choice.rails.begin());
      const std::size_t in_turn =
          rail->is_near ? (place + choice.num_near - choice.turn) % choice.num_near : place + 1;
      ranked.push_back({in_turn, {index, rail->is_near || are_named}});
      continue;
    }
    const bool is_left_out =
        std::any_of(choice.left_out.begin(), choice.left_out.end(), [&](const LeftOut& left) {
          return left.device == port.device && (left.port == 0 || left.port == port.port);
        });
    if (!is_left_out || are_named) ranked.push_back({choice.num_near, {index, true}});
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Ranked& one, const Ranked& other) { return one.place < other.place; });
  std::vector<PortUse> uses;
  for (const Ranked& each : ranked) uses.push_back(each.use);
  return uses;
}

std::vector<int> nodes_far_from(const Topology& topology, const PortName& port) {
  std::vector<int> far;
  if (topology.nodes.size() < 2) return far;
  for (const NumaNode& node : topology.nodes) {
    const RailChoice choice = rails_for(topology, MemoryPlace::on_node(node.number));
    if (std::any_of(choice.rails.begin(), choice.rails.end(), [&](const Rail& rail) {
          return rail.device == port.device && rail.port == port.port && !rail.is_near;
        }))
      far.push_back(node.number);
  }
  return far;
}

std::vector<LeftOut> left_out(const Topology& topology) {
  const Judge judge(topology);
  std::vector<LeftOut> found;
  for (const Nic& nic : topology.nics) {
    if (nic.ports.empty())
      found.push_back({nic.name, 0, "it has no ports that this process can see; run it with access to /sys"});
    for (const Port& port : nic.ports)
      if (std::string why = judge.why_not(nic, port); !why.empty())
        found.push_back({nic.name, port.number, std::move(why)});
  }
  return found;
}

std::vector<std::string> describe(const Topology& topology) {
  std::vector<std::string> sentences;
  const auto name_of_port = [](const std::string& device, int port) {
    return port == 0 ? device : device + " port " + std::to_string(port);
  };
  const auto describe_one = [&](const std::string& memory, const RailChoice& choice) {
    std::string near, far;
    for (std::size_t i = 0; i < choice.rails.size(); ++i) {
      const bool is_near = i < choice.num_near;
      const Rail& rail = choice.rails[is_near ? (i + choice.turn) % choice.num_near : i];
      std::string& words = is_near ? near : far;
      words += (words.empty() ? "" : ", ") + name_of_port(rail.device, rail.port);
    }
    if (near.empty()) return;
    const Rail& first = choice.rails.front();
    sentences.push_back(memory + ": " + near + " (" + std::string(name_of(first.distance)) + ", " +
                        std::string(meaning_of(first.distance)) + ")" +
                        (far.empty() ? "" : "; if these are lost: " + far));
  };
  for (const Gpu& gpu : topology.gpus)
    describe_one("GPU " + gpu.address, rails_for(topology, MemoryPlace::on_gpu(gpu.address)));
  const bool differ = std::any_of(topology.nics.begin(), topology.nics.end(), [&](const Nic& nic) {
    return std::any_of(nic.ports.begin(), nic.ports.end(), [&](const Port& port) {
      return !nodes_far_from(topology, {nic.name, port.number}).empty();
    });
  });
  for (const NumaNode& node : topology.nodes)
    if (differ)
      describe_one("host memory on " + node_words(node.number),
                   rails_for(topology, MemoryPlace::on_node(node.number)));
  if (topology.gpus.empty() && !differ) describe_one("host memory", rails_for(topology, {}));
  for (const LeftOut& left : left_out(topology))
    sentences.push_back(name_of_port(left.device, left.port) + " is not used: " + left.why);
  return sentences;
}

std::string why_no_rail(const Topology& topology) {
  if (topology.nics.empty())
    return "this machine has no RDMA device (/sys/class/infiniband is empty); load the driver of its NIC, "
           "and give containers the device (docker run --device /dev/infiniband)";
  if (!candidates_for(topology, {}).empty()) return {};
  std::string words = "no RDMA device can be used: ";
  const char* separator = "";
  for (const LeftOut& left : left_out(topology)) {
    words +=
        separator + left.device + (left.port == 0 ? "" : ":" + std::to_string(left.port)) + ": " + left.why;
    separator = ". ";
  }
  return words;
}

}  // namespace kvxfer::verbs
