// Which ports of which RDMA devices carry pages of a given memory: the nearest ones, all that are equally near.
//
// Pure and without state, so that every process of a machine comes to the same answer for the same memory.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "transports/verbs/topology.h"

namespace kvxfer::verbs {

// Where a region lies.
struct MemoryPlace {
  std::string gpu;  // PCI address; "": the processor's memory
  int numa_node = kNoNode;  // of the processor's memory; kNoNode: not known, or several

  static MemoryPlace on_gpu(std::string address) { return {std::move(address), kNoNode}; }
  static MemoryPlace on_node(int node) { return {{}, node}; }
};

struct Rail {
  std::string device;
  int port = 0;
  Distance distance = Distance::kUnknown;
  int node_distance = 0;  // which of two nodes that are both SYS is nearer; 0 where PCI or one node decides
  bool is_near = false;  // chosen; the others are what is left when these are lost
  std::string why;  // a sentence, for people
};

struct LeftOut {
  std::string device;
  int port = 0;  // 0: the whole device
  std::string why;  // a sentence that ends with what to do, where something can be done
};

struct RailChoice {
  std::vector<Rail> rails;  // nearest first, ties in natural order of names
  std::size_t num_near = 0;  // of them the first
  // Which of the near ones this memory begins with. GPUs that are equally near to the same rails differ in it, so
  // that what one rail alone carries does not all go over the first.
  std::size_t turn = 0;
  std::vector<LeftOut> left_out;
};

RailChoice rails_for(const Topology& topology, const MemoryPlace& memory);

// Of ports that were opened: which become rails, and whether they are near.
struct PortName {
  std::string device;
  int port = 0;
};
struct PortUse {
  std::size_t index = 0;  // among those that were opened
  bool is_near = true;
};
// In the order in which the memory uses them. Where the caller has named devices all of them are, and equally near: it
// knows better. One that sysfs does not show is near, since nothing speaks against it.
std::vector<PortUse> ports_to_use(const RailChoice& choice, std::span<const PortName> opened, bool are_named);

// Nodes whose host memory uses others before this port. None on a machine with one node.
std::vector<int> nodes_far_from(const Topology& topology, const PortName& port);

// Ports that no memory uses, whatever its place: inactive ones, parts of bonds, virtual functions beside the physical
// one, devices without reliable connections.
std::vector<LeftOut> left_out(const Topology& topology);

// Sentences for people: for each GPU, and for host memory of each NUMA node where that makes a difference, which ports
// carry it; and which ports are left out. Empty on a machine without RDMA devices.
std::vector<std::string> describe(const Topology& topology);

// Why there is no rail at all on this machine, in words; "" where there is one.
std::string why_no_rail(const Topology& topology);

}  // namespace kvxfer::verbs
