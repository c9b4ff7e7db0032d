// Where the words of peers' fence tables land that are READ, and our own table as peers read it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/verbs/registration.h"

namespace kvxfer::verbs {

class FenceWords {
 public:
  static Result<std::unique_ptr<FenceWords>> create(std::shared_ptr<const Device> device,
                                                    const FenceTable& table);

  // ---- ours: registered when the first peer needs these
  Result<KeyedSpan> share(const FenceSlotRange& slots);

  // ---- peers', one for each question that is under way
  bool has_room() const noexcept { return !free_.empty(); }
  std::uint32_t take() noexcept {
    const std::uint32_t place = free_.back();
    free_.pop_back();
    return place;
  }
  void give_back(std::uint32_t place) noexcept { free_.push_back(place); }
  // Where the device is to put it, and what it has put there once that request has completed.
  KeyedSpan target(std::uint32_t place) const noexcept;
  std::uint64_t value(std::uint32_t place) const noexcept { return landed_[place]; }
  // Where a packet's bytes land that nobody looks at.
  KeyedSpan nowhere() const noexcept;

 private:
  FenceWords(std::shared_ptr<const Device> device, const FenceTable& table)
      : device_(std::move(device)), table_(table) {}

  const std::shared_ptr<const Device> device_;
  const FenceTable& table_;
  std::map<std::uint32_t, std::shared_ptr<const Registration>> shared_;  // by the first slot
  std::vector<std::uint64_t> landed_;
  std::vector<std::uint32_t> free_;
  std::shared_ptr<const Registration> registration_;  // of landed_: ends before it
};

}  // namespace kvxfer::verbs
