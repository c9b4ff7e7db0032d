// Moves pages between two agents of one process and prints nothing, because its instructions are counted
// (bench/plan/instructions.py). One thread drives both ends.
//
//   move_pages TRANSPORT PAGES PAGE_NBYTES TRANSFERS [OF_A_BATCH]
//
// With OF_A_BATCH both agents leave records of their transfers; the program takes them in batches of this
// size.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/runtime.h"

// Where every instruction is counted, everything takes fifty times as long. So time passes as slowly here:
// what is bounded by time is done as it is otherwise.
extern "C" int clock_gettime(clockid_t clock, timespec* at) noexcept {
  constexpr std::int64_t kSlower = 100, kSecondNs = 1'000'000'000;
  static std::int64_t began = 0;
  ::syscall(SYS_clock_gettime, clock, at);
  if (clock != CLOCK_MONOTONIC) return 0;
  const std::int64_t now = at->tv_sec * kSecondNs + at->tv_nsec;
  if (began == 0) began = now;
  const std::int64_t slow = began + (now - began) / kSlower;
  *at = {slow / kSecondNs, slow % kSecondNs};
  return 0;
}

namespace {

using namespace kvxfer;

constexpr Time kSecond = 1'000'000'000;

template <class T>
T take(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "move_pages: %s\n", result.status().message().c_str());
  std::exit(1);
}

CopyProgram one_layer(std::uint64_t page_nbytes) {
  CopyLoop loop{};
  loop.num_layers = 1;
  loop.src_block_stride = loop.dst_block_stride = page_nbytes;
  loop.counts[0] = loop.counts[1] = 1;
  loop.nbytes = page_nbytes;
  CopyProgram program;
  program.loops = {loop};
  program.num_layers = 1;
  return program;
}

struct End {
  End(const char* name, const std::string& transport, std::uint32_t num_pages, std::uint64_t page_nbytes)
      : memory(std::make_unique_for_overwrite<std::byte[]>(num_pages * page_nbytes)) {
    RuntimeOptions options;
    options.name = name;
    options.listen = "tcp://127.0.0.1:0";
    options.transports = {transport};
    // Where every instruction is counted, seconds pass between two frames.
    options.heartbeat_ns = 600 * kSecond;
    options.silent_ns = 2400 * kSecond;
    options.handshake_ns = 60 * kSecond;
    runtime = take(Runtime::create(std::move(options)));
    region = take(runtime->register_region("kv", {{memory.get(), num_pages * page_nbytes}}, num_pages,
                                           one_layer(page_nbytes), {}));
  }
  std::unique_ptr<std::byte[]> memory;  // not filled, since that would be counted, too
  std::shared_ptr<Runtime> runtime;
  RegionId region = 0;
};

// One transfer of all pages, from the call that posts it until both ends have heard of its end: what is
// counted.
[[gnu::noinline]] void move_all(End& src, End& dst, const TransferRequest& what) {
  const auto handle =
      take(src.runtime->with_engine([&](Engine& engine, Time now) { return engine.post(now, what); }));
  while (handle->outcome() == Outcome::kPending) {
    src.runtime->poll();
    dst.runtime->poll();
  }
  if (handle->outcome() != Outcome::kDone) {
    std::fprintf(stderr, "move_pages: %s\n", handle->status().message().c_str());
    std::exit(1);
  }
  (void)src.runtime->ring().drain(256, false);
  (void)dst.runtime->ring().drain(256, false);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "usage: move_pages TRANSPORT PAGES PAGE_NBYTES TRANSFERS [OF_A_BATCH]\n");
    return 2;
  }
  const std::string transport = argv[1];
  const auto num_pages = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 0));
  const std::uint64_t page_nbytes = std::strtoull(argv[3], nullptr, 0);
  const std::uint64_t num_transfers = std::strtoull(argv[4], nullptr, 0);
  const std::uint64_t of_a_batch = argc == 6 ? std::strtoull(argv[5], nullptr, 0) : 0;
  End src("src", transport, num_pages, page_nbytes), dst("dst", transport, num_pages, page_nbytes);

  const SessionKey there = take(src.runtime->begin_connect(dst.runtime->address(), 60 * kSecond));
  std::vector<SessionKey> peers;
  // Until the rail is up pages would go over tcp.
  const auto has_rail = [&](Runtime& runtime) {
    return runtime.with_engine([&](Engine& engine, Time) {
      peers = engine.open_peers();
      if (peers.empty()) return false;
      const auto view = engine.peer(peers.front());
      return view && std::ranges::count(view->rails, transport) != 0;
    });
  };
  while (!has_rail(*src.runtime) || !has_rail(*dst.runtime)) {
    src.runtime->poll();
    dst.runtime->poll();
    // Threads of theirs open the rail, and hardly run beside one that polls while instructions are counted.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  take(dst.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.grant(now,
                        {peers.front(), dst.region, wire::LeaseMode::kWrite, true, {}, 3600 * kSecond, true});
  }));
  const std::uint32_t program = take(src.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.install_program(now, there, true, src.region, dst.region, one_layer(page_nbytes));
  }));

  if (of_a_batch != 0)
    for (const End* end : {&src, &dst}) take(end->runtime->watch_records(2 * of_a_batch));
  std::vector<Record> records(of_a_batch);

  // Pages are neighbours at neither end, so that no two pages become one copy.
  std::vector<std::uint32_t> order(num_pages);
  std::iota(order.begin(), order.end(), 0u);
  for (std::uint32_t i = 0; i + 2 < num_pages; i += 2) std::swap(order[i], order[num_pages - 1 - i]);
  TransferRequest request;
  request.peer = there;
  request.program = program;
  request.src_ids = order;
  request.dst_ids.assign(order.rbegin(), order.rend());
  request.num_layers = request.layers_ready = 1;
  request.timeout_ns = 600 * kSecond;
  request.notify = wire::Bytes(8, std::byte{1});
  for (std::uint64_t transfer = 0; transfer < num_transfers; ++transfer) {
    move_all(src, dst, request);
    if (of_a_batch == 0 || (transfer + 1) % of_a_batch != 0) continue;
    for (const End* end : {&src, &dst})
      if (end->runtime->records().take(records) != of_a_batch) return 1;
  }
  return 0;
}
