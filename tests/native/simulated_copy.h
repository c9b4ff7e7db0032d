// One copy of a workload as its judge knows it: its ends, the bytes that have to arrive, and which rights are
// over. Its parts are transfers; each part's source brings some heads, from pages of its own size.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "simulated_pair.h"

namespace simulation {

// Layer, token of the sequence, head.
using Cells = std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::vector<std::byte>>;

struct Part {
  std::string src_name;
  std::size_t src = 0;  // agent
  std::uint64_t src_life = 0;
  std::pair<SessionKey, SessionKey> sessions;  // the source's number for the session, and the destination's
  std::shared_ptr<Memory> from;
  Blocks blocks;
  Heads heads;
  std::uint32_t num_fine = 0;
  std::shared_ptr<Handle> handle;  // of the end that posted
  bool src_over = false;  // the right to the blocks ended at the source
  int num_ended = 0;

  bool brings(std::uint32_t head) const { return head - heads.first < heads.num; }
};

struct Copy {
  enum class Kind { kExpected, kUnderWriteLease, kUnderReadLease };

  Kind kind;
  std::string dst_name;
  std::size_t dst = 0;
  std::uint64_t dst_life = 0;
  std::shared_ptr<Memory> to;
  Blocks blocks;
  std::uint32_t first_token = 0, end_token = 0;
  std::uint32_t first_layer = 0, num_layers = 0;
  wire::Bytes tag;
  std::vector<Part> parts;
  bool is_whole = true;  // the parts bring all heads together
  std::shared_ptr<Handle> expected;  // the receiver's
  LeaseId lease = 0;
  Cells cells;  // the bytes that have to arrive
  bool dst_over = false;
  bool dst_done = false;
  int num_expected_ended = 0;
  Time ends_by = 0;

  bool read() const { return kind == Kind::kUnderReadLease; }
  bool of_bearer() const { return (lease & kBearerBit) != 0; }
  // The token of the sequence at a place; the block has to be one of this copy's.
  std::uint32_t token_at(const Layout::Place& place) const {
    const auto found = std::find(blocks.begin(), blocks.end(), place.block);
    return static_cast<std::uint32_t>(found - blocks.begin()) * to->layout.block_tokens + place.token;
  }
  std::string words() const {
    static constexpr const char* kKinds[] = {"expected", "under a write lease", "under a read lease"};
    std::string out = std::string(reinterpret_cast<const char*>(tag.data()), tag.size()) + " " +
                      kKinds[static_cast<int>(kind)] + " to " + dst_name + ", lease " +
                      std::to_string(lease) + ", tokens " + std::to_string(first_token) + " to " +
                      std::to_string(end_token) + ", into";
    for (const std::uint32_t block : blocks) out += " " + std::to_string(block);
    for (const Part& part : parts) {
      out += "; heads " + std::to_string(part.heads.first) + " + " + std::to_string(part.heads.num) +
             " from " + part.src_name;
      for (const std::uint32_t block : part.blocks) out += " " + std::to_string(block);
      if (part.handle) out += ", handle " + std::to_string(part.handle->id());
      if (part.src_over) out += ", over at the source";
    }
    if (dst_over) out += "; over at the destination";
    return out;
  }
};

}  // namespace simulation
