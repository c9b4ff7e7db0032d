// Pages that arrive by WRITE: requests to the device, works that one end ends before the other, and peers
// that lie.
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "verbs_ends.h"

namespace verbs_ends {
namespace {

using verbs::Message;
using verbs::MessageKind;

verbs::Options writing(bool writes = true) {
  verbs::Options options;
  options.writes = writes;
  return options;
}

// A destination whose sources write.
struct Writes : Rails {
  explicit Writes(std::uint32_t pages = 1024, const Limits& limits = {}) : Rails(pages, writing(), limits) {
    REQUIRE_OK(src.transport->attach(back, to.remote()));
    REQUIRE_OK(other.transport->attach(other_back, to.remote()));
  }
  // The destination's works, and the source's works that send the same pieces.
  struct Works { std::vector<Work> receives, sends; };
  Works some_writes(std::uint32_t num_pages_of_it, std::uint32_t pairs_per_piece, RegionId region = 1) {
    Works works{some_works(num_pages_of_it, pairs_per_piece, region), {}};
    auto move = std::make_shared<Move>(*works.receives.front().move);
    move->local = std::make_shared<const LocalRegion>(region == 1 ? from.local : from_other.local);
    move->remote_region = to.local.id;
    for (Work& work : works.receives) {
      work.kind = WorkKind::kReceive;
      Work& send = works.sends.emplace_back(work);
      send.kind = WorkKind::kSend;
      send.id = next_work++;
      send.move = move;
    }
    return works;
  }
  static void post(End& end, PeerId at, const std::vector<Work>& works) {
    CHECK_EQ(testing::post_all(*end.transport, at, works).accepted, works.size());
  }
  void finish_writes(const Works& works, End& source, PeerId there, PeerId here) {
    post(dst, there, works.receives);
    post(source, here, works.sends);
    REQUIRE(run_until([&] { return ended(works.receives) && all_sent(works, source); }));
    const Move& move = *works.receives.front().move;
    const Region& region = move.remote_region == 1 ? from : from_other;
    for (const Work& work : works.receives) CHECK_EQ(code_of(work), Code::kOk);
    for (std::size_t i = 0; i < move.src_ids.size(); ++i)
      CHECK(std::memcmp(region.memory.data() + move.src_ids[i] * page_nbytes,
                        to.memory.data() + move.dst_ids[i] * page_nbytes, page_nbytes) == 0);
  }
  void other_writes_on() { finish_writes(some_writes(64, 16, 2), other, other_peer, other_back); }
  static bool all_sent(const Works& works, const End& source) {
    return std::all_of(works.sends.begin(), works.sends.end(),
                       [&](const Work& work) { return source.completion_of(work.id) != nullptr; });
  }
};

TEST(pages_are_written_by_few_requests_and_nothing_is_read) {
  Writes writes(4096);
  writes.fabric.forget_counts();
  writes.finish_writes(writes.some_writes(2048, 128), writes.src, writes.peer, writes.back);
  const auto counts = writes.fabric.counts();
  std::printf("  2048 pages: %llu requests, %llu doorbells\n",
              static_cast<unsigned long long>(counts.requests),
              static_cast<unsigned long long>(counts.doorbells));
  CHECK(counts.requests <= 2048 + 16);
  CHECK(counts.doorbells <= counts.requests / 32);
  CHECK_EQ(counts.nbytes, 2048 * kPage);
}

TEST(where_the_destination_ends_first_the_source_does_and_writes_nothing) {
  for (const bool is_awaited : {true, false}) {
    Writes writes;
    const auto works = writes.some_writes(256, 32);
    const std::vector<std::byte> before = writes.to.memory;
    Writes::post(writes.dst, writes.peer, works.receives);
    for (int i = 0; is_awaited && i < 10; ++i) writes.step();
    for (const Work& work : works.receives) writes.dst.cancel(work.id);
    Writes::post(writes.src, writes.back, works.sends);
    REQUIRE(writes.run_until(
        [&] { return writes.ended(works.receives) && Writes::all_sent(works, writes.src); }));
    for (const Work& work : works.receives) CHECK_EQ(writes.code_of(work), Code::kCancelled);
    for (const Work& work : works.sends) CHECK_EQ(writes.src.completion_of(work.id)->code, Code::kCancelled);
    CHECK(before == writes.to.memory);
    // The same pieces once more, each by new works.
    auto again = works;
    for (std::size_t i = 0; i < again.sends.size(); ++i)
      again.receives[i].id = writes.next_work++, again.sends[i].id = writes.next_work++;
    writes.finish_writes(again, writes.src, writes.peer, writes.back);
  }
}

TEST(where_the_source_ends_first_the_destination_does) {
  for (const bool is_awaited : {true, false}) {
    Writes writes;
    const auto works = writes.some_writes(256, 32);
    if (is_awaited) Writes::post(writes.dst, writes.peer, works.receives);
    for (int i = 0; i < 10; ++i) writes.step();
    // Queued behind a network that does not move, so none has begun.
    const bool queued = !is_awaited;
    if (queued) Writes::post(writes.src, writes.back, works.sends);
    if (queued)
      for (const Work& work : works.sends) writes.src.cancel(work.id);
    if (queued) Writes::post(writes.dst, writes.peer, works.receives);
    if (!queued) {
      writes.src.transport->disconnect(writes.back);
      REQUIRE(writes.run_until([&] { return writes.is_down(writes.peer); }));
    }
    REQUIRE(writes.run_until([&] { return writes.ended(works.receives); }));
    for (const Work& work : works.receives)
      CHECK_EQ(writes.code_of(work), queued ? Code::kLeaseEnded : Code::kRailFailed);
    writes.other_writes_on();
  }
}

// Sending to the peer fails because it has hung up, while works of it are still queued.
TEST(a_peer_that_hangs_up_while_it_is_told_of_works_that_end_ends_them_all) {
  Writes writes;
  const auto works = writes.some_writes(1024, 4);  // more than are awaited at a time
  Writes::post(writes.dst, writes.peer, works.receives);
  for (int i = 0; i < 10; ++i) writes.dst.step();
  writes.src.transport->disconnect(writes.back);
  std::vector<WorkId> ids;
  for (auto work = works.receives.rbegin(); work != works.receives.rend(); ++work) ids.push_back(work->id);
  writes.dst.transport->cancel(ids);
  REQUIRE(writes.run_until([&] { return writes.ended(works.receives); }));
  CHECK(writes.is_down(writes.peer));
  writes.other_writes_on();
}

TEST(ends_of_which_one_takes_no_writes_read) {
  Fabric fabric;
  for (const bool ours : {true, false}) {
    End a(on("nic0", writing(ours))), b(on("nic1", writing(!ours)));
    Region to(a, 7, 16 * kPage);
    const auto [b_at_a, a_at_b] = connect_both(a, b);
    const auto move = testing::block_move(9, to.memory.data(), kPage, {1}, {2}, 1);
    CHECK(a.transport->choose(b_at_a, *move, 0) == WorkKind::kFetch);
    CHECK(b.transport->choose(a_at_b, *move, 0) == WorkKind::kFetch);
    Work work = fetch_work(1, move, 0);
    work.kind = WorkKind::kReceive;
    CHECK_EQ(a.transport->post(b_at_a, work), Code::kOk);
    CHECK_EQ(a.await(1).code, Code::kUnsupported);
  }
}

TEST(a_peer_that_asks_for_writes_it_may_not_have_loses_its_rail) {
  Fabric fabric;
  Message await;
  await.kind = MessageKind::kAwait;
  {
    Liar liar;
    liar.introduce();
    liar.say(await);
    CHECK_HAS(liar.down_words(), "WRITEs, which the two ends have not agreed on");
  }
  Liar liar(writing());
  liar.introduce();
  for (std::uint32_t i = 0; i < 65; ++i) {
    await.ticket = {5, i, i + 1};
    liar.say(await);
  }
  CHECK_HAS(liar.down_words(), "awaits more pieces than it may");
}

// Works that a peer gave up and never awaited take no memory, however often it sends them.
TEST(a_peer_that_gives_up_without_end_holds_nothing) {
  Fabric fabric;
  Liar liar(writing());
  liar.introduce();
  Message message;
  for (std::uint32_t i = 0; i < 3000; ++i) {
    message.kind = i % 3 == 0 ? MessageKind::kAwait : MessageKind::kGiveUp;
    message.ticket = {i, 0, i % 3 == 2 ? 0 : i - i % 3 + 1};
    liar.say(message);
    liar.victim.step();
    // The victim's answers are read; otherwise the victim would give the rail up.
    Message heard;
    while (::recv(liar.socket.get(), &heard, sizeof heard, MSG_DONTWAIT) > 0) {}
  }
  CHECK(liar.victim.event(CompletionKind::kRailDown) == nullptr);
}

}  // namespace
}  // namespace verbs_ends
