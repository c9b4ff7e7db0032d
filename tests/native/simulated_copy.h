// One copy of a workload as its judge knows it: who, from where, to where, what is to arrive, and
// which rights are over.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simulated_pair.h"

namespace simulation {

struct Copy {
  enum class Kind { kExpected, kUnderWriteLease, kUnderReadLease };

  Kind kind;
  std::string src_name, dst_name;
  std::size_t src, dst;  // agents
  std::uint64_t src_life, dst_life;
  std::shared_ptr<Memory> from, to;
  Blocks src_blocks, dst_blocks;
  std::uint32_t first_layer, num_layers;
  wire::Bytes tag;
  std::shared_ptr<Handle> handle, expected;  // of whoever posted; of the receiver
  LeaseId lease = 0;
  // (layer, pair) -> what is to arrive
  std::map<std::pair<std::uint32_t, std::size_t>, std::vector<std::byte>> bytes;
  bool src_over = false, dst_over = false;  // the right to the blocks ended at that end
  bool dst_done = false;
  int num_ended = 0, num_expected_ended = 0;
  Time ends_by = 0;

  std::string words() const {
    static constexpr const char* kKinds[] = {"expected", "under a write lease", "under a read lease"};
    std::string out = std::string(reinterpret_cast<const char*>(tag.data()), tag.size()) + " " +
                      kKinds[static_cast<int>(kind)] + " from " + src_name + " to " + dst_name + ", lease " +
                      std::to_string(lease);
    if (handle) out += ", handle " + std::to_string(handle->id());
    for (std::size_t i = 0; i < src_blocks.size(); ++i)
      out += " " + std::to_string(src_blocks[i]) + ">" + std::to_string(dst_blocks[i]);
    if (src_over) out += ", over at the source";
    if (dst_over) out += ", over at the destination";
    return out;
  }
};

}  // namespace simulation
