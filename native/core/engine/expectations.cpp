#include "core/engine/expectations.h"

#include <algorithm>

namespace kvxfer {
namespace {

// Tags may be any bytes. A tag that is no text is shown by the first bytes of its hexadecimal form.
std::string tag_in_words(std::string tag) {
  constexpr std::size_t kMostText = 64, kMostBytes = 16;
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7f; };
  if (std::all_of(tag.begin(), tag.end(), is_plain))
    return "tag " + quoted(tag.size() > kMostText ? tag.substr(0, kMostText) + "..." : tag);
  std::string digits;
  for (std::size_t i = 0; i < std::min(tag.size(), kMostBytes); ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    digits += kDigits[static_cast<unsigned char>(tag[i]) >> 4];
    digits += kDigits[tag[i] & 0xf];
  }
  return "tag 0x" + digits + (tag.size() > kMostBytes ? "..." : "");
}

std::string_view view_of(const wire::Bytes& tag) noexcept {
  return {reinterpret_cast<const char*>(tag.data()), tag.size()};
}

}  // namespace

Result<std::shared_ptr<Expectation>> Expectations::add(wire::Bytes tag, RegionId region_id,
                                                       std::vector<std::uint32_t> blocks,
                                                       std::uint32_t first_layer, std::uint32_t num_layers,
                                                       const Needed& needed, std::optional<SessionKey> from,
                                                       Time timeout_ns, wire::Bytes context) {
  const Region* local = regions_.find(region_id);
  if (local == nullptr)
    return Status(Code::kUnknownRegion,
                  "region " + std::to_string(region_id) + " is not registered (any more)");
  if (tag.empty() || tag.size() > wire::kMaxNotify)
    return Status(Code::kInvalidArgument, "a tag has 1 to " + std::to_string(wire::kMaxNotify) + " bytes");
  if (tags_.contains(view_of(tag)))
    return Status(Code::kInvalidArgument, tag_in_words(wire::text_of(tag)) +
                                              " is already expected: use another tag for each request");
  if (num_layers == 0 || num_layers > wire::kMaxLayers || first_layer > wire::kMaxLayers)
    return Status(Code::kOutOfRange, "an expectation names at least one layer of its region");
  if (blocks.size() > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument,
                  "an expectation names up to " + std::to_string(wire::kMaxBlocks) + " blocks");
  if (timeout_ns <= 0) return Status(Code::kInvalidArgument, "an expectation's timeout is more than 0 s");
  if (context.size() > wire::kMaxContext)
    return Status(Code::kInvalidArgument,
                  "a context has up to " + std::to_string(wire::kMaxContext) + " bytes");
  if (from && sessions_.find_open(*from) == nullptr) return sessions_.lost_status(*from);
  if (Status status = check_blocks(blocks, local->num_blocks, true, "blocks", local->name); !status.ok())
    return status;
  if (!from) leases_.ended().make_room(region_id, local->num_blocks, blocks);
  auto handle = handles_.make(first_layer, num_layers, std::move(context));
  const std::uint64_t id = handle->id();
  auto expectation = std::make_shared<Expectation>(std::move(handle), std::move(tag), region_id, from,
                                                   std::move(blocks), first_layer, num_layers, needed);
  // Peers find it by its tag, which is entered last.
  try {
    Expected& expected = expectations_[id];
    expected.expectation = expectation;
    context_.timers.set(expected.timer, time_after(context_.now, timeout_ns), TimerKind::kExpectation, id);
    by_region_.emplace(region_id, id);
    if (from) by_writer_.emplace(*from, id);
    tag_memory_.forget_ours(wire::text_of(expectation->tag()));
    tags_.emplace(view_of(expectation->tag()), id);
  } catch (...) {
    withdraw(*expectation);
    throw;
  }
  return expectation;
}

void Expectations::withdraw(const Expectation& expectation) noexcept {
  const std::uint64_t handle = expectation.handle()->id();
  const auto tag = tags_.find(view_of(expectation.tag()));
  if (tag != tags_.end() && tag->second == handle) tags_.erase(tag);
  by_region_.erase({expectation.region(), handle});
  if (expectation.from()) by_writer_.erase({*expectation.from(), handle});
  const auto found = expectations_.find(handle);
  if (found == expectations_.end()) return;
  context_.timers.clear(found->second.timer);
  expectations_.erase(found);
}

std::shared_ptr<Expectation> Expectations::find(const TransferEnd& transfer) const {
  if (tags_.empty() || transfer.notify.empty()) return nullptr;
  const auto tag = tags_.find(view_of(transfer.notify));
  if (tag == tags_.end()) return nullptr;
  const std::shared_ptr<Expectation>& expectation = expectations_.at(tag->second).expectation;
  return expectation->concerns(transfer.key.first, transfer.region) ? expectation : nullptr;
}

