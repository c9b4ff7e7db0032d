// When a right ends, at either end and in the middle of a transfer: which bytes no longer land, and which
// transfers are never done.
#include <functional>
#include <set>

#include "simulated_pair.h"

namespace simulation {
namespace {

// ---- rights that end at the destination -------------------------------------------------------

// In the middle of a transfer, `end` ends the right. Once the owner is told that it has ended, no byte
// changes, on rails that stop at once and on those that do not. The writer fails with one of the codes.
void write_is_fenced(const std::function<void(Pair&)>& begin, const std::function<void(Pair&)>& end,
                     const std::function<bool(Pair&)>& has_descriptor, std::vector<Code> codes) {
  std::size_t num_late = 0;
  for (const Time fence_ns : {Time{0}, 20 * kMillisecond})
    on_every_rail([&](Pair& pair) {
      begin(pair);
      auto handle = pair.write(kFrom, kTo, "req");
      REQUIRE(pair.until_midway(kFrom.size()));
      pair.dst.fence_ns = fence_ns;
      if (end) end(pair);  // otherwise its time ends it
      const std::uint64_t at_end = pair.bytes_landed;
      REQUIRE(pair.world.until([&] { return has_descriptor(pair); }));
      pair.freeze_destination();
      if (end && fence_ns == 0) CHECK_EQ(pair.bytes_landed, at_end);
      num_late += pair.bytes_landed != at_end;
      REQUIRE(pair.ends(handle));
      const bool is_cancelled = handle->status().code() == Code::kCancelled;
      CHECK_EQ(handle->outcome(), is_cancelled ? Outcome::kCancelled : Outcome::kFailed);
      CHECK(std::find(codes.begin(), codes.end(), handle->status().code()) != codes.end());
      CHECK_EQ(handle->failed_blocks(), kFrom);
      pair.world.run_for(kSecond);
    });
  CHECK(num_late >= 3);  // of 20: otherwise a report that comes too soon would not show
}
bool has_drained(Pair& pair) { return pair.dst.engine().num_transfers() == 0; }

TEST(after_revoke_no_byte_lands) {
  LeaseId lease = 0;
  write_is_fenced([&](Pair& pair) { lease = pair.grant_write(kTo); },
                  [&](Pair& pair) { pair.dst.revoke(lease); },
                  [&](Pair& pair) { return pair.dst.engine().lease_state(lease) == LeaseState::kRevoked; },
                  {Code::kLeaseEnded});
}

TEST(after_deregistration_no_byte_lands) {
  write_is_fenced([](Pair& pair) { pair.grant_write(); },
                  [](Pair& pair) { CHECK_OK(pair.dst.deregister(pair.dst_region)); },
                  [](Pair& pair) { return !pair.destination().registered; }, {Code::kRegionGone});
}

TEST(after_an_expectation_is_cancelled_no_byte_lands) {
  std::shared_ptr<Handle> expected;
  write_is_fenced([&](Pair& pair) { expected = pair.expect("req", kTo); },
                  [&](Pair& pair) { pair.dst.cancel(expected); },
                  [&](Pair&) { return expected->outcome() == Outcome::kCancelled; }, {Code::kCancelled});
}

TEST(after_an_expectations_time_no_byte_lands) {
  std::shared_ptr<Handle> expected;
  write_is_fenced(
      [&](Pair& pair) {
        expected = pair.expect("req", kTo, 250 * kMillisecond);
        pair.src.work_ns = pair.dst.work_ns = 60 * kMillisecond;
      },
      nullptr, [&](Pair&) { return expected->outcome() == Outcome::kFailed; }, {Code::kDeadline});
}

TEST(after_a_lease_expires_no_byte_lands) {
  LeaseId lease = 0;
  write_is_fenced(
      [&](Pair& pair) {
        lease = pair.grant_write(kTo, 250 * kMillisecond, false);
        pair.src.work_ns = pair.dst.work_ns = 60 * kMillisecond;
      },
      nullptr, [&](Pair& pair) { return pair.dst.engine().lease_state(lease) == LeaseState::kExpired; },
      {Code::kLeaseEnded});
}

TEST(after_the_session_is_ended_no_byte_lands) {
  write_is_fenced([](Pair& pair) { pair.grant_write(); },
                  [](Pair& pair) {
                    pair.dst.engine().end_session(pair.dst.now(), pair.to_src, Code::kClosed, "enough");
                    pair.dst.settle();
                  },
                  has_drained, {Code::kPeerLost});
}

TEST(after_close_no_byte_lands_and_every_handle_is_final) {
  std::shared_ptr<Handle> expected;
  write_is_fenced([&](Pair& pair) { expected = pair.expect("req", kTo); },
                  [&](Pair& pair) {
                    pair.dst.engine().close(pair.dst.now());
                    pair.dst.settle();
                  },
                  [&](Pair&) { return expected->outcome() == Outcome::kFailed; }, {Code::kPeerLost});
}

TEST(a_fence_that_takes_long_is_logged_and_not_told_to_be_complete) {
  Pair pair;
  pair.src.work_ns = pair.dst.work_ns = 20 * kSecond;
  pair.dst.fence_ns = 100 * kSecond;
  const LeaseId lease = pair.grant_write(kTo);
  auto handle = pair.write(kFrom, kTo);
  REQUIRE(pair.world.until([&] { return pair.dst.num_works() == kFrom.size(); }));
  pair.dst.revoke(lease);
  REQUIRE(pair.ends(handle));  // the peer is told at once
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  const auto logged = [&] {
    return std::count_if(pair.dst.events.begin(), pair.dst.events.end(), [](const Event& event) {
      return event.kind == EventKind::kLog &&
             event.message.find("with peer 'prefill'") != std::string::npos &&
             event.message.find("on mapped (rail 0)") != std::string::npos;
    });
  };
  REQUIRE(pair.world.until([&] { return logged() == 2; }));
  CHECK(pair.dst.engine().lease_state(lease) == LeaseState::kEnding);
  REQUIRE(pair.world.until([&] { return pair.dst.engine().lease_state(lease) == LeaseState::kRevoked; },
                           200 * kSecond));
  pair.freeze_destination();
  pair.world.run_for(100 * kSecond);
}

// A source that awaits the destination's last word is told of no end before it: whatever ends the write, in
// whichever phase, no byte lands once the source's handle has ended. A session that is lost owes no word.
TEST(after_a_write_that_awaits_the_last_word_ended_no_byte_lands) {
  struct Way {
    std::function<void(Pair&, const std::shared_ptr<Handle>&, LeaseId)> end;
    std::vector<Code> codes;
    Time timeout_ns = Pair::kTimeout;
  };
  const Way ways[] = {
      {[](Pair& pair, const auto& handle, LeaseId) { pair.src.cancel(handle); },
       {Code::kOk, Code::kCancelled}},
      {[](Pair& pair, const auto&, LeaseId lease) { pair.dst.revoke(lease); },  // perhaps before it has heard
       {Code::kOk, Code::kLeaseEnded, Code::kNotPermitted, Code::kDeadline}},
      {[](Pair& pair, const auto&, LeaseId) { CHECK_OK(pair.dst.deregister(pair.dst_region)); },
       {Code::kOk, Code::kRegionGone, Code::kLeaseEnded, Code::kUnknownRegion}},
      {nullptr, {Code::kOk, Code::kDeadline}, 250 * kMillisecond},
      {[](Pair& pair, const auto&, LeaseId) {
         pair.src.engine().end_session(pair.src.now(), pair.to_dst, Code::kClosed, "enough");
         pair.src.settle();
       },
       {Code::kOk, Code::kClosed}}};
  for (const Way& way : ways) {
    const bool is_lost = &way == &ways[std::size(ways) - 1];
    std::size_t num_late = 0;
    on_every_rail([&](Pair& pair) {
      const LeaseId lease = pair.grant_write();
      pair.dst.work_ns = 60 * kMillisecond;
      pair.dst.fence_ns = 100 * kMillisecond;
      TransferRequest request = pair.request(true, kFrom, kTo, "req");
      request.awaits_last_word = true;
      request.timeout_ns = way.timeout_ns;
      auto handle = Pair::post(pair.src, std::move(request));
      pair.world.run_for(static_cast<Time>(pair.world.random().below(400)) * kMillisecond);
      const std::uint64_t at_end = pair.bytes_landed;
      if (way.end) way.end(pair, handle, lease);
      // It waits for its own works alone, which take less time than the destination's.
      if (is_lost)
        CHECK(pair.world.until([&] { return handle->outcome() != Outcome::kPending; }, 50 * kMillisecond));
      REQUIRE(pair.ends(handle));
      num_late += pair.bytes_landed != at_end;
      CHECK(std::find(way.codes.begin(), way.codes.end(), handle->status().code()) != way.codes.end());
      if (!is_lost) pair.freeze_destination();
      pair.world.run_for(kSecond);
      CHECK_EQ(pair.src.engine().num_transfers(), 0u);
    });
    if (!is_lost) CHECK(num_late >= 2);
  }
}

TEST(works_under_a_right_that_ends_are_cancelled_once_for_each_rail) {
  for (const auto& rails : rail_sets()) {
    Pair pair(rails);
    const LeaseId lease = pair.grant_write();
    pair.dst.work_ns = kSecond;
    std::vector<std::shared_ptr<Handle>> writes;
    for (std::size_t i = 0; i < kFrom.size(); ++i) writes.push_back(pair.write({kFrom[i]}, {kTo[i]}));
    pair.world.run_for(kMillisecond);
    const std::size_t num_works = pair.dst.num_works();
    const std::size_t num_transfers = pair.dst.engine().num_transfers();
    REQUIRE(num_works >= 4);
    REQUIRE_EQ(num_transfers, kFrom.size());
    pair.dst.revoke(lease);
    std::set<RailId> asked;
    std::size_t num_cancelled = 0;
    for (const auto& [rail, num] : pair.dst.cancels) {
      CHECK(asked.insert(rail).second);
      num_cancelled += num;
    }
    CHECK_EQ(num_cancelled, num_works);
    for (const auto& handle : writes) REQUIRE(pair.ends(handle));
    pair.check_quiet();
  }
}

// ---- rights that end at the source ------------------------------------------------------------

// In the middle of a transfer the source ends the right and reuses the pages at once: the read is never done.
enum class Reader { kListens, kStopped, kCutOff };
void read_is_fenced(const std::function<void(Pair&)>& begin, const std::function<void(Pair&)>& end,
                    Reader reader, std::vector<Code> codes) {
  std::size_t num_failed = 0;
  on_every_rail([&](Pair& pair) {
    begin(pair);
    auto handle = pair.read(kFrom, kTo, "fetched");
    REQUIRE(pair.until_midway(kFrom.size()));
    if (reader == Reader::kStopped) pair.dst.pause();
    // Frames are held back, but mapped memory stays visible.
    if (reader == Reader::kCutOff) pair.world.partition(pair.src, pair.dst, false);
    end(pair);
    pair.reuse_source(kFrom);
    if (reader == Reader::kStopped) {
      pair.world.run_for(pair.world.random().chance(50) ? 100 * kMillisecond : 4 * kSecond);
      pair.dst.resume();
    }
    REQUIRE(pair.ends(handle));
    if (handle->outcome() == Outcome::kDone) {  // it had read all and checked the fence before
      CHECK(pair.equal_held(kFrom, kTo));
      return;
    }
    ++num_failed;
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK(std::find(codes.begin(), codes.end(), handle->status().code()) != codes.end());
    pair.world.run_for(kSecond);
    CHECK(!pair.src.alive() || !pair.notified(pair.src, "fetched"));
  });
  CHECK(num_failed >= 15);  // of 20: few are done
}
const std::vector<Code> kAnyLoss = {Code::kLeaseEnded,   Code::kRegionGone, Code::kPeerLost,
                                    Code::kPeerSilent,   Code::kDeadline,   Code::kNoPath,
                                    Code::kPeerRestarted};

TEST(pages_read_under_a_revoked_lease_are_never_done) {
  LeaseId lease = 0;
  for (const Reader reader : {Reader::kListens, Reader::kStopped, Reader::kCutOff})
    read_is_fenced([&](Pair& pair) { lease = pair.grant_read(kFrom); },
                   [&](Pair& pair) { pair.src.revoke(lease); }, reader,
                   reader != Reader::kListens ? kAnyLoss : std::vector{Code::kLeaseEnded});
}

TEST(pages_of_a_deregistered_region_are_never_done) {
  for (const Reader reader : {Reader::kListens, Reader::kStopped, Reader::kCutOff})
    read_is_fenced([](Pair& pair) { pair.grant_read(); },
                   [](Pair& pair) { CHECK_OK(pair.src.deregister(pair.src_region)); }, reader,
                   reader != Reader::kListens ? kAnyLoss : std::vector{Code::kLeaseEnded, Code::kRegionGone});
}

TEST(pages_of_a_session_that_the_source_ended_are_never_done) {
  for (const Reader reader : {Reader::kListens, Reader::kStopped, Reader::kCutOff})
    read_is_fenced([](Pair& pair) { pair.grant_read(); },
                   [](Pair& pair) {
                     pair.src.engine().end_session(pair.src.now(), pair.to_dst, Code::kClosed, "enough");
                     pair.src.settle();
                   },
                   reader, kAnyLoss);
}

TEST(a_reader_that_was_stopped_until_its_lease_expired_is_never_done) {
  read_is_fenced(
      [](Pair& pair) { pair.grant_read(kFrom, kSecond); },
      [](Pair& pair) { REQUIRE(pair.world.until([&] { return pair.src.engine().load().leases == 0; })); },
      Reader::kStopped, kAnyLoss);
}

TEST(a_reader_stops_before_a_lease_that_nobody_renews_expires) {
  on_every_rail([](Pair& pair) {
    pair.src.work_ns = pair.dst.work_ns = 20 * kMillisecond;
    pair.grant_read(kFrom, 80 * kMillisecond, false);
    auto handle = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  });
}

TEST(a_renewed_lease_carries_a_read_that_takes_longer_than_it) {
  on_every_rail([](Pair& pair) {
    pair.src.work_ns = pair.dst.work_ns = 800 * kMillisecond;
    pair.grant_read(kFrom, kSecond);
    pair.world.run_for(static_cast<Time>(pair.world.random().below(2 * kSecond)));
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.timeout_ns = 60 * kSecond;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle, 60 * kSecond));
    CHECK_OK(handle->status());
  });
}

