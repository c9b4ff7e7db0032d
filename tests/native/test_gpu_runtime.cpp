// Agents whose caches lie on a GPU, from a caller's post to the bytes: two Runtimes over an emulated driver.
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_ends.h"
#include "held_launches.h"

namespace kvxfer::gpu_runtime_test {
namespace {

using namespace agent_pair;
using emulated::held_copy;
using emulated::launches;
using gpu_ends::CachesEnd;
using gpu_ends::CachesEnds;
using gpu_memory::DeviceMemory;
using Transports = std::vector<std::string>;

constexpr std::uint32_t kBlocks = 24;
constexpr std::uint64_t kBlockNbytes = 1024 * 1024;  // 8 of them are a piece, and a launch
constexpr std::uint32_t kPieceBlocks = 8;
constexpr std::uint64_t kNbytes = kBlocks * kBlockNbytes;

Options over(const Transports& transports, std::size_t num_rails = 0) {
  launches().reset();
  GpuPart gpu =
      gpu_ends::emulated_gpu({{&held_copy, nullptr, &emulated::convert}}, 0);  // test_gpu_staged_runtime.cpp
  // Room for one piece's tables: other pieces wait for its end before they are launched.
  gpu.stream.tables_nbytes = 2 * kPieceBlocks * sizeof(std::uint32_t);
  return {.transports = transports, .layout = {kBlocks, kBlockNbytes}, .num_rails = num_rails, .gpu = gpu};
}
RuntimeOptions alone_over(const Transports& transports) {
  return options_of("alone", gpu_ends::with_gpu(over(transports)));
}

struct Ends : CachesEnds {
  explicit Ends(const Options& options = over({"shm", "cuda_ipc", "tcp"}, 3))
      : CachesEnds(options, options) {}
  ~Ends() { launches().let_all(); }  // closing waits for them
  // Writes between the caches on the GPUs.
  std::shared_ptr<Handle> write(std::uint32_t num_blocks = 0) {
    return post(true, src.on_gpu, dst.on_gpu, num_blocks);
  }
  std::shared_ptr<Handle> read(std::uint32_t num_blocks = 0) {
    return post(false, src.on_gpu, dst.on_gpu, num_blocks);
  }
  std::shared_ptr<Handle> write_host() { return post(true, src.on_host, dst.on_host); }
  LeaseId grant_write() { return dst.grant(here, dst.on_gpu, wire::LeaseMode::kWrite); }
  LeaseId grant_write_host() { return dst.grant(here, dst.on_host, wire::LeaseMode::kWrite); }
  LeaseId grant_read() { return src.grant(there, src.on_gpu, wire::LeaseMode::kRead); }
  bool arrived(const std::byte* from, std::uint32_t num_blocks = 0) {
    return dst.has(dst.on_gpu, from, num_blocks);
  }
};

// Allocations of the device that this process has made or mapped.
std::size_t num_allocations() {
  const std::lock_guard lock(emulated::device().mutex);
  return emulated::device().blocks.size();
}

// It has to be the first, while this process has one thread, because it forks.
TEST(a_peer_that_dies_while_its_memory_is_mapped_is_lost_and_the_memory_unmapped) {
  const Options options = over({"unix", "cuda_ipc"});
  gpu_ends::Child<CachesEnd> child(options);
  CachesEnd dst("dst", options);
  dst.add();
  const std::size_t own = num_allocations();
  const auto called = dst.runtime->begin_connect(child.address(), 60 * kSecond);
  REQUIRE_OK(called);
  REQUIRE(await([&] { return num_rails(*dst.runtime, called.value()) == 2; }));
  // The child's only region on the GPU has number 1.
  const auto read = [&](std::uint32_t num_blocks) {
    auto handle = dst.try_post(called.value(), false, 1, dst.on_gpu, num_blocks);
    REQUIRE_OK(handle);
    return std::move(handle).value();
  };
  child.lease();  // until the lease exists the peer refuses
  REQUIRE(is_done(read(1)));
  CHECK(num_allocations() > own);

  launches().reset();
  launches().let(1);
  const auto handle = read(kBlocks);
  launches().await_held(2);
  child.kill();
  launches().let_all();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kFailed);
  CHECK_EQ(handle->status().code(), Code::kPeerLost);
  CHECK(await([&] { return num_allocations() == own; }));
  CHECK_EQ(dst.num_transfers(), 0);
  dst.runtime->close(5 * kSecond);
}

TEST(pages_on_gpus_are_written_and_read_and_host_pages_go_their_own_way_meanwhile) {
  const std::vector<std::pair<Transports, std::size_t>> sets = {
      {{"shm", "cuda_ipc", "tcp"}, 3}, {{"cuda_ipc", "tcp"}, 2}, {{"loopback", "cuda_ipc"}, 2}};
  for (const auto& [transports, rails] : sets) {
    const std::uint32_t num_blocks = &transports == &sets.front().first ? kBlocks : 2;
    Ends both(over(transports, rails));
    both.grant_write();
    both.grant_read();
    both.grant_write_host();

    // Host pages arrive while a kernel does not end.
    launches().let(0);
    const auto written = both.write(num_blocks);
    launches().await_held(1);
    const auto beside = both.write_host();
    REQUIRE(ends(beside));
    CHECK_EQ(beside->outcome(), Outcome::kDone);
    CHECK(both.dst.has(both.dst.on_host, both.src.memory.host.data()));
    CHECK_EQ(written->outcome(), Outcome::kPending);
    launches().let_all();
    REQUIRE(ends(written));
    REQUIRE_EQ(written->outcome(), Outcome::kDone);
    CHECK(both.arrived(both.src.memory.gpu->data(), num_blocks));
    CHECK_EQ(launches().num_begun(), (num_blocks + kPieceBlocks - 1) / kPieceBlocks);

    std::memset(both.dst.memory.gpu->data(), 0, kNbytes);
    const auto read = both.read(num_blocks);
    REQUIRE(ends(read));
    REQUIRE_EQ(read->outcome(), Outcome::kDone);
    CHECK(both.arrived(both.src.memory.gpu->data(), num_blocks));
    CHECK_EQ(read->rails(), std::vector<std::string>{"cuda_ipc"});
    CHECK(both.quiet());
  }
}

TEST(agents_of_a_gpu_alone_move_its_pages) {
  Ends both(over({"cuda_ipc"}));
  both.grant_read();
  const auto read = both.read(2);
  REQUIRE(ends(read));
  CHECK_EQ(read->outcome(), Outcome::kDone);
  CHECK(both.arrived(both.src.memory.gpu->data(), 2));
}

TEST(after_a_destination_revoked_no_byte_lands_and_no_kernel_begins) {
  Ends both;
  const LeaseId lease = both.grant_write();
  const std::vector<std::byte> before = both.src.copy(both.src.on_gpu),
                               untouched = both.dst.copy(both.dst.on_gpu);
  launches().let(1);
  const auto handle = both.write();
  launches().await_held(2);

  // The kernel ends after revoke() has certainly begun.
  std::thread device([&] {
    await([&] {
      return both.dst.runtime->with_engine(
                 [&](Engine& engine, Time) { return *engine.lease_state(lease); }) == LeaseState::kEnding;
    });
    launches().let_all();
  });
  CHECK(both.dst.runtime->revoke(lease));
  std::memset(both.src.memory.gpu->data(), 0xee, kNbytes);
  const std::vector<std::byte> at_fence = both.dst.copy(both.dst.on_gpu);
  device.join();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  CHECK(both.quiet());
  CHECK_EQ(launches().num_begun(), 2);
  CHECK(both.dst.copy(both.dst.on_gpu) == at_fence);
  CHECK(both.arrived(before.data(), 2 * kPieceBlocks));
  CHECK(std::equal(untouched.begin(), untouched.begin() + (kBlocks - 2 * kPieceBlocks) * kBlockNbytes,
                   at_fence.begin()));
}

TEST(a_region_deregistered_in_mid_transfer_is_not_touched_afterwards) {
  const std::size_t before = num_allocations();
  Ends both;
  both.grant_write();
  // Each end has its region and two allocations of its stream, and maps the other's region.
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  launches().let(1);
  const auto handle = both.write();
  launches().await_held(2);
  std::thread device([&] {
    await([&] {
      return both.dst.runtime->with_engine(
          [&](Engine& engine, Time) { return engine.is_leaving(both.dst.on_gpu); });
    });
    launches().let_all();
  });
  CHECK_OK(both.dst.runtime->deregister_region(both.dst.on_gpu));
  both.dst.memory.gpu.reset();  // a byte that lands now kills the process
  device.join();
  REQUIRE(ends(handle));
  CHECK(both.quiet());
  // The source takes its memory back as well: each end has unmapped the other's.
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK(await([&] { return num_allocations() == before + 5; }));
}

TEST(when_deregister_returns_no_peer_has_the_memory_mapped) {
  const std::size_t before = num_allocations();
  Ends both;
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK_EQ(num_allocations(), before + 2 * 4 - 1);
  both.src.memory.gpu.reset();
  // The rail is still up for the next transfer.
  both.src.memory.gpu.emplace(kNbytes);
  both.src.on_gpu = both.src.add(both.src.memory.gpu->data(), "gpu", MemoryKind::kGpu);
  both.grant_write();
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  const auto written = both.write(1);
  REQUIRE(ends(written));
  CHECK_EQ(written->outcome(), Outcome::kDone);
}

TEST(a_closed_agent_has_nothing_open_and_its_peers_have_nothing_of_it_mapped) {
  const std::size_t before = num_allocations();
  const int contexts = emulated::device().num_contexts;
  Ends both;
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  both.src.runtime->close(60 * kSecond);  // the object lives on
  // Its own memory, which belongs to its owner, and three allocations of the peer.
  CHECK_EQ(num_allocations(), before + 1 + 3);
  // Two contexts of the peer: its transport's, and that of streams that it could wait for.
  CHECK_EQ(emulated::device().num_contexts, contexts + 2);
  CHECK_EQ(both.src.runtime->deregister_region(both.src.on_gpu).code(), Code::kOk);
}

TEST(a_peer_that_stands_still_does_not_keep_a_caller_from_its_memory) {
  const std::size_t before = num_allocations();
  Options options = over({"shm", "cuda_ipc", "tcp"}, 3);
  options.heartbeat_ns = kSecond / 2;
  options.silent_ns = 4 * kSecond;
  Ends both(options);
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  std::optional<Standstill> stopped(*both.dst.runtime);
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK(num_allocations() >= before + 7);  // the peer still has it mapped, and the log says so
  std::string said;
  for (const Event& event : both.src.runtime->ring().drain(1000, false))
    if (event.kind == EventKind::kLog) said += event.message;
  CHECK_HAS(said, "GPU memory of region 'gpu' may still be mapped by peer 'dst'");
  CHECK(num_rails(*both.src.runtime, both.there) < 3);
  // The agent goes on: memory that no peer has mapped is deregistered at once.
  const RegionId again = both.src.add(both.src.memory.gpu->data(), "gpu", MemoryKind::kGpu);
  CHECK_OK(both.src.runtime->deregister_region(again));
  stopped.reset();
  CHECK(await([&] { return num_allocations() == before + 6; }));
}

TEST(a_gpu_that_fails_ends_its_transfers_and_leaves_host_memory_alone) {
  Ends both;
  both.grant_read();
  both.grant_write_host();
  emulated::device().launches_until_failure = 1;
  const auto handle = both.read();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kFailed);
  CHECK_EQ(handle->status().code(), Code::kNoPath);
  CHECK_HAS(handle->status().message(), "cuLaunchKernel");
  emulated::device().launches_until_failure = -1;
  CHECK_REFUSED(both.dst.try_post(both.here, false, both.src.on_gpu, both.dst.on_gpu).status(),
                Code::kRailFailed, "cuLaunchKernel");
  const auto beside = both.write_host();
  REQUIRE(ends(beside));
  CHECK_EQ(beside->outcome(), Outcome::kDone);
  CHECK(both.dst.has(both.dst.on_host, both.src.memory.host.data()));
  CHECK(both.quiet());
}

