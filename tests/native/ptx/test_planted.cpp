// Wrong kernels (planted.ptx): each ends its program, and the message says where and why. The same kernel
// done right does not.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <string>

#include "check.h"
#include "cuda_threads.h"
#include "emulated/bulk_engine.h"
#include "planted.h"
#include "ptx/place.h"

namespace {

constexpr std::size_t kSharedNbytes = 64;

struct Launch {
  unsigned num_threads = 1;
  bool engines_rest = false;
};

using Kernel = void (*)(std::uint64_t);

// Returns how a process that runs the kernel ended, and what it printed.
std::string said_by(Kernel kernel, Launch launch) {
  int ends[2];
  REQUIRE_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ptx::bound_s = 1;  // seconds to wait for what does not happen
    cuda_threads::engines_rest = launch.engines_rest;
    auto* memory = new (std::align_val_t{128}) std::array<std::byte, 128>{};
    cuda_threads::launch(1, launch.num_threads, kSharedNbytes, kernel,
                         reinterpret_cast<std::uint64_t>(memory));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string said;
  char buffer[4096];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    said.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  int status = 0;
  REQUIRE_EQ(::waitpid(child, &status, 0), child);
  return (WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "it ends well: " : "it does not end well: ") + said;
}

void check_says(Kernel kernel, const char* instruction, const char* why, Launch launch = {}) {
  const std::string said = said_by(kernel, launch);
  if (said.find("it does not end well") == 0 && said.find(instruction) != std::string::npos &&
      said.find(why) != std::string::npos)
    return;
  FAIL(said + "\n  in place of: " + instruction + ": ... " + why);
}

TEST(accesses_are_aligned_and_inside_of_their_state_space) {
  check_says(misaligned_vector, "planted.ptx:", "is no multiple of 16");
  check_says(misaligned_vector, "ld.global.cs.v4.u32 {%r0, %r1, %r2, %r3}, [%rd0+8];",
             "is no multiple of 16");
  check_says(misaligned_word_of_shared_memory, "st.shared.u32 [memory+2], 1;", "0x402 is no multiple of 4");
  check_says(beyond_shared_memory, "st.shared.u32 [%r0+64], 1;",
             "4 bytes at 0x440 of shared memory, of which the CTA has 64");
  check_says(below_shared_memory, "st.shared.u32 [%r0], 1;", "4 bytes at 0x10 of shared memory");
  check_says(unwritten_shared_memory, "ld.shared.v2.u32", "0x404 of shared memory was never written");
  check_says(shared_memory_as_global, "st.global.u32 [%rd2], 1;", "is shared memory, and not global");
  check_says(global_memory_as_shared, "cvta.to.shared.u64 %rd1, %rd0;", "is not in the CTA's shared memory");
  check_says(null_pointer, "st.global.u32 [%rd0+64], 1;", "0x40 is nobody's");
  check_says(beyond_its_parameters, "ld.param.u32 %r0, [at+8];",
             "4 bytes at 8 of the kernel's parameters, which have 8");
  check_says(beyond_local_memory, "st.local.u32 [%rd0+8], 1;",
             "4 bytes at 8 of the thread's local memory, which has 8");
  check_says(division_by_zero, "div.u32 %r1, 7, %r0;", "a division by zero");
  check_says(too_many_threads, "too_many_threads", "launched with 3 threads", {.num_threads = 3});
}

TEST(mbarriers_are_initialized_published_and_counted) {
  check_says(barrier_that_nobody_initialized, "mbarrier.arrive.expect_tx", "there is no mbarrier at 0x400");
  check_says(barrier_initialized_twice, "mbarrier.init", "there is an mbarrier at 0x400 already");
  check_says(barrier_of_no_arrivals, "mbarrier.init", "an mbarrier of 0 arrivals");
  check_says(misaligned_barrier, "mbarrier.init", "0x404 is no multiple of 8");
  check_says(barrier_read_as_memory, "ld.shared.u64", "an mbarrier lies at 0x400");
  check_says(barrier_that_copies_do_not_know, "cp.async.bulk.shared::cluster",
             "thread 0 has initialized 0x400 through the generic proxy");
  check_says(one_arrival_too_many, "mbarrier.arrive.shared", "1 arrivals at 0x400, where 0 are pending");
  check_says(more_bytes_than_a_barrier_counts, "mbarrier.arrive.expect_tx",
             "becomes 1048576, beyond 2^20 - 1");
  check_says(bytes_that_do_not_come, "mbarrier.try_wait.parity",
             "the phase of parity 0 does not end: 0 arrivals and 16 bytes are pending");
}

TEST(bulk_copies_are_aligned_fenced_and_waited_for) {
  constexpr const char* kLoad = "cp.async.bulk.shared::cluster.global";
  constexpr const char* kStore = "cp.async.bulk.global.shared::cta";
  const Launch late{.engines_rest = true};
  check_says(load_of_8_bytes, kLoad, "8 bytes are no multiple of 16");
  check_says(load_from_a_multiple_of_8, kLoad, "is no multiple of 16");
  check_says(load_to_a_multiple_of_8, kLoad, "0x418 is no multiple of 16");
  check_says(load_over_a_barrier, kLoad, "an mbarrier lies at 0x400");
  check_says(policy_that_is_a_size, kLoad, "0x10 is no cache policy");
  check_says(load_that_nobody_waits_for, "ld.shared.u32", "a bulk copy to 0x410 is under way", late);
  check_says(parity_of_the_phase_before, "ld.shared.u32", "a bulk copy to 0x410 is under way", late);
  check_says(load_that_outlives_its_cta, "its end", "a bulk copy to 0x410 of its shared memory is under way",
             late);
  check_says(store_without_a_proxy_fence, kStore, "thread 0 has written 0x410 through the generic proxy");
  check_says(proxy_fence_in_front_of_the_stores, kStore,
             "neither it nor this thread executed fence.proxy.async since");
  check_says(store_of_unwritten_memory, kStore, "0x410 of shared memory was never written");
  check_says(memory_reused_before_it_was_read, "st.shared.u32 [memory+16], 9;",
             "nobody waited until it was read", late);
  check_says(release_before_bytes_are_there, "st.release.sys.global.u32",
             "cp.async.bulk.wait_group 0 (without .read)");
  check_says(end_before_it_was_read, "thread 0 of CTA 0", "cp.async.bulk.wait_group is missing");
  check_says(another_group_is_awaited, "thread 0 of CTA 0", "cp.async.bulk.wait_group is missing");
}

TEST(who_waits_for_a_lane_that_does_not_come_says_where_it_is) {
  check_says(lane_that_is_not_in_its_mask, "bar.warp.sync 2;", "lane 0 is not in the mask 0x2",
             {.num_threads = 2});
  // Either thread may be the first to report it.
  check_says(lane_that_does_not_come, "not all ", " waits at line ", {.num_threads = 2});
  check_says(barrier_of_half_a_warp, "barrier.sync 1, 16;", "16 threads, which are not so many warps",
             {.num_threads = 32});
  check_says(lanes_that_shuffle_elsewhere, "shfl.sync.bfly.b32", "under the same mask 0x3",
             {.num_threads = 2});
  check_says(value_of_a_lane_that_is_not_there, "shfl.sync.idx.b32", "the value of lane 5, which gives none",
             {.num_threads = 2});
}

TEST(memory_is_the_process_s_and_sanitizers_see_it) {
#if defined(__SANITIZE_THREAD__)
  check_says(lanes_that_race, "ThreadSanitizer", "data race", {.num_threads = 2});
  check_says(flag_without_a_release, "ThreadSanitizer", "data race", {.num_threads = 2});
#elif defined(__SANITIZE_ADDRESS__)
  check_says(beyond_an_allocation, "AddressSanitizer", "heap-buffer-overflow");
#endif
}

TEST(what_is_right_goes_on) {
  for (int round = 0; round < 20; ++round) {
    alignas(128) std::array<std::uint32_t, 32> memory{41, 42, 43, 44};
    const std::string said = said_by(right, {});
    CHECK_EQ(said, "it ends well: ");
    if (round < 19) continue;
    // Runs in this process, and last: from now on the process has engines.
    cuda_threads::launch(1, 1, kSharedNbytes, right, reinterpret_cast<std::uint64_t>(memory.data()));
    const std::array<std::uint32_t, 4> expected{42, 42, 43, 44};
    CHECK_EQ(std::memcmp(memory.data() + 8, expected.data(), sizeof expected), 0);
    CHECK_EQ(memory[16], 1u);
  }
}

}  // namespace
