// Agents whose caches lie on a GPU, from a caller's post to the bytes: two Runtimes over an emulated driver.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"
#include "held_launches.h"
#include "runtime_calls.h"

namespace kvxfer {
namespace {

using emulated::held_copy;
using emulated::launches;
using gpu_memory::DeviceMemory;
using runtime_calls::await;
using runtime_calls::ends;
using runtime_calls::kSecond;
using runtime_calls::num_rails;
using runtime_calls::pages_of;
using Transports = std::vector<std::string>;

constexpr std::uint32_t kBlocks = 24;
constexpr std::uint64_t kBlockNbytes = 1024 * 1024;  // 8 of them are a piece, and a launch
constexpr std::uint32_t kPieceBlocks = 8;
constexpr std::uint64_t kNbytes = kBlocks * kBlockNbytes;
constexpr std::uint64_t kHostBlockNbytes = 4096;

RuntimeOptions options_of(const std::string& name, const Transports& transports) {
  RuntimeOptions options;
  options.name = name;
  options.listen = "tcp://127.0.0.1:0";
  options.transports = transports;
  options.transport_options = {{"tcp.rails", std::int64_t{1}}};
  // Agents of a busy machine, and of one under a sanitizer, are not to be given up while a launch is held.
  options.heartbeat_ns = 30 * kSecond;
  options.silent_ns = 120 * kSecond;
  if (std::find(transports.begin(), transports.end(), "cuda_ipc") != transports.end()) {
    options.gpus.emplace_back();
    options.gpus.front().driver = &emulated::driver();
    options.gpus.front().kernels = {{&held_copy, nullptr, &emulated::convert}};
    options.gpus.front().staging_nbytes = 0;  // test_gpu_staged_runtime.cpp
    // Room for one piece's tables: the others wait for its end, unlaunched.
    options.gpus.front().stream.tables_nbytes = 2 * kPieceBlocks * sizeof(std::uint32_t);
  }
  return options;
}

// An agent with a cache on the GPU and, where it can move it, one in host memory.
struct End {
  End(const std::string& name, const Transports& transports, std::uint64_t seed, Time silent_ns = 0)
      : gpu(std::in_place, kNbytes), host(kBlocks * kHostBlockNbytes) {
    check::Random random(seed);
    std::array<std::byte, 4096> page;  // of each block, over and over: numbers cost under a sanitizer
    for (std::uint64_t at = 0; at < kNbytes; at += page.size()) {
      if (at % kBlockNbytes == 0) random.fill(page.data(), page.size());
      std::memcpy(gpu->data() + at, page.data(), page.size());
    }
    random.fill(host.data(), host.size());
    RuntimeOptions options = options_of(name, transports);
    if (silent_ns != 0) {
      options.silent_ns = silent_ns;
      options.heartbeat_ns = silent_ns / 8;
    }
    runtime = runtime_calls::create(std::move(options));
    auto region = runtime->register_region("gpu", {{gpu->data(), kNbytes}}, kBlocks, pages_of(kBlockNbytes),
                                           {}, MemoryKind::kGpu);
    REQUIRE_OK(region);
    on_gpu = region.value();
    if (transports.size() == 1) return;
    region = runtime->register_region("host", {{host.data(), host.size()}}, kBlocks,
                                      pages_of(kHostBlockNbytes), {});
    REQUIRE_OK(region);
    on_host = region.value();
  }

