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

TEST(a_hello_of_another_process_downs_the_rail) {
  Loopback destination;
  auto [left, right] = socket_pair();
  REQUIRE_OK(destination.transport->connect(std::move(left), {true, 0, "stranger"}));
  char hello[32] = "kvxloop1";
  REQUIRE(::send(right.get(), hello, sizeof hello, 0) == sizeof hello);
  CHECK_HAS(destination.await(CompletionKind::kRailDown).detail, "another process");
}

}  // namespace
