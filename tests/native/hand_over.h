// Two agents, and a write that the destination's copy threads are in the middle of.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/system/pool_memory.h"
#include "held_memory.h"

namespace hand_over {

using namespace agent_pair;
using kvxfer::testing::HeldMemory;

// Memory that a reader may map.
struct Pool {
  explicit Pool(std::size_t nbytes)
      : memory(PoolMemory::create({.nbytes = nbytes, .name = "src", .huge_pages = false}).value()) {}
  std::byte* data() const { return memory->data(); }
  std::shared_ptr<PoolMemory> memory;
};

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

  explicit HandOver(const std::string& transport)
      : src("src", options_over(transport)), dst("dst", options_over(transport)) {
    src.add();
    dst.add();
    const auto [there, here] =
        meet(*src.runtime, *dst.runtime, 2);  // shm's, and a stream for what shm cannot reach
    lease = dst.grant(here, wire::LeaseMode::kWrite);
    TransferRequest request = src.request(there, src.install(there, true, src.region, dst.region));
    request.timeout_ns = 10 * kBound;
    handle = src.post(std::move(request));
    is_held = to.await_held(1, [&] { return handle->outcome() != Outcome::kPending; });
  }
  HandOver(const HandOver&) = delete;
  HandOver& operator=(const HandOver&) = delete;
  ~HandOver() {
    to.let_on();
    src.runtime->close(kBound);
    dst.runtime->close(kBound);
  }
  static Options options_over(const std::string& transport) {
    return {.transports = {transport}, .layout = {kNumBlocks, kPageNbytes}, .copy_threads = 2};
  }

  Agent<Pool> src;
  Agent<HeldMemory> dst;
  HeldMemory& to = dst.memory;
  LeaseId lease = 0;
  std::shared_ptr<Handle> handle;
  bool is_held = false;
};

// True, with a printed line, where no test can hold a thread in a page.
inline bool skips() {
  if (HeldMemory::is_possible()) return false;
  std::printf("  %s: skipped, no userfaultfd for this process\n", check::state().current);
  return true;
}

// ---- what holds for every transport whose pieces several threads copy ----

inline void what_was_held_arrives(const std::string& transport) {
  if (skips()) return;
  const auto over = HandOver::in_a_piece(transport);
  CHECK(over->handle->outcome() == Outcome::kPending);
  over->to.let_on();
  CHECK(is_done(over->handle));
  CHECK(std::memcmp(over->src.memory.data(), over->to.data(), over->to.nbytes()) == 0);
}

// `is_told_later`: an agent need not wait while its thread is in a piece, and may ask for the fence later.
inline void what_ends_a_right_waits_for_the_thread_in_a_piece(const std::string& transport,
                                                              bool is_told_later) {
  if (skips()) return;
  const std::pair<const char*, std::function<void(HandOver&, Runtime&)>> ways[] = {
      {"revoke",
       [=](HandOver& over, Runtime& dst) {
         if (is_told_later)
           CHECK(!dst.revoke(over.lease, 0));  // the right has ended, but its fence is not complete
         CHECK(dst.revoke(over.lease, kBound));
       }},
      {"deregister",
       [=](HandOver& over, Runtime& dst) {
         if (is_told_later) CHECK_EQ(dst.deregister_region(over.dst.region, 0).code(), Code::kDeadline);
         CHECK_OK(dst.deregister_region(over.dst.region, kBound));
       }},
      {"close", [](HandOver&, Runtime& dst) { dst.close(kBound); }},
      {"close at once", [](HandOver&, Runtime& dst) { dst.close(0); }},
  };
  for (const auto& [name, end] : ways) {
    std::printf("  %s\n", name);
    const auto over = HandOver::in_a_piece(transport);
    std::atomic<bool> ended{false};
    std::thread ending([&, &end = end] {
      end(*over, *over->dst.runtime);
      ended = true;
    });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    CHECK(!ended);
    CHECK_EQ(over->to.num_held(), 1u);
    over->to.let_on();
    ending.join();
    const std::vector<std::byte> at_fence(over->to.data(), over->to.data() + over->to.nbytes());
    CHECK(ends(over->handle));
    CHECK(over->handle->outcome() != Outcome::kDone);
    CHECK(std::memcmp(at_fence.data(), over->to.data(), at_fence.size()) == 0);
  }
}

}  // namespace hand_over
