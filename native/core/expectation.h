// What a receiver has named: blocks that transfers with one tag may write, and what arrived.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/control/wire.h"
#include "core/copy/claims.h"
#include "core/copy/coverage.h"
#include "core/event.h"
#include "core/handle.h"
#include "core/linked_list.h"
#include "core/sparse_table.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A transfer that writes under an expectation.
class Writer : public Linked<Writer> {
 protected:
  Writer() = default;
  ~Writer() = default;

 private:
  friend class Expectation;
  std::uint64_t num_cells_ = 0;  // Coverage: that it brings in each of its layers
};

class Expectation {
 public:
  Expectation(std::shared_ptr<Handle> handle, wire::Bytes tag, RegionId region,
              std::optional<SessionKey> from, std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
              std::uint32_t num_layers, const Needed& needed);

  // Is a transfer of this peer to this region, which has the tag, meant?
  bool concerns(SessionKey peer, RegionId region) const;
  // May one that is meant write what it names? kRefused where it names more; waiting would not help it.
  Status covers(const Move& move) const;
  // Once it may: makes ready to follow what it brings, and gives it to no other. kRefused where
  // that cannot be, or another brings some of it.
  Status follow(const Move& move, Writer& writer);
  void drained(Writer& writer) noexcept { writers_.remove(writer); }

  // Those that write under it, also while they drain, in the order in which they came.
  const LinkedList<Writer>& writers() const noexcept { return writers_; }

  // All that a writer brings of one layer has arrived, for good. True when that was the layer's last.
  bool arrived(std::uint32_t layer, const Writer& writer) noexcept;
  // And of all of its layers.
  void arrived(const Move& move);
  bool complete() const noexcept { return coverage_.complete(); }
  // Blocks of which writers that have brought all of theirs have not brought everything, in the order in which they
  // were named. What a writer lacks it lacks of all of its blocks, since its layers arrive whole.
  std::vector<std::uint32_t> incomplete_blocks() const;

  const std::shared_ptr<Handle>& handle() const noexcept { return handle_; }
  const wire::Bytes& tag() const noexcept { return tag_; }
  RegionId region() const noexcept { return region_; }
  const std::optional<SessionKey>& from() const noexcept { return from_; }
  const std::vector<std::uint32_t>& blocks() const noexcept { return blocks_; }
  std::uint32_t num_layers() const noexcept { return num_layers_; }

 private:
  std::shared_ptr<Handle> handle_;
  wire::Bytes tag_;
  RegionId region_;
  std::optional<SessionKey> from_;
  std::vector<std::uint32_t> blocks_;
  // Of a block in blocks_; its size where it is not named.
  std::uint32_t place_of(std::uint32_t block) const noexcept;
  std::vector<Stretch> stretches_of(const Move& move) const;
  // Block -> 1 + its place; empty where so few are named that they are looked through. No hash: a request may name
  // 64 thousand blocks, of which a hash costs milliseconds of its hand-over.
  static constexpr std::size_t kFewBlocks = 16;
  SparseTable<std::uint32_t, 256> index_;
  std::uint32_t first_layer_, num_layers_;
  std::uint32_t block_tokens_;
  Coverage coverage_;
  Claims claims_;
  LinkedList<Writer> writers_;
};

}  // namespace kvxfer
