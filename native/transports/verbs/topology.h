// Where this machine's RDMA devices, GPUs and NUMA nodes are, as sysfs reports it. Only facts; rail_choice.h
// decides.
//
// Nothing here fails. What cannot be read, or means nothing, is unknown, and unknown counts as farthest. (In
// many virtual machines numa_node is -1; a software device lies on no bus.)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transports/verbs/sysfs.h"

namespace kvxfer::verbs {

// What lies between two devices, or between a device and memory, nearest first, in the words of `nvidia-smi
// topo -m`.
enum class Distance : std::uint8_t { kPix, kPxb, kPhb, kNode, kSys, kUnknown };

std::string_view name_of(Distance distance) noexcept;  // "PIX"
std::string_view meaning_of(Distance distance) noexcept;  // "one PCIe switch": what lies between

inline constexpr int kNoNode = -1;

// A device's place below its host bridge.
struct PciPath {
  std::string host_bridge;  // "pci0000:15"; "" if the device is on no PCI bus or its place is unknown
  // The bridges from the root port on, then the device itself: "0000:15:01.0", ..., "0000:18:00.0".
  std::vector<std::string> functions;

  bool known() const noexcept { return !functions.empty(); }
  std::string_view address() const noexcept { return known() ? functions.back() : std::string_view(); }
};

struct Place {
  PciPath pci;
  int numa_node = kNoNode;
};

enum class LinkLayer : std::uint8_t { kUnknown, kInfiniBand, kEthernet };

// The InfiniBand specification's numbers, which sysfs uses.
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
  std::string net_device;  // "" where it is not known or lies in another network namespace
  Bond bond;
};

struct Nic {
  std::string name;  // "mlx5_0"
  Place place;
  bool is_software = false;  // Soft-RoCE: it lies on no bus, and the processor copies every byte
  std::string node_type;  // "1: CA"
  std::string physical_function;  // PCI address of the physical function; "" if this is no virtual function
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
  // The kernel's figure, 10 within a node; kFar where the kernel has none.
  int node_distance(int from, int to) const noexcept;
  static constexpr int kFar = 255;  // the largest of the kernel's figures
};

// `root` is where sysfs is. Without `gpus` it finds all NVIDIA GPUs of the bus. `gpus` are addresses as CUDA
// or NVML write them ("0000:1B:00.0", "00000000:1B:00.0").
Topology read_topology(const std::string& root = sysfs::root(), std::span<const std::string> gpus = {});

// Rewrites an address as sysfs writes it: "0000:1b:00.0". A text that is no address stays as it is.
std::string pci_address(std::string_view text);

Distance distance_between(const Place& one, const Place& other);

}  // namespace kvxfer::verbs
