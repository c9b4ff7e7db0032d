// Records of transfers: each end leaves one record when it ends, in whatever way, and the records of both
// ends join.
#include "memory_failure.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "simulated_pair.h"

namespace simulation {
namespace {

using Of = Engine::OpenPlace::Of;

// A pair with records at both ends.
struct Watched {
  explicit Watched(const std::vector<RailPlan>& rails, std::uint64_t seed) : pair(rails, seed) {
    REQUIRE(at_src.resize(64).ok() && at_dst.resize(64).ok());
    pair.src.engine().watch_records(&at_src);
    pair.dst.engine().watch_records(&at_dst);
  }
  static std::vector<Record> take(RecordRing& ring) {
    std::vector<Record> records(64);
    records.resize(ring.take(records));
    return records;
  }
  RecordRing at_src, at_dst;
  Pair pair;
};

void on_every_watched(const std::function<void(Watched&)>& scenario) {
  for (const auto& rails : rail_sets())
    for (std::uint64_t i = 0; i < 3; ++i) {
      Watched watched(rails, check::seed() * 1000 + i);
      scenario(watched);
    }
}

std::vector<Record> open_at(Node& node, std::size_t of_a_hold = 2) {
  std::vector<Record> found;
  Engine::OpenPlace place;
  while (place.of != Of::kNothing) {
    std::vector<Record> some(of_a_hold);
    some.resize(node.engine().open_transfers(place, some));
    found.insert(found.end(), some.begin(), some.end());
  }
  return found;
}

std::string context_of(const Record& record) { return {record.context, record.context_nbytes}; }
std::string message_of(const Record& record) { return {record.message, record.message_nbytes}; }

bool cancel(Node& node, const Record& record) {
  const bool was_open = node.engine().cancel_transfer(node.now(), {record.session, record.transfer},
                                                      record.role == RecordRole::kSource);
  node.settle();
  return was_open;
}

// ---- ends -----------------------------------------------------------------------------------------

struct End {
  std::optional<Outcome> outcome;  // none: failed or cancelled, as the code says
  std::optional<Code> code;        // none: any code, where either end may be first
};
struct Ending {
  const char* name;
  bool write;
  // Posts one transfer and brings about its end.
  std::function<void(Pair&)> run;
  End src, dst;
};

std::shared_ptr<Handle> halfway(Pair& pair, bool write) {
  pair.grant_read();
  pair.grant_write();
  auto handle = write ? pair.write(kFrom, kTo, "req", "whose") : pair.read(kFrom, kTo, "req", "whose");
  REQUIRE(pair.until_midway(kFrom.size()));
  return handle;
}

const End kDone{Outcome::kDone, Code::kOk};
End failed(Code code) { return {Outcome::kFailed, code}; }
const End kAnyFailure{Outcome::kFailed, std::nullopt};
// Whichever end cancelled it.
const End kCancelled{Outcome::kCancelled, Code::kCancelled};
// If the source cancels, the destination hears of it, or first finds that its right has ended.
const End kAnyEnd{std::nullopt, std::nullopt};

const std::vector<Ending>& endings() {
  static const std::vector<Ending> all = {
      {"done write", true,
       [](Pair& pair) {
         pair.grant_write();
         pair.write(kFrom, kTo, "req", "whose");
       },
       kDone, kDone},
      {"done read", false,
       [](Pair& pair) {
         pair.grant_read();
         pair.read(kFrom, kTo, "req", "whose");
       },
       kDone, kDone},
      {"write without blocks", true,
       [](Pair& pair) {
         pair.grant_write();
         pair.write({}, {}, "req", "whose");
       },
       kDone, kDone},
      {"refused write", true, [](Pair& pair) { pair.write(kFrom, kTo, "", "whose"); },
       failed(Code::kNotPermitted), failed(Code::kNotPermitted)},
      {"refused read", false, [](Pair& pair) { pair.read(kFrom, kTo, "", "whose"); },
       failed(Code::kNotPermitted), failed(Code::kNotPermitted)},
      {"write that does not fit what is expected", true,
       [](Pair& pair) {
         pair.expect("req", {1});
         pair.write(kFrom, kTo, "req", "whose");
       },
       failed(Code::kRefused), failed(Code::kRefused)},
      {"parked write whose time is over",
       true,
       [](Pair& pair) { pair.write(kFrom, kTo, "req", "whose"); },
       {Outcome::kFailed, {}},
       {Outcome::kFailed, {}}},
      {"write cancelled by its poster", true, [](Pair& pair) { pair.src.cancel(halfway(pair, true)); },
       kCancelled, kAnyEnd},
      {"read cancelled by its poster", false, [](Pair& pair) { pair.dst.cancel(halfway(pair, false)); },
       kCancelled, kCancelled},
      {"write cancelled by its number at the destination", true,
       [](Pair& pair) {
         halfway(pair, true);
         CHECK(cancel(pair.dst, open_at(pair.dst).at(0)));
       },
       kCancelled, kCancelled},
      {"read cancelled by its number at the source", false,
       [](Pair& pair) {
         halfway(pair, false);
         CHECK(cancel(pair.src, open_at(pair.src).at(0)));
       },
       kCancelled, kAnyEnd},
      {"write whose region is deregistered", true,
       [](Pair& pair) {
         halfway(pair, true);
         CHECK(pair.src.deregister(pair.src_region).ok());
       },
       failed(Code::kRegionGone), kAnyFailure},
      {"session that ends", true,
       [](Pair& pair) {
         halfway(pair, true);
         pair.src.end_session_with(pair.to_dst);
       },
       failed(Code::kClosed), failed(Code::kPeerLost)},
      {"agent that is closed", false,
       [](Pair& pair) {
         halfway(pair, false);
         pair.dst.engine().close(pair.dst.now());
         pair.dst.settle();
       },
       failed(Code::kPeerLost), failed(Code::kClosed)},
  };
  return all;
}

void check_end(const Ending& ending, const Record& record, const End& expected, bool is_source,
               const Pair& pair) {
  const Layout& layout = pair.src_layout;
  CHECK(record.role == (is_source ? RecordRole::kSource : RecordRole::kDestination));
  CHECK_EQ(record.outcome, expected.outcome.value_or(record.outcome));
  CHECK_EQ(record.outcome == Outcome::kDone, expected.outcome == Outcome::kDone);
  CHECK_EQ(record.outcome == Outcome::kCancelled,
           record.code == static_cast<std::uint16_t>(Code::kCancelled));
  if (expected.code) CHECK_EQ(record.code, static_cast<std::uint16_t>(*expected.code));
  CHECK_EQ(record.message_nbytes != 0, record.outcome != Outcome::kDone);
  CHECK_EQ(record.ours != 0, is_source == ending.write);
  CHECK_EQ(record.handle != 0, record.ours != 0);
  CHECK_EQ(record.session, is_source ? pair.to_dst : pair.to_src);
  CHECK_EQ(record.region, is_source ? pair.src_region : pair.dst_region);
  CHECK_EQ(record.remote_region, is_source ? pair.dst_region : pair.src_region);
  CHECK_EQ(record.num_layers, layout.num_layers);
  CHECK_EQ(record.nbytes, record.num_blocks * std::uint64_t{2} * layout.chunk_nbytes * layout.num_layers);
  CHECK_EQ(context_of(record), "whose");
  CHECK(record.posted_ns > 0 && record.posted_ns <= record.ended_ns);
  CHECK(record.begun_ns == 0 || (record.posted_ns <= record.begun_ns && record.begun_ns <= record.ended_ns));
  CHECK(record.first_piece_ns == 0 || record.begun_ns <= record.first_piece_ns);
  CHECK(record.pieces_done <= record.num_pieces);
  if (record.outcome != Outcome::kDone) return;
  CHECK_EQ(record.pieces_done, record.num_pieces);
  CHECK(record.begun_ns != 0);
  if (is_source || record.num_blocks == 0) return;
  CHECK(record.first_piece_ns != 0);
  CHECK(record.rails_nbytes != 0);
}

TEST(each_end_leaves_one_record_however_it_ends_and_both_join) {
  for (const Ending& ending : endings())
    on_every_watched([&](Watched& watched) {
      Pair& pair = watched.pair;
      ending.run(pair);
      REQUIRE(pair.world.until(
          [&] { return pair.src.engine().num_transfers() + pair.dst.engine().num_transfers() == 0; },
          12 * kSecond));
      pair.world.run_for(kSecond);
      const std::vector<Record> src = Watched::take(watched.at_src), dst = Watched::take(watched.at_dst);
      if (src.size() != 1 || dst.size() != 1)
        FAIL(std::string(ending.name) + ": " + std::to_string(src.size()) + " and " +
             std::to_string(dst.size()));
      REQUIRE(src.size() == 1 && dst.size() == 1);
      check_end(ending, src[0], ending.src, true, pair);
      check_end(ending, dst[0], ending.dst, false, pair);
      CHECK_EQ(src[0].transfer, dst[0].transfer);
      CHECK_EQ(src[0].num_pieces, dst[0].num_pieces);
    });
}

TEST(of_a_peer_that_died_this_end_leaves_its_record) {
  on_every_watched([](Watched& watched) {
    Pair& pair = watched.pair;
    const auto handle = halfway(pair, true);
    pair.dst.crash();
    REQUIRE(pair.ends(handle));
    const std::vector<Record> src = Watched::take(watched.at_src);
    REQUIRE(src.size() == 1);
    CHECK_EQ(src[0].code, static_cast<std::uint16_t>(Code::kPeerLost));
    CHECK_EQ(message_of(src[0]), handle->status().message().substr(0, sizeof src[0].message));
  });
}

// Transfers that would otherwise never end: the agent's transports are gone.
TEST(what_is_abandoned_leaves_its_record_too) {
  on_every_watched([](Watched& watched) {
    Pair& pair = watched.pair;
    halfway(pair, true);
    pair.dst.engine().close(pair.dst.now());
    pair.dst.engine().abandon(pair.dst.now());
    CHECK_EQ(Watched::take(watched.at_dst).size(), 1u);
  });
}

TEST(an_expectation_leaves_one_record) {
  struct Case {
    const char* name;
    std::function<void(Pair&, const std::shared_ptr<Handle>&)> run;
    Outcome outcome;
    Code code;
  };
  const Case cases[] = {{"done", [](Pair& pair, const auto&) { pair.write(kFrom, kTo, "req", "w"); },
                         Outcome::kDone, Code::kOk},
                        {"cancelled", [](Pair& pair, const auto& handle) { pair.dst.cancel(handle); },
                         Outcome::kCancelled, Code::kCancelled},
                        {"late", [](Pair&, const auto&) {}, Outcome::kFailed, Code::kDeadline},
                        {"cancelled while it is written",
                         [](Pair& pair, const auto& handle) {
                           pair.write(kFrom, kTo, "req", "w");
                           REQUIRE(pair.until_midway(kFrom.size()));
                           pair.dst.cancel(handle);
                         },
                         Outcome::kCancelled, Code::kCancelled},
                        {"closed", [](Pair& pair, const auto&) { pair.dst.engine().close(pair.dst.now()); },
                         Outcome::kFailed, Code::kClosed}};
  for (const auto& [name, run, outcome, code] : cases)
    on_every_watched([&, run = run, outcome = outcome, code = code](Watched& watched) {
      Pair& pair = watched.pair;
      const auto handle = pair.expect("req", kTo, Pair::kTimeout, "whose");
      const std::vector<Record> open = open_at(pair.dst);
      REQUIRE(open.size() == 1);
      CHECK(open[0].role == RecordRole::kExpectation && open[0].outcome == Outcome::kPending);
      run(pair, handle);
      REQUIRE(pair.ends(handle));
      std::vector<Record> records = Watched::take(watched.at_dst);
      std::erase_if(records, [](const Record& record) { return record.role != RecordRole::kExpectation; });
      REQUIRE(records.size() == 1);
      CHECK_EQ(records[0].handle, handle->id());
      CHECK_EQ(records[0].transfer, handle->id());
      CHECK_EQ(records[0].outcome, outcome);
      CHECK_EQ(records[0].code, static_cast<std::uint16_t>(code));
      CHECK_EQ(records[0].num_blocks, kTo.size());
      CHECK_EQ(records[0].region, pair.dst_region);
      CHECK_EQ(context_of(records[0]), "whose");
      CHECK_EQ(records[0].rails_nbytes != 0, outcome == Outcome::kDone || records[0].first_piece_ns != 0);
      CHECK(open_at(pair.dst).empty());
    });
}

// ---- open -----------------------------------------------------------------------------------------

TEST(what_is_open_is_listed_once_whatever_fits_into_a_hold) {
  for (const std::size_t of_a_hold : {1u, 2u, 5u, 64u}) {
    Watched watched({two_sided_rail()}, check::seed());
    Pair& pair = watched.pair;
    for (const char* tag : {"a", "b", "c"}) pair.write({1, 2}, {3, 4}, tag);
    for (const char* tag : {"x", "y"}) pair.expect(tag, {5, 6});
    pair.world.run_for(100 * kMillisecond);
    const std::vector<Record> src = open_at(pair.src, of_a_hold), dst = open_at(pair.dst, of_a_hold);
    REQUIRE(src.size() == 3 && dst.size() == 5);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK_EQ(src[i].transfer, dst[i].transfer);
      CHECK_EQ(src[i].state, TransferState::kServing);
      CHECK_EQ(dst[i].state, TransferState::kParked);
      CHECK_EQ(dst[i].begun_ns, 0);
      CHECK_EQ(src[i].outcome, Outcome::kPending);
      CHECK_EQ(src[i].ended_ns, 0);
      if (i != 0) CHECK(src[i - 1].transfer < src[i].transfer);
    }
    CHECK(dst[3].role == RecordRole::kExpectation && dst[4].role == RecordRole::kExpectation);
    CHECK(dst[3].handle != dst[4].handle);
    pair.src.engine().close(pair.src.now());
    pair.dst.engine().close(pair.dst.now());
    CHECK(open_at(pair.src).empty());
  }
}

TEST(a_held_write_is_seen_and_is_cancelled_by_its_number_once) {
  on_every_watched([](Watched& watched) {
    Pair& pair = watched.pair;
    pair.grant_write();
    TransferRequest request = pair.request(true, kFrom, kTo, "req");
    request.layers_ready = 0;
    const auto handle = Pair::post(pair.src, std::move(request));
    pair.world.run_for(kSecond);
    const std::vector<Record> open = open_at(pair.src);
    REQUIRE(open.size() == 1);
    CHECK_EQ(open[0].handle, handle->id());
    CHECK_EQ(open[0].pieces_done, 0u);
    CHECK(open[0].num_pieces != 0);
    Record unlike = open[0];
    unlike.role = RecordRole::kDestination;
    CHECK(!cancel(pair.src, unlike));
    CHECK(cancel(pair.src, open[0]));
    CHECK(!cancel(pair.src, open[0]));
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kCancelled);
    pair.check_quiet();
  });
}

