// The contracts that every transport keeps (native/include/kvxfer/transport.h, contracts 1 to 7), as one
// suite: CONFORMANCE(subject) runs all of it for a Subject.
#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "conformance_ends.h"

namespace kvxfer::conformance {

inline const Shape kShapes[] = {
    {1, 1, 1, {1, 1}, 1},  // one byte
    {3, 12, 5, {1, 1}, 4096},  // whole pages
    {2, 40, 16, {16, 2}, 192},  // slices of heads: 1024 runs and more in a piece
    {1, 30, 30, {8, 16}, 24},  // 7680 short runs: several system calls a piece
    {2, 3, 1, {1, 1}, 256 * 1024},  // contiguous
    {2, 9, 100, {1, 3}, 5000},  // one piece a layer
};

// Each round draws new values, and each run begins with another seed. Half as many rounds where a sanitizer
// makes them slow.
constexpr int rounds(int plain) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return plain / 2;
#else
  return plain;
#endif
}

inline bool may_fail(const Subject& subject) { return subject.faults && subject.faults->fail > 0; }

inline void every_byte_arrives_and_no_other_changes(const Subject& subject) {
  for (const Shape& shape : kShapes) {
    Pair pair(subject);
    for (int round = 0; round < 2; ++round) {
      TestTransfer transfer(pair, shape);
      transfer.finish(may_fail(subject));
      transfer.check_bytes();
      pair.dst.memory.fill_canary();
    }
  }
}

// If a rail does not convert, such works end with that code, and write nothing.
inline void is_refused(const Subject& subject, Pair& pair, TestTransfer& transfer) {
  transfer.start(transfer.all_pieces());
  REQUIRE(pair.run_until([&] { return pair.dst.all_completed(); }));
  for (const std::uint32_t piece : transfer.all_pieces()) {
    const Code code = pair.dst.outcome(transfer.dst_works[piece]);
    CHECK(code == Code::kUnsupported || (may_fail(subject) && code == Code::kRailFailed));
  }
  CHECK(pair.dst.memory.is_as_filled());
}

inline void programs_of_every_kind_arrive(const Subject& subject) {
  for (const Wish& wish : wishes()) {
    Pair pair(subject);
    for (int round = 0; round < rounds(2); ++round) {
      TestTransfer transfer(pair, wish);
      if (!pair.can_run(*transfer.at_dst)) {
        is_refused(subject, pair, transfer);
        continue;
      }
      transfer.finish(may_fail(subject));
      transfer.check_bytes();
      pair.dst.memory.fill_canary();
    }
  }
}

inline void post_accepts_a_prefix_and_the_rest_later(const Subject& subject) {
  Pair pair(subject);
  TestTransfer transfer(pair, {8, 600, 1, {1, 1}, 64});  // 4800 pieces: no queue is that long
  REQUIRE_EQ(transfer.num_pieces(), 4800);
  transfer.finish(may_fail(subject));
  transfer.check_bytes();
}

inline void transfers_in_both_directions_do_not_mix(const Subject& subject) {
  // One direction must not read what the other writes; otherwise the expected bytes would depend on the
  // order. So `forth` lies in the lower part of both regions, and `back` in the upper part.
  Pair pair(subject);
  const Shape shape{2, 20, 3, {4, 2}, 500};
  TestTransfer forth(pair, pair.src, pair.dst, shape);
  TestTransfer also_forth(pair, pair.src, pair.dst, shape, kRegionNbytes / 3);
  TestTransfer back(pair, pair.dst, pair.src, shape, kRegionNbytes / 3 * 2);
  for (TestTransfer* transfer : {&forth, &also_forth, &back}) transfer->start(transfer->all_pieces());
  for (TestTransfer* transfer : {&forth, &also_forth, &back}) transfer->finish(may_fail(subject));
  REQUIRE(pair.run_until([&] { return pair.src.all_completed() && pair.dst.all_completed(); }));
  for (TestTransfer* transfer : {&forth, &also_forth, &back}) transfer->check_pieces();
}

