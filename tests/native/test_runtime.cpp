// Two agents alive in one process, with callers on several threads: what TSan is to look at.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/runtime.h"

namespace kvxfer {
namespace {

constexpr std::uint32_t kBlocks = 32;
constexpr std::uint64_t kBlockNbytes = 16 * 1024;
constexpr Time kSecond = 1'000'000'000;

CopyProgram one_layer() {
  CopyLoop loop{};
  loop.num_layers = 1;
  loop.src_block_stride = loop.dst_block_stride = kBlockNbytes;
  loop.counts[0] = loop.counts[1] = 1;
  loop.nbytes = kBlockNbytes;
  return {{loop}, 1};
}

struct End {
  End(const std::string& name, const std::string& transport) : memory(kBlocks * kBlockNbytes) {
    RuntimeOptions options;
    options.name = name;
    options.listen = "tcp://127.0.0.1:0";
    options.transports = {transport};
    Result<std::shared_ptr<Runtime>> created = Runtime::create(std::move(options));
    REQUIRE(created.ok());
    runtime = std::move(created).value();
    Result<RegionId> id =
        runtime->register_region("kv", {{memory.data(), memory.size()}}, kBlocks, one_layer(), {});
    REQUIRE(id.ok());
    region = id.value();
  }
  std::vector<std::byte> memory;
  std::shared_ptr<Runtime> runtime;
  RegionId region = 0;
};

std::string state_of(Runtime& runtime, SessionKey key) {
  const auto view = runtime.with_engine([&](Engine& engine, Time) { return engine.peer(key); });
  return view ? view->state : "";
}

void many_callers(const std::string& transport) {
  End src("src", transport), dst("dst", transport);
  Result<SessionKey> there = src.runtime->begin_connect(dst.runtime->address(), 5 * kSecond);
  REQUIRE(there.ok());
  REQUIRE(src.runtime->wait([&] { return state_of(*src.runtime, there.value()) == "open"; }, 5 * kSecond));
  SessionKey here = 0;
  REQUIRE(dst.runtime->wait(
      [&] {
        const auto peers = dst.runtime->with_engine([](Engine& engine, Time) { return engine.open_peers(); });
        if (!peers.empty()) here = peers.front();
        return !peers.empty();
      },
      5 * kSecond));
  const auto lease = dst.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.grant(now, here, dst.region, wire::LeaseMode::kWrite, true, {}, 30 * kSecond, true);
  });
  REQUIRE(lease.ok());
  const auto program = src.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.install_program(now, there.value(), true, src.region, dst.region, one_layer());
  });
  REQUIRE(program.ok());
  for (std::size_t i = 0; i < src.memory.size(); ++i)
    src.memory[i] = static_cast<std::byte>(i * 31 + i / 4096);

  // Each thread writes blocks of its own, waits, polls and drains beside the others.
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::uint32_t round = 0; round < 8; ++round) {
        TransferRequest request;
        request.peer = there.value();
        request.program = program.value();
        request.src_blocks = request.dst_blocks = {t * 8 + round};
        request.num_layers = request.layers_ready = 1;
        request.timeout_ns = 20 * kSecond;
        const auto handle = src.runtime->with_engine(
            [&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
        if (!handle.ok()) continue;
        if (t % 2 == 0) src.runtime->poll();
        src.runtime->wait([&] { return handle.value()->outcome() != Outcome::kPending; }, 20 * kSecond);
        num_done += handle.value()->outcome() == Outcome::kDone ? 1 : 0;
        (void)src.runtime->ring().drain(8);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_done.load(), 32);
  dst.runtime->with_engine([&](Engine& engine, Time now) {
    engine.revoke(now, lease.value());
    return 0;
  });
  CHECK(std::memcmp(src.memory.data(), dst.memory.data(), src.memory.size()) == 0);
  src.runtime->close(5 * kSecond);
  dst.runtime->close(5 * kSecond);
}

TEST(callers_on_many_threads_share_an_agent_over_loopback) { many_callers("loopback"); }
TEST(callers_on_many_threads_share_an_agent_over_unix) { many_callers("unix"); }
TEST(callers_on_many_threads_share_an_agent_over_tcp) { many_callers("tcp"); }

TEST(a_listener_beyond_loopback_needs_a_secret) {
  RuntimeOptions options;
  options.name = "open";
  options.listen = "tcp://0.0.0.0:0";
  options.transports = {"tcp"};
  const auto created = Runtime::create(std::move(options));
  REQUIRE(!created.ok());
  CHECK(created.status().code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvxfer
