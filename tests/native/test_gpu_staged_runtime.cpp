// Agents that move pages between a GPU and memory that no GPU rail reaches, from a caller's post to the
// bytes: two Runtimes whose streams stage, over an emulated driver.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_ends.h"
#include "held_launches.h"

namespace kvxfer::gpu_staged_runtime_test {
namespace {

using namespace agent_pair;
using emulated::launches;
using gpu_ends::CachesEnd;
using gpu_ends::CachesEnds;
using gpu_memory::DeviceMemory;
using Transports = std::vector<std::string>;

constexpr std::uint32_t kBlocks = 24;
constexpr std::uint64_t kBlockNbytes = 256 * 1024;  // two of them are a piece, and a launch
constexpr std::uint32_t kPieceBlocks = 2;
constexpr std::uint64_t kNbytes = kBlocks * kBlockNbytes;
// Options for the CTAs of cuda_ipc's kernels, and of staging's.
constexpr std::uint32_t kIpcCtas = 5, kStagingCtas = 3;
constexpr std::uint64_t kOnePieceEachWay = 4 * 1024 * 1024;  // an arena with that much room for a peer

struct Plan {
  Transports src = {"cuda_ipc", "tcp"}, dst = {"cuda_ipc", "tcp"};
  std::size_t rails = 2;
  std::uint64_t staging_nbytes = 8 * 1024 * 1024;
  std::int64_t tcp_rails = 1;
};

Options options_of(const Plan& plan, const Transports& transports) {
  GpuPart gpu =
      gpu_ends::emulated_gpu({{&emulated::held_copy, nullptr, &emulated::convert}}, plan.staging_nbytes);
  gpu.stream.tables_nbytes = 64 * 1024;
  gpu.stream.num_ctas = kIpcCtas;
  gpu.stream.calibration = emulated::calibration();
  gpu.staging_ctas = kStagingCtas;
  launches().reset();
  return {.transports = transports,
          .layout = {kBlocks, kBlockNbytes},
          .num_rails = plan.rails,
          .gpu = gpu,
          .transport_options = {{"tcp.rails", plan.tcp_rails}}};
}

// Two agents that grant each other everything.
struct Ends : CachesEnds {
  explicit Ends(const Plan& plan = {})
      : CachesEnds(options_of(plan, plan.src), options_of(plan, plan.dst)),
        src_leases(src.grant_all(there)),
        dst_leases(dst.grant_all(here)) {}
  ~Ends() {
    launches().let_all();  // closing waits for them
    emulated::device().refuses_imports = false;
    emulated::device().launches_until_failure = -1;
    emulated::device().most_host_nbytes = SIZE_MAX;
  }
  // The copy that is held under one of the leases ends after all leases have ended.
  static void revoke_while_held(CachesEnd& end, const std::vector<LeaseId>& leases) {
    end.runtime->with_engine([&](Engine& engine, Time now) {
      for (const LeaseId lease : leases) engine.revoke(now, lease);
      return 0;
    });
    launches().let_all();
    for (const LeaseId lease : leases) CHECK(end.runtime->revoke(lease));
  }

