#include <sys/mman.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <string>

#include "check.h"
#include "shm_ends.h"

namespace {

using namespace shm_ends;

TEST(pool_pages_arrive_byte_for_byte) {
  Shm source, destination;
  const auto pool = make_pool(kRegionNbytes + 8192);
  fill_pattern(pool->data() + 8192, kRegionNbytes);  // the region begins inside the pool
  const RemoteRegion remote = register_at(source, pool_region(7, pool->data() + 8192, kRegionNbytes));
  const auto [peer, back] = connect_ends(destination, source);
  static_cast<void>(back);
  REQUIRE_OK(destination.transport->attach(peer, remote));
  fetch_all_and_check(destination, peer, 7);
  CHECK_EQ(destination.transport->num_mappings(), 1u);
  while (destination.transport->busy())
    destination.step();  // page tables are filled while idle, then it rests
}

TEST(foreign_pages_arrive_byte_for_byte) {
  Shm source, destination;
  std::vector<std::byte> memory(kRegionNbytes);
  fill_pattern(memory.data(), kRegionNbytes);
  const RemoteRegion remote = register_at(source, foreign_region(7, memory.data(), kRegionNbytes));
  const PeerId peer = connect_ends(destination, source).first;
  REQUIRE_OK(destination.transport->attach(peer, remote));
  fetch_all_and_check(destination, peer, 7);
}

TEST(foreign_memory_of_more_runs_than_one_call_takes) {
  Shm source, destination;
  constexpr std::uint32_t kRuns = 5000;
  std::vector<std::byte> from(kRuns * 128), to(kRuns * 128);
  fill_pattern(from.data(), from.size());
  const RemoteRegion remote = register_at(source, foreign_region(1, from.data(), from.size()));
  const PeerId peer = connect_ends(destination, source).first;
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::uint32_t> src(kRuns), dst(kRuns);
  for (std::uint32_t i = 0; i < kRuns; ++i) {
    src[i] = i;
    dst[i] = kRuns - 1 - i;
  }
  const Work work = fetch_work(1, block_move(1, to.data(), 128, src, dst, kRuns), 0);
  REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk);
  CHECK_EQ(destination.await(1).code, Code::kOk);
  for (std::uint32_t i = 0; i < kRuns; ++i)
    REQUIRE(std::memcmp(to.data() + std::size_t{kRuns - 1 - i} * 128, from.data() + std::size_t{i} * 128,
                        128) == 0);
}

TEST(unmapped_foreign_memory_fails_its_piece_in_words) {
  Shm source, destination;
  void* memory = ::mmap(nullptr, kRegionNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  const RemoteRegion remote =
      register_at(source, foreign_region(1, static_cast<std::byte*>(memory), kRegionNbytes));
  const PeerId peer = connect_ends(destination, source).first;
  REQUIRE_OK(destination.transport->attach(peer, remote));
  ::munmap(static_cast<std::byte*>(memory) + kRegionNbytes / 2, kRegionNbytes / 2);
  std::vector<std::byte> to(kRegionNbytes);
  const Work work = fetch_work(1, block_move(1, to.data(), kBlockNbytes, {0, kNumBlocks - 1}, {0, 1}, 2), 0);
  REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk);
  const Completion completion = destination.await(1);
  CHECK_EQ(completion.code, Code::kSystem);
  CHECK(completion.detail.find("EFAULT") != std::string::npos);
  ::munmap(memory, kRegionNbytes / 2);
}

TEST(a_fence_word_that_moved_on_ends_the_lease) {
  Shm source, destination;
  const auto pool = make_pool();
  const RemoteRegion remote = register_at(source, pool_region(3, pool->data(), kRegionNbytes));
  const PeerId peer = connect_ends(destination, source).first;
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::byte> to(kBlockNbytes);
  const auto fetch = [&](WorkId id, std::uint32_t slot, std::uint64_t generation) {
    return with_fence(fetch_work(id, block_move(3, to.data(), kBlockNbytes, {5}, {0}, 1), 0), slot,
                      generation);
  };
  REQUIRE_EQ(destination.transport->post(peer, fetch(1, 42, 0)), Code::kOk);
  CHECK_EQ(destination.await(1).code, Code::kOk);
  source.fences->bump(42);
  const std::vector<Work> after{fetch(2, 42, 0), fetch(3, 42, 1), fetch(4, 41, 0),
                                fetch(5, FenceTable::kNumSlots, 0)};
  REQUIRE_EQ(testing::post_all(*destination.transport, peer, after).accepted, after.size());
  CHECK_EQ(destination.await(2).code, Code::kLeaseEnded);
  CHECK_EQ(destination.await(3).code, Code::kOk);
  CHECK_EQ(destination.await(4).code, Code::kOk);
  CHECK_EQ(destination.await(5).code, Code::kLeaseEnded);
}

