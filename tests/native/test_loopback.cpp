#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "one_sided_ends.h"
#include "transports/loopback/loopback_transport.h"

namespace {

using namespace kvxfer;
using namespace kvxfer::testing;

using Loopback = End<LoopbackTransport>;

struct Pair {
  Pair() : source(std::make_unique<Loopback>()), from(64 * 1024), to(64 * 1024) {
    check::Random random(check::seed());
    random.fill(from.data(), from.size());
    peer = connect_ends(destination, *source).first;
    const Result<RegionKeys> keys =
        testing::register_memory(*source->transport, {5, from.data(), {{0, from.size()}}});
    REQUIRE_OK(keys);
    remote = {5, reinterpret_cast<std::uintptr_t>(from.data()), {{0, from.size()}}, keys.value()};
    REQUIRE_OK(destination.transport->attach(peer, remote));
  }
  void post(const Work& work) { REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk); }
  Work fetch(WorkId id, std::vector<std::uint32_t> src = {0, 1, 2, 3}) {
    std::vector<std::uint32_t> dst(src.rbegin(), src.rend());
    const auto num_pairs = static_cast<std::uint32_t>(src.size());
    return fetch_work(id, block_move(5, to.data(), 4096, std::move(src), std::move(dst), num_pairs), 0);
  }

  Loopback destination;
  std::unique_ptr<Loopback> source;
  std::vector<std::byte> from, to;
  RemoteRegion remote;
  PeerId peer = 0;
};

TEST(pages_arrive_where_they_belong) {
  Pair pair;
  pair.post(pair.fetch(1));
  CHECK_EQ(pair.destination.await(1).code, Code::kOk);
  for (std::size_t block = 0; block < 4; ++block)
    CHECK(std::memcmp(&pair.to[(3 - block) * 4096], &pair.from[block * 4096], 4096) == 0);
  CHECK(!pair.destination.transport->busy());
}

TEST(a_moved_fence_word_ends_the_lease) {
  Pair pair;
  pair.post(with_fence(pair.fetch(1), 3, 0));
  CHECK_EQ(pair.destination.await(1).code, Code::kOk);
  pair.source->fences->bump(3);
  pair.post(with_fence(pair.fetch(2), 3, 0));
  CHECK_EQ(pair.destination.await(2).code, Code::kLeaseEnded);
  pair.post(with_fence(pair.fetch(3), FenceTable::kNumSlots, 0));
  CHECK_EQ(pair.destination.await(3).code, Code::kLeaseEnded);
}

TEST(nothing_is_read_after_deregistration) {
  Pair pair;
  pair.post(pair.fetch(1));
  pair.source->transport->deregister_memory(5);
  pair.from = {};
  CHECK_EQ(pair.destination.await(1).code, Code::kRegionGone);
}

TEST(nothing_is_read_after_the_source_is_gone) {
  Pair pair;
  pair.post(pair.fetch(1));
  pair.source.reset();
  pair.from = {};
  Completion out[4];  // without the reactor: the socket's end has not been noticed
  REQUIRE_EQ(pair.destination.transport->poll(out), 1u);
  CHECK_EQ(out[0].code, Code::kRegionGone);
  CHECK_EQ(pair.destination.await(CompletionKind::kRailDown).peer, pair.peer);
}

TEST(a_piece_outside_its_region_is_refused) {
  Pair pair;
  pair.to.resize(32 * 4096);
  pair.post(pair.fetch(1, {16}));
  CHECK_EQ(pair.destination.await(1).code, Code::kInternal);
  pair.remote.spans = {{0, 64 * 1024 + 1}};
  CHECK_EQ(pair.destination.transport->attach(pair.peer, pair.remote).code(), Code::kUnsupported);
}

TEST(cancel_and_disconnect_complete_what_has_not_begun) {
  Pair pair;
  for (WorkId id = 1; id <= 3; ++id) pair.post(pair.fetch(id));
  pair.destination.cancel(2);
  pair.destination.transport->disconnect(pair.peer);
  for (WorkId id = 1; id <= 3; ++id) CHECK_EQ(pair.destination.await(id).code, Code::kCancelled);
  CHECK(pair.to == std::vector<std::byte>(pair.to.size()));
  CHECK_EQ(pair.destination.reactor.num_handlers(), 0u);
}

TEST(post_accepts_a_prefix_when_the_queue_is_full) {
  Pair pair;
  const std::vector<Work> batch(5000, pair.fetch(1));
  const testing::Posted posted = testing::post_all(*pair.destination.transport, pair.peer, batch);
  CHECK_EQ(posted.code, Code::kAgain);
  CHECK(posted.accepted > 0 && posted.accepted < batch.size());
}

TEST(a_hello_of_another_process_downs_the_rail) {
  Loopback destination;
  auto [left, right] = socket_pair();
  REQUIRE_OK(destination.transport->connect(std::move(left), {true, 0, "stranger"}));
  char hello[32] = "kvxloop1";
  REQUIRE(::send(right.get(), hello, sizeof hello, 0) == sizeof hello);
  CHECK(destination.await(CompletionKind::kRailDown).detail.find("another process") != std::string::npos);
}

}  // namespace
