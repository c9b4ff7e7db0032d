// Two ends of an shm rail, driven by hand, with regions of 64 blocks; and a peer whose end of the rail's
// socket the test writes, beside a peer that keeps the rules.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/system/memfd.h"
#include "core/system/pool_memory.h"
#include "one_sided_ends.h"
#include "transports/shm/shm_transport.h"

namespace shm_ends {

using namespace kvxfer;
using namespace kvxfer::testing;

inline constexpr std::uint64_t kBlockNbytes = 4096;
inline constexpr std::uint32_t kNumBlocks = 64;
inline constexpr std::uint64_t kRegionNbytes = kBlockNbytes * kNumBlocks;
using Shm = End<ShmTransport>;

inline std::shared_ptr<PoolMemory> make_pool(std::size_t nbytes = kRegionNbytes) {
  auto pool =
      PoolMemory::create({.nbytes = nbytes, .name = "shm-test", .huge_pages = false, .numa_node = -1});
  REQUIRE_OK(pool);
  return pool.value();
}

inline LocalRegion pool_region(RegionId id, std::byte* base, std::uint64_t nbytes) {
  const auto slice = PoolMemory::find(base, nbytes);
  REQUIRE(slice.has_value());
  return {id, base, {{0, nbytes}}};
}

inline LocalRegion foreign_region(RegionId id, std::byte* base, std::uint64_t nbytes) {
  return {id, base, {{0, nbytes}}};
}

inline RemoteRegion as_remote(const LocalRegion& local, RegionKeys keys) {
  return {local.id, reinterpret_cast<std::uintptr_t>(local.base), local.spans, std::move(keys)};
}

inline RemoteRegion register_at(Shm& end, const LocalRegion& local) {
  Result<RegionKeys> keys = testing::register_memory(*end.transport, local);
  REQUIRE_OK(keys);
  return as_remote(local, keys.value());
}

inline std::byte pattern(std::uint64_t at) { return static_cast<std::byte>((at * 2654435761u) >> 13); }
inline void fill_pattern(std::byte* data, std::uint64_t nbytes) {
  for (std::uint64_t at = 0; at < nbytes; ++at) data[at] = pattern(at);
}
inline bool holds_block(const std::byte* dst, std::uint32_t dst_block, std::uint32_t src_block) {
  for (std::uint64_t i = 0; i < kBlockNbytes; ++i)
    if (dst[dst_block * kBlockNbytes + i] != pattern(src_block * kBlockNbytes + i)) return false;
  return true;
}

// Fetches all blocks, reversed, in pieces of 5; checks every byte.
inline void fetch_all_and_check(Shm& destination, PeerId peer, RegionId region) {
  std::vector<std::uint32_t> src(kNumBlocks), dst(kNumBlocks);
  for (std::uint32_t i = 0; i < kNumBlocks; ++i) {
    src[i] = kNumBlocks - 1 - i;
    dst[i] = i * 7 % kNumBlocks;
  }
  std::vector<std::byte> memory(kRegionNbytes);
  const auto move = block_move(region, memory.data(), kBlockNbytes, src, dst, 5);
  static WorkId next_work = 1000;
  std::vector<Work> batch;
  for (std::uint32_t piece = 0; piece < move->grid.num_pieces(); ++piece)
    batch.push_back(fetch_work(next_work++, move, piece));
  const Posted posted = testing::post_all(*destination.transport, peer, batch);
  REQUIRE_EQ(posted.accepted, batch.size());
  for (const Work& work : batch) {
    const Completion completion = destination.await(work.id);
    if (completion.code != Code::kOk) FAIL(completion.detail);
  }
  for (std::uint32_t i = 0; i < kNumBlocks; ++i) CHECK(holds_block(memory.data(), dst[i], src[i]));
}

// A memfd of 16 MiB, written to through `data`.
struct Memfd {
  static constexpr std::uint64_t kNbytes = 16 * 1024 * 1024;

  explicit Memfd(const char* name) : fd(std::move(create_memfd(name, kNbytes)).value()) {
    void* const at = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    REQUIRE(at != MAP_FAILED);
    data = static_cast<std::byte*>(at);
  }
  ~Memfd() { ::munmap(data, kNbytes); }
  Memfd(const Memfd&) = delete;
  Memfd& operator=(const Memfd&) = delete;
  // As agents do, or as before Linux 5.1, so that it can be punched.
  void seal(bool loosely = false) const {
    if (loosely)
      REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    else
      REQUIRE_OK(seal_memfd(fd.get()));
  }
  UniqueFd fd;
  std::byte* data = nullptr;
};

inline std::size_t num_open_fds() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// A destination with a peer that keeps the rules, and a peer whose end of the socket the test writes.
struct Impostor {
  explicit Impostor(std::shared_ptr<Budget> budget = nullptr) {
    bystander_peer = connect_ends(destination, bystander).first;
    fill_pattern(bystander_pool->data(), kRegionNbytes);
    REQUIRE_OK(destination.transport->attach(
        bystander_peer, register_at(bystander, pool_region(1, bystander_pool->data(), kRegionNbytes))));
    destination.completions.clear();
    auto [left, right] = socket_pair();
    const Result<PeerId> connected =
        destination.transport->connect(std::move(left), {false, 0, "impostor", std::move(budget)});
    REQUIRE_OK(connected);
    peer = connected.value();
    channel.emplace(std::move(right));
  }
  // The peer that keeps the rules loses nothing.
  ~Impostor() { fetch_all_and_check(destination, bystander_peer, 1); }

