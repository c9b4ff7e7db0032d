// cuda_ipc beyond the contracts of all transports (test_gpu_conformance.cpp): memory in several allocations,
// owners that take it back, a device that fails, and peers that lie.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"
#include "ipc_ends.h"

namespace kvxfer::gpu_ipc_test {
namespace {

using emulated::device;
using gpu_memory::DeviceMemory;
using testing::connect_ends;
using testing::fetch_work;
using testing::socket_pair;
using namespace ipc_ends;

TEST(a_region_in_two_allocations_is_fetched_from_both) {
  Ends src(make), dst(make);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory one(kNbytes), other(kNbytes), arrived(2 * kNbytes);
  const DeviceMemory& low = one.data() < other.data() ? one : other;
  const DeviceMemory& high = one.data() < other.data() ? other : one;
  check::Random random(check::seed());
  random.fill(low.data(), kNbytes);
  random.fill(high.data(), kNbytes);
  const auto apart = static_cast<std::uint64_t>(high.data() - low.data());
  const LocalRegion region = region_of(1, low.data(), {{0, kNbytes}, {apart, kNbytes}});
  const RemoteRegion remote = told(*src.transport, region);
  REQUIRE(dst.transport->attach(src_at_dst, remote).ok());
  const auto move = move_of(1, arrived.data(), 2, apart);
  const Work works[] = {fetch_work(1, move, 0), fetch_work(2, move, 1)};
  CHECK_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, 2);
  CHECK(dst.await(1).code == Code::kOk);
  CHECK(dst.await(2).code == Code::kOk);
  for (std::size_t k = 0; k < kBlocks; ++k) {
    constexpr std::size_t kBlock = kNbytes / kBlocks;
    const std::size_t to = (kBlocks - 1 - k) * kBlock;
    CHECK(std::memcmp(arrived.data() + to, low.data() + k * kBlock, kBlock) == 0);
    CHECK(std::memcmp(arrived.data() + kNbytes + to, high.data() + k * kBlock, kBlock) == 0);
  }
  CHECK_EQ(dst.transport->num_mappings(), 2);
  dst.transport->detach(src_at_dst, 1);
  CHECK_EQ(dst.transport->num_mappings(), 0);
}

// Returns how many launches copy four pieces in each of two layers, with tables of so many bytes.
std::int64_t launches_of_pieces(std::uint32_t tables_nbytes) {
  const auto with_room = [&](Reactor& reactor, const FenceTable& fences) {
    auto made = CudaIpcTransport::create(reactor, fences, emulated::driver(),
                                         {.device = 0,
                                          .kernels = emulated::fast_kernels(),
                                          .stream = {.tables_nbytes = tables_nbytes, .calibration = {}}});
    REQUIRE_OK(made);
    return std::move(made).value();
  };
  Ends src(make), dst(with_room);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory memory(2 * kNbytes), arrived(2 * kNbytes);
  check::Random random(check::seed());
  random.fill(memory.data(), memory.size());
  const RemoteRegion remote = told(*src.transport, region_of(1, memory.data(), {{0, 2 * kNbytes}}));
  REQUIRE(dst.transport->attach(src_at_dst, remote).ok());
  auto move = std::make_shared<Move>(*move_of(1, arrived.data(), 2, kNbytes));
  move->grid.pairs_per_piece = kBlocks / 4;
  std::vector<Work> works;
  for (std::uint32_t piece = 0; piece < 8; ++piece) works.push_back(fetch_work(1 + piece, move, piece));
  constexpr std::int64_t kMany = 1000;
  device().launches_until_failure = kMany;
  CHECK_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, 8);
  for (const Work& work : works) CHECK(dst.await(work.id).code == Code::kOk);
  const std::int64_t num_launches = kMany - device().launches_until_failure;
  device().launches_until_failure = -1;
  for (std::size_t layer = 0; layer < 2; ++layer)
    for (std::size_t k = 0; k < kBlocks; ++k) {
      constexpr std::size_t kBlock = kNbytes / kBlocks;
      CHECK(std::memcmp(arrived.data() + layer * kNbytes + (kBlocks - 1 - k) * kBlock,
                        memory.data() + layer * kNbytes + k * kBlock, kBlock) == 0);
    }
  return num_launches;
}

TEST(pieces_of_a_layer_that_follow_each_other_are_one_launch_where_their_tables_have_room) {
  CHECK_EQ(launches_of_pieces(1024 * 1024), 2);
  // Room for the two pairs of one piece on both sides, aligned, but not for those of two pieces.
  CHECK_EQ(launches_of_pieces(2 * 16), 8);
}

