// The handles of our callers: numbers them, and knows to which end of which transfer each belongs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/transfer_end.h"
#include "core/spare_nodes.h"

namespace kvxfer {

class Handles {
 public:
  struct Meant {
    bool is_destination;
    TransferKey key;
  };

  explicit Handles(Context& context) : context_(context) {}

  std::shared_ptr<Handle> make(std::uint32_t first_layer, std::uint32_t num_layers, wire::Bytes context) {
    return std::make_shared<Handle>(next_++, context_.now, first_layer, num_layers, std::move(context));
  }
  void give(const TransferEnd& transfer) {
    spare_.insert(transfers_, transfer.handle->id(), Meant{!transfer.is_source(), transfer.key});
  }
  void take_back(const Handle& handle) noexcept { transfers_.erase(handle.id()); }  // its caller has none
  std::optional<Meant> find(std::uint64_t id) const {
    auto found = transfers_.find(id);
    return found == transfers_.end() ? std::nullopt : std::optional(found->second);
  }
  // Sets its last state, and emits kEnded for a waiter. Does nothing without a handle.
  void end(const std::shared_ptr<Handle>& handle, TransferState state, const Status& status,
           std::vector<std::uint32_t> failed_blocks);
  std::size_t size() const noexcept { return transfers_.size(); }

 private:
  Context& context_;
  std::uint64_t next_ = 1;
  std::unordered_map<std::uint64_t, Meant> transfers_;
  SpareNodes<std::unordered_map<std::uint64_t, Meant>> spare_;
};

}  // namespace kvxfer