  void say(const shm::Message& message, int fd = -1) {
    channel->queue(message, fd < 0 ? nullptr : share(UniqueFd(::dup(fd))));
    static_cast<void>(channel->flush());
  }
  // `readable`: other processes may read it by the kernel's calls.
  void hello(bool readable = false) {
    shm::Message message;
    message.nbytes = FenceTable::kNbytes;
    if (readable) message.probe_address = reinterpret_cast<std::uintptr_t>(probe.data());
    message.probe = probe;
    say(message, fences->fill().value());
    destination.await(CompletionKind::kRailUp);
  }
  shm::Message memfd(std::uint64_t nbytes, std::uint64_t memfd_id = 1) const {
    shm::Message message;
    message.kind = shm::MessageKind::kMemfd;
    message.memfd_id = memfd_id;
    message.nbytes = nbytes;
    return message;
  }
  // A region that fills the whole memfd, as its owner's REGION would describe it.
  RemoteRegion region_in(RegionId id, std::uint64_t nbytes, std::byte* base = nullptr,
                         std::uint64_t memfd_id = 1) const {
    const std::uint64_t words[] = {1, memfd_id, 0, nbytes};
    RegionKeys keys(sizeof words);
    std::memcpy(keys.data(), words, sizeof words);
    return {id, reinterpret_cast<std::uintptr_t>(base), {{0, nbytes}}, std::move(keys)};
  }
  std::string down_words() { return destination.await(CompletionKind::kRailDown).detail; }

  Shm bystander;
  std::shared_ptr<PoolMemory> bystander_pool = make_pool();
  Shm destination;
  PeerId bystander_peer = 0, peer = 0;
  std::array<std::byte, 16> probe{std::byte{0x6b}, std::byte{0x76}, std::byte{0x78}};
  std::unique_ptr<FenceTable> fences = Shm::make_fences();
  std::optional<shm::SideChannel> channel;
};

// ---- another process ----

// A source in a child process: region 1 in a pool, region 2 in other memory, and fence word 9.
struct ChildSource {
  explicit ChildSource(const Shm::Make& make =
                           [](Reactor& on, const FenceTable& table) {
                             return std::make_unique<ShmTransport>(on, table);
                           })
      : destination(make) {
    const std::string name =
        "kvxfer-test-shm-" + std::to_string(::getpid()) + "-" + std::to_string(check::seed());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // an abstract name
    const auto address_nbytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), address_nbytes) == 0);
    REQUIRE(::listen(listener.get(), 1) == 0);
    auto [parent_control, child_control] = socket_pair();
    pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      parent_control.reset();
      // Connected after the fork, so that the socket's credentials name this process.
      UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), address_nbytes) != 0)
        ::_exit(1);
      serve(std::move(socket), child_control.get());
      ::_exit(0);
    }
    control = std::move(parent_control);
    const Result<PeerId> connected = destination.transport->connect(
        UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)), {false, 0, "child"});
    REQUIRE_OK(connected);
    peer = connected.value();
    destination.await(CompletionKind::kRailUp);
    for (const RegionId id : {RegionId{1}, RegionId{2}}) {
      RemoteRegion remote{id, 0, {{0, kRegionNbytes}}, RegionKeys(32)};
      REQUIRE(::recv(control.get(), &remote.base, sizeof remote.base, MSG_WAITALL) == sizeof remote.base);
      REQUIRE(::recv(control.get(), remote.keys.data(), remote.keys.size(), MSG_WAITALL) == 32);
      REQUIRE_OK(destination.transport->attach(peer, remote));
    }
    // The child sends the pool over the rail's socket; from here on nothing waits for the child.
    for (const RegionId id : {RegionId{1}, RegionId{2}}) fetch_all_and_check(destination, peer, id);
  }
  ~ChildSource() {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }

  [[noreturn]] static void serve(UniqueFd socket, int control_fd) {
    Shm source;
    const auto pool = make_pool();
    std::vector<std::byte> memory(kRegionNbytes);
    fill_pattern(pool->data(), kRegionNbytes);
    fill_pattern(memory.data(), kRegionNbytes);
    const LocalRegion regions[] = {pool_region(1, pool->data(), kRegionNbytes),
                                   foreign_region(2, memory.data(), kRegionNbytes)};
    for (const LocalRegion& region : regions) {
      const RemoteRegion remote = register_at(source, region);
      static_cast<void>(::send(control_fd, &remote.base, sizeof remote.base, MSG_NOSIGNAL));
      static_cast<void>(::send(control_fd, remote.keys.data(), remote.keys.size(), MSG_NOSIGNAL));
    }
    static_cast<void>(source.transport->connect(std::move(socket), {true, 0, "parent"}));
    for (;;) {
      source.step();
      char command = 0;
      const ssize_t got = ::recv(control_fd, &command, 1, MSG_DONTWAIT);
      if (got == 0) ::_exit(0);
      if (got == 1 && command == 'b') {
        source.fences->bump(9);
        static_cast<void>(::send(control_fd, &command, 1, MSG_NOSIGNAL));
      }
      source.reactor.run_once(1);
    }
  }

  Shm destination;
  PeerId peer = 0;
  pid_t pid = -1;
  UniqueFd control;
};

}  // namespace shm_ends
