// Memory into which a device reads the words of peers' fence tables, and our own table as peers read it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/in_room.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Registration: memory of a region as the device knows it, with its KeyedSpans in local().
template <class Registration>
class FenceWords {
 public:
  using Register = std::function<Result<std::shared_ptr<const Registration>>(const LocalRegion& region)>;

  static Result<std::unique_ptr<FenceWords>> create(Register register_memory, const FenceTable& table) {
    std::unique_ptr<FenceWords> words(new FenceWords(std::move(register_memory), table));
    for (std::uint32_t place = kMostFetches; place-- > 0;) words->free_.push_back(place);
    LocalRegion region;
    region.base = reinterpret_cast<std::byte*>(words->landed_.data());
    region.spans = {{0, words->landed_.size() * sizeof(std::uint64_t)}};
    Result<std::shared_ptr<const Registration>> registered = words->register_(region);
    if (!registered.ok()) return registered.status();
    words->registration_ = std::move(registered).value();
    return words;
  }

  // ---- our table: it is registered when the first peer needs it
  Result<const Registration*> share() {
    if (shared_ == nullptr) {
      if (const Result<int> filled = table_.fill(); !filled.ok()) return filled.status();
      LocalRegion region;
      // Peers read these words; the device never writes them.
      region.base = reinterpret_cast<std::byte*>(const_cast<std::atomic<std::uint64_t>*>(table_.words()));
      region.spans = {{0, FenceTable::kNbytes}};
      Result<std::shared_ptr<const Registration>> registered = register_(region);
      if (!registered.ok()) return registered.status();
      shared_ = std::move(registered).value();
    }
    return shared_.get();
  }

  // ---- peers' words: a place for each fetch that is under way
  bool has_room() const noexcept { return !free_.empty(); }
  std::uint32_t take() noexcept {
    const std::uint32_t place = free_.back();
    free_.pop_back();
    return place;
  }
  void give_back(std::uint32_t place) noexcept { add_in_room(free_, place); }
  // The place into which the device puts the word. value() has the word once that request has completed.
  auto target(std::uint32_t place) const noexcept {
    auto span = registration_->local().all().front();
    span.address += place * sizeof(std::uint64_t);
    span.offset = 0;
    span.end = sizeof(std::uint64_t);
    return span;
  }
  std::uint64_t value(std::uint32_t place) const noexcept { return landed_[place]; }
  // A place for a packet whose bytes are not looked at.
  auto nowhere() const noexcept { return target(kMostFetches); }

 private:
  // More than the engine has under way (256 pieces of each of 8 classes), and as many again: what was cancelled
  // has its place until it ends, which a peer may delay. A queue pair has 64.
  static constexpr std::uint32_t kMostFetches = 4096;
  static constexpr std::uint32_t kPacketWords = 4096 / sizeof(std::uint64_t);  // of the largest packet

  FenceWords(Register register_memory, const FenceTable& table)
      : register_(std::move(register_memory)), table_(table), landed_(kMostFetches + kPacketWords) {}

  const Register register_;
  const FenceTable& table_;
  std::shared_ptr<const Registration> shared_;
  std::vector<std::uint64_t> landed_;
  std::vector<std::uint32_t> free_;
  std::shared_ptr<const Registration> registration_;  // of landed_, so it must end first
};

}  // namespace kvxfer