TEST(memory_that_its_owner_takes_back_is_unmapped_and_its_work_ends) {
  Two two;
  two.fetch(1);
  CHECK(two.dst.await(1).code == Code::kOk);
  CHECK_EQ(two.dst.transport->num_mappings(), 1);
  two.src.transport->deregister_memory(1);
  REQUIRE(two.comes([&] { return two.dst.transport->num_mappings() == 0; }));
  two.fetch(2);
  CHECK(two.dst.await(2).code == Code::kRailFailed);
}

// Memory with a legacy IPC handle must not be freed while another process has it open.
TEST(memory_is_held_until_peers_say_that_they_have_unmapped_it) {
  Two two;
  REQUIRE(two.comes([&] { return two.dst.transport->num_mappings() == 1; }));
  CHECK(!two.src_is_held(1) && !two.src_is_held(kEveryRegion));
  two.src.transport->deregister_memory(1);
  for (int step = 0; step < 10; ++step) two.src.step();
  CHECK(two.src_is_held(1) && two.src_is_held(kEveryRegion));
  CHECK(!two.src_is_held(2));
  CHECK_EQ(two.dst.transport->num_mappings(), 1);
  REQUIRE(two.comes([&] { return !two.src_is_held(1); }));
  CHECK_EQ(two.dst.transport->num_mappings(), 0);
  CHECK(!two.src_is_held(kEveryRegion));
  CHECK(two.src.transport->lender()->give_up_holders(kEveryRegion).empty());
  CHECK(two.src.event(CompletionKind::kRailDown) == nullptr &&
        two.dst.event(CompletionKind::kRailDown) == nullptr);
}

TEST(memory_under_two_regions_is_held_from_the_end_of_the_second_on) {
  Ends src(make), dst(make);
  connect_ends(src, dst);
  DeviceMemory memory(kNbytes);
  told(*src.transport, region_of(1, memory.data()));
  told(*src.transport, region_of(2, memory.data()));
  src.transport->deregister_memory(1);
  CHECK(!src.transport->lender()->held_by_peers(1));
  src.transport->deregister_memory(2);
  CHECK(src.transport->lender()->held_by_peers(2) && !src.transport->lender()->held_by_peers(1));
  REQUIRE(src.reactor.run_until([&] { src.step(), dst.step(); },
                                [&] { return !src.transport->lender()->held_by_peers(2); }));
}

TEST(memory_registered_again_at_its_address_is_another) {
  Ends src(make), dst(make);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory memory(kNbytes), arrived(kNbytes);
  check::Random random(check::seed());
  for (RegionId id = 1; id <= 3; ++id) {
    random.fill(memory.data(), kNbytes);
    REQUIRE(dst.transport->attach(src_at_dst, told(*src.transport, region_of(id, memory.data()))).ok());
    const Work works[] = {fetch_work(id, move_of(id, arrived.data(), 1, 0), 0)};
    testing::post_all(*dst.transport, src_at_dst, works);
    REQUIRE(dst.reactor.run_until([&] { src.step(), dst.step(); },
                                  [&] { return dst.completion_of(id) != nullptr; }));
    CHECK(dst.completion_of(id)->code == Code::kOk);
    CHECK(std::memcmp(arrived.data(), memory.data() + (kBlocks - 1) * (kNbytes / kBlocks),
                      kNbytes / kBlocks) == 0);
    src.transport->deregister_memory(id);
    // The next region is announced before the peer has answered: one answer must not count for the other
    // region.
    CHECK(src.transport->lender()->held_by_peers(id));
  }
  REQUIRE(src.reactor.run_until([&] { src.step(), dst.step(); },
                                [&] { return !src.transport->lender()->held_by_peers(kEveryRegion); }));
  CHECK_EQ(dst.transport->num_mappings(), 0);
}