std::vector<std::uint64_t> Expectations::all() const {
  std::vector<std::uint64_t> handles;
  for (const auto& [handle, expected] : expectations_) handles.push_back(handle);
  std::sort(handles.begin(), handles.end());  // in the order of their naming
  return handles;
}

std::vector<std::uint64_t> Expectations::of_region(RegionId region) const {
  std::vector<std::uint64_t> handles;
  for (auto each = by_region_.lower_bound({region, 0}); each != by_region_.end() && each->first == region;
       ++each)
    handles.push_back(each->second);
  return handles;
}

std::vector<std::uint64_t> Expectations::from(SessionKey session) const {
  std::vector<std::uint64_t> handles;
  for (auto each = by_writer_.lower_bound({session, 0}); each != by_writer_.end() && each->first == session;
       ++each)
    handles.push_back(each->second);
  return handles;
}

const Expectation* Expectations::after(Place& place) const {
  const auto found = by_region_.upper_bound(place);
  if (found == by_region_.end()) return nullptr;
  place = *found;
  return expectations_.at(place.second).expectation.get();
}

Status Expectations::late(std::uint64_t handle) {
  auto found = expectations_.find(handle);
  if (found == expectations_.end()) return {};
  found->second.timer.reset();
  const Expectation& expected = *found->second.expectation;
  return {Code::kDeadline, std::to_string(expected.incomplete_blocks().size()) + " of the " +
                               std::to_string(expected.blocks().size()) + " expected blocks of region " +
                               quoted(regions_.find(expected.region())->name) + ", for " +
                               tag_in_words(wire::text_of(expected.tag())) +
                               ", had not arrived in full when the expectation's time was over"};
}

void Expectations::give_up(std::uint64_t handle, const Status& why) {
  auto found = expectations_.find(handle);
  if (found == expectations_.end()) return;
  const Expectation& expectation = *found->second.expectation;
  tag_memory_.remember(
      TagMemory::kOurs, nullptr, wire::text_of(expectation.tag()),
      {expectation.region(), expectation.from(), why,
       expectation.handle()->has_own_context() ? expectation.handle()->context() : wire::Bytes()});
}

std::optional<Expectations::GivenUp> Expectations::given_up(const TransferEnd& transfer) const {
  if (tag_memory_.size() == 0 || transfer.notify.empty()) return std::nullopt;
  const TagMemory::Ended* const ended = tag_memory_.given_up(wire::text_of(transfer.notify));
  if (ended == nullptr || ended->region != transfer.region ||
      (ended->peer && *ended->peer != transfer.key.first))
    return std::nullopt;
  return GivenUp{{ended->why.code(), "the expectation of its tag had ended" + in_words(ended->context) +
                                         ": " + ended->why.message()},
                 ended->context};
}

void Expectations::end(const std::shared_ptr<Expectation>& expectation, TransferState state,
                       const Status& why, std::size_t num_draining) {
  const std::uint64_t handle = expectation->handle()->id();
  // What takes memory comes first.
  ending_.insert_or_assign(handle, Ending{expectation, state, why, num_draining, false});
  remember_ended(*expectation);
  withdraw(*expectation);
  if (state != TransferState::kDone) expectation->handle()->release_streams(outcome_of(state));
  if (num_draining == 0) fenced(handle);
}

// A peer that wrote under it may send more writes that were meant for it.
void Expectations::remember_ended(const Expectation& expectation) {
  if (!expectation.from())
    return leases_.ended().add_for_all(expectation.region(), expectation.blocks(), sessions_.next_key());
  if (sessions_.find(*expectation.from()) == nullptr) return;
  context_.serve(*expectation.from(), [&] {
    SparseBitSet blocks(regions_.find(expectation.region())->num_blocks);
    for (const std::uint32_t block : expectation.blocks()) blocks.insert(block);
    leases_.ended().add(*expectation.from(), expectation.region(), wire::LeaseMode::kWrite, blocks);
  });
}

bool Expectations::drained(const Expectation& expectation) {
  auto found = ending_.find(expectation.handle()->id());
  if (found == ending_.end()) return false;
  if (--found->second.num_draining == 0) fenced(found->first);
  return true;
}

void Expectations::fenced(std::uint64_t handle) {
  bool has_ended = false;
  context_.serve(kNobody, [&] {
    const auto found = ending_.find(handle);
    auto& [expectation, state, why, num_draining, is_recorded] = found->second;
    std::vector<std::uint32_t> failed;
    if (state != TransferState::kDone) failed = expectation->incomplete_blocks();
    if (!std::exchange(is_recorded, true)) records_.ended(*expectation, state, why);
    handles_.end(expectation->handle(), state, why, std::move(failed));
    has_ended = true;
    ending_.erase(found);
  });
  has_rest_ = has_rest_ || !has_ended;
}

void Expectations::end_rest() {
  has_rest_ = false;
  for (auto next = ending_.begin(); next != ending_.end();)
    if (const auto each = next++; each->second.num_draining == 0) fenced(each->first);
}

}  // namespace kvxfer
