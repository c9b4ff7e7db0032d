// Two agents, and a write that the destination's copy threads are in the middle of.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "agent_pair.h"
#include "check.h"
#include "core/system/pool_memory.h"
#include "held_memory.h"

namespace hand_over {

using namespace agent_pair;
using kvxfer::testing::HeldMemory;

struct HandOver {
  // One whose copy thread waits in a page. On a busy machine the thread that drives may move all bytes before
  // another one comes to help: then the next is tried.
  static std::unique_ptr<HandOver> in_a_piece(const std::string& transport) {
    for (int attempt = 0; attempt < 50; ++attempt)
      if (auto over = std::make_unique<HandOver>(transport); over->is_held) return over;
    REQUIRE(!"a copy thread was in a piece in one of 50 transfers");
    return nullptr;
  }

  static constexpr std::uint32_t kNumBlocks = 256;
  static constexpr std::uint64_t kPageNbytes = 64 * 1024;

  explicit HandOver(const std::string& transport) {
    src = agent("src", transport);
    dst = agent("dst", transport);
    src_region = add(*src, pool->data());
    dst_region = add(*dst, to.data());
    const auto [there, here] = meet(*src, *dst, 2);  // shm's, and a stream for what shm cannot reach
    lease = grant(*dst, here, dst_region, wire::LeaseMode::kWrite);
    const auto program = src->with_engine([&, peer = there](Engine& engine, Time now) {
      return engine.install_program(now, peer, true, src_region, dst_region, pages_of(kPageNbytes));
    });
    REQUIRE_OK(program);
    TransferRequest request;
    request.peer = there;
    request.program = program.value();
    for (std::uint32_t block = 0; block < kNumBlocks; ++block) request.src_ids.push_back(block);
    request.dst_ids = request.src_ids;
    request.num_layers = request.layers_ready = 1;
    request.timeout_ns = 10 * kBound;
    const auto posted =
        src->with_engine([&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
    REQUIRE_OK(posted);
    handle = posted.value();
    is_held = to.await_held(1, [&] { return handle->outcome() != Outcome::kPending; });
  }
  HandOver(const HandOver&) = delete;
  HandOver& operator=(const HandOver&) = delete;
  ~HandOver() {
    to.let_on();
    src->close(kBound);
    dst->close(kBound);
  }
  static std::shared_ptr<Runtime> agent(const std::string& name, const std::string& transport) {
    RuntimeOptions options = options_of(name, {.transports = {transport}});
    options.copy_threads = 2;
    return create(std::move(options));
  }
  static std::shared_ptr<PoolMemory> make_pool() {
    auto pool = PoolMemory::create({.nbytes = kNumBlocks * kPageNbytes, .name = "src", .huge_pages = false});
    REQUIRE_OK(pool);
    return pool.value();
  }
  static RegionId add(Runtime& runtime, std::byte* memory) {
    const auto region = runtime.register_region("kv", {{memory, kNumBlocks * kPageNbytes}}, kNumBlocks,
                                                pages_of(kPageNbytes), {});
    REQUIRE_OK(region);
    return region.value();
  }

  std::shared_ptr<PoolMemory> pool = make_pool();
  HeldMemory to{kNumBlocks * kPageNbytes};
  std::shared_ptr<Runtime> src, dst;
  RegionId src_region = 0, dst_region = 0;
  LeaseId lease = 0;
  std::shared_ptr<Handle> handle;
  bool is_held = false;
};

}  // namespace hand_over