TEST(heartbeats_renew_a_lease_for_as_long_as_both_live) {
  on_every_rail([](Pair& pair) {
    const LeaseId lease = pair.grant_read(kFrom, kSecond);
    pair.world.run_for(20 * kSecond);
    CHECK(pair.src.engine().lease_state(lease) == LeaseState::kActive);
    auto handle = pair.read(kFrom, kTo);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    pair.dst.pause();
    REQUIRE(pair.world.until([&] { return pair.src.engine().lease_state(lease) != LeaseState::kActive; },
                             2 * kSecond));
    pair.dst.resume();
  });
}

// A transfer is on its way when its right ends, and arrives when the next right to the same blocks is in
// place.
TEST(what_is_late_is_not_served_under_the_next_lease) {
  for (const bool write : {false, true})
    for (const bool named : {false, true})
      on_every_rail([&](Pair& pair) {
        Node &grantor = write ? pair.dst : pair.src, &holder = write ? pair.src : pair.dst;
        const auto grant = [&] { return write ? pair.grant_write(kTo) : pair.grant_read(kFrom); };
        const auto post = [&](LeaseId lease) {
          TransferRequest request = pair.request(write, kFrom, kTo);
          request.lease = named ? lease : 0;
          return Pair::post(holder, request);
        };
        const LeaseId first = grant();
        pair.world.run_for(100 * kMillisecond);
        auto late = post(first);
        grantor.revoke(first);
        const LeaseId second = grant();
        pair.freeze_destination();
        REQUIRE(pair.ends(late));
        CHECK_EQ(late->status().code(), Code::kLeaseEnded);
        pair.world.run_for(100 * kMillisecond);
        pair.world.after_step = nullptr;
        auto told = post(second);
        REQUIRE(pair.ends(told));
        CHECK_OK(told->status());
        grantor.revoke(second);
        pair.world.run_for(100 * kMillisecond);
        // The lease's number came by another path, and faster.
        auto outran = post(grant());
        REQUIRE(pair.ends(outran));
        CHECK_EQ(outran->status().code(), named ? Code::kOk : Code::kLeaseEnded);
      });
}

