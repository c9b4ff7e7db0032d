// Events for a caller: every end of a peer or a lease, ends of transfers that a caller waits for, and
// notifications in order, within bounds.
#include "core/completion_ring.h"

#include <poll.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace kvxfer {
namespace {

wire::Bytes bytes_of(std::uint32_t value) {
  wire::Bytes bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::uint32_t value_of(const Mail& mail) {
  std::uint32_t value = 0;
  std::memcpy(&value, mail.payload.data(), sizeof value);
  return value;
}

bool readable(const CompletionRing& ring) {
  pollfd polled{ring.fd(), POLLIN, 0};
  return ::poll(&polled, 1, 0) == 1;
}

TEST(ends_of_transfers_are_told_while_somebody_waits_and_no_longer) {
  CompletionRing ring;
  ring.push({.kind = EventKind::kEnded, .handle = 1});
  ring.push({.kind = EventKind::kLayer, .handle = 1, .layer = 2});
  CHECK(ring.take_news());  // a caller that polls still learns that something came
  CHECK(!ring.has_events());
  ring.add_waiters(1);
  ring.push({.kind = EventKind::kEnded, .handle = 2});
  ring.add_waiters(-1);
  ring.push({.kind = EventKind::kEnded, .handle = 3});
  ring.push({.kind = EventKind::kPeerLost, .peer = 4});
  const std::vector<Event> events = ring.drain(8, true);
  REQUIRE(events.size() == 2);
  CHECK_EQ(events[0].handle, 2u);
  CHECK(events[1].kind == EventKind::kPeerLost);
}

TEST(many_notifications_are_one_event_and_keep_their_order) {
  CompletionRing ring;
  ring.deliver(MailKind::kNotification, {7, bytes_of(0)});
  CHECK(!ring.has_events());
  ring.add_waiters(1);
  for (std::uint32_t i = 1; i < 4; ++i) ring.deliver(MailKind::kNotification, {7, bytes_of(i)});
  CHECK_EQ(ring.drain(8, true).size(), 1u);
  ring.deliver(MailKind::kNotification, {7, bytes_of(4)});
  CHECK_EQ(ring.drain(8, true).size(), 1u);
  CHECK_EQ(ring.drain(8, true).size(), 0u);
  for (std::uint32_t i = 0; i < 5; ++i) {
    const std::optional<Mail> taken = ring.take(MailKind::kNotification);
    REQUIRE(taken.has_value());
    CHECK_EQ(taken->peer, 7u);
    CHECK_EQ(value_of(*taken), i);
  }
  CHECK(!ring.take(MailKind::kNotification).has_value());
}

TEST(the_descriptor_wakes_those_who_wait_alone) {
  CompletionRing ring;
  (void)ring.drain(8, true);  // armed
  ring.deliver(MailKind::kNotification, {7, bytes_of(0)});
  ring.push({.kind = EventKind::kEnded, .handle = 1});
  CHECK(!readable(ring));
  ring.add_waiters(1);
  ring.deliver(MailKind::kNotification, {7, bytes_of(1)});
  CHECK(readable(ring));
  CHECK_EQ(ring.drain(8, true).size(), 1u);
  CHECK(!readable(ring));
}

TEST(news_are_told_once) {
  CompletionRing ring;
  CHECK(!ring.take_news());
  ring.deliver(MailKind::kNotification, {7, bytes_of(0)});
  CHECK(ring.take_news());
  CHECK(!ring.take_news());  // although the notification is unread, so `while poll()` ends
  CHECK(ring.take(MailKind::kNotification).has_value());
}

constexpr std::uint32_t kMost = CompletionRing::kMaxLeft;

TEST(of_what_peers_leave_that_are_gone_the_oldest_goes_and_one_line_says_so) {
  CompletionRing ring;
  constexpr SessionKey kOpen = 1, kGone = 2, kLater = 3;
  for (std::uint32_t i = 0; i < kMost; ++i) {
    ring.deliver(MailKind::kNotification, {kGone, bytes_of(i)});
    ring.deliver(MailKind::kNotification, {kOpen, bytes_of(i)});
  }
  ring.push({.kind = EventKind::kPeerLost, .peer = kGone});
  CHECK_EQ(ring.num_dropped(MailKind::kNotification), 0u);
  for (std::uint32_t i = 0; i < 3; ++i) ring.deliver(MailKind::kNotification, {kLater, bytes_of(i)});
  ring.push({.kind = EventKind::kPeerLost, .peer = kLater});
  CHECK_EQ(ring.num_dropped(MailKind::kNotification), 3u);
  const std::vector<Event> events = ring.drain(8, true);
  REQUIRE(events.size() == 3);
  CHECK(events[1].kind == EventKind::kLog);
  CHECK_HAS(events[1].message, "notifications of lost peers are unread");
  std::uint32_t next_open = 0, next_gone = 3;
  for (std::uint32_t i = 0; i < 2 * kMost - 3; ++i) {
    const std::optional<Mail> taken = ring.take(MailKind::kNotification);
    REQUIRE(taken.has_value());
    CHECK_EQ(value_of(*taken), taken->peer == kOpen ? next_open++ : next_gone++);
  }
  CHECK_EQ(next_open, kMost);
  for (std::uint32_t i = 0; i < 3; ++i) CHECK_EQ(ring.take(MailKind::kNotification)->peer, kLater);
  CHECK(!ring.take(MailKind::kNotification).has_value());
}

TEST(messages_and_notifications_keep_apart) {
  CompletionRing ring;
  ring.add_waiters(1);
  ring.deliver(MailKind::kMessage, {7, bytes_of(1), {}, true});
  ring.deliver(MailKind::kNotification, {7, bytes_of(2)});
  ring.deliver(MailKind::kMessage, {7, bytes_of(3)});
  const std::vector<Event> events = ring.drain(8, true);
  REQUIRE(events.size() == 2);
  CHECK(events[0].kind == EventKind::kMessage);
  CHECK(events[1].kind == EventKind::kNotification);
  const std::optional<Mail> first = ring.take(MailKind::kMessage);
  CHECK_EQ(value_of(*first), 1u);
  CHECK(first->tells);
  CHECK_EQ(value_of(*ring.take(MailKind::kNotification)), 2u);
  CHECK(!ring.take(MailKind::kNotification).has_value());
  CHECK_EQ(value_of(*ring.take(MailKind::kMessage)), 3u);
}

TEST(what_is_left_unread_is_bounded_in_bytes_too) {
  CompletionRing ring;
  constexpr std::size_t kNum = Mailbox::kMaxLeftNbytes / wire::kMaxMessage + 2;
  for (std::uint32_t i = 0; i < kNum; ++i) {
    wire::Bytes longest(wire::kMaxMessage);
    std::memcpy(longest.data(), &i, sizeof i);
    ring.deliver(MailKind::kMessage, {i, std::move(longest)});
    ring.push({.kind = EventKind::kPeerLost, .peer = i});
  }
  CHECK_EQ(ring.num_dropped(MailKind::kMessage), 2u);
  CHECK_EQ(ring.num_dropped(MailKind::kNotification), 0u);
  for (std::uint32_t i = 2; i < kNum; ++i) CHECK_EQ(value_of(*ring.take(MailKind::kMessage)), i);
  CHECK(!ring.take(MailKind::kMessage).has_value());
}

TEST(room_and_told_leases_wake_those_who_wait_alone) {
  for (const EventKind kind : {EventKind::kRoom, EventKind::kLeaseAcknowledged}) {
    CompletionRing ring;
    ring.push({.kind = kind, .peer = 1, .lease = 2});
    CHECK(ring.take_news());
    CHECK(!ring.has_events());
    ring.add_waiters(1);
    ring.push({.kind = kind, .peer = 1, .lease = 2});
    CHECK_EQ(ring.drain(8, true).size(), 1u);
  }
}

TEST(sessions_that_come_and_go_leave_no_more_events_than_a_bound) {
  CompletionRing ring;
  ring.push({.kind = EventKind::kPeerUp, .peer = 1});
  for (SessionKey peer = 2; peer < kMost + 10; ++peer) {
    ring.push({.kind = EventKind::kPeerUp, .peer = peer});
    ring.push({.kind = EventKind::kRegion, .peer = peer, .region = 1});
    ring.push({.kind = EventKind::kPeerLost, .peer = peer});
  }
  CHECK_EQ(ring.num_events_dropped(), 16u);  // up and lost, of the 8 oldest
  const std::vector<Event> events = ring.drain(3 * kMost, true);
  REQUIRE(events.size() == 2 * kMost + 1);
  CHECK_EQ(events[0].peer, 1u);
  CHECK_EQ(events[1].peer, 10u);
  CHECK(events.back().kind == EventKind::kPeerLost);
}

TEST(what_waits_is_charged_until_a_caller_takes_it) {
  CompletionRing ring;
  Budget::Amounts limits{};
  limits[static_cast<std::size_t>(Resource::kEvents)] = 8;
  const auto budget = std::make_shared<Budget>(limits);
  const auto charge = [&] { return Charge::take(budget, Resource::kEvents, 1); };
  ring.push({.kind = EventKind::kRegion, .peer = 1, .charge = charge()});
  ring.push({.kind = EventKind::kRegionGone, .peer = 2, .charge = charge()});
  ring.deliver(MailKind::kNotification, {1, bytes_of(0), charge()});
  CHECK_EQ(budget->used(Resource::kEvents), 3u);
  const std::vector<Event> events = ring.drain(1, true);
  CHECK_EQ(budget->used(Resource::kEvents), 2u);  // although the event is kept
  const std::optional<Mail> taken = ring.take(MailKind::kNotification);
  CHECK_EQ(budget->used(Resource::kEvents), 1u);
  ring.push({.kind = EventKind::kPeerLost, .peer = 2});
  CHECK_EQ(budget->used(Resource::kEvents), 0u);
}

// The waiter announces its wait and looks once more; the other thread ends the transfer and notifies. One of
// the two always sees the other.
TEST(no_end_is_missed_between_the_last_look_and_the_wait) {
  CompletionRing ring;
  std::atomic<std::uint64_t> ended{0}, pushed{0}, asked{0};
#ifdef __SANITIZE_THREAD__
  constexpr std::uint64_t kRounds = 500;  // each takes some milliseconds
#else
  constexpr std::uint64_t kRounds = 5'000;
#endif
  std::thread engine([&] {
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      while (asked.load() < round) std::this_thread::yield();
      ended.store(round);
      ring.push({.kind = EventKind::kEnded, .handle = round});
      pushed.store(round);
    }
  });
  std::uint64_t num_missed = 0;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    asked.store(round);
    ring.add_waiters(1);
    bool told = ended.load() == round;
    // If the event is not in the ring after the push, it never will be.
    for (bool last = false; !told && !last;) {
      last = pushed.load() == round;
      for (const Event& event : ring.drain(8, false)) told = told || event.handle == round;
    }
    num_missed += told ? 0 : 1;
    ring.add_waiters(-1);
    (void)ring.drain(8, false);
  }
  engine.join();
  CHECK_EQ(num_missed, 0u);
}

}  // namespace
}  // namespace kvxfer
