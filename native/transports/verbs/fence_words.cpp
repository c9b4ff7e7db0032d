#include "transports/verbs/fence_words.h"

#include <cstring>

namespace kvxfer::verbs {
namespace {

// A question is a page's worth of time: few are under way at once, and more wait for these.
constexpr std::uint32_t kMostQuestions = 512;
constexpr std::uint32_t kPacketWords = 4096 / sizeof(std::uint64_t);  // of the largest there are

}  // namespace

Result<std::unique_ptr<FenceWords>> FenceWords::create(std::shared_ptr<const Device> device,
                                                       const FenceTable& table) {
  std::unique_ptr<FenceWords> words(new FenceWords(std::move(device), table));
  words->landed_.resize(kMostQuestions + kPacketWords);
  for (std::uint32_t place = kMostQuestions; place-- > 0;) words->free_.push_back(place);
  LocalRegion region;
  region.base = reinterpret_cast<std::byte*>(words->landed_.data());
  region.spans = {{0, words->landed_.size() * sizeof(std::uint64_t)}};
  Result<std::shared_ptr<const Registration>> registered = Registration::create(words->device_, region);
  if (!registered.ok()) return registered.status();
  words->registration_ = std::move(registered).value();
  return words;
}

Result<KeyedSpan> FenceWords::share(const FenceSlotRange& slots) {
  std::shared_ptr<const Registration>& registration = shared_[slots.first];
  if (registration == nullptr) {
    if (const Result<int> filled = table_.fill(slots); !filled.ok()) return filled.status();
    LocalRegion region;
    // Of peers, who read; the device never writes it.
    region.base = reinterpret_cast<std::byte*>(const_cast<std::atomic<std::uint64_t>*>(table_.words()));
    region.spans = {{slots.first * sizeof(std::uint64_t), slots.nbytes()}};
    Result<std::shared_ptr<const Registration>> registered = Registration::create(device_, region);
    if (!registered.ok()) return registered.status();
    if (registered.value()->remote().all().size() != 1)
      return Status(Code::kUnsupported, device_->name() + " registers no more than " +
                                            std::to_string(device_->most_registered_nbytes()) +
                                            " bytes at once, too few for the fence table");
    registration = std::move(registered).value();
  }
  // Peers have its key as they have those of regions.
  return registration->remote().all().front();
}

KeyedSpan FenceWords::target(std::uint32_t place) const noexcept {
  const KeyedSpan& all = registration_->local().all().front();
  return {0, sizeof(std::uint64_t), all.address + place * sizeof(std::uint64_t), all.key};
}

KeyedSpan FenceWords::nowhere() const noexcept { return target(kMostQuestions); }

}  // namespace kvxfer::verbs