  LeaseId grant(SessionKey peer, RegionId region, wire::LeaseMode mode) {
    return runtime_calls::grant(*runtime, peer, region, mode);
  }
  std::uint32_t install(SessionKey peer, bool write, RegionId src, RegionId dst, std::uint64_t block_nbytes) {
    return runtime_calls::install(*runtime, peer, write, src, dst, pages_of(block_nbytes));
  }
  // The first blocks, to the last ones in reverse.
  Result<std::shared_ptr<Handle>> try_post(SessionKey peer, std::uint32_t program,
                                           std::uint32_t num_blocks = kBlocks, bool integrity = false) {
    TransferRequest request;
    request.peer = peer;
    request.program = program;
    for (std::uint32_t block = 0; block < num_blocks; ++block) {
      request.src_ids.push_back(block);
      request.dst_ids.push_back(kBlocks - 1 - block);
    }
    request.num_layers = request.layers_ready = 1;
    request.timeout_ns = 300 * kSecond;
    request.integrity = integrity;
    return runtime->with_engine(
        [&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
  }
  std::shared_ptr<Handle> post(SessionKey peer, std::uint32_t program, std::uint32_t num_blocks = kBlocks) {
    auto handle = try_post(peer, program, num_blocks);
    REQUIRE_OK(handle);
    return std::move(handle).value();
  }
  std::size_t num_transfers() { return runtime_calls::num_transfers(*runtime); }
  LeaseState state_of(LeaseId lease) {
    return *runtime->with_engine([&](Engine& engine, Time) { return engine.lease_state(lease); });
  }

  std::optional<DeviceMemory> gpu;
  std::vector<std::byte> host;
  std::shared_ptr<Runtime> runtime;
  RegionId on_gpu = 0, on_host = 0;
};

// Two agents that know each other, with all rails up at both ends.
struct Ends {
  explicit Ends(const Transports& transports = {"shm", "cuda_ipc", "tcp"}, std::size_t rails = 3,
                Time silent_ns = 0)
      : src("src", transports, check::seed(), silent_ns),
        dst("dst", transports, check::seed() + 1, silent_ns) {
    launches().reset();
    const auto both = runtime_calls::meet(*src.runtime, *dst.runtime, rails);
    there = both.there;
    here = both.here;
  }
  ~Ends() {
    launches().let_all();  // closing waits for them
    src.runtime->close(5 * kSecond);
    dst.runtime->close(5 * kSecond);
  }
  std::uint32_t write_program() { return src.install(there, true, src.on_gpu, dst.on_gpu, kBlockNbytes); }
  std::uint32_t read_program() { return dst.install(here, false, src.on_gpu, dst.on_gpu, kBlockNbytes); }
  std::uint32_t host_program() {
    return src.install(there, true, src.on_host, dst.on_host, kHostBlockNbytes);
  }
  LeaseId grant_write() { return dst.grant(here, dst.on_gpu, wire::LeaseMode::kWrite); }
  LeaseId grant_read() { return src.grant(there, src.on_gpu, wire::LeaseMode::kRead); }

  // The first blocks are at the destination, where transfers put them. A source's handle ends by a frame,
  // which may come through memory that a sanitizer does not follow: the destination is asked first.
  bool arrived(const std::byte* from, std::uint32_t num_blocks = kBlocks) {
    dst.num_transfers();
    for (std::uint32_t block = 0; block < num_blocks; ++block)
      if (std::memcmp(from + block * kBlockNbytes, dst.gpu->data() + (kBlocks - 1 - block) * kBlockNbytes,
                      kBlockNbytes) != 0)
        return false;
    return true;
  }
  bool host_arrived() {
    dst.num_transfers();
    for (std::uint32_t block = 0; block < kBlocks; ++block)
      if (std::memcmp(src.host.data() + block * kHostBlockNbytes,
                      dst.host.data() + (kBlocks - 1 - block) * kHostBlockNbytes, kHostBlockNbytes) != 0)
        return false;
    return true;
  }
  bool quiet() {
    return await([&] { return src.num_transfers() + dst.num_transfers() == 0; });
  }

  End src, dst;
  SessionKey there = 0, here = 0;
};

// Allocations of the device that this process has made or mapped.
std::size_t num_allocations() {
  const std::lock_guard lock(emulated::device().mutex);
  return emulated::device().blocks.size();
}

std::vector<std::byte> copy_of(const DeviceMemory& memory) {
  return {memory.data(), memory.data() + memory.size()};
}

// The first, while this process has one thread: it forks.
TEST(a_peer_that_dies_while_its_memory_is_mapped_is_lost_and_the_memory_unmapped) {
  int sockets[2];
  REQUIRE_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
  const UniqueFd ours(sockets[0]);
  UniqueFd theirs(sockets[1]);
  const Transports transports = {"unix", "cuda_ipc"};
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // A source that lets whoever connects read, and waits for its end.
    End source("child", transports, check::seed());
    auto& runtime = *source.runtime;
    const std::string address = runtime.address();
    if (::send(theirs.get(), address.data(), address.size(), MSG_NOSIGNAL) < 0) ::_exit(1);
    for (SessionKey granted = 0;;) {
      const auto peers = runtime.with_engine([](Engine& engine, Time) { return engine.open_peers(); });
      if (!peers.empty() && granted == 0) {
        granted = peers.front();
        source.grant(granted, source.on_gpu, wire::LeaseMode::kRead);
      }
      char end;
      if (::recv(theirs.get(), &end, 1, granted == 0 ? MSG_DONTWAIT : 0) == 0) ::_exit(0);
    }
  }
  theirs.reset();
  launches().reset();
  End dst("dst", transports, check::seed() + 1);
  const std::size_t own = num_allocations();
  char address[64] = {};
  REQUIRE(::recv(ours.get(), address, sizeof address - 1, 0) > 0);
  const auto called = dst.runtime->begin_connect(address, 60 * kSecond);
  REQUIRE_OK(called);
  REQUIRE(await([&] { return num_rails(*dst.runtime, called.value()) == 2; }));
  // Its one region on the GPU is the first that it registered.
  const std::uint32_t program = dst.install(called.value(), false, 1, dst.on_gpu, kBlockNbytes);
  // Until the lease is there the peer refuses.
  std::shared_ptr<Handle> first;
  REQUIRE(await([&] {
    first = dst.post(called.value(), program, 1);
    return ends(first) && first->outcome() == Outcome::kDone;
  }));
  CHECK(num_allocations() > own);

  launches().reset();
  launches().let(1);
  const auto handle = dst.post(called.value(), program);
  launches().await_held(2);
  REQUIRE_EQ(::kill(child, SIGKILL), 0);
  REQUIRE_EQ(::waitpid(child, nullptr, 0), child);
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
    Ends both(transports, rails);
    both.grant_write();
    both.grant_read();
    both.dst.grant(both.here, both.dst.on_host, wire::LeaseMode::kWrite);
    const std::uint32_t write = both.write_program(), host = both.host_program();

    // Host pages arrive while a kernel does not end.
    launches().let(0);
    const auto written = both.src.post(both.there, write, num_blocks);
    launches().await_held(1);
    const auto beside = both.src.post(both.there, host);
    REQUIRE(ends(beside));
    CHECK_EQ(beside->outcome(), Outcome::kDone);
    CHECK(both.host_arrived());
    CHECK_EQ(written->outcome(), Outcome::kPending);
    launches().let_all();
    REQUIRE(ends(written));
    REQUIRE_EQ(written->outcome(), Outcome::kDone);
    CHECK(both.arrived(both.src.gpu->data(), num_blocks));
    CHECK_EQ(launches().num_begun(), (num_blocks + kPieceBlocks - 1) / kPieceBlocks);

    std::memset(both.dst.gpu->data(), 0, kNbytes);
    const auto read = both.dst.post(both.here, both.read_program(), num_blocks);
    REQUIRE(ends(read));
    REQUIRE_EQ(read->outcome(), Outcome::kDone);
    CHECK(both.arrived(both.src.gpu->data(), num_blocks));
    CHECK_EQ(read->rails(), std::vector<std::string>{"cuda_ipc"});
    CHECK(both.quiet());
  }
}

TEST(agents_of_a_gpu_alone_move_its_pages) {
  Ends both({"cuda_ipc"}, 1);
  both.grant_read();
  const auto read = both.dst.post(both.here, both.read_program(), 2);
  REQUIRE(ends(read));
  CHECK_EQ(read->outcome(), Outcome::kDone);
  CHECK(both.arrived(both.src.gpu->data(), 2));
}

TEST(after_a_destination_revoked_no_byte_lands_and_no_kernel_begins) {
  Ends both;
  const LeaseId lease = both.grant_write();
  const std::vector<std::byte> before = copy_of(*both.src.gpu), untouched = copy_of(*both.dst.gpu);
  launches().let(1);
  const auto handle = both.src.post(both.there, both.write_program());
  launches().await_held(2);

  // The kernel ends once revoke() is certain to have begun.
  std::thread device([&] {
    await([&] { return both.dst.state_of(lease) == LeaseState::kEnding; });
    launches().let_all();
  });
  CHECK(both.dst.runtime->revoke(lease));
  std::memset(both.src.gpu->data(), 0xee, kNbytes);
  const std::vector<std::byte> at_fence = copy_of(*both.dst.gpu);
  device.join();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  CHECK(both.quiet());
  CHECK_EQ(launches().num_begun(), 2);
  CHECK(copy_of(*both.dst.gpu) == at_fence);
  CHECK(both.arrived(before.data(), 2 * kPieceBlocks));
  CHECK(std::equal(untouched.begin(), untouched.begin() + (kBlocks - 2 * kPieceBlocks) * kBlockNbytes,
                   at_fence.begin()));
}

TEST(what_was_read_under_a_lease_that_ended_is_never_done) {
  Ends both;
  const LeaseId lease = both.grant_read();
  launches().let(1);
  const auto handle = both.dst.post(both.here, both.read_program());
  launches().await_held(2);
  CHECK(both.src.runtime->revoke(lease));  // nothing is under way here: the kernel is the reader's
  std::memset(both.src.gpu->data(), 0xee, kNbytes);  // its owner's again
  launches().let_all();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kFailed);
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  CHECK(both.quiet());
}

TEST(a_region_deregistered_in_mid_transfer_is_not_touched_afterwards) {
  const std::size_t before = num_allocations();
  Ends both;
  both.grant_write();
  // Each has a region and its stream's two, and maps the other's region.
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  launches().let(1);
  const auto handle = both.src.post(both.there, both.write_program());
  launches().await_held(2);
  std::thread device([&] {
    await([&] {
      return both.dst.runtime->with_engine(
          [&](Engine& engine, Time) { return engine.is_leaving(both.dst.on_gpu); });
    });
    launches().let_all();
  });
  CHECK_OK(both.dst.runtime->deregister_region(both.dst.on_gpu));
  both.dst.gpu.reset();  // a byte that lands now kills the process
  device.join();
  REQUIRE(ends(handle));
  CHECK(both.quiet());
  // The source takes its own back, too: each has unmapped the other's.
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK(await([&] { return num_allocations() == before + 5; }));
}

TEST(when_deregister_returns_no_peer_has_the_memory_mapped) {
  const std::size_t before = num_allocations();
  Ends both;
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK_EQ(num_allocations(), before + 2 * 4 - 1);
  both.src.gpu.reset();
  // The rail is there for the next.
  both.src.gpu.emplace(kNbytes);
  auto again = both.src.runtime->register_region("gpu", {{both.src.gpu->data(), kNbytes}}, kBlocks,
                                                 pages_of(kBlockNbytes), {}, MemoryKind::kGpu);
  REQUIRE_OK(again);
  both.src.on_gpu = again.value();
  both.grant_write();
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  const auto written = both.src.post(both.there, both.write_program(), 1);
  REQUIRE(ends(written));
  CHECK_EQ(written->outcome(), Outcome::kDone);
}

TEST(a_closed_agent_has_nothing_open_and_its_peers_have_nothing_of_it_mapped) {
  const std::size_t before = num_allocations();
  const int contexts = emulated::device().num_contexts;
  Ends both;
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  both.src.runtime->close(60 * kSecond);  // the object lives on
  // Its memory, which is its owner's, and the peer's with the stream's two.
  CHECK_EQ(num_allocations(), before + 1 + 3);
  // The peer's: of its transport, and of the streams that it could wait for.
  CHECK_EQ(emulated::device().num_contexts, contexts + 2);
  CHECK_EQ(both.src.runtime->deregister_region(both.src.on_gpu).code(), Code::kOk);
}

// Whoever holds its gate keeps a runtime from moving, as a stopped process is.
TEST(a_peer_that_stands_still_does_not_keep_a_caller_from_its_memory) {
  const std::size_t before = num_allocations();
  Ends both({"shm", "cuda_ipc", "tcp"}, 3, 4 * kSecond);
  REQUIRE(await([&] { return num_allocations() == before + 2 * 4; }));
  std::atomic<bool> stands{false}, goes_on{false};
  std::thread holder([&] {
    both.dst.runtime->with_engine([&](Engine&, Time) {
      stands = true;
      stands.notify_all();
      goes_on.wait(false);
      return 0;
    });
  });
  stands.wait(false);
  CHECK_OK(both.src.runtime->deregister_region(both.src.on_gpu));
  CHECK(num_allocations() >= before + 7);  // it is still mapped there, and that is said
  std::string said;
  for (const Event& event : both.src.runtime->ring().drain(1000, false))
    if (event.kind == EventKind::kLog) said += event.message;
  CHECK(said.find("GPU memory of region 'gpu' may still be mapped by peer 'dst'") != std::string::npos);
  CHECK(num_rails(*both.src.runtime, both.there) < 3);
  // The agent goes on: what nobody has mapped is taken away at once.
  auto again = both.src.runtime->register_region("gpu", {{both.src.gpu->data(), kNbytes}}, kBlocks,
                                                 pages_of(kBlockNbytes), {}, MemoryKind::kGpu);
  REQUIRE_OK(again);
  CHECK_OK(both.src.runtime->deregister_region(again.value()));
  goes_on = true;
  goes_on.notify_all();
  holder.join();
  CHECK(await([&] { return num_allocations() == before + 6; }));
}

// What a caller is told, at once and in words.
void refused(const Result<std::shared_ptr<Handle>>& posted, Code code, const std::string& words) {
  REQUIRE(!posted.ok());
  CHECK_EQ(posted.status().code(), code);
  if (posted.status().message().find(words) == std::string::npos) FAIL(posted.status().message());
}

TEST(pairs_of_gpu_and_host_memory_are_refused_when_they_are_posted) {
  Ends both;
  End &src = both.src, &dst = both.dst;
  const std::uint64_t nbytes = kHostBlockNbytes;
  for (const auto& [from, to] : {std::pair(src.on_gpu, dst.on_host), std::pair(src.on_host, dst.on_gpu)}) {
    // Blocks of one region are larger than the other's: a program of the smaller fits both.
    const auto half = [&](End& end, SessionKey peer, bool write) {
      return end.runtime->with_engine([&](Engine& engine, Time now) {
        CopyProgram program = pages_of(nbytes);
        program.loops[0].src_block_stride = from == src.on_gpu ? kBlockNbytes : nbytes;
        program.loops[0].dst_block_stride = to == dst.on_gpu ? kBlockNbytes : nbytes;
        return engine.install_program(now, peer, write, from, to, std::move(program));
      });
    };
    const auto write = half(src, both.there, true), read = half(dst, both.here, false);
    REQUIRE_OK(write);
    REQUIRE_OK(read);
    refused(src.try_post(both.there, write.value()), Code::kUnsupported, "go over streams");
    refused(dst.try_post(both.here, read.value()), Code::kUnsupported, "go over streams");
  }
  CHECK_EQ(src.num_transfers() + dst.num_transfers(), 0);
}

TEST(integrity_of_pages_on_a_gpu_is_refused_when_it_is_posted) {
  Ends both;
  refused(both.src.try_post(both.there, both.write_program(), 1, true), Code::kUnsupported,
          "integrity=False");
  refused(both.dst.try_post(both.here, both.read_program(), 1, true), Code::kUnsupported, "integrity=False");
}

TEST(a_gpu_that_fails_ends_its_transfers_and_leaves_host_memory_alone) {
  Ends both;
  both.grant_read();
  both.dst.grant(both.here, both.dst.on_host, wire::LeaseMode::kWrite);
  const std::uint32_t read = both.read_program(), host = both.host_program();
  emulated::device().launches_until_failure = 1;
  const auto handle = both.dst.post(both.here, read);
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kFailed);
  CHECK_EQ(handle->status().code(), Code::kNoPath);
  if (handle->status().message().find("cuLaunchKernel") == std::string::npos)
    FAIL(handle->status().message());
  emulated::device().launches_until_failure = -1;
  refused(both.dst.try_post(both.here, read), Code::kRailFailed, "cuLaunchKernel");
  const auto beside = both.src.post(both.there, host);
  REQUIRE(ends(beside));
  CHECK_EQ(beside->outcome(), Outcome::kDone);
  CHECK(both.host_arrived());
  CHECK(both.quiet());
}

