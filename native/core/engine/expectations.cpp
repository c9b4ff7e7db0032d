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
  if (tags_.contains(wire::text_of(tag)))
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
  by_region_.emplace(region_id, id);
  if (from) by_writer_.emplace(*from, id);
  tags_.emplace(wire::text_of(tag), id);
  tag_memory_.forget_ours(wire::text_of(tag));
  Expected& expected = expectations_[id];
  expected.expectation = std::make_shared<Expectation>(std::move(handle), std::move(tag), region_id, from,
                                                       std::move(blocks), first_layer, num_layers, needed);
  context_.timers.set(expected.timer, time_after(context_.now, timeout_ns), TimerKind::kExpectation, id);
  return expected.expectation;
}

std::shared_ptr<Expectation> Expectations::find(const TransferEnd& transfer) const {
  if (tags_.empty() || transfer.notify.empty()) return nullptr;
  auto tag = tags_.find(wire::text_of(transfer.notify));
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
  ending_.insert_or_assign(handle, Ending{expectation, state, why, num_draining});
  remember_ended(*expectation);
  tags_.erase(wire::text_of(expectation->tag()));
  by_region_.erase({expectation->region(), handle});
  if (expectation->from()) by_writer_.erase({*expectation->from(), handle});
  const auto found = expectations_.find(handle);
  context_.timers.clear(found->second.timer);
  expectations_.erase(found);
  if (state != TransferState::kDone) expectation->handle()->let_streams_go(outcome_of(state));
  if (num_draining != 0) return;
  ending_.erase(handle);
  fenced(*expectation, state, why);
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
  if (--found->second.num_draining == 0) {
    const Ending ended = std::move(found->second);
    ending_.erase(found);
    fenced(*ended.expectation, ended.state, ended.why);
  }
  return true;
}

void Expectations::fenced(const Expectation& expectation, TransferState state, const Status& why) {
  std::vector<std::uint32_t> failed;
  context_.serve(kNobody, [&] {
    if (state != TransferState::kDone) failed = expectation.incomplete_blocks();
  });
  records_.ended(expectation, state, why);
  context_.serve(kNobody, [&] { handles_.end(expectation.handle(), state, why, std::move(failed)); });
}

}  // namespace kvxfer
