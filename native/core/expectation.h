// What a receiver has named: the blocks that transfers with one tag may write, and what of them has arrived.
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
  std::uint64_t num_cells_ = 0;  // Coverage: cells that it brings in each of its layers
};

class Expectation {
 public:
  Expectation(std::shared_ptr<Handle> handle, wire::Bytes tag, RegionId region,
              std::optional<SessionKey> from, std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
              std::uint32_t num_layers, const Needed& needed);

  // Is this expectation meant for a transfer of this peer to this region that has its tag?
  bool concerns(SessionKey peer, RegionId region) const;
  // May a transfer for which it is meant write the blocks that it names? kRefused if it names more;
  // waiting would not help.
  Status covers(const Move& move) const;
  // Once the write is permitted: prepares to follow what it brings, and reserves that part for it.
  // kRefused if that cannot be, or if another writer brings a part of it.
  Status follow(const Move& move, Writer& writer);
  void drained(Writer& writer) noexcept { writers_.remove(writer); }

  // The writers under it, draining ones included, in the order in which they came.
  const LinkedList<Writer>& writers() const noexcept { return writers_; }

  // Everything that a writer brings of one layer has arrived for good. True if that completes the layer.
  bool arrived(std::uint32_t layer, const Writer& writer) noexcept;
  // Everything that a writer brings has arrived, in all of its layers.
  void arrived(const Move& move);
  bool complete() const noexcept { return coverage_.complete(); }
  // The blocks that the finished writers do not fill completely, in the order of their naming. A writer
  // that is not finished lacks something of all of its blocks, since its layers arrive whole.
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
  // The place of a block in blocks_; the size of blocks_ if the block is not named.
  std::uint32_t place_of(std::uint32_t block) const noexcept;
  std::vector<Stretch> stretches_of(const Move& move) const;
  // Block -> 1 + its place; empty if so few blocks are named that a search does. No hash: a request may
  // name 64 thousand blocks, and hashing them costs milliseconds of its hand-over.
  static constexpr std::size_t kFewBlocks = 16;
  SparseTable<std::uint32_t, 256> index_;
  std::uint32_t first_layer_, num_layers_;
  std::uint32_t block_tokens_;
  Coverage coverage_;
  Claims claims_;
  LinkedList<Writer> writers_;
};

}  // namespace kvxfer