TEST(a_region_on_a_gpu_that_is_not_the_agents_is_refused_in_words) {
  const auto runtime = runtime_calls::create(options_of("alone", {"cuda_ipc"}));
  const DeviceMemory memory(kBlockNbytes);
  const auto add = [&](const std::string& name, int device) {
    return runtime->register_region(name, {{memory.data(), kBlockNbytes}}, 1, pages_of(kBlockNbytes), {},
                                    MemoryKind::kGpu, nullptr, device);
  };
  const Status other = add("other", 1).status();
  CHECK_EQ(other.code(), Code::kUnsupported);
  CHECK(other.message().find("lies on GPU 1, and this rail is one of GPU 0") != std::string::npos);
  REQUIRE_OK(add("own", 0));
  REQUIRE_OK(add("untold", -1));
}

TEST(memory_is_registered_with_the_transports_of_its_kind_or_refused) {
  const auto code_of = [](const Transports& transports, MemoryKind kind) {
    auto runtime = Runtime::create(options_of("alone", transports));
    REQUIRE_OK(runtime);
    const DeviceMemory memory(kBlockNbytes);
    return runtime.value()
        ->register_region("kv", {{memory.data(), kBlockNbytes}}, 1, pages_of(kBlockNbytes), {}, kind)
        .status()
        .code();
  };
  CHECK_EQ(code_of({"shm", "tcp"}, MemoryKind::kGpu), Code::kUnsupported);
  CHECK_EQ(code_of({"cuda_ipc"}, MemoryKind::kHost), Code::kUnsupported);
  RuntimeOptions without = options_of("alone", {"cuda_ipc"});
  without.gpus.clear();
  CHECK_EQ(Runtime::create(std::move(without)).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvxfer
