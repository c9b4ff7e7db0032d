// Two agents in this process that have connected to each other, each with its own memory, and what tests do
// with agents and wait for. The agents' own threads do the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "core/runtime.h"

namespace agent_pair {

using namespace kvxfer;
using block_programs::pages_of;

inline constexpr Time kSecond = 1'000'000'000;
// A wait that takes this long hangs: the bound also covers a sanitizer, and a machine that stands still for
// seconds.
inline constexpr Time kBound = 120 * kSecond;
// Agents then move only by wake-ups that are due, so a lost wake-up shows.
inline constexpr Time kNoHeartbeat = 600 * kSecond;

inline bool await(const std::function<bool()>& is_so) {
  const Time until = Runtime::now() + kBound;
  while (!is_so() && Runtime::now() < until) std::this_thread::sleep_for(std::chrono::microseconds(200));
  return is_so();
}
inline bool ends(const std::shared_ptr<Handle>& handle) {
  return await([&] { return handle->outcome() != Outcome::kPending; });
}
inline bool is_done(const std::shared_ptr<Handle>& handle) {
  if (!ends(handle)) return false;
  if (handle->outcome() != Outcome::kDone) FAIL(handle->status().message());
  return handle->outcome() == Outcome::kDone;
}

// A region's layers lie one after the other.
struct Layout {
  std::uint32_t num_blocks;
  std::uint64_t block_nbytes;
  std::uint32_t num_layers = 1;

  std::uint64_t layer_nbytes() const { return num_blocks * block_nbytes; }
  std::uint64_t nbytes() const { return num_layers * layer_nbytes(); }
  std::uint64_t at(std::uint32_t block, std::uint32_t layer) const {
    return layer * layer_nbytes() + block * block_nbytes;
  }
  CopyProgram pages() const { return pages_of(block_nbytes, num_layers, layer_nbytes()); }
};

// The options in which tests differ.
struct Options {
  std::vector<std::string> transports = {};
  Layout layout = {64, 4096};
  std::size_t num_rails = 0;  // how many a pair has then; 0: any number
  bool grants = true;  // each of a pair grants the other all blocks, to read and to write
  std::optional<MemoryKind> kind = {};  // by default a GPU's if there is one
  std::optional<GpuPart> gpu = {};  // of agents with cuda_ipc or verbs
  Time heartbeat_ns = kNoHeartbeat, silent_ns = 4 * kNoHeartbeat;
  NamedOptions transport_options = {};
  std::string faults = {};
  std::uint32_t copy_threads = 1;
  int (*numa_node_of)(const LocalRegion& region) = &kvxfer::numa_node_of;