TEST(a_region_on_a_gpu_that_is_not_the_agents_is_refused_in_words) {
  const auto runtime = create(alone_over({"cuda_ipc"}));
  const DeviceMemory memory(kBlockNbytes);
  const auto add = [&](const std::string& name, int device) {
    return runtime->register_region(name, {{memory.data(), kBlockNbytes}}, 1, pages_of(kBlockNbytes), {},
                                    MemoryKind::kGpu, nullptr, device);
  };
  const Status other = add("other", 1).status();
  CHECK_REFUSED(other, Code::kUnsupported, "lies on GPU 1, but this rail serves GPU 0");
  REQUIRE_OK(add("own", 0));
  REQUIRE_OK(add("untold", -1));
}

TEST(memory_is_registered_with_the_transports_of_its_kind_or_refused) {
  const auto code_of = [](const Transports& transports, MemoryKind kind) {
    auto runtime = Runtime::create(alone_over(transports));
    REQUIRE_OK(runtime);
    const DeviceMemory memory(kBlockNbytes);
    return runtime.value()
        ->register_region("kv", {{memory.data(), kBlockNbytes}}, 1, pages_of(kBlockNbytes), {}, kind)
        .status()
        .code();
  };
  CHECK_EQ(code_of({"shm", "tcp"}, MemoryKind::kGpu), Code::kUnsupported);
  CHECK_EQ(code_of({"cuda_ipc"}, MemoryKind::kHost), Code::kUnsupported);
  RuntimeOptions without = alone_over({"cuda_ipc"});
  without.gpus.clear();
  CHECK_EQ(Runtime::create(std::move(without)).status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace kvxfer::gpu_runtime_test