  std::vector<LeaseId> src_leases, dst_leases;
};

TEST(pages_go_between_a_gpu_and_host_memory_over_every_stream) {
  const std::vector<std::pair<Plan, std::string>> plans = {
      {{.src = {"cuda_ipc", "tcp"}, .dst = {"cuda_ipc", "tcp"}, .rails = 2}, "tcp"},
      {{.src = {"shm", "cuda_ipc"}, .dst = {"shm", "cuda_ipc"}, .rails = 3}, "unix"},
      {{.src = {"cuda_ipc", "tcp"}, .dst = {"tcp"}, .rails = 1}, "tcp"}};  // one end has no GPU
  for (const auto& [plan, rail] : plans) {
    Ends both(plan);
    const auto written = both.write(both.src.on_gpu, both.dst.on_host);
    REQUIRE(is_done(written));
    CHECK_EQ(written->rails(), std::vector<std::string>{rail});
    CHECK(both.dst.has(both.dst.on_host, both.src.bytes(both.src.on_gpu)));
    CHECK_EQ(launches().num_begun(), kBlocks / kPieceBlocks);  // gathers alone

    std::fill(both.dst.memory.host.begin(), both.dst.memory.host.end(), std::byte{0});
    REQUIRE(is_done(both.read(both.src.on_gpu, both.dst.on_host)));
    CHECK(both.dst.has(both.dst.on_host, both.src.bytes(both.src.on_gpu)));

    if (both.dst.on_gpu == 0) continue;
    REQUIRE(is_done(both.write(both.src.on_host, both.dst.on_gpu)));
    CHECK(both.dst.has(both.dst.on_gpu, both.src.bytes(both.src.on_host)));
    std::memset(both.dst.memory.gpu->data(), 0, kNbytes);
    const auto read = both.read(both.src.on_host, both.dst.on_gpu);
    REQUIRE(is_done(read));
    CHECK_EQ(read->rails(), std::vector<std::string>{rail});
    CHECK(both.dst.has(both.dst.on_gpu, both.src.bytes(both.src.on_host)));
    CHECK(both.quiet());
  }
}

// A piece of 512 KiB has work for eight.
TEST(staging_has_its_own_number_of_ctas) {
  Ends both;
  REQUIRE(is_done(both.write(both.src.on_gpu, both.dst.on_host)));
  REQUIRE(is_done(both.write(both.src.on_host, both.dst.on_gpu)));
  CHECK_EQ(launches().ctas(), (std::set<unsigned>{emulated::by_engines() ? 0 : kStagingCtas}));
  launches().reset();
  REQUIRE(is_done(both.write(both.src.on_gpu, both.dst.on_gpu)));  // between GPUs that reach each other
  CHECK_EQ(launches().ctas(), std::set<unsigned>{kIpcCtas});
}

// As between two hosts, or on one host where the driver does not map a peer's memory.
TEST(gpus_that_do_not_reach_each_other_stage_at_both_ends) {
  emulated::device().refuses_imports = true;
  Ends both;
  for (const bool write : {true, false}) {
    std::memset(both.dst.memory.gpu->data(), 0, kNbytes);
    const auto handle =
        write ? both.write(both.src.on_gpu, both.dst.on_gpu) : both.read(both.src.on_gpu, both.dst.on_gpu);
    REQUIRE(is_done(handle));
    CHECK_EQ(handle->rails(), std::vector<std::string>{"tcp"});
    CHECK(both.dst.has(both.dst.on_gpu, both.src.bytes(both.src.on_gpu)));
  }
  CHECK(both.quiet());
}

// Each end holds slots for pieces that it waits for, and needs one more to send what the other waits for.
TEST(two_agents_that_write_to_each_other_through_small_arenas_do_not_wait_for_each_other) {
  emulated::device().refuses_imports = true;
  Ends both({.staging_nbytes = kOnePieceEachWay});
  const std::vector<std::byte> from_src = both.src.copy(both.src.on_gpu),
                               from_dst = both.dst.copy(both.dst.on_gpu);
  // From one end's GPU to the other's host memory and GPU, and back.
  std::vector<std::shared_ptr<Handle>> handles;
  const auto post = [&](CachesEnd& end, SessionKey peer, RegionId from, RegionId to) {
    auto handle = end.try_post(peer, true, from, to, kBlocks / 2);
    REQUIRE_OK(handle);
    handles.push_back(std::move(handle).value());
  };
  for (int k = 0; k < 4; ++k) {
    post(both.src, both.there, both.src.on_gpu, both.dst.on_gpu);
    post(both.dst, both.here, both.dst.on_gpu, both.src.on_gpu);
    post(both.src, both.there, both.src.on_gpu, both.dst.on_host);
    post(both.dst, both.here, both.dst.on_gpu, both.src.on_host);
  }
  for (const auto& handle : handles) REQUIRE(is_done(handle));
  REQUIRE(both.quiet());
  // The first halves go to the last, which nobody sends.
  const auto holds = [](const CachesEnd& end, RegionId region, const std::vector<std::byte>& from) {
    for (std::uint32_t block = 0; block < kBlocks / 2; ++block)
      if (std::memcmp(from.data() + block * kBlockNbytes,
                      end.bytes(region) + (kBlocks - 1 - block) * kBlockNbytes, kBlockNbytes) != 0)
        return false;
    return true;
  };
  CHECK(holds(both.dst, both.dst.on_gpu, from_src));
  CHECK(holds(both.dst, both.dst.on_host, from_src));
  CHECK(holds(both.src, both.src.on_gpu, from_dst));
  CHECK(holds(both.src, both.src.on_host, from_dst));
}

TEST(after_a_destination_revoked_no_staged_byte_lands) {
  Ends both;
  launches().let(2);
  const auto handle = both.write(both.src.on_host, both.dst.on_gpu);
  launches().await_held(3);
  both.revoke_while_held(both.dst, both.dst_leases);
  const std::vector<std::byte> at_fence = both.dst.copy(both.dst.on_gpu);
  REQUIRE(ends(handle));
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  CHECK(both.quiet());
  CHECK(both.dst.copy(both.dst.on_gpu) == at_fence);
}

TEST(after_a_source_revoked_no_kernel_reads_its_pages_and_nothing_of_them_is_done) {
  Ends both;
  launches().let(2);
  const auto handle = both.read(both.src.on_gpu, both.dst.on_host);
  launches().await_held(3);
  both.revoke_while_held(both.src, both.src_leases);
  const int begun = launches().num_begun();
  std::memset(both.src.memory.gpu->data(), 0xee, kNbytes);  // the owner may use its memory again
  REQUIRE(ends(handle));
  CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
  CHECK(both.quiet());
  CHECK_EQ(launches().num_begun(), begun);
  CHECK(std::count(both.dst.memory.host.begin(), both.dst.memory.host.end(), std::byte{0xee}) <
        std::ptrdiff_t{kBlockNbytes});
}

TEST(a_transfer_that_is_cancelled_gives_its_slots_back) {
  emulated::device().refuses_imports = true;
  Ends both({.staging_nbytes = kOnePieceEachWay});
  for (const bool at_source : {true, false}) {
    launches().reset();
    launches().let(1);
    const auto handle = at_source ? both.write(both.src.on_gpu, both.dst.on_gpu)
                                  : both.read(both.src.on_gpu, both.dst.on_gpu);
    launches().await_held(2);
    (at_source ? both.src : both.dst).runtime->cancel(*handle);
    launches().let_all();
    REQUIRE(ends(handle));
    CHECK_EQ(handle->status().code(), Code::kCancelled);
    REQUIRE(both.quiet());
    // A peer has room for one piece each way. If that were lost, this would not end.
    std::memset(both.dst.memory.gpu->data(), 0, kNbytes);
    REQUIRE(is_done(both.write(both.src.on_gpu, both.dst.on_gpu)));
    CHECK(both.dst.has(both.dst.on_gpu, both.src.bytes(both.src.on_gpu)));
  }
}

TEST(a_region_deregistered_in_mid_transfer_is_not_touched_by_staging) {
  for (const bool at_source : {true, false}) {
    Ends both;
    CachesEnd& end = at_source ? both.src : both.dst;
    launches().let(1);
    const auto handle = at_source ? both.write(both.src.on_gpu, both.dst.on_host)
                                  : both.write(both.src.on_host, both.dst.on_gpu);
    launches().await_held(2);
    std::thread device([&] {
      await([&] {
        return end.runtime->with_engine([&](Engine& engine, Time) { return engine.is_leaving(end.on_gpu); });
      });
      launches().let_all();
    });
    CHECK_OK(end.runtime->deregister_region(end.on_gpu));
    const int begun = launches().num_begun();
    const std::vector<std::byte> at_end = end.copy(end.on_gpu);
    device.join();
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK(both.quiet());
    CHECK_EQ(launches().num_begun(), begun);
    CHECK(end.copy(end.on_gpu) == at_end);
  }
}

TEST(a_peer_that_is_lost_in_mid_transfer_leaves_its_slots_to_others) {
  Ends both({.staging_nbytes = kOnePieceEachWay});
  launches().let(1);
  const auto out = both.write(both.src.on_gpu, both.dst.on_host);
  launches().await_held(2);
  both.dst.runtime->close(kSecond);
  launches().let_all();
  REQUIRE(ends(out));
  CHECK_EQ(out->outcome(), Outcome::kFailed);
  REQUIRE(await([&] { return both.src.num_transfers() == 0; }));

  CachesEnd third("third", options_of({.staging_nbytes = kOnePieceEachWay}, {"cuda_ipc", "tcp"}));
  third.add();
  const auto [there, here] = meet(*both.src.runtime, *third.runtime, 2);
  third.grant(here, third.on_host, wire::LeaseMode::kWrite);
  const auto again = both.src.try_post(there, true, both.src.on_gpu, third.on_host);
  REQUIRE_OK(again);
  REQUIRE(is_done(again.value()));
  CHECK(third.has(third.on_host, both.src.bytes(both.src.on_gpu)));
  third.runtime->close(5 * kSecond);
}

// The peer owes pieces over four rails, and each rail holds room for one that other peers need.
TEST(a_peer_that_stands_still_in_mid_transfer_leaves_room_for_others) {
  emulated::device().refuses_imports = true;
  Ends both({.rails = 5, .staging_nbytes = kOnePieceEachWay, .tcp_rails = 4});
  CachesEnd other("other", options_of({.tcp_rails = 4}, {"tcp"}));
  other.add();
  const auto [there, here] = meet(*both.dst.runtime, *other.runtime, 4);
  both.dst.grant(there, both.dst.on_gpu, wire::LeaseMode::kWrite);

  launches().let(0);
  const auto stuck = both.write(both.src.on_gpu, both.dst.on_gpu);
  launches().await_held(1);
  std::optional<Standstill> stopped(*both.src.runtime);
  launches().let_all();

  const auto written = other.try_post(here, true, other.on_host, both.dst.on_gpu);
  const bool done = written.ok() && is_done(written.value());
  CHECK(done && both.dst.has(both.dst.on_gpu, other.bytes(other.on_host)));
  CHECK_EQ(stuck->outcome(), Outcome::kPending);
  stopped.reset();
  CHECK(is_done(stuck));
  other.runtime->close(5 * kSecond);
}

TEST(a_gpu_that_fails_ends_what_it_stages_in_words_and_host_memory_goes_on) {
  for (const bool at_source : {true, false}) {
    Ends both;
    emulated::device().launches_until_failure = 2;
    const auto handle = at_source ? both.write(both.src.on_gpu, both.dst.on_host)
                                  : both.write(both.src.on_host, both.dst.on_gpu);
    REQUIRE(ends(handle));
    emulated::device().launches_until_failure = -1;
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK_EQ(handle->status().code(), Code::kNoPath);
    const std::string call = emulated::by_engines() ? "cuMemcpyBatchAsync" : "cuLaunchKernel";
    CHECK_HAS(handle->status().message(), call);
    REQUIRE(is_done(both.write(both.src.on_host, both.dst.on_host)));
    CHECK(both.dst.has(both.dst.on_host, both.src.bytes(both.src.on_host)));
    CHECK(both.quiet());
    // No new transfer with it begins either.
    const auto later = at_source ? both.src.try_post(both.there, true, both.src.on_gpu, both.dst.on_host)
                                 : both.dst.try_post(both.here, false, both.src.on_host, both.dst.on_gpu);
    if (later.ok()) {
      REQUIRE(ends(later.value()));
      CHECK_EQ(later.value()->status().code(), Code::kNoPath);
    } else {
      CHECK_EQ(later.status().code(), Code::kRailFailed);
    }
  }
}

TEST(without_an_arena_pages_of_a_gpu_stay_on_gpus_and_checksums_are_refused) {
  {
    Ends both({.staging_nbytes = 0});
    const auto refused = both.src.try_post(both.there, true, both.src.on_gpu, both.dst.on_host);
    CHECK_REFUSED(refused.status(), Code::kUnsupported, "staging_nbytes");
    REQUIRE(is_done(both.write(both.src.on_gpu, both.dst.on_gpu)));
  }
  Ends both;
  const auto summed = both.src.try_post(both.there, true, both.src.on_gpu, both.dst.on_host, 1, true);
  REQUIRE(!summed.ok());
  CHECK_HAS(summed.status().message(), "integrity=False");
  // If the other end has the GPU, the other end refuses.
  const auto there = both.src.try_post(both.there, true, both.src.on_host, both.dst.on_gpu, 1, true);
  REQUIRE_OK(there);
  REQUIRE(ends(there.value()));
  CHECK_EQ(there.value()->status().code(), Code::kRefused);
}

TEST(of_pinned_memory_that_is_not_there_a_part_will_do_and_none_is_said_in_the_regions_notes) {
  emulated::device().most_host_nbytes = 5 * 1024 * 1024;  // enough for half of the 8 MiB
  {
    Ends both;
    REQUIRE(is_done(both.write(both.src.on_gpu, both.dst.on_host)));
    CHECK(both.dst.has(both.dst.on_host, both.src.bytes(both.src.on_gpu)));
  }
  emulated::device().most_host_nbytes = 2 * 1024 * 1024;
  // The rail that needs no pinned memory comes up, and the notes say why the other does not.
  CachesEnd other("other", options_of(Plan(), {"cuda_ipc", "tcp"}));
  other.add();
  const std::vector<std::string> notes =
      other.runtime->with_engine([&](Engine& engine, Time) { return engine.region(other.on_gpu)->notes; });
  REQUIRE_EQ(notes.size(), 1);
  CHECK_HAS(notes[0], "staging_nbytes");
  emulated::device().most_host_nbytes = SIZE_MAX;
  CHECK_EQ(Runtime::create(
               agent_pair::options_of("tiny", options_of({.staging_nbytes = 4096}, {"cuda_ipc", "tcp"})))
               .status()
               .code(),
           Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvxfer::gpu_staged_runtime_test
