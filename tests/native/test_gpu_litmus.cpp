// The litmus test over an emulated driver: under TSan every round shows that the stores of a kernel's lanes
// reach a kernel of another stream by way of the host. This holds for threads; hardware has not shown it yet.
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "../../bench/native/relay.h"
#include "check.h"
#include "cuda_threads.h"
#include "emulated_driver.h"
#include "gpu/litmus.h"

extern "C" void kvxfer_litmus_say(unsigned* pages, unsigned* said, unsigned num_words, unsigned round,
                                  unsigned* arrivals, std::uint64_t* done);
extern "C" void kvxfer_litmus_say_unfenced(unsigned* pages, unsigned* said, unsigned num_words,
                                           unsigned round, unsigned* arrivals, std::uint64_t* done);
extern "C" void kvxfer_litmus_see(const unsigned* pages, const unsigned* reply, unsigned num_words,
                                  unsigned round, kvxfer::gpu::LitmusWrong* wrong);

namespace {

using kvxfer::gpu::Address;
using kvxfer::gpu::FunctionHandle;
using kvxfer::gpu::LitmusWrong;
using kvxfer::gpu::Stream;

constexpr unsigned kCtas = 3, kThreads = 32, kWords = 512, kRounds = 20;
constexpr double kBound_s = 120;

// The arguments of a launch; the emulation passes one argument.
struct Say {
  unsigned* pages;
  unsigned* said;
  unsigned round;
  unsigned* arrivals;
  std::uint64_t* done;
};
struct See {
  const unsigned* pages;
  const unsigned* reply;
  unsigned round;
  LitmusWrong* wrong;
};

FunctionHandle say{[](unsigned, unsigned, unsigned, void** arguments) {
                     const auto& given = *static_cast<Say*>(arguments[0]);
                     cuda_threads::launch(kCtas, kThreads, 0, kvxfer_litmus_say, given.pages, given.said,
                                          kWords, given.round, given.arrivals, given.done);
                   },
                   {sizeof(Say)}};
FunctionHandle see{[](unsigned, unsigned, unsigned, void** arguments) {
                     const auto& given = *static_cast<See*>(arguments[0]);
                     cuda_threads::launch(kCtas, kThreads, 0, kvxfer_litmus_see, given.pages, given.reply,
                                          kWords, given.round, given.wrong);
                   },
                   {sizeof(See)}};

Address address_of(std::uint32_t& word) { return reinterpret_cast<Address>(&word); }

TEST(what_many_lanes_store_comes_by_the_host_to_a_kernel_of_another_stream) {
  const auto& driver = emulated::driver();
  Stream a = nullptr, b = nullptr;
  REQUIRE_EQ(driver.stream_create(&a, 1, 0), 0);
  REQUIRE_EQ(driver.stream_create(&b, 1, 0), 0);
  std::vector<unsigned> pages(kWords), said(kWords), reply(kWords);
  std::uint64_t done = 0;
  std::uint32_t word = 0, ack = 0;
  unsigned arrivals = 0;
  LitmusWrong wrong{};
  std::optional<std::uint64_t> wrong_said;
  std::thread host([&] {
    wrong_said = kvxfer::bench::relay({&done, &word, said.data(), reply.data(), kWords}, kRounds, kBound_s);
  });
  for (unsigned round = 1; round <= kRounds; ++round) {
    Say saying{pages.data(), said.data(), round, &arrivals, &done};
    See seeing{pages.data(), reply.data(), round, &wrong};
    void* say_arguments[] = {&saying};
    void* see_arguments[] = {&seeing};
    CHECK_EQ(driver.stream_wait(a, address_of(ack), round - 1, 0), 0);
    CHECK_EQ(driver.launch(&say, kCtas, 1, 1, kThreads, 1, 1, 0, a, say_arguments, nullptr), 0);
    CHECK_EQ(driver.stream_wait(b, address_of(word), round, 0), 0);
    CHECK_EQ(driver.launch(&see, kCtas, 1, 1, kThreads, 1, 1, 0, b, see_arguments, nullptr), 0);
    CHECK_EQ(driver.stream_write(b, address_of(ack), round, 0), 0);
  }
  host.join();
  driver.stream_synchronize(a);
  driver.stream_synchronize(b);
  driver.stream_destroy(a);
  driver.stream_destroy(b);
  REQUIRE(wrong_said.has_value());
  CHECK_EQ(*wrong_said, 0u);
  CHECK_EQ(wrong.pages, 0u);
  CHECK_EQ(wrong.reply, 0u);
}

// The test can fail: the values of another round count as wrong, at both ends.
TEST(what_is_of_another_round_is_counted) {
  std::vector<unsigned> pages(kWords), said(kWords), reply(kWords);
  unsigned arrivals = 0;
  std::uint64_t done = 0;
  std::uint32_t word = 0;
  LitmusWrong wrong{};
  cuda_threads::launch(kCtas, kThreads, 0, kvxfer_litmus_say_unfenced, pages.data(), said.data(), kWords, 1u,
                       &arrivals, &done);
  CHECK_EQ(done, 1u);
  done = 2;
  const auto found = kvxfer::bench::relay({&done, &word, said.data(), reply.data(), kWords}, 2, kBound_s);
  REQUIRE(found.has_value());
  CHECK_EQ(*found, kWords);
  cuda_threads::launch(kCtas, kThreads, 0, kvxfer_litmus_see, pages.data(), reply.data(), kWords, 3u, &wrong);
  CHECK_EQ(wrong.pages, kWords);
  CHECK_EQ(wrong.reply, kWords);
  // A relay that does not end releases the streams.
  CHECK(!kvxfer::bench::relay({&done, &word, said.data(), reply.data(), kWords}, 5, 0.01).has_value());
  CHECK_EQ(word, 5u);
}

}  // namespace