// ---- cost -----------------------------------------------------------------------------------------

std::atomic<std::uint64_t> num_allocated{0};

// Allocations in the same world, with records or without.
std::uint64_t allocations(const std::vector<RailPlan>& rails, bool watched, bool write) {
  RecordRing at_src, at_dst;
  Pair pair(rails, check::seed());
  pair.grant_read();
  pair.grant_write();
  if (watched) {
    REQUIRE(at_src.resize(8).ok() && at_dst.resize(8).ok());
    pair.src.engine().watch_records(&at_src);
    pair.dst.engine().watch_records(&at_dst);
  }
  num_allocated = 0;
  memory_failure::fails = [](std::size_t) noexcept { return ++num_allocated == 0; };
  const auto handle = write ? pair.write(kFrom, kTo, "req", "whose") : pair.read(kFrom, kTo, "req", "whose");
  const bool ended = pair.ends(handle);
  pair.world.run_for(kSecond);
  memory_failure::fails = nullptr;
  REQUIRE(ended && at_src.size() + at_dst.size() == (watched ? 2u : 0u));
  return num_allocated;
}

TEST(a_record_allocates_nothing) {
  for (const auto& rails : rail_sets())
    for (const bool write : {false, true})
      CHECK_EQ(allocations(rails, true, write), allocations(rails, false, write));
}