// The fence of a work is complete when the work completes, early or late.
inline void a_cancel_is_complete_with_its_completion(const Subject& subject) {
  Pair pair(subject);
  const Shape shapes[] = {
      {2, 10, 1, {1, 1}, 128 * 1024}, {1, 30, 10, {4, 4}, 4000}, {1, 2, 1, {1, 1}, 1024 * 1024}};
  const std::vector<Wish> large = large_wishes();
  for (int round = 0; round < rounds(18); ++round) {
    pair.dst.memory.fill_canary();
    TestTransfer transfer =
        round < rounds(12) ? TestTransfer(pair, shapes[round % 3]) : TestTransfer(pair, large[round % 3u]);
    if (!pair.can_run(*transfer.at_dst)) continue;
    std::set<std::uint32_t> cancelled;
    const auto cancel_some = [&](unsigned percent) {
      std::vector<WorkId> works = {next_work_id()};  // never posted
      for (const std::uint32_t piece : transfer.all_pieces()) {
        if (!pair.random.chance(percent)) continue;
        works.push_back(transfer.dst_works[piece]);
        cancelled.insert(piece);
      }
      pair.dst.transport->cancel(works);
    };
    std::map<std::uint32_t, std::vector<std::byte>> at_fence;
    pair.dst.on_completed = [&](WorkId id) {
      const auto found = std::find(transfer.dst_works.begin(), transfer.dst_works.end(), id);
      const auto piece = static_cast<std::uint32_t>(found - transfer.dst_works.begin());
      if (cancelled.contains(piece)) at_fence[piece] = transfer.piece_bytes(piece);
    };
    transfer.start(transfer.all_pieces());
    cancel_some(20);  // before
    for (std::uint64_t steps = pair.random.below(8); steps != 0; --steps) pair.step();
    cancel_some(40);  // during
    if (!pair.run_until([&] { return pair.src.all_completed() && pair.dst.all_completed(); }))
      FAIL("a work did not complete");
    cancel_some(10);  // after: has no effect
    pair.run_until_quiet();
    pair.dst.on_completed = nullptr;
    for (const auto& [piece, bytes] : at_fence) CHECK(bytes == transfer.piece_bytes(piece));
    for (const std::uint32_t piece : transfer.all_pieces()) {
      const Code code = pair.dst.outcome(transfer.dst_works[piece]);
      if (!cancelled.contains(piece) && !may_fail(subject)) CHECK_EQ(code, Code::kOk);
      CHECK(code == Code::kOk || code == Code::kCancelled ||
            (may_fail(subject) && code == Code::kRailFailed));
    }
    transfer.check_bytes();
    transfer.finish(may_fail(subject));  // the same pieces again, on the same rail
    transfer.check_bytes();
  }
}

inline void a_source_that_cancels_is_never_counted_as_done(const Subject& subject) {
  Pair pair(subject);
  if (!pair.two_sided()) {
    std::printf("  %s: skipped, one-sided: the source has no work to cancel\n", subject.name.c_str());
    return;
  }
  const std::vector<Wish> large = large_wishes();
  for (int round = 0; round < rounds(30); ++round) {
    pair.dst.memory.fill_canary();
    // The last of the shapes is larger than what a socket holds, so the cancel comes in the middle of a
    // piece.
    const Shape shapes[] = {
        {2, 10, 2, {1, 1}, 64 * 1024}, {1, 30, 10, {4, 4}, 4000}, {1, 2, 2, {1, 1}, 1200 * 1024}};
    TestTransfer transfer =
        round < rounds(12) ? TestTransfer(pair, shapes[round % 3]) : TestTransfer(pair, large[round % 3u]);
    if (!pair.can_run(*transfer.at_dst)) continue;
    transfer.start(transfer.all_pieces());
    for (std::uint64_t steps = pair.random.below(6); steps != 0; --steps) pair.src.step();
    for (std::uint64_t steps = pair.random.below(3); steps != 0; --steps) pair.step();
    // After its completion, a work's pages are no longer the transport's.
    std::map<WorkId, std::uint32_t> cancelled;
    pair.src.on_completed = [&](WorkId id) {
      if (const auto found = cancelled.find(id); found != cancelled.end())
        transfer.scribble_source(found->second);
    };
    for (const std::uint32_t piece : transfer.all_pieces()) {
      const WorkId id = transfer.src_works[piece];
      if (id == 0 || !pair.random.chance(50)) continue;
      pair.src.cancel(id);
      if (pair.src.completed(id))
        transfer.scribble_source(piece);
      else
        cancelled[id] = piece;
    }
    REQUIRE(pair.run_until([&] { return pair.src.all_completed(); }));
    if (!may_fail(subject)) {  // contract 6; a segment may still be on its way
      const auto sent_is_done = [&](std::uint32_t piece) {
        const WorkId id = transfer.src_works[piece];
        return id == 0 || pair.src.outcome(id) != Code::kOk || transfer.done(piece);
      };
      REQUIRE(pair.run_until([&] { return std::ranges::all_of(transfer.all_pieces(), sent_is_done); }));
    }
    pair.run_until_quiet();
    pair.dst.transport->cancel(transfer.dst_works);
    REQUIRE(pair.run_until([&] { return pair.dst.all_completed(); }));
    for (const std::uint32_t piece : transfer.all_pieces()) {
      const Code code = pair.dst.outcome(transfer.dst_works[piece]);
      CHECK(code == Code::kOk || code == Code::kLeaseEnded || code == Code::kCancelled || may_fail(subject));
    }
    pair.src.on_completed = nullptr;
    transfer.check_bytes();
    transfer.restore_source();
    transfer.finish(true);
    transfer.check_bytes();
  }
}

