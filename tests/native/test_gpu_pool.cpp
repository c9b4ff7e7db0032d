// The pool in which an engine allocates its cache: what it returns, what it keeps, and that other agents
// reach it by every kind of handle.
#include <cstring>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/memory_pool.h"
#include "ipc_ends.h"

namespace kvxfer::gpu_pool_test {
namespace {

using emulated::device;
using gpu::MemoryPool;
using ipc_ends::Ends;
using ipc_ends::make;
using testing::block_move;
using testing::connect_ends;
using testing::fetch_work;

std::unique_ptr<MemoryPool> make_pool() {
  auto pool = MemoryPool::create(emulated::driver(), 0);
  REQUIRE_OK(pool);
  return std::move(pool).value();
}

// What the driver has not got back.
struct Kept {
  std::size_t num_blocks;
  int num_handles, num_reserved;
  bool operator==(const Kept&) const = default;
};
Kept kept() {
  const std::lock_guard lock(device().mutex);
  return {device().blocks.size(), device().num_handles, device().num_reserved};
}

TEST(memory_is_rounded_up_usable_and_given_back) {
  const Kept before = kept();
  {
    const auto pool = make_pool();
    CHECK_EQ(pool->handle_types(), 0);
    const auto one = pool->allocate(1), other = pool->allocate(emulated::kGranularity + 1);
    REQUIRE_OK(one);
    REQUIRE_OK(other);
    CHECK_EQ(pool->nbytes(), 3 * emulated::kGranularity);
    CHECK_EQ(pool->handle_types(), gpu::kPosixFdHandle);
    auto* const bytes = reinterpret_cast<std::byte*>(other.value());
    std::memset(bytes, 7, 2 * emulated::kGranularity);
    CHECK_OK(pool->free(one.value()));
    CHECK(bytes[2 * emulated::kGranularity - 1] == std::byte{7});
    CHECK_EQ(pool->nbytes(), 2 * emulated::kGranularity);
  }
  CHECK(kept() == before);  // the second block was not freed before the pool was
}

TEST(memory_that_is_not_the_pools_is_left_alone_and_that_is_said) {
  const auto pool = make_pool();
  const auto memory = pool->allocate(4096);
  REQUIRE_OK(memory);
  const Kept before = kept();
  for (const gpu::Address address : {memory.value() + 4096, gpu::Address{0}, gpu::Address{4096}}) {
    const Status refused = pool->free(address);
    CHECK_REFUSED(refused, Code::kInvalidArgument, "has not allocated this memory, or has freed it already");
  }
  CHECK(kept() == before);
  CHECK_OK(pool->free(memory.value()));
  CHECK_EQ(pool->free(memory.value()).code(), Code::kInvalidArgument);
  CHECK_EQ(pool->allocate(0).status().code(), Code::kInvalidArgument);
}

TEST(a_device_without_room_says_so_and_nothing_stays_behind) {
  const auto pool = make_pool();
  const Kept before = kept();
  device().most_nbytes = 8 * emulated::kGranularity;
  const auto refused = pool->allocate(9 * emulated::kGranularity);
  CHECK_REFUSED(refused.status(), Code::kExhausted, "CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_EQ(pool->allocate(UINT64_MAX).status().code(), Code::kExhausted);
  CHECK(kept() == before);
  const auto smaller = pool->allocate(8 * emulated::kGranularity);
  CHECK_OK(smaller);
  device().most_nbytes = SIZE_MAX;
}

TEST(a_step_that_fails_undoes_those_before_it) {
  const auto pool = make_pool();
  const Kept before = kept();
  const std::pair<std::atomic<int>*, const char*> steps[] = {{&device().reserve_error, "cuMemAddressReserve"},
                                                             {&device().map_error, "cuMemMap"},
                                                             {&device().access_error, "cuMemSetAccess"}};
  for (const auto& [error, name] : steps) {
    *error = emulated::kNotPermitted;
    const auto refused = pool->allocate(4096);
    *error = 0;
    CHECK_REFUSED(refused.status(), Code::kSystem, name);
    CHECK(kept() == before);
  }
  CHECK_EQ(pool->nbytes(), 0);
  CHECK_EQ(MemoryPool::create(emulated::driver(), 1).status().code(), Code::kSystem);
}

// Copies over cuda_ipc, by an end that maps the pool by its handle.
void carries(gpu::HandleKind kind) {
  constexpr std::size_t kBlocks = 8, kBlockNbytes = 4096, kNbytes = kBlocks * kBlockNbytes;
  const Kept before = kept();
  {
    const auto pool = make_pool();
    const auto memory = pool->allocate(kNbytes), arrived = pool->allocate(kNbytes);
    REQUIRE_OK(memory);
    REQUIRE_OK(arrived);
    auto* const bytes = reinterpret_cast<std::byte*>(memory.value());
    auto* const landed = reinterpret_cast<std::byte*>(arrived.value());
    check::Random(check::seed()).fill(bytes, kNbytes);
    const auto exported = gpu::export_memory(emulated::driver(), memory.value() + kNbytes / 2);
    REQUIRE_OK(exported);
    CHECK(exported.value().kind == kind);
    CHECK_EQ(exported.value().base, memory.value());

    Ends src(make), dst(make);
    const PeerId src_at_dst = connect_ends(src, dst).second;
    LocalRegion region;
    region.id = 1;
    region.kind = MemoryKind::kGpu;
    region.base = bytes;
    region.spans = {{0, kNbytes}};
    auto keys = testing::register_memory(*src.transport, region);
    REQUIRE_OK(keys);
    REQUIRE(dst.transport->attach(src_at_dst, {1, memory.value(), region.spans, keys.value()}).ok());
    const auto move = block_move(1, landed, kBlockNbytes, {0, 1, 2, 3}, {7, 6, 5, 4}, 4);
    const Work works[] = {fetch_work(1, move, 0)};
    REQUIRE_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, 1);
    REQUIRE(dst.reactor.run_until([&] { src.step(), dst.step(); },
                                  [&] { return dst.completion_of(1) != nullptr; }));
    REQUIRE(dst.completion_of(1)->code == Code::kOk);
    for (std::size_t block = 0; block < 4; ++block)
      CHECK(std::memcmp(landed + (7 - block) * kBlockNbytes, bytes + block * kBlockNbytes, kBlockNbytes) ==
            0);
    src.transport->deregister_memory(1);
    REQUIRE(src.reactor.run_until([&] { src.step(), dst.step(); },
                                  [&] { return !src.transport->lender()->held_by_peers(1); }));
    CHECK_OK(pool->free(memory.value()));
  }
  CHECK(kept() == before);
}

TEST(memory_goes_to_other_agents_by_descriptor) { carries(gpu::HandleKind::kPosixFd); }

TEST(memory_goes_to_other_agents_by_fabric_handle_where_there_is_a_fabric) {
  device().fabric = true;
  carries(gpu::HandleKind::kFabric);
  device().fabric = false;
}

// The fabric manager goes away after the memory was made.
TEST(memory_made_for_a_fabric_that_is_gone_goes_by_descriptor) {
  const auto pool = make_pool();
  device().fabric = true;
  const auto memory = pool->allocate(4096);
  device().fabric = false;
  REQUIRE_OK(memory);
  CHECK_EQ(pool->handle_types(), gpu::kFabricHandle | gpu::kPosixFdHandle);
  const auto exported = gpu::export_memory(emulated::driver(), memory.value());
  REQUIRE_OK(exported);
  CHECK(exported.value().kind == gpu::HandleKind::kPosixFd);
}

}  // namespace
}  // namespace kvxfer::gpu_pool_test