TEST(what_is_late_for_an_expectation_is_not_served_under_a_lease) {
  on_every_rail([&](Pair& pair) {
    auto expected = pair.expect("req", kTo);
    auto late = pair.write(kFrom, kTo, "req");
    pair.dst.cancel(expected);
    pair.grant_write(kTo);
    pair.freeze_destination();
    REQUIRE(pair.ends(late));
    CHECK_EQ(late->outcome(), Outcome::kFailed);
  });
}

// An expectation has ended: one for any writer, or for one writer. A writer that could have used it, and
// writes under the next right before it has heard of it, is refused. A writer that came later, or could not
// have used it, loses nothing.
TEST(rights_that_ended_are_ended_for_those_that_had_them) {
  enum class Ended { kOfAll, kOfPrefill };
  enum class Writes { kPrefill, kAnother, kNewcomer };
  for (const Ended ended : {Ended::kOfAll, Ended::kOfPrefill})
    for (const Writes writes : {Writes::kPrefill, Writes::kAnother, Writes::kNewcomer})
      on_every_rail([&](Pair& pair) {
        Node& another = pair.world.add("another");
        const RegionId region = another.add_region(pair.src_layout);
        const auto connect = [&] { pair.world.connect(another, pair.dst); };
        if (writes != Writes::kNewcomer) connect();
        auto expected = pair.expect("req", kTo, Pair::kTimeout, "",
                                    ended == Ended::kOfAll ? std::nullopt : std::optional(pair.to_src));
        pair.dst.cancel(expected);
        REQUIRE(pair.ends(expected));
        if (writes == Writes::kNewcomer) connect();
        const bool is_prefill = writes == Writes::kPrefill;
        Node& writer = is_prefill ? pair.src : another;
        TransferRequest request = pair.request(true, kFrom, kTo);
        if (!is_prefill) {
          request.peer = another.session_with("decode");
          request.program = another.engine()
                                .install_program(another.now(), request.peer, true, region, pair.dst_region,
                                                 program_between(pair.src_layout, pair.dst_layout))
                                .value();
        }
        Pair::grant(pair.dst, pair.dst.session_with(writer.name()), pair.dst_region, wire::LeaseMode::kWrite,
                    kTo, 10 * kSecond, true);
        auto written = Pair::post(writer, std::move(request));  // it has not heard of the lease
        REQUIRE(pair.ends(written));
        const bool had_it = is_prefill || (ended == Ended::kOfAll && writes == Writes::kAnother);
        CHECK_EQ(written->status().code(), had_it ? Code::kLeaseEnded : Code::kOk);
      });
}

TEST(a_lease_that_is_named_allows_what_it_covers_alone) {
  on_every_rail([&](Pair& pair) {
    const LeaseId few = pair.grant_read({1, 2});
    pair.grant_read(kFrom);
    TransferRequest request = pair.request(false, kFrom, kTo);
    request.lease = few;
    auto handle = Pair::post(pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_REFUSED(handle->status(), Code::kNotPermitted, "does not cover block 3");
  });
}

TEST(durations_without_end_are_never_over) {
  Pair pair;
  pair.grant_write({}, kNever);
  pair.grant_read({}, kNever);
  for (const bool write : {false, true}) {
    TransferRequest request = pair.request(write, kFrom, kTo);
    request.timeout_ns = kNever;
    auto handle = Pair::post(write ? pair.src : pair.dst, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
  auto expected = pair.expect("never", {3}, kNever);
  pair.world.run_for(10 * kSecond);
  CHECK_EQ(expected->outcome(), Outcome::kPending);
}

}  // namespace
}  // namespace simulation