inline void a_disconnect_is_complete_with_its_completions(const Subject& subject) {
  Pair pair(subject);
  for (int round = 0; round < rounds(8); ++round) {
    pair.dst.memory.fill_canary();
    TestTransfer transfer(pair, {2, 10, 2, {1, 1}, 100 * 1024});
    transfer.start(transfer.all_pieces());
    for (std::uint64_t steps = pair.random.below(6); steps != 0; --steps) pair.step();
    End& leaver = round % 2 == 0 ? pair.dst : pair.src;
    End& other = round % 2 == 0 ? pair.src : pair.dst;
    leaver.transport->disconnect(leaver.peer);
    REQUIRE(pair.run_until([&] { return leaver.all_completed(); }));
    std::vector<std::byte> at_fence;
    if (&leaver == &pair.dst)
      at_fence.assign(pair.dst.memory.data(), pair.dst.memory.data() + pair.dst.memory.nbytes());
    REQUIRE(
        pair.run_until([&] { return other.down && pair.src.all_completed() && pair.dst.all_completed(); }));
    CHECK(!leaver.down);
    for (const WorkId id : &other == &pair.dst ? transfer.dst_works : transfer.src_works) {
      if (id == 0) continue;  // a source without work
      CHECK(other.outcome(id) == Code::kOk || other.outcome(id) == Code::kRailFailed);
    }
    for (const WorkId id : &leaver == &pair.dst ? transfer.dst_works : transfer.src_works) {
      if (id == 0) continue;
      CHECK(leaver.outcome(id) == Code::kOk || leaver.outcome(id) == Code::kCancelled || may_fail(subject));
    }
    if (&leaver == &pair.dst) CHECK(std::equal(at_fence.begin(), at_fence.end(), pair.dst.memory.data()));
    transfer.check_bytes();

    Work work;
    work.id = next_work_id();
    work.kind = pair.kind_to_bring(*transfer.at_dst, 0);
    work.move = transfer.at_dst;
    CHECK_EQ(pair.dst.post(work), Code::kRailFailed);
    other.transport->disconnect(other.peer);
    leaver.transport->disconnect(leaver.peer);  // again: has no effect

    pair.connect();  // a new rail between the same two
    transfer.finish(may_fail(subject));
    transfer.check_bytes();
  }
}

