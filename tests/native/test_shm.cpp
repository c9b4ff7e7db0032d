#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <string>

#include "check.h"
#include "shm_ends.h"

namespace {

using namespace shm_ends;

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
  CHECK_HAS(completion.detail, "EFAULT");
  ::munmap(memory, kRegionNbytes / 2);
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
  destination.transport->disconnect(peer);
  CHECK_EQ(destination.transport->num_mappings(), 0u);
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
  CHECK_HAS(down.detail, "closed its end");
  CHECK_EQ(destination.transport->num_mappings(), 0u);
  CHECK_EQ(destination.transport->post(peer, work), Code::kRailFailed);
  destination.transport->disconnect(peer);
}

TEST(many_peers_are_told_of_a_pool_in_slices_and_in_order) {
  Shm source;
  std::vector<UniqueFd> peers;
  for (int i = 0; i < 150; ++i) {
    auto [near, far] = socket_pair();
    REQUIRE_OK(source.transport->connect(std::move(near), {false, 0, "peer"}));
    peers.push_back(std::move(far));
  }
  const auto num_told = [&] {  // besides a hello each
    std::size_t nbytes = 0;
    for (const UniqueFd& peer : peers) {
      int unread = 0;
      REQUIRE(::ioctl(peer.get(), FIONREAD, &unread) == 0);
      nbytes += static_cast<std::size_t>(unread);
    }
    return nbytes / sizeof(shm::Message) - peers.size();
  };
  const auto pool = make_pool();
  register_at(source, pool_region(1, pool->data(), kRegionNbytes));
  CHECK_EQ(num_told(), 16u);
  source.transport->deregister_memory(1);
  CHECK_EQ(num_told(), 32u);
  Completion out[4];
  while (source.transport->busy()) source.transport->poll(out);
  CHECK_EQ(num_told(), 300u);
  for (const UniqueFd& peer : peers)
    for (const shm::MessageKind kind :
         {shm::MessageKind::kHello, shm::MessageKind::kMemfd, shm::MessageKind::kMemfdGone}) {
      shm::Message message;
      REQUIRE(::recv(peer.get(), &message, sizeof message, 0) == sizeof message);
      CHECK(message.kind == kind);
    }
}

// ---- another process ----

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
  CHECK_HAS(out[0].detail, "gone");
  child.destination.await(CompletionKind::kRailDown);
}

}  // namespace
