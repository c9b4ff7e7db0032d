#include "core/engine/rails.h"

#include <algorithm>
#include <new>

namespace kvxfer {
namespace {

// A rail that was slow is tried again before other rails have moved so many times its pieces.
constexpr Time kSlowest = 8;

}  // namespace

bool Rail::is_sooner(const Rail& other, std::uint8_t priority) const noexcept {
  const Lane &ours = lane(priority), &others = other.lane(priority);
  if (ours.pace_ns_ == 0 || others.pace_ns_ == 0) return ours.outstanding_ < others.outstanding_;
  const auto ends_in = [](const Lane& lane, Time slowest) {
    return (Time{lane.outstanding_} + 1) * std::min(lane.pace_ns_, slowest);
  };
  return ends_in(ours, kSlowest * others.pace_ns_) < ends_in(others, kSlowest * ours.pace_ns_);
}

void Rail::Lane::count_posted(Time now) noexcept {
  if (outstanding_++ != 0) return;
  measured_at_ = now;
  num_measured_ = 0;
}

// A piece has come. If several come at once, the first one does not count for the others; they count with
// the next.
void Rail::Lane::measure(std::uint32_t window, Time now) noexcept {
  ++num_measured_;
  if (now <= measured_at_) return;
  const Time each = std::max<Time>((now - measured_at_) / num_measured_, 1);
  // With few pieces under way, a piece takes the network's time: the rail is at least this fast.
  const bool is_loaded = outstanding_ >= window / 2;
  if (is_loaded || each < pace_ns_) pace_ns_ = pace_ns_ == 0 ? each : (7 * pace_ns_ + each) / 8;
  measured_at_ = now;
  num_measured_ = 0;
}

Rail& Rails::add(SessionKey session, const RailInfo& info) {
  Rail& rail = rails_[info.id];
  rail.info_ = info;
  rail.session_ = session;
  OfSession& all = sessions_[session];
  all.alive.push_back(&rail);
  all.newest[info.name.index] = {info.name.attempt};
  return rail;
}

const std::vector<Rail*>& Rails::of(SessionKey session) const {
  static const std::vector<Rail*> none;
  auto found = sessions_.find(session);
  return found == sessions_.end() ? none : found->second.alive;
}

bool Rails::any(SessionKey session, std::string_view transport) const {
  const std::vector<Rail*>& alive = of(session);
  return std::any_of(alive.begin(), alive.end(),
                     [&](const Rail* rail) { return rail->capabilities().name == transport; });
}

bool Rails::was_lost(SessionKey session, const std::string& transport) const {
  auto found = sessions_.find(session);
  return found != sessions_.end() && found->second.lost.contains(transport);
}

Rail* Rails::at(SessionKey session, std::uint16_t index) {
  for (Rail* each : of(session))
    if (each->info().name.index == index) return each;
  return nullptr;
}

void Rails::expect(SessionKey session, const wire::RailName& rail) {
  sessions_[session].newest[rail.index] = {rail.attempt, true};
}

void Rails::give_up(SessionKey session, const wire::RailName& rail) {
  Attempt& attempt = sessions_[session].newest[rail.index];
  if (rail.attempt >= attempt.number) attempt = {rail.attempt};
}

const Rails::Attempt* Rails::newest(SessionKey session, std::uint16_t index) const {
  auto all = sessions_.find(session);
  if (all == sessions_.end()) return nullptr;
  auto found = all->second.newest.find(index);
  return found == all->second.newest.end() ? nullptr : &found->second;
}

bool Rails::is_expected(SessionKey session, const wire::RailName& rail) const {
  const Attempt* const attempt = newest(session, rail.index);
  return attempt != nullptr && attempt->expected && attempt->number == rail.attempt;
}

bool Rails::is_over(SessionKey session, const wire::RailName& rail) const {
  const Attempt* const attempt = newest(session, rail.index);
  if (attempt == nullptr || rail.attempt > attempt->number) return false;
  return rail.attempt < attempt->number || !attempt->expected;
}

void Rails::remove(Rail& rail) {
  OfSession& session = sessions_[rail.session_];
  session.lost.emplace(rail.capabilities().name);
  std::erase(session.alive, &rail);
  context_.timers.clear(rail.watch_);
  rails_.erase(rail.id());
}

void Rails::drop_session(SessionKey session) {
  auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  for (Rail* each : found->second.alive) {
    context_.host.drop_rail(each->id());
    context_.timers.clear(each->watch_);
    rails_.erase(each->id());
  }
  sessions_.erase(found);
}

Code Rails::post(Rail& rail, Work& work, TransferEnd& transfer) {
  work.id = next_work_++;
  // Everything that remembers the work exists before a byte of it can land.
  if (is_awaited(work.kind) && !rail.watch_) watch_on(rail);
  transfer.posted.push_back({work.id, rail.id()});
  const std::size_t of_class = rail.class_of(transfer.priority);
  Code posted = Code::kAgain;
  try {
    spare_works_.insert(
        works_, work.id,
        Record{work.kind, transfer.key, rail.id(), work.piece, static_cast<std::uint8_t>(of_class)});
    posted = context_.host.post(rail.id(), work);
  } catch (...) {
    forget_posted(work.id, transfer);
    throw;
  }
  if (posted != Code::kOk)
    forget_posted(work.id, transfer);
  else if (is_awaited(work.kind))
    count_posted(rail, of_class);
  return posted;
}

void Rails::forget_posted(WorkId work, TransferEnd& transfer) {
  transfer.posted.pop_back();
  if (const auto found = works_.find(work); found != works_.end()) spare_works_.erase(works_, found);
}

void Rails::note_again(Rail& rail, std::uint8_t priority) {
  rail.lanes_[rail.class_of(priority)].said_again_ = true;
  saying_again_.push_back(rail.id());
}

void Rails::begin_round() {
  for (const RailId id : saying_again_)
    if (auto rail = rails_.find(id); rail != rails_.end())
      for (Rail::Lane& lane : rail->second.lanes_) lane.said_again_ = false;
  saying_again_.clear();
}

void Rails::stop(const TransferEnd& transfer) {
  for (const auto& [id, rail_id] : transfer.posted) {
    Rail* const rail = find(rail_id);  // null: it is gone, and has ended its works
    if (rail != nullptr) try {
        rail->stopped_.push_back(id);
        if (rail->stopped_.size() == 1) stopping_.push_back(rail_id);
      } catch (const std::bad_alloc&) {
        std::erase(rail->stopped_, id);
        context_.host.cancel(rail_id, std::span(&id, 1));
      }
    auto work = works_.find(id);
    if (work == works_.end() || !is_awaited(work->second.kind) || work->second.stopped) continue;
    work->second.stopped = true;
    forget_due(rail, work->second.of_class);
  }
}

void Rails::cancel_stopped() {
  for (const RailId id : stopping_)
    if (const auto rail = rails_.find(id); rail != rails_.end()) {
      context_.host.cancel(id, rail->second.stopped_);
      rail->second.stopped_.clear();
    }
  stopping_.clear();
}

std::optional<Rails::Completed> Rails::completed(const Completion& completion) {
  auto found = works_.find(completion.work);
  if (found == works_.end()) return std::nullopt;
  const Record work = found->second;
  spare_works_.erase(works_, found);
  const bool is_due = is_awaited(work.kind) && !work.stopped;
  Rail* const rail = find(work.rail);
  if (rail != nullptr && is_awaited(work.kind)) {
    if (is_due) rail->lanes_[work.of_class].measure(rail->capabilities().window, context_.now);
    rail->moved_at_ = context_.now;
    rail->forgiven_ = false;
  }
  if (is_due) forget_due(rail, work.of_class);
  return Completed{work.kind, work.transfer, work.piece, work.rail, rail};
}

void Rails::count_posted(Rail& rail, std::size_t of_class) {
  ++outstanding_;
  ++outstanding_of_[of_class];
  rail.lanes_[of_class].count_posted(context_.now);
  if (rail.outstanding_++ == 0) {
    rail.moved_at_ = context_.now;
    rail.forgiven_ = false;
  }
}

void Rails::forget_due(Rail* rail, std::size_t of_class) noexcept {
  --outstanding_;
  --outstanding_of_[of_class];
  if (rail == nullptr) return;
  --rail->outstanding_;
  --rail->lanes_[of_class].outstanding_;
}

bool Rails::is_silent(RailId id, Time late) {
  Rail& rail = rails_.at(id);
  rail.watch_.reset();
  if (rail.outstanding_ == 0) return false;
  const Time silent = context_.config.session.silent_ns;
  const Time at = time_after(rail.moved_at_, silent);
  if (at > context_.now) {
    watch(rail, at);
    return false;
  }
  // What came while this agent stood still has not been read yet. Forgiven once, as in a session.
  if (late < silent / 4 || std::exchange(rail.forgiven_, true)) return true;
  watch_on(rail);
  return false;
}

void Rails::watch_on(Rail& rail) { watch(rail, time_after(context_.now, context_.config.session.silent_ns)); }

}  // namespace kvxfer