inline void the_end_of_the_peer_ends_every_work(const Subject& subject) {
  for (int round = 0; round < 6; ++round) {
    Pair pair(subject);
    TestTransfer transfer(pair, {1, 4, 1, {1, 1}, 700 * 1024});
    transfer.start(transfer.all_pieces());
    for (std::uint64_t steps = pair.random.below(6); steps != 0; --steps) pair.step();
    End& dies = round % 2 == 0 ? pair.src : pair.dst;
    End& lives = round % 2 == 0 ? pair.dst : pair.src;
    dies.transport.reset();
    REQUIRE(pair.run_until([&] { return lives.down && lives.all_completed(); }));
    for (const auto& [id, completion] : lives.outcomes) {
      const Code code = completion.code;
      CHECK(code == Code::kOk || code == Code::kRailFailed || code == Code::kRegionGone);
    }
    transfer.check_bytes();
    lives.transport->disconnect(lives.peer);
    REQUIRE(pair.run_until([&] { return lives.has_let_go(); }));
  }
}

inline void a_fence_that_moved_is_noticed(const Subject& subject) {
  Pair pair(subject);
  TestTransfer transfer(pair, {2, 4, 1, {1, 1}, 4096});
  if (pair.kind_to_bring(*transfer.at_dst, 0) != WorkKind::kFetch) {
    std::printf("  %s: skipped, two-sided: the source's trailers say it\n", subject.name.c_str());
    return;
  }
  const auto fetch = [&](std::uint32_t slot, std::uint64_t generation, bool moves_on) {
    for (;;) {  // again where a fault was injected
      auto move = std::make_shared<Move>(*transfer.at_dst);
      move->fence = {slot, generation};
      Work work;
      work.id = next_work_id();
      work.kind = WorkKind::kFetch;
      work.move = std::move(move);
      while (pair.dst.post(work) != Code::kOk) pair.step();
      if (std::exchange(moves_on, false)) pair.src.fences->bump(slot);
      REQUIRE(pair.run_until([&] { return pair.dst.completed(work.id); }));
      if (pair.dst.outcome(work.id) == Code::kRailFailed && may_fail(subject)) continue;
      return pair.dst.outcome(work.id);
    }
  };
  for (const std::uint32_t slot : {0u, 7u, FenceTable::kNumSlots - 1}) {
    const std::uint64_t generation = pair.src.fences->generation(slot);
    CHECK_EQ(fetch(slot, generation, false), Code::kOk);
    CHECK_EQ(fetch(slot, generation, true), Code::kLeaseEnded);  // while the bytes move
    CHECK_EQ(fetch(slot, generation, false), Code::kLeaseEnded);
    CHECK_EQ(fetch(slot, pair.src.fences->generation(slot), false), Code::kOk);
  }
  // Slots that a peer names are checked.
  for (const std::uint32_t slot : {FenceTable::kNumSlots, UINT32_MAX})
    CHECK(fetch(slot, 0, false) != Code::kOk);
}

inline void mistakes_complete_and_harm_nobody(const Subject& subject) {
  Pair pair(subject);
  TestTransfer transfer(pair, {2, 4, 1, {1, 1}, 4096});
  Work work;
  work.id = next_work_id();
  work.move = transfer.at_dst;
  if (!pair.one_sided() || !pair.two_sided()) {
    work.kind = pair.one_sided() ? WorkKind::kReceive : WorkKind::kFetch;
    while (pair.dst.post(work) != Code::kOk) pair.step();
    REQUIRE(pair.run_until([&] { return pair.dst.completed(work.id); }));
    if (!may_fail(subject)) CHECK_EQ(pair.dst.outcome(work.id), Code::kUnsupported);
  }
  pair.dst.cancel(work.id);  // completed
  pair.dst.cancel(next_work_id());  // never posted
  pair.dst.transport->cancel({});
  pair.dst.transport->disconnect(pair.dst.peer + 1000);
  pair.dst.transport->detach(pair.dst.peer, 12345);
  pair.dst.transport->deregister_memory(12345);
  work.id = next_work_id();
  CHECK_EQ(pair.dst.transport->post(pair.dst.peer + 1000, work), Code::kRailFailed);

  transfer.finish(may_fail(subject));
  transfer.check_bytes();
}

inline void pieces_without_bytes_complete(const Subject& subject) {
  Pair pair(subject);
  TestTransfer transfer(pair, {3, 4, 2, {0, 1}, 4096});
  transfer.finish(may_fail(subject));
  transfer.check_bytes();
}

