// Chooses which ports of which RDMA devices carry pages of a given memory: all of the nearest ones.
//
// Pure and without state, so every process of a machine chooses the same ports for the same memory.
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
  int node_distance = 0;  // tells two nodes apart that are both SYS; 0 where PCI or one node decides
  bool is_near = false;  // chosen; the others serve when all chosen ones are lost
  std::string why;  // a sentence, for people
};

struct LeftOut {
  std::string device;
  int port = 0;  // 0: the whole device
  std::string why;  // a sentence that ends with what to do, if anything can be done
};

struct RailChoice {
  std::vector<Rail> rails;  // nearest first, ties in natural order of names
  std::size_t num_near = 0;  // the first num_near of them are near
  // The index of the near rail that this memory uses first. It differs between GPUs that are equally near to
  // the same rails, so that pieces that go over one rail alone are spread over them.
  std::size_t turn = 0;
  std::vector<LeftOut> left_out;
};

RailChoice rails_for(const Topology& topology, const MemoryPlace& memory);

// An opened port: whether it becomes a rail, and whether it is near.
struct PortName {
  std::string device;
  int port = 0;
};
struct PortUse {
  std::size_t index = 0;  // among those that were opened
  bool is_near = true;
};
// In the order in which the memory uses them. If the caller has named devices, all of their ports are rails,
// and equally near: the caller knows better. A port that sysfs does not show counts as near, since nothing
// says that it is far.
std::vector<PortUse> ports_to_use(const RailChoice& choice, std::span<const PortName> opened, bool are_named);

// NUMA nodes whose host memory prefers other ports to this one. None on a machine with one node.
std::vector<int> nodes_far_from(const Topology& topology, const PortName& port);

// Ports that no memory uses, wherever it lies: inactive ports, parts of bonds, virtual functions beside their
// physical one, devices without reliable connections.
std::vector<LeftOut> left_out(const Topology& topology);

// Sentences for people: which ports carry the memory of each GPU, and of each NUMA node where nodes differ;
// and which ports are left out. Empty on a machine without RDMA devices.
std::vector<std::string> describe(const Topology& topology);

// Why this machine has no rail at all, in words; "" if it has one.
std::string why_no_rail(const Topology& topology);

}  // namespace kvxfer::verbs