  bool has(const std::string& transport) const {
    return std::find(transports.begin(), transports.end(), transport) != transports.end();
  }
};

inline RuntimeOptions options_of(const std::string& name, const Options& wished) {
  RuntimeOptions options;
  options.name = name;
  options.listen = "tcp://127.0.0.1:0";
  options.transports = wished.transports;
  options.transport_options = wished.transport_options;
  options.heartbeat_ns = wished.heartbeat_ns;
  options.silent_ns = wished.silent_ns;
  options.handshake_ns = kBound;
  options.faults = wished.faults;
  options.copy_threads = wished.copy_threads;
  options.numa_node_of = wished.numa_node_of;
  if ((wished.has("cuda_ipc") || wished.has("verbs")) && wished.gpu) options.gpus = {*wished.gpu};
  return options;
}

inline std::shared_ptr<Runtime> create(RuntimeOptions options) {
  Result<std::shared_ptr<Runtime>> created = Runtime::create(std::move(options));
  REQUIRE_OK(created);
  return std::move(created).value();
}
inline std::size_t num_transfers(Runtime& runtime) {
  return runtime.with_engine([](Engine& engine, Time) { return engine.num_transfers(); });
}
// Of a peer; 0 unless its session is open.
inline std::size_t num_rails(Runtime& runtime, SessionKey peer) {
  const auto view = runtime.with_engine([&](Engine& engine, Time) { return engine.peer(peer); });
  return view && view->state == "open" ? view->rails.size() : 0;
}
// The first peer whose session is open; 0 if there is none.
inline SessionKey first_peer(Runtime& runtime) {
  const auto peers = runtime.with_engine([](Engine& engine, Time) { return engine.open_peers(); });
  return peers.empty() ? 0 : peers.front();
}
// Grants all blocks of a region, for longer than any test takes.
inline LeaseId grant(Runtime& runtime, SessionKey peer, RegionId region, wire::LeaseMode mode) {
  const auto lease = runtime.with_engine([&](Engine& engine, Time now) {
    return engine.grant(now, {peer, region, mode, true, {}, 10 * kBound, true});
  });
  REQUIRE_OK(lease);
  return lease.value();
}

// Connects two agents with regions; dst may know no other agent. Waits until that many rails are up at both
// ends, or any number if `rails` is 0. Returns src's number for dst, and dst's number for src.
inline std::pair<SessionKey, SessionKey> meet(Runtime& src, Runtime& dst, std::size_t rails) {
  const auto called = src.begin_connect(dst.address(), kBound);
  REQUIRE_OK(called);
  const auto is_up = [rails](Runtime& runtime, SessionKey peer) {
    const std::size_t up = num_rails(runtime, peer);
    const auto regions = runtime.with_engine([&](Engine& engine, Time) { return engine.peer_regions(peer); });
    return up != 0 && (rails == 0 || up == rails) && regions.ok() && !regions.value().empty();
  };
  SessionKey caller = 0;
  REQUIRE(await([&] {
    caller = first_peer(dst);
    return is_up(src, called.value()) && is_up(dst, caller);
  }));
  return {called.value(), caller};
}

// An agent with memory for one region. Derived classes have several regions of one layout.
template <class Memory = std::vector<std::byte>>
struct Agent {
  Agent(RuntimeOptions options, const Layout& wished, MemoryKind its_kind = MemoryKind::kHost)
      : layout(wished), kind(its_kind), memory(wished.nbytes()), runtime(create(std::move(options))) {}
  Agent(const std::string& name, const Options& wished)
      : Agent(options_of(name, wished), wished.layout,
              wished.kind.value_or(wished.has("cuda_ipc") ? MemoryKind::kGpu : MemoryKind::kHost)) {}