inline void what_is_detached_is_not_read(const Subject& subject) {
  Pair pair(subject);
  if (!pair.one_sided()) {
    std::printf("  %s: skipped, two-sided: a source sends what it chooses\n", subject.name.c_str());
    return;
  }
  TestTransfer transfer(pair, {2, 4, 1, {1, 1}, 4096});
  pair.dst.transport->detach(pair.dst.peer, pair.src.region.id);
  transfer.start(transfer.all_pieces());
  REQUIRE(pair.run_until([&] { return pair.dst.all_completed(); }));
  for (const std::uint32_t piece : transfer.all_pieces())
    CHECK(!transfer.done(piece) || transfer.src_works[piece] != 0);
  transfer.check_bytes();
}

inline void descriptors_are_given_back(const Subject& subject) {
  { Pair warm_up(subject); }
  const std::size_t before = num_descriptors();
  {
    Pair pair(subject);
    const std::size_t connected = num_descriptors();
    for (int round = 0; round < 5; ++round) {
      TestTransfer transfer(pair, {1, 4, 1, {1, 1}, 4096});
      transfer.finish(may_fail(subject));
      pair.src.transport->disconnect(pair.src.peer);
      REQUIRE(pair.run_until([&] { return pair.dst.down; }));
      pair.dst.transport->disconnect(pair.dst.peer);
      // With mapped memory, each end has to hear that the other has let go.
      REQUIRE(pair.run_until([&] { return pair.src.has_let_go() && pair.dst.has_let_go(); }));
      pair.connect();
      CHECK(num_descriptors() + subject.num_loose_descriptors >= connected);
      CHECK(num_descriptors() <= connected + subject.num_loose_descriptors);
    }
  }
  CHECK_EQ(num_descriptors(), before);
}

inline void an_idle_rail_asks_for_nothing(const Subject& subject) {
  Pair pair(subject);
  TestTransfer transfer(pair, {2, 10, 1, {1, 1}, 64 * 1024});
  transfer.finish(may_fail(subject));
  pair.run_until_quiet();
  for (End* end : {&pair.src, &pair.dst}) {
    CHECK(!end->transport->busy());
    CHECK(!end->transport->wants_poll());
    // On a busy machine the last bytes may come later. A rail that never rests goes on without end.
    int stirred = 0;
    while (stirred < 1000 && end->reactor.run_once(20) != 0) ++stirred;
    CHECK(stirred < 1000);
  }
}

}  // namespace kvxfer::conformance

// One TEST for each promise; `subject` is a function that returns a Subject.
#define CONFORMANCE_PROMISE(subject, promise) \
  TEST(subject##_##promise) { ::kvxfer::conformance::promise(subject()); }
#define CONFORMANCE(subject)                                                   \
  CONFORMANCE_PROMISE(subject, every_byte_arrives_and_no_other_changes)        \
  CONFORMANCE_PROMISE(subject, programs_of_every_kind_arrive)                  \
  CONFORMANCE_PROMISE(subject, post_accepts_a_prefix_and_the_rest_later)       \
  CONFORMANCE_PROMISE(subject, transfers_in_both_directions_do_not_mix)        \
  CONFORMANCE_PROMISE(subject, a_cancel_is_complete_with_its_completion)       \
  CONFORMANCE_PROMISE(subject, a_source_that_cancels_is_never_counted_as_done) \
  CONFORMANCE_PROMISE(subject, a_disconnect_is_complete_with_its_completions)  \
  CONFORMANCE_PROMISE(subject, the_end_of_the_peer_ends_every_work)            \
  CONFORMANCE_PROMISE(subject, a_fence_that_moved_is_noticed)                  \
  CONFORMANCE_PROMISE(subject, mistakes_complete_and_harm_nobody)              \
  CONFORMANCE_PROMISE(subject, pieces_without_bytes_complete)                  \
  CONFORMANCE_PROMISE(subject, what_is_detached_is_not_read)                   \
  CONFORMANCE_PROMISE(subject, descriptors_are_given_back)                     \
  CONFORMANCE_PROMISE(subject, an_idle_rail_asks_for_nothing)