TEST(a_peer_that_does_not_answer_loses_its_rail_and_nobody_waits_for_it_again) {
  Ends src(make), dst(make), other(make);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  connect_ends(src, other);
  DeviceMemory memory(kNbytes), second(kNbytes);
  REQUIRE(dst.transport->attach(src_at_dst, told(*src.transport, region_of(1, memory.data()))).ok());
  told(*src.transport, region_of(2, second.data()));
  REQUIRE(dst.reactor.run_until([&] { src.step(), dst.step(), other.step(); },
                                [&] { return dst.transport->num_mappings() == 1; }));
  src.transport->deregister_memory(1);
  // The other peer answers, which is not enough.
  for (int step = 0; step < 10; ++step) other.step(), src.step();
  CHECK(src.transport->lender()->held_by_peers(1));
  CHECK_EQ(src.transport->lender()->give_up_holders(1), std::vector<std::string>{"b"});
  CHECK(!src.transport->lender()->held_by_peers(kEveryRegion));
  const Completion down = src.await(CompletionKind::kRailDown);
  CHECK_HAS(down.detail, "did not report in time that it has unmapped");
  std::size_t num_down = 0;
  for (const Completion& each : src.completions) num_down += each.kind == CompletionKind::kRailDown;
  CHECK_EQ(num_down, 1);
  src.transport->deregister_memory(2);
  REQUIRE(src.reactor.run_until([&] { src.step(), other.step(); },
                                [&] { return !src.transport->lender()->held_by_peers(2); }));
  // It runs again, sees the end of the rail, and unmaps.
  dst.await(CompletionKind::kRailDown);
  CHECK_EQ(dst.transport->num_mappings(), 0);
}

TEST(a_peer_that_dies_holds_nothing) {
  Ends src(make);
  std::optional<Ends> dst(std::in_place, make);
  const PeerId src_at_dst = connect_ends(src, *dst).second;
  DeviceMemory memory(kNbytes);
  REQUIRE(dst->transport->attach(src_at_dst, told(*src.transport, region_of(1, memory.data()))).ok());
  src.transport->deregister_memory(1);
  CHECK(src.transport->lender()->held_by_peers(1));
  dst.reset();
  REQUIRE(
      src.reactor.run_until([&] { src.step(); }, [&] { return !src.transport->lender()->held_by_peers(1); }));
  CHECK(src.event(CompletionKind::kRailDown) != nullptr);
}

TEST(a_peer_whose_rail_ended_holds_memory_until_it_has_met_that_end) {
  Two two;
  REQUIRE(two.comes([&] { return two.dst.transport->num_mappings() == 1; }));
  two.src.transport->disconnect(two.dst_at_src);
  CHECK(two.src_is_held(kEveryRegion));
  two.src.transport->deregister_memory(1);
  for (int step = 0; step < 10; ++step) two.src.step();
  CHECK(two.src_is_held(1));
  CHECK_EQ(two.dst.transport->num_mappings(), 1);
  REQUIRE(two.comes([&] { return !two.src_is_held(kEveryRegion); }));
  CHECK_EQ(two.dst.transport->num_mappings(), 0);
  CHECK_EQ(two.src.reactor.num_handlers(), 0);
}

// A transport is polled when it is busy, and not otherwise.
TEST(work_behind_some_whose_memory_is_still_to_come_is_not_left_lying) {
  Ends src(make), dst(make);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory memory(kNbytes), arrived(kNbytes);
  RemoteRegion ready = told(*src.transport, region_of(1, memory.data())), awaited = ready;
  awaited.id = 2;
  const std::uint64_t later = 99;  // its last allocation, which has not been announced
  std::memcpy(awaited.keys.data() + 8, &later, sizeof later);
  REQUIRE(dst.transport->attach(src_at_dst, ready).ok());
  REQUIRE(dst.transport->attach(src_at_dst, awaited).ok());
  REQUIRE(dst.reactor.run_until([&] { src.step(), dst.step(); },
                                [&] { return dst.transport->num_mappings() == 1; }));
  const Work first[] = {fetch_work(1, move_of(2, arrived.data(), 1, 0), 0)};
  const Work second[] = {fetch_work(2, move_of(1, arrived.data(), 1, 0), 0)};
  testing::post_all(*dst.transport, src_at_dst, first);
  CHECK(!dst.transport->busy());
  testing::post_all(*dst.transport, src_at_dst, second);
  CHECK(dst.transport->busy());
  CHECK(dst.await(2).code == Code::kOk);
  CHECK(dst.completion_of(1) == nullptr);
  dst.transport->disconnect(src_at_dst);
  CHECK(dst.await(1).code == Code::kCancelled);
}

TEST(memory_that_cannot_be_shared_is_refused_in_words) {
  Ends src(make);
  const gpu::Address unshared = emulated::allocate_pages(kNbytes, 0);
  const auto refused =
      testing::register_memory(*src.transport, region_of(1, reinterpret_cast<std::byte*>(unshared)));
  CHECK_EQ(refused.status().code(), Code::kUnsupported);
  emulated::release(unshared);
  std::vector<std::byte> host(kNbytes);
  CHECK_EQ(testing::register_memory(*src.transport, region_of(2, host.data())).status().code(),
           Code::kUnsupported);
}