// ---- leases ---------------------------------------------------------------------------------------

TEST(leases_that_were_granted_are_listed_in_their_order) {
  Pair pair;
  const LeaseId whole = pair.grant_write({}, 8 * kSecond, false), some = pair.grant_write({1, 2, 3});
  const LeaseId bearers =
      Pair::grant(pair.dst, std::nullopt, pair.dst_region, wire::LeaseMode::kRead, {7}, 2 * kSecond, false);
  pair.world.run_for(kSecond);
  const auto listed = [&] {
    std::vector<LeaseView> views;
    LeaseId last = 0;
    while (pair.dst.engine().append_leases(pair.dst.now(), last, 1, views)) continue;
    return views;
  };
  const std::vector<LeaseView> views = listed();
  REQUIRE(views.size() == 3);
  CHECK_EQ(views[0].id, whole);
  CHECK_EQ(views[1].id, some);
  CHECK_EQ(views[2].id, bearers);
  CHECK(!views[0].num_blocks && views[1].num_blocks == 3u && views[2].num_blocks == 1u);
  CHECK_EQ(views[0].name, "prefill");
  CHECK(views[0].holder == pair.to_src && !views[2].holder);
  CHECK_EQ(views[2].name, "");
  CHECK(views[0].mode == wire::LeaseMode::kWrite && views[2].mode == wire::LeaseMode::kRead);
  CHECK_EQ(views[0].left_ns, 7 * kSecond);
  CHECK(views[1].left_ns > 9 * kSecond);  // renewed by heartbeats
  CHECK_EQ(views[2].left_ns, kSecond);
  CHECK_EQ(views[0].state, LeaseState::kActive);
  pair.dst.revoke(some);
  pair.world.run_for(2 * kSecond);
  REQUIRE(listed().size() == 1);
  CHECK_EQ(listed()[0].id, whole);
}

TEST(a_lease_is_listed_as_ending_while_works_under_it_are_under_way) {
  Pair pair;
  const LeaseId lease = pair.grant_write();
  pair.write(kFrom, kTo, "req");
  REQUIRE(pair.until_midway(kFrom.size()));
  pair.dst.engine().revoke(pair.dst.now(), lease);
  std::vector<LeaseView> views;
  LeaseId last = 0;
  CHECK(!pair.dst.engine().append_leases(pair.dst.now(), last, 8, views));
  REQUIRE(views.size() == 1);
  CHECK_EQ(views[0].state, LeaseState::kEnding);
  CHECK_EQ(views[0].region, pair.dst_region);
  CHECK_EQ(views[0].name, "prefill");
  pair.dst.settle();
  pair.check_quiet();
}

}  // namespace
}  // namespace simulation
