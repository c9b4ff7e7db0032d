// Every promise at once, under every fault, from many seeds. A seed that fails is printed:
//   KVXFER_SIMULATION_ROUNDS=1 ./test_simulation_random --seed N
// runs it again, the same to the last step. More rounds for a nightly run.
#include "simulated_workload.h"

namespace simulation {
namespace {

TEST(promises_hold_under_random_faults) {
  const char* const wanted = std::getenv("KVXFER_SIMULATION_ROUNDS");
  const std::uint64_t num_rounds = wanted != nullptr ? std::strtoull(wanted, nullptr, 0) : 300;
  std::size_t num_copies = 0, num_done = 0, num_together = 0, num_shared = 0, num_fine = 0, num_messages = 0,
              num_waits = 0;
  for (std::uint64_t seed = check::seed(); seed < check::seed() + num_rounds; ++seed) {
    {
      Workload workload(seed);
      try {
        workload.run(400);
      } catch (const check::RequirementFailed&) {}
      num_copies += workload.num_copies();
      num_done += workload.num_done();
      num_together += workload.num_done_together();
      num_shared += workload.num_shared();
      num_fine += workload.num_with_single_tokens();
      num_messages += workload.messages().num_received();
      num_waits += workload.messages().num_waits();
    }
    if (check::state().num_failures == 0) continue;
    std::printf("the simulation failed with seed %llu\n", static_cast<unsigned long long>(seed));
    return;
  }
  std::printf(
      "%zu copies, %zu done, %zu of these by several writers, %zu under a lease that served others; "
      "%zu transfers with single tokens; %zu messages, room for which was waited for %zu times\n",
      num_copies, num_done, num_together, num_shared, num_fine, num_messages, num_waits);
  if (num_rounds < 100) return;
  // In spite of the faults, enough copies are done.
  CHECK(num_done * 5 > num_copies);
  CHECK(num_together * 20 > num_done);
  CHECK(num_shared * 40 > num_done);
  CHECK(num_fine * 5 > num_copies);
  CHECK(num_messages > 100 * num_rounds);
  CHECK(num_waits * 2 > num_rounds);
}

}  // namespace
}  // namespace simulation