TEST(a_region_that_is_refused_leaves_nothing_behind) {
  Ends src(make), dst(make);
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory memory(kNbytes), other(kNbytes), arrived(kNbytes);
  std::vector<std::byte> elsewhere(kNbytes);
  check::Random random(check::seed());
  random.fill(memory.data(), kNbytes);
  told(*src.transport, region_of(1, memory.data()));
  // Its first allocation can be shared; the second is not an allocation.
  const auto apart = static_cast<std::uint64_t>(elsewhere.data() - other.data());
  const auto refused =
      testing::register_memory(*src.transport, region_of(2, other.data(), {{0, kNbytes}, {apart, kNbytes}}));
  CHECK(!refused.ok() && refused.status().code() == Code::kUnsupported);
  src.transport->deregister_memory(2);
  CHECK(!src.transport->lender()->held_by_peers(kEveryRegion));
  // Peers do not wait for memory that is never announced to them.
  REQUIRE(dst.transport->attach(src_at_dst, told(*src.transport, region_of(3, memory.data()))).ok());
  const Work works[] = {fetch_work(1, move_of(3, arrived.data(), 1, 0), 0)};
  CHECK_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, 1);
  CHECK(dst.await(1).code == Code::kOk);
  CHECK(std::memcmp(arrived.data() + kNbytes - kNbytes / kBlocks, memory.data(), kNbytes / kBlocks) == 0);
  // The first of the two regions had held it as well.
  src.transport->deregister_memory(3);
  CHECK(!src.transport->lender()->held_by_peers(kEveryRegion));
  src.transport->deregister_memory(1);
  REQUIRE(src.reactor.run_until([&] { src.step(), dst.step(); },
                                [&] { return !src.transport->lender()->held_by_peers(kEveryRegion); }));
}

TEST(a_device_that_fails_ends_its_rails_and_no_work_stays) {
  Two two;
  const auto move = move_of(1, two.arrived.data(), 1, 0);
  std::vector<Work> works;
  for (WorkId id = 1; id <= 5; ++id) works.push_back(fetch_work(id, move, 0));
  device().launches_until_failure = 2;
  CHECK_EQ(testing::post_all(*two.dst.transport, two.src_at_dst, works).accepted, works.size());
  CHECK_HAS(two.dst.await(CompletionKind::kRailDown).detail, "cuLaunchKernel");
  device().launches_until_failure = -1;
  for (const Work& work : works) {
    const Code code = two.dst.await(work.id).code;
    CHECK(code == Code::kOk || code == Code::kRailFailed);
  }
  CHECK(two.dst.completion_of(5)->code == Code::kRailFailed);
  CHECK(!two.dst.transport->busy());
  CHECK(!two.dst.transport->connect(socket_pair().first, {true, 0, "later"}).ok());
}

// A sticky error in the middle of a kernel: no completion is ever reported.
TEST(a_device_that_falls_silent_with_an_error_is_found_out) {
  Two two;
  emulated::hang_launches() = true;
  two.fetch(1);
  for (int step = 0; step < 10; ++step) two.dst.step();
  CHECK(two.dst.completion_of(1) == nullptr);
  device().stream_error = emulated::kLaunchFailed;
  CHECK(two.dst.await(1).code == Code::kRailFailed);
  emulated::hang_launches() = false;
  device().stream_error = 0;
}

TEST(a_peer_that_lies_loses_its_rail) {
  constexpr std::size_t kMessageNbytes = 104;
  const auto says = [&](std::initializer_list<std::pair<std::size_t, std::uint32_t>> words) {
    Ends end(make);
    auto [ours, theirs] = socket_pair();
    REQUIRE_OK(end.transport->connect(std::move(ours), {true, 0, "liar"}));
    std::array<std::byte, kMessageNbytes> message{};
    std::memcpy(message.data(), "kvg2", 4);
    for (const auto& [at, word] : words) std::memcpy(message.data() + at, &word, sizeof word);
    REQUIRE_EQ(::send(theirs.get(), message.data(), message.size(), MSG_NOSIGNAL), message.size());
    return end.await(CompletionKind::kRailDown).detail;
  };
  CHECK_HAS(says({{0, 0}}), "version");
  CHECK_HAS(says({{4, 2}}), "did not begin with a hello");
  CHECK_HAS(says({{4, 1}}), "with a missing or an extra descriptor");
  CHECK_HAS(says({{4, 9}}), "did not begin with a hello");
}