TEST(work_waits_for_a_memfd_that_is_late) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  const auto pool = make_pool();
  fill_pattern(pool->data(), kRegionNbytes);
  const RemoteRegion remote = register_at(source, pool_region(3, pool->data(), kRegionNbytes));
  // The keys came over another socket, and faster: the reactor has not run yet.
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::byte> to(kRegionNbytes);
  const Work work = fetch_work(1, block_move(3, to.data(), kBlockNbytes, {5}, {6}, 1), 0);
  REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk);
  Completion out[4];
  CHECK_EQ(destination.transport->poll(out), 0u);
  CHECK(!destination.transport->busy());  // it waits for the socket, not for the processor
  CHECK_EQ(destination.await(1).code, Code::kOk);
  CHECK(holds_block(to.data(), 6, 5));
}

TEST(a_pool_with_two_regions_is_mapped_once_and_unmapped_after_both) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  const auto pool = make_pool();
  const RemoteRegion first = register_at(source, pool_region(1, pool->data(), kRegionNbytes / 2));
  const RemoteRegion second =
      register_at(source, pool_region(2, pool->data() + kRegionNbytes / 2, kRegionNbytes / 2));
  REQUIRE_OK(destination.transport->attach(peer, first));
  REQUIRE_OK(destination.transport->attach(peer, second));
  REQUIRE(destination.reactor.run_until([&] { destination.step(); },
                                        [&] { return destination.transport->num_mappings() == 1; }));
  destination.transport->detach(peer, 1);
  CHECK_EQ(destination.transport->num_mappings(), 1u);
  destination.transport->detach(peer, 2);
  CHECK_EQ(destination.transport->num_mappings(), 0u);
  REQUIRE_OK(destination.transport->attach(peer, second));  // the descriptor was kept
  CHECK_EQ(destination.transport->num_mappings(), 1u);
}

TEST(a_deregistered_pool_is_given_back_and_may_come_again) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  const auto pool = make_pool();
  fill_pattern(pool->data(), kRegionNbytes);
  const std::size_t fds_before = num_open_fds();
  for (RegionId id = 1; id <= 3; ++id) {
    const RemoteRegion remote = register_at(source, pool_region(id, pool->data(), kRegionNbytes));
    REQUIRE_OK(destination.transport->attach(peer, remote));
    fetch_all_and_check(destination, peer, id);
    source.transport->deregister_memory(id);
    REQUIRE(destination.reactor.run_until([&] { destination.step(); },
                                          [&] { return destination.transport->num_mappings() == 0; }));
    destination.transport->detach(peer, id);
  }
  CHECK_EQ(num_open_fds(), fds_before);
}

TEST(a_region_outside_its_pool_is_refused_and_so_is_a_piece_outside_its_region) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  const auto pool = make_pool();
  RemoteRegion remote = register_at(source, pool_region(1, pool->data(), kRegionNbytes));
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::byte> to(kRegionNbytes);
  const Work outside = fetch_work(1, block_move(1, to.data(), kBlockNbytes, {kNumBlocks}, {0}, 1), 0);
  REQUIRE_EQ(destination.transport->post(peer, outside), Code::kOk);
  CHECK_EQ(destination.await(1).code, Code::kInternal);

  remote.spans = {{4096, kRegionNbytes}};
  CHECK_EQ(destination.transport->attach(peer, remote).code(), Code::kUnsupported);
  remote.spans = {{UINT64_MAX - 3, 100}};
  CHECK_EQ(destination.transport->attach(peer, remote).code(), Code::kUnsupported);
  remote.keys.resize(5);
  CHECK_EQ(destination.transport->attach(peer, remote).code(), Code::kUnsupported);
}

TEST(cancelled_work_lands_nothing_and_completes_once) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  std::vector<std::byte> from(kRegionNbytes, std::byte{1}), to(kRegionNbytes);
  const RemoteRegion remote = register_at(source, foreign_region(1, from.data(), kRegionNbytes));
  REQUIRE_OK(destination.transport->attach(peer, remote));
  const auto move = block_move(1, to.data(), kBlockNbytes, {0, 1, 2}, {0, 1, 2}, 1);
  const std::vector<Work> batch{fetch_work(1, move, 0), fetch_work(2, move, 1), fetch_work(3, move, 2)};
  REQUIRE_EQ(testing::post_all(*destination.transport, peer, batch).accepted, 3u);
  destination.cancel(2);
  destination.cancel(2);
  destination.cancel(99);
  CHECK_EQ(destination.await(1).code, Code::kOk);
  CHECK_EQ(destination.await(2).code, Code::kCancelled);
  CHECK_EQ(destination.await(3).code, Code::kOk);
  destination.step();
  CHECK_EQ(destination.completions.size(), 4u);  // rail up, and one for each work
  CHECK(to[kBlockNbytes] == std::byte{0});
  CHECK(to[2 * kBlockNbytes] == std::byte{1});
}