  void add() { region = add(memory.data(), "kv", kind); }
  RegionId add(std::byte* bytes, const std::string& name, MemoryKind its_kind = MemoryKind::kHost) {
    const Result<RegionId> id = try_add(bytes, name, its_kind);
    REQUIRE_OK(id);
    return id.value();
  }
  Result<RegionId> try_add(std::byte* bytes, const std::string& name,
                           MemoryKind its_kind = MemoryKind::kHost) {
    return runtime->register_region(name, {{bytes, layout.nbytes()}}, layout.num_blocks, layout.pages(), {},
                                    its_kind);
  }
  LeaseId grant(SessionKey peer, wire::LeaseMode mode) {
    return agent_pair::grant(*runtime, peer, region, mode);
  }
  std::uint32_t install(SessionKey peer, bool write, RegionId from, RegionId to) {
    const auto installed = runtime->with_engine([&](Engine& engine, Time now) {
      return engine.install_program(now, peer, write, from, to, layout.pages());
    });
    REQUIRE_OK(installed);
    return installed.value();
  }
  // Copies blocks (all, by default) to the blocks of the same numbers, in every layer.
  TransferRequest request(SessionKey peer, std::uint32_t program, std::vector<std::uint32_t> blocks = {}) {
    if (blocks.empty()) {
      blocks.resize(layout.num_blocks);
      std::iota(blocks.begin(), blocks.end(), 0u);
    }
    TransferRequest made;
    made.peer = peer;
    made.program = program;
    made.src_ids = made.dst_ids = std::move(blocks);
    made.num_layers = made.layers_ready = layout.num_layers;
    made.timeout_ns = 2 * kBound;
    return made;
  }
  Result<std::shared_ptr<Handle>> try_post(TransferRequest request) {
    return runtime->with_engine(
        [&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
  }
  std::shared_ptr<Handle> post(TransferRequest request, std::optional<After> after = {}) {
    auto handle =
        after ? runtime->post_after(std::move(request), std::move(*after)) : try_post(std::move(request));
    REQUIRE_OK(handle);
    return std::move(handle).value();
  }
  std::size_t num_transfers() { return agent_pair::num_transfers(*runtime); }
  EngineStats stats() {
    return runtime->with_engine([](Engine& engine, Time) { return engine.stats(); });
  }

  const Layout layout;
  const MemoryKind kind;
  Memory memory;
  std::shared_ptr<Runtime> runtime;
  RegionId region = 0;
};

// Two agents with a session between them; their regions are up to the test.
template <class End>
struct Meeting {
  Meeting(const Options& at_src, const Options& at_dst) : src("src", at_src), dst("dst", at_dst) {
    src.add();
    dst.add();
    std::tie(there, here) = meet(*src.runtime, *dst.runtime, at_src.num_rails);
  }
  ~Meeting() {
    for (End* one : {&src, &dst})
      if (one->runtime) one->runtime->close(kBound);
  }
  // The end that posts a write, or a read, of the source's blocks.
  End& end(bool write) { return write ? src : dst; }
  SessionKey peer(bool write) const { return write ? there : here; }
  std::size_t num_transfers() { return src.num_transfers() + dst.num_transfers(); }
  bool quiet() {
    return await([&] { return num_transfers() == 0; });
  }
  // Waits until both ends know of each transfer.
  bool has_descriptor(std::size_t transfers = 1) {
    return await([&] { return num_transfers() == 2 * transfers; });
  }

  End src, dst;
  SessionKey there = 0, here = 0;  // src's number for dst, and dst's number for src
};

// Two agents with one region each, and the programs and leases for a copy from `src` to `dst` that either
// posts.
template <class End = Agent<>>
struct Pair : Meeting<End> {
  using Meeting<End>::src, Meeting<End>::dst, Meeting<End>::there, Meeting<End>::here;

  explicit Pair(const Options& at_both) : Pair(at_both, at_both) {}
  Pair(const Options& at_src, const Options& at_dst) : Meeting<End>(at_src, at_dst) {
    writes = src.install(there, true, src.region, dst.region);
    reads = dst.install(here, false, src.region, dst.region);
    if (at_src.grants) read_lease = src.grant(there, wire::LeaseMode::kRead);
    if (at_dst.grants) write_lease = dst.grant(here, wire::LeaseMode::kWrite);
  }
  TransferRequest request(bool write, std::vector<std::uint32_t> blocks = {}) {
    TransferRequest made =
        this->end(write).request(this->peer(write), write ? writes : reads, std::move(blocks));
    if (!write) made.lease = read_lease;  // dst may not have heard of it yet
    return made;
  }
  std::shared_ptr<Handle> post(bool write, After after, std::vector<std::uint32_t> blocks = {},
                               Time timeout_ns = 2 * kBound) {
    TransferRequest made = request(write, std::move(blocks));
    made.timeout_ns = timeout_ns;
    return this->end(write).post(std::move(made), std::move(after));
  }
  // Call it before the source reads, whichever end posts. It holds the gate, because TSan sees no order in
  // frames that come through memory that is mapped twice.
  void fill_source(check::Random& random) {
    src.runtime->with_engine([&](Engine&, Time) { random.fill(src.memory.data(), src.memory.size()); });
  }
  // Writes random bytes into every block and copies all of them; returns whether all arrived.
  bool hand_over(check::Random& random) {
    fill_source(random);
    return is_done(src.post(request(true))) && src.memory == dst.memory;
  }
  bool arrived(std::uint32_t block, std::uint32_t layer) {
    const std::uint64_t at = src.layout.at(block, layer);
    return dst.runtime->with_engine([&](Engine&, Time) {
      return std::memcmp(src.memory.data() + at, dst.memory.data() + at, src.layout.block_nbytes) == 0;
    });
  }

  LeaseId write_lease = 0, read_lease = 0;
  std::uint32_t writes = 0, reads = 0;
};

// Keeps an agent from moving for as long as this object lives, by holding its gate, as if its process were
// stopped.
class Standstill {
 public:
  explicit Standstill(Runtime& runtime)
      : thread_([this, &runtime] {
          runtime.with_engine([this](Engine&, Time) {
            stands_ = true;
            stands_.notify_all();
            ended_.wait(false);
          });
        }) {
    stands_.wait(false);
  }
  ~Standstill() {
    ended_ = true;
    ended_.notify_all();
  }

 private:
  std::atomic<bool> stands_{false}, ended_{false};
  std::jthread thread_;
};

}  // namespace agent_pair
