// What tests of whole agents say to them and wait for. Agents' own threads do the work.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime.h"

namespace runtime_calls {

using namespace kvxfer;

inline constexpr Time kSecond = 1'000'000'000;
// What reaches it hangs, on a machine that stands still for seconds and under a sanitizer, too.
inline constexpr Time kBound = 120 * kSecond;
// Nothing but a wake-up that is due moves agents with it: one that is lost is seen.
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

inline std::shared_ptr<Runtime> create(RuntimeOptions options) {
  Result<std::shared_ptr<Runtime>> created = Runtime::create(std::move(options));
  REQUIRE_OK(created);
  return std::move(created).value();
}

// Of all of a region's blocks, for as long as a test may take.
inline LeaseId grant(Runtime& runtime, SessionKey peer, RegionId region, wire::LeaseMode mode) {
  const auto lease = runtime.with_engine([&](Engine& engine, Time now) {
    return engine.grant(now, {peer, region, mode, true, {}, 10 * kBound, true});
  });
  REQUIRE_OK(lease);
  return lease.value();
}
inline std::uint32_t install(Runtime& runtime, SessionKey peer, bool write, RegionId src, RegionId dst,
                             const CopyProgram& program) {
  const auto installed = runtime.with_engine(
      [&](Engine& engine, Time now) { return engine.install_program(now, peer, write, src, dst, program); });
  REQUIRE_OK(installed);
  return installed.value();
}
inline std::size_t num_transfers(Runtime& runtime) {
  return runtime.with_engine([](Engine& engine, Time) { return engine.num_transfers(); });
}
// Of a peer whose session is open.
inline std::size_t num_rails(Runtime& runtime, SessionKey peer) {
  const auto view = runtime.with_engine([&](Engine& engine, Time) { return engine.peer(peer); });
  return view && view->state == "open" ? view->rails.size() : 0;
}

struct Meeting {
  SessionKey there = 0;  // dst, as src calls it
  SessionKey here = 0;   // src, as dst calls it
};
// Connects two agents, of which dst knows no other, and waits until they have so many rails up at both ends.
inline Meeting meet(Runtime& src, Runtime& dst, std::size_t rails) {
  const auto called = src.begin_connect(dst.address(), kBound);
  REQUIRE_OK(called);
  Meeting both{called.value(), 0};
  REQUIRE(await([&] {
    const auto peers = dst.with_engine([](Engine& engine, Time) { return engine.open_peers(); });
    if (!peers.empty()) both.here = peers.front();
    return !peers.empty() && num_rails(src, both.there) == rails && num_rails(dst, both.here) == rails;
  }));
  return both;
}

// Every block of every layer to the block of its pair. A layer's blocks lie side by side.
inline CopyProgram pages_of(std::uint64_t block_nbytes, std::uint32_t num_layers = 1,
                            std::uint64_t layer_nbytes = 0) {
  CopyLoop loop{};
  loop.num_layers = num_layers;
  loop.src_layer_stride = loop.dst_layer_stride = layer_nbytes;
  loop.src_block_stride = loop.dst_block_stride = loop.nbytes = block_nbytes;
  loop.counts[0] = loop.counts[1] = 1;
  CopyProgram program;
  program.loops = {loop};
  program.num_layers = num_layers;
  return program;
}

}  // namespace runtime_calls