TEST(disconnect_completes_everything_as_cancelled_and_unmaps) {
  Shm source, destination;
  const PeerId peer = connect_ends(destination, source).first;
  const auto pool = make_pool();
  const RemoteRegion remote = register_at(source, pool_region(1, pool->data(), kRegionNbytes));
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::byte> to(kRegionNbytes);
  const auto move = block_move(1, to.data(), kBlockNbytes, {0, 1}, {0, 1}, 1);
  const std::vector<Work> batch{fetch_work(1, move, 0), fetch_work(2, move, 1)};
  REQUIRE_EQ(testing::post_all(*destination.transport, peer, batch).accepted, 2u);
  destination.transport->disconnect(peer);
  CHECK_EQ(destination.transport->num_mappings(), 0u);
  CHECK_EQ(destination.await(1).code, Code::kCancelled);
  CHECK_EQ(destination.await(2).code, Code::kCancelled);
  CHECK(destination.event(CompletionKind::kRailDown) == nullptr);
  CHECK_EQ(post_all(*destination.transport, peer, batch).code, Code::kRailFailed);
  CHECK_EQ(destination.reactor.num_handlers(), 0u);
  const Completion down = source.await(CompletionKind::kRailDown);  // the socket tells the other end
  CHECK(!down.detail.empty());
}

TEST(the_end_of_the_socket_fails_what_is_outstanding) {
  Shm destination;
  auto source = std::make_unique<Shm>();
  const PeerId peer = connect_ends(destination, *source).first;
  const auto pool = make_pool();
  const LocalRegion local = pool_region(1, pool->data(), kRegionNbytes);
  RemoteRegion remote = register_at(*source, local);
  REQUIRE(remote.keys.size() == 32);
  remote.keys[8] ^= std::byte{0x55};  // another memfd, which will never come
  REQUIRE_OK(destination.transport->attach(peer, remote));
  std::vector<std::byte> to(kRegionNbytes);
  const Work work = fetch_work(1, block_move(1, to.data(), kBlockNbytes, {0}, {0}, 1), 0);
  REQUIRE_EQ(destination.transport->post(peer, work), Code::kOk);
  source.reset();
  CHECK_EQ(destination.await(1).code, Code::kRailFailed);
  const Completion down = destination.await(CompletionKind::kRailDown);
  CHECK_EQ(down.peer, peer);
  CHECK(down.detail.find("closed its end") != std::string::npos);
  CHECK_EQ(destination.transport->num_mappings(), 0u);
  CHECK_EQ(destination.transport->post(peer, work), Code::kRailFailed);
  destination.transport->disconnect(peer);
}

// ---- another process ----

TEST(pages_of_another_process_arrive_byte_for_byte) {
  ChildSource child;
  fetch_all_and_check(child.destination, child.peer, 1);
  fetch_all_and_check(child.destination, child.peer, 2);
}

TEST(the_fence_word_of_another_process_is_seen) {
  ChildSource child;
  std::vector<std::byte> to(kBlockNbytes);
  const auto move = block_move(2, to.data(), kBlockNbytes, {0}, {0}, 1);
  const Work before = with_fence(fetch_work(1, move, 0), 9, 0),
             after = with_fence(fetch_work(2, move, 0), 9, 0);
  REQUIRE_EQ(child.destination.transport->post(child.peer, before), Code::kOk);
  CHECK_EQ(child.destination.await(1).code, Code::kOk);
  char command = 'b';
  REQUIRE(::send(child.control.get(), &command, 1, 0) == 1);
  REQUIRE(::recv(child.control.get(), &command, 1, 0) == 1);
  REQUIRE_EQ(child.destination.transport->post(child.peer, after), Code::kOk);
  CHECK_EQ(child.destination.await(2).code, Code::kLeaseEnded);
}

TEST(a_killed_process_fails_work_on_its_memory_and_downs_the_rail) {
  ChildSource child;
  ::kill(child.pid, SIGKILL);
  siginfo_t info;
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOWAIT) ==
          0);  // gone, its number not yet free
  std::vector<std::byte> to(kRegionNbytes);
  const Work work = fetch_work(1, block_move(2, to.data(), kBlockNbytes, {0}, {0}, 1), 0);
  REQUIRE_EQ(child.destination.transport->post(child.peer, work), Code::kOk);
  Completion out[4];  // without the reactor: the socket's end has not been noticed
  REQUIRE_EQ(child.destination.transport->poll(out), 1u);
  CHECK_EQ(out[0].code, Code::kRailFailed);
  CHECK(out[0].detail.find("gone") != std::string::npos);
  child.destination.await(CompletionKind::kRailDown);
}

}  // namespace