// A peer that the test drives by hand; it has said hello.
struct Liar {
  explicit Liar(Ends& end) : fences(Ends::make_fences()), channel(open(end), kMessageNbytes) {
    say(1, 0, share_copy_of(fences->fill().value()));
    end.await(CompletionKind::kRailUp);
  }
  static UniqueFd open(Ends& end) {
    auto [ours, theirs] = socket_pair();
    REQUIRE_OK(end.transport->connect(std::move(ours), {true, 0, "liar"}));
    return std::move(theirs);
  }
  void say(std::uint32_t kind, std::uint64_t memory_id, SharedFd fd = nullptr) {
    std::array<std::byte, kMessageNbytes> message{};
    const std::uint64_t nbytes = FenceTable::kNbytes;
    std::memcpy(message.data(), "kvg2", 4);
    std::memcpy(message.data() + 4, &kind, sizeof kind);
    std::memcpy(message.data() + 8, &memory_id, sizeof memory_id);
    std::memcpy(message.data() + 24, &nbytes, sizeof nbytes);
    const std::uint32_t by_ipc = 3;  // a handle's kind; only messages of memory have one
    std::memcpy(message.data() + 32, &by_ipc, sizeof by_ipc);
    channel.queue(message, std::move(fd));
    REQUIRE(channel.flush().ok());
  }
  static constexpr std::size_t kMessageNbytes = 104;
  std::unique_ptr<FenceTable> fences;
  MessageChannel channel;
};

TEST(a_peer_that_does_not_read_what_it_is_answered_loses_its_rail) {
  constexpr std::uint32_t kMemory = 2, kGone = 3;
  Ends end(make);
  Liar liar(end);
  for (std::uint64_t id = 1; end.event(CompletionKind::kRailDown) == nullptr && id < 20'000; ++id) {
    liar.say(kMemory, id);
    liar.say(kGone, id);
    end.step();
  }
  CHECK_HAS(end.await(CompletionKind::kRailDown).detail, "does not read its socket");
}

TEST(peers_that_never_let_go_take_a_bounded_number_of_descriptors) {
  constexpr std::size_t kMost = 64;
  DeviceMemory memory(kNbytes);
  Ends end(make);
  told(*end.transport, region_of(1, memory.data()));
  std::vector<UniqueFd> theirs;
  for (std::size_t k = 0; k < kMost + 6; ++k) {
    auto [ours, far] = socket_pair();
    const auto peer = end.transport->connect(std::move(ours), {true, 0, "clinging"});
    REQUIRE_OK(peer);
    end.transport->disconnect(peer.value());
    theirs.push_back(std::move(far));
    CHECK_EQ(end.reactor.num_handlers(), std::min(k + 1, kMost));
  }
  CHECK(end.transport->lender()->held_by_peers(kEveryRegion));
  theirs.clear();
  REQUIRE(end.reactor.run_until([&] { end.step(); },
                                [&] { return !end.transport->lender()->held_by_peers(kEveryRegion); }));
}

TEST(a_peer_that_lies_of_what_is_unmapped_loses_its_rail) {
  constexpr std::uint32_t kGone = 3, kUnmapped = 4;
  const auto down = [](Ends& end) { return end.await(CompletionKind::kRailDown).detail; };
  DeviceMemory memory(kNbytes);
  {
    Ends end(make);
    told(*end.transport, region_of(1, memory.data()));
    Liar liar(end);
    liar.say(kUnmapped, 1);  // it is still registered
    CHECK_HAS(down(end), "unmapped memory that it was not asked to unmap");
    // Its messages no longer count: it holds the memory until its socket ends.
    end.transport->deregister_memory(1);
    CHECK(end.transport->lender()->held_by_peers(1));
    liar.channel = MessageChannel(UniqueFd(), Liar::kMessageNbytes);
    REQUIRE(end.reactor.run_until([&] { end.step(); },
                                  [&] { return !end.transport->lender()->held_by_peers(1); }));
  }
  {
    Ends end(make);
    Liar liar(end);
    told(*end.transport, region_of(1, memory.data()));
    end.transport->deregister_memory(1);
    liar.say(kUnmapped, 1);
    REQUIRE(end.reactor.run_until([&] { end.step(); },
                                  [&] { return !end.transport->lender()->held_by_peers(1); }));
    CHECK(end.event(CompletionKind::kRailDown) == nullptr);
    liar.say(kUnmapped, 1);
    CHECK_HAS(down(end), "unmapped memory that it was not asked to unmap");
  }
  {
    Ends end(make);
    Liar liar(end);
    liar.say(kGone, 7);
    CHECK_HAS(down(end), "took back memory that it had not announced");
  }
}

}  // namespace
}  // namespace kvxfer::gpu_ipc_test
