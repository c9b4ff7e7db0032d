// Agents with caches on a GPU whose pages a NIC moves: counting devices and an emulated driver in one process.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "counting_device.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_ends.h"
#include "near_machine.h"
#include "transports/verbs/registration.h"

namespace kvxfer::gpu_verbs_test {
namespace {

using namespace agent_pair;
using counting_device::Fabric;
using gpu_ends::CachesEnds;

constexpr std::uint32_t kBlocks = 24;
constexpr std::uint64_t kBlockNbytes = 96 * 1024;
constexpr std::uint64_t kNbytes = kBlocks * kBlockNbytes;

Options options_of(std::uint64_t staging_nbytes, const std::string& ways) {
  return {.transports = {"verbs"},
          .layout = {kBlocks, kBlockNbytes},
          .num_rails = 3,  // of each device, and a socket
          .gpu = gpu_ends::emulated_gpu(emulated::fast_kernels(), staging_nbytes),
          .transport_options = {{"tcp.rails", std::int64_t{1}}, {"verbs.ways", ways}}};
}

struct Ends : CachesEnds {
  explicit Ends(std::uint64_t staging_nbytes = 0, const std::string& ways = "read")
      : CachesEnds(options_of(staging_nbytes, ways), options_of(staging_nbytes, ways)) {
    src.grant_all(there);
    dst.grant_all(here);
  }
  // Whether the pages of a region arrived in the other's.
  bool move(RegionId from, RegionId to, bool write) {
    std::memset(const_cast<std::byte*>(dst.bytes(to)), 0, kNbytes);
    return is_done(post(write, from, to)) && dst.has(to, src.bytes(from));
  }
  std::string notes_of(RegionId region) {
    std::string all;
    for (const std::string& note :
         dst.runtime->with_engine([&](Engine& engine, Time) { return engine.region(region)->notes; }))
      all += note + "\n";
    return all;
  }
};

// Restores the emulated device for later tests.
struct Restored {
  ~Restored() {
    emulated::device().writes_ordering = gpu::kSeenByOwner;
    emulated::device().flush_options = gpu::kFlushByHost;
    emulated::device().exports_dmabufs = 1;
    emulated::device().flush_error = 0;
    emulated::device().flush = nullptr;
    emulated::device().num_flushes = 0;
  }
};

TEST(a_nic_moves_pages_between_gpus_and_between_gpus_and_hosts) {
  const Restored restored;
  Fabric fabric;
  Ends both;
  CHECK_EQ(fabric.num_dmabufs(), 4u);  // of each of two agents, for two devices
  for (const RegionId from : {both.src.on_gpu, both.src.on_host})
    for (const RegionId to : {both.dst.on_gpu, both.dst.on_host})
      for (const bool write : {true, false}) {
        fabric.forget_counts();
        CHECK(both.move(from, to, write));
        CHECK(fabric.counts().nbytes >= kNbytes);
      }
  CHECK_EQ(emulated::device().num_flushes.load(), 0u);  // the device sees writes in order
}

// The GPU is near one NIC and the host memory near the other.
TEST(memory_of_a_gpu_and_of_the_host_take_the_nics_near_each) {
  const NearMachine machine;
  const Restored restored;
  Fabric fabric;
  Options options = options_of(0, "read");
  options.numa_node_of = [](const LocalRegion&) { return 1; };
  CachesEnds both(options, options);
  both.src.grant_all(both.there);
  both.dst.grant_all(both.here);
  for (int round = 0; round < 3; ++round)
    for (const bool to_gpu : {true, false}) {
      fabric.forget_counts();
      REQUIRE(is_done(both.write(both.src.on_gpu, to_gpu ? both.dst.on_gpu : both.dst.on_host)));
      CHECK(fabric.counts().nbytes_of[to_gpu ? 0 : 1] >= kNbytes);
      CHECK(fabric.counts().nbytes_of[to_gpu ? 1 : 0] <= 64);
    }
}

TEST(a_gpu_sees_what_came_before_anybody_is_told) {
  for (const std::string ways : {"read", "write"}) {
    const Restored restored;
    Fabric fabric;
    emulated::device().writes_ordering = 0;
    emulated::device().flush = Fabric::flush_gpu;
    Ends both(0, ways);
    fabric.hold_gpu_writes(true);
    for (const bool write : {true, false}) {
      CHECK(both.move(both.src.on_gpu, both.dst.on_gpu, write));
      CHECK(both.move(both.src.on_host, both.dst.on_gpu, write));
    }
    CHECK(emulated::device().num_flushes.load() > 0);
    const std::uint64_t before = emulated::device().num_flushes;
    CHECK(both.move(both.src.on_gpu, both.dst.on_host, true));
    CHECK_EQ(emulated::device().num_flushes.load(), before);
    fabric.hold_gpu_writes(false);
  }
}

TEST(a_flush_that_fails_tells_nobody_that_pages_are_there) {
  const Restored restored;
  Fabric fabric;
  emulated::device().writes_ordering = 0;
  Ends both;
  emulated::device().flush_error = 719;
  const auto handle = both.write(both.src.on_gpu, both.dst.on_gpu);
  REQUIRE(ends(handle));
  CHECK(handle->outcome() == Outcome::kFailed);
  CHECK(both.move(both.src.on_gpu, both.dst.on_host, true));  // a write to host memory needs none
}

TEST(what_no_nic_may_write_is_staged_and_read_by_nics_all_the_same) {
  const Restored restored;
  Fabric fabric;
  emulated::device().writes_ordering = 0;
  emulated::device().flush_options = 0;
  Ends both(GpuPart::kLeastStagingNbytes);
  fabric.forget_counts();
  CHECK(both.move(both.src.on_gpu, both.dst.on_host, true));
  CHECK(fabric.counts().nbytes >= kNbytes);
  fabric.forget_counts();
  CHECK(both.move(both.src.on_gpu, both.dst.on_gpu, true));
  CHECK(fabric.counts().nbytes < kNbytes);
}

TEST(memory_goes_as_a_dmabuf_or_by_its_address_or_staged_with_the_reason) {
  for (const bool has_dmabufs : {true, false})
    for (const bool has_peermem : {true, false}) {
      std::printf("  %s, %s\n", has_dmabufs ? "dmabuf" : "no dmabuf", has_peermem ? "peermem" : "no peermem");
      const Restored restored;
      Fabric fabric;
      emulated::device().exports_dmabufs = has_dmabufs ? 1 : 0;
      if (!has_peermem)
        fabric.refuse_addresses([](std::uint64_t address) {
          const std::lock_guard lock(emulated::device().mutex);
          return emulated::block_at(address) != emulated::device().blocks.end();
        });
      Ends both(GpuPart::kLeastStagingNbytes);
      CHECK_EQ(fabric.num_dmabufs(), has_dmabufs ? 4u : 0u);
      fabric.forget_counts();
      CHECK(both.move(both.src.on_gpu, both.dst.on_gpu, true));
      const bool by_nics = has_dmabufs || has_peermem;
      CHECK(by_nics ? fabric.counts().nbytes >= kNbytes : fabric.counts().nbytes < kNbytes);
      const std::string notes = both.notes_of(both.dst.on_gpu);
      CHECK_EQ(notes.find("modprobe nvidia-peermem") != std::string::npos, !by_nics);
      CHECK_EQ(notes.find("open kernel modules") != std::string::npos, !by_nics);
    }
}

// Two allocations that are mapped side by side; a region has all of them except for some bytes at each end.
TEST(a_span_over_several_allocations_has_a_registration_in_each) {
  const Restored restored;
  Fabric fabric;
  const gpu::Driver& driver = emulated::driver();
  constexpr std::size_t kPart = emulated::kGranularity;
  constexpr std::uint64_t kCut = 100;
  gpu::Address base = 0;
  REQUIRE_EQ(driver.address_reserve(&base, 2 * kPart, 0, 0, 0), 0);
  const gpu::AllocationProperties properties{};
  const gpu::Access access{.location = {}, .flags = gpu::kWriteAccess};
  for (const std::size_t at : {std::size_t{0}, kPart}) {
    gpu::Allocation allocation = 0;
    REQUIRE_EQ(driver.allocation_create(&allocation, kPart, &properties, 0), 0);
    REQUIRE_EQ(driver.map(base + at, kPart, 0, allocation, 0), 0);
    REQUIRE_EQ(driver.set_access(base + at, kPart, &access, 1), 0);
    driver.allocation_release(allocation);
  }
  {
    const auto library = verbs::Library::load();
    REQUIRE_OK(library);
    verbs::Options options;
    options.devices = "nic0";
    auto devices = verbs::Device::open_all(*library.value(), options);
    REQUIRE_OK(devices);
    const auto memory = verbs::GpuMemory::create(gpu_ends::emulated_gpu());
    REQUIRE_OK(memory);
    LocalRegion region;
    region.base = reinterpret_cast<std::byte*>(base);
    region.spans = {{kCut, kPart}, {kCut + kPart, kPart - 2 * kCut}};
    region.kind = MemoryKind::kGpu;
    const auto made = verbs::Registration::create(devices.value().front(), region, memory.value().get());
    REQUIRE_OK(made);
    const std::vector<verbs::KeyedSpan>& spans = made.value()->local().all();
    REQUIRE_EQ(spans.size(), 2u);
    CHECK_EQ(spans[0].offset, kCut);
    CHECK_EQ(spans[0].end, kPart);
    CHECK_EQ(spans[1].offset, kPart);
    CHECK_EQ(spans[1].end, 2 * kPart - kCut);
    CHECK_EQ(fabric.num_dmabufs(), 2u);
    region.device = 1;
    const auto elsewhere = verbs::Registration::create(devices.value().front(), region, memory.value().get());
    CHECK_REFUSED(elsewhere.status(), Code::kUnsupported, "GPU 1");
  }
  for (const std::size_t at : {std::size_t{0}, kPart}) CHECK_EQ(driver.unmap(base + at, kPart), 0);
  driver.address_free(base, 2 * kPart);
}

}  // namespace
}  // namespace kvxfer::gpu_verbs_test
