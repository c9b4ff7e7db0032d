// Where RDMA devices, GPUs and NUMA nodes of this machine are, as sysfs tells it: facts alone. rail_choice.h decides.
//
// Nothing here is an error. What cannot be read, or means nothing (numa_node is -1 in many virtual machines, a
// software device lies on no bus), is unknown, and what is unknown counts as farthest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transports/verbs/sysfs.h"

namespace kvxfer::verbs {

// What lies between two devices, or a device and memory, nearest first: the words of `nvidia-smi topo -m`.
enum class Distance : std::uint8_t { kPix, kPxb, kPhb, kNode, kSys, kUnknown };

std::string_view name_of(Distance distance) noexcept;  // "PIX"
std::string_view meaning_of(Distance distance) noexcept;  // "one PCIe switch": what lies between

inline constexpr int kNoNode = -1;

// How a device hangs on its host bridge.
struct PciPath {
  std::string host_bridge;  // "pci0000:15"; "" where the device lies on no PCI bus, or its place is not known
  // Bridges from the root port on, then the device itself: "0000:15:01.0", ..., "0000:18:00.0".
  std::vector<std::string> functions;

  bool known() const noexcept { return !functions.empty(); }
  std::string_view address() const noexcept { return known() ? functions.back() : std::string_view(); }
};

struct Place {
  PciPath pci;
  int numa_node = kNoNode;
};

enum class LinkLayer : std::uint8_t { kUnknown, kInfiniBand, kEthernet };

// Numbers of the InfiniBand specification, as sysfs has them.
enum class PortState : std::uint8_t { kUnknown = 0, kDown = 1, kInit = 2, kArmed = 3, kActive = 4 };

// A bond that a port's net device belongs to.
struct Bond {
  std::string name;  // "" where there is none
  std::string mode;  // "active-backup", "802.3ad"
  std::string active_member;  // of active-backup
  std::vector<std::string> member_addresses;  // PCI addresses of its net devices
};

struct Port {
  int number = 0;
  PortState state = PortState::kUnknown;
  std::string state_words, physical_words;  // "4: ACTIVE", "5: LinkUp"
  LinkLayer link_layer = LinkLayer::kUnknown;
  double rate_gbps = 0;  // 0: unknown
  std::string net_device;  // "" where it is not known, or in another network namespace
  Bond bond;
};

struct Nic {
  std::string name;  // "mlx5_0"
  Place place;
  bool is_software = false;  // Soft-RoCE: it lies on no bus, and every byte passes the processor
  std::string node_type;  // "1: CA"
  std::string physical_function;  // PCI address of the one whose virtual function this is; "" of others
  std::vector<Port> ports;
};

struct Gpu {
  std::string address;  // "0000:1b:00.0"
  Place place;
};

struct NumaNode {
  int number = kNoNode;
  std::vector<int> distances;  // to the nodes in order of their numbers, 10 to itself
};

// Each list in natural order of names, addresses and numbers.
struct Topology {
  std::vector<Nic> nics;
  std::vector<Gpu> gpus;
  std::vector<NumaNode> nodes;

  const Gpu* find_gpu(std::string_view address) const;
  // The kernel's figure, 10 within a node. kFar where it has none.
  int node_distance(int from, int to) const noexcept;
  static constexpr int kFar = 255;  // of the kernel's figures the largest
};

// `root` is where sysfs is. Without `gpus` it takes all NVIDIA GPUs of the bus, else those: as CUDA or NVML write
// addresses ("0000:1B:00.0", "00000000:1B:00.0").
Topology read_topology(const std::string& root = sysfs::root(), std::span<const std::string> gpus = {});

// As sysfs writes it: "0000:1b:00.0". What is no address stays as it is.
std::string pci_address(std::string_view text);

Distance distance_between(const Place& one, const Place& other);

}  // namespace kvxfer::verbs
