// Transfers that kernels start: commands in a ring, over an emulated driver, with correct and wrong writers.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/commands/command_reader.h"
#include "cuda_threads.h"
#include "gpu_ends.h"

#include "gpu/examples/post_pages.cu"

namespace kvxfer {
namespace {

using namespace gpu_ends;

// More looks than a kernel of these tests makes while the agent lives.
constexpr unsigned kForever = ~0u - 1;

// Two agents and a ring of the source's.
struct Posting : Ends {
  explicit Posting(std::uint32_t num_commands = 64) {
    const auto opened = src.runtime->open_command_ring(num_commands);
    REQUIRE_OK(opened);
    reader = opened.value();
    // Device memory is memory of this process.
    ring = reinterpret_cast<CommandRing*>(reader->address());
    for (std::uint64_t at = 0; at < kNbytes; ++at)
      src.memory.data()[at] = static_cast<std::byte>(1 + at / kBlockNbytes);
    prepared = prepare({0, 1, 2, 3}, {3, 2, 1, 0});
  }
  std::uint32_t prepare(std::vector<std::uint32_t> src_ids, std::vector<std::uint32_t> dst_ids,
                        std::uint32_t first_layer = 0) {
    PreparedWrite write;
    write.request = request(true, std::move(src_ids));
    write.request.dst_ids = std::move(dst_ids);
    write.first_layer = first_layer;
    const auto number = reader->prepare(std::move(write));
    REQUIRE_OK(number);
    return number.value();
  }
  // As a kernel of one thread.
  bool post(unsigned pair, unsigned layer = kEveryLayer, unsigned num_pairs = 1, unsigned looks = kForever) {
    bool posted = false;
    cuda_threads::launch(1, 1, 0, [&] { posted = start(ring, prepared, pair, layer, num_pairs, looks); });
    return posted;
  }
  bool ended(std::uint64_t count) {
    return await([&] { return reader->counts().ended == count; });
  }
  bool arrived(std::uint32_t pair, std::uint32_t layer) {
    return dst.runtime->with_engine([&](Engine&, Time) {
      const std::byte* page = dst.memory.data() + layer * kLayerNbytes + (3 - pair) * kBlockNbytes;
      return std::memcmp(page, src.memory.data() + layer * kLayerNbytes + pair * kBlockNbytes,
                         kBlockNbytes) == 0;
    });
  }
  std::uint64_t bytes_in() {
    return dst.runtime->with_engine([](Engine& engine, Time) { return engine.stats().bytes_in; });
  }
  // Returns the only failure.
  CommandReader::Failure failure() {
    std::vector<CommandReader::Failure> failures = reader->take_failures();
    REQUIRE_EQ(failures.size(), 1u);
    return failures.front();
  }
  void stays_usable(std::uint64_t num_ended) {
    REQUIRE(post(0));
    REQUIRE(ended(num_ended + 1));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) CHECK(arrived(0, layer));
  }

  std::shared_ptr<CommandReader> reader;
  CommandRing* ring = nullptr;
  std::uint32_t prepared = 0;
};

// ---- what goes ------------------------------------------------------------------------------------

// The arguments of a launch of the example's kernel.
struct PostPages {
  unsigned* pages;
  unsigned num_words;
  const unsigned* table;
  unsigned num_pairs, seed;
  CommandRing* ring;
  unsigned prepared, layer;
  unsigned* num_lost;
};

TEST(kernels_start_each_page_as_soon_as_it_is_there) {
  Posting both;
  ModelStream stream;
  gpu::FunctionHandle kernel{[](unsigned num_ctas, unsigned num_threads, unsigned, void** arguments) {
                               const auto& g = *static_cast<PostPages*>(arguments[0]);
                               cuda_threads::launch(num_ctas, num_threads, 0, post_pages, g.pages,
                                                    g.num_words, g.table, g.num_pairs, g.seed, g.ring,
                                                    g.prepared, g.layer, g.num_lost);
                             },
                             {sizeof(PostPages)}};
  constexpr unsigned kNumWords = kBlockNbytes / sizeof(unsigned), kCtas = 3;
  const unsigned table[] = {0, 1, 2, 3};
  unsigned num_lost = 0;
  gpu::EventHandle between;
  for (unsigned layer = 0; layer < kLayers; ++layer) {
    PostPages given{reinterpret_cast<unsigned*>(both.src.memory.data() + layer * kLayerNbytes),
                    kNumWords,
                    table,
                    kBlocks,
                    1000 * (layer + 1),
                    both.ring,
                    both.prepared,
                    layer,
                    &num_lost};
    void* arguments[] = {&given};
    REQUIRE_EQ(emulated::driver().launch(&kernel, kCtas, 1, 1, 8, 1, 1, 0, stream.get(), arguments, nullptr),
               0);
    if (layer == 0) stream.hold(between);
  }
  const auto word = [&](unsigned layer, unsigned pair, unsigned at) {
    return both.dst.runtime->with_engine([&](Engine&, Time) {
      unsigned value;
      std::memcpy(
          &value,
          both.dst.memory.data() + layer * kLayerNbytes + (3 - pair) * kBlockNbytes + at * sizeof value,
          sizeof value);
      return value;
    });
  };
  REQUIRE(both.ended(kBlocks));
  for (unsigned pair = 0; pair < kBlocks; ++pair) {
    CHECK_EQ(word(0, pair, kNumWords - 1), 1000 + pair + kNumWords - 1);
    CHECK_EQ(word(1, pair, 0), 0u);  // its kernel has not run
  }
  between.fire();
  REQUIRE(both.ended(kLayers * kBlocks));
  for (unsigned layer = 0; layer < kLayers; ++layer)
    for (unsigned pair = 0; pair < kBlocks; ++pair)
      for (const unsigned at : {0u, kNumWords - 1})
        CHECK_EQ(word(layer, pair, at), 1000 * (layer + 1) + pair + at);
  CHECK_EQ(num_lost, 0u);
  CHECK_EQ(both.reader->counts().failed, 0u);
}

TEST(a_command_moves_its_pairs_in_its_layer_and_nothing_else) {
  Posting both;
  both.prepared = both.prepare({0, 1, 2, 3}, {3, 2, 1, 0}, 20);  // layers 20 to 22 of the model
  REQUIRE(both.post(1, 21, 2));
  REQUIRE(both.ended(1));
  for (std::uint32_t pair = 0; pair < kBlocks; ++pair)
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      CHECK_EQ(both.arrived(pair, layer), layer == 1 && (pair == 1 || pair == 2));
  REQUIRE(both.post(0, kEveryLayer, 4));
  REQUIRE(both.ended(2));
  CHECK_EQ(both.bytes_in(), 2 * kBlockNbytes + kNbytes);
  CHECK_EQ(both.reader->counts().failed, 0u);
}

TEST(ctas_and_kernels_share_a_ring_that_is_smaller_than_what_they_post) {
  Posting both(4);
  constexpr unsigned kKernels = 3, kCtas = 3, kEach = 12;
  std::atomic<unsigned> num_posted = 0, seen_ended = 0;
  {
    std::vector<std::jthread> kernels;
    for (unsigned k = 0; k < kKernels; ++k)
      kernels.emplace_back([&] {
        cuda_threads::launch(kCtas, 2, 0, [&] {
          for (unsigned i = 0; i < kEach; ++i)
            if (threadIdx.x == 0)
              num_posted += start(both.ring, both.prepared, i % kBlocks, i % kLayers, 1, kForever);
          __syncthreads();
          if (threadIdx.x == 1 && wait_until_ended(both.ring, kEach, kForever))
            seen_ended = std::max(seen_ended.load(), num_ended(both.ring));
        });
      });
  }
  CHECK_EQ(num_posted.load(), kKernels * kCtas * kEach);
  CHECK(seen_ended.load() >= kEach);
  REQUIRE(both.ended(kKernels * kCtas * kEach));
  CHECK_EQ(both.reader->counts().failed, 0u);
  CHECK_EQ(num_failed(both.ring), 0u);
  CHECK_EQ(num_ended(both.ring), kKernels * kCtas * kEach);
  CHECK_EQ(both.bytes_in(), kKernels * kCtas * kEach * kBlockNbytes);
}

TEST(a_kernel_overwrites_its_page_once_the_command_has_ended) {
  Posting both;
  cuda_threads::launch(1, 1, 0, [&] {
    for (unsigned round = 1; round <= 20; ++round) {
      auto* page = reinterpret_cast<unsigned*>(both.src.memory.data());
      for (unsigned at = 0; at < kBlockNbytes / sizeof(unsigned); ++at) page[at] = round;
      if (!start(both.ring, both.prepared, 0, 0) || !wait_until_ended(both.ring, round, kForever)) return;
    }
  });
  CHECK_EQ(both.reader->counts().ended, 20u);
  CHECK_EQ(static_cast<unsigned>(both.first_byte(3, 0)), 20u);
}

// ---- a ring that is full, and numbers that begin again --------------------------------------------

TEST(a_full_ring_says_so_instead_of_hanging_and_loses_nothing) {
  Posting both(2);
  {
    const Standstill still(*both.dst.runtime);
    // As many commands are under way as the ring has room for, and as many again wait in it.
    for (int i = 0; i < 4; ++i) REQUIRE(both.post(0, 0));
    CHECK(await([&] { return both.reader->counts().taken == 2; }));
    CHECK(!both.reader->has_news());
    for (int i = 0; i < 3; ++i) CHECK(!both.post(1, 1, 1, 5));
    CHECK_EQ(both.ring->tail, 4u);
    CHECK_EQ(both.reader->counts().ended, 0u);
  }
  REQUIRE(both.ended(4));
  CHECK_EQ(both.reader->counts().failed, 0u);
  CHECK(!both.arrived(1, 1));
  both.stays_usable(4);
}

TEST(numbers_begin_again_behind_the_last) {
  Command commands[4] = {};
  CommandCounts counts = {};
  const unsigned first = ~0u - 1;
  counts.taken.value = first;
  CommandRing ring{commands, &counts, 4, first, first};
  cuda_threads::launch(1, 1, 0, [&] {
    for (unsigned i = 0; i < 4; ++i) CHECK(start(&ring, i, i, i, 1, 3));
    CHECK(!start(&ring, 9, 9, 9, 1, 3));
    store_release(&counts.taken.value, first + 3);
    for (unsigned i = 4; i < 7; ++i) CHECK(start(&ring, i, i, i, 1, 3));
    CHECK(!start(&ring, 9, 9, 9, 1, 3));
  });
  for (unsigned i = 3; i < 7; ++i) {
    const unsigned number = first + i;
    CHECK_EQ(commands[number % 4].number, kThere | number);
    CHECK_EQ(commands[number % 4].what, what_of(i, 1));
    CHECK_EQ(commands[number % 4].pair, i);
    CHECK_EQ(commands[number % 4].layer, i);
  }
}

// ---- what nobody should write ---------------------------------------------------------------------

TEST(a_command_that_is_half_written_is_not_read) {
  Posting both;
  Command& command = both.ring->commands[0];
  command.what = what_of(both.prepared, 1);
  command.pair = command.layer = 0;
  for (const unsigned number : {0u, 1u, kThere | 1u, kThere | 64u, kThere - 1}) {
    store_release(&command.number, number);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    CHECK(!both.reader->has_news());
  }
  CHECK_EQ(both.reader->counts().taken, 0u);
  store_release(&command.number, kThere);
  REQUIRE(both.ended(1));
  CHECK(both.arrived(0, 0));
}

TEST(garbage_is_refused_command_by_command_and_the_agent_goes_on) {
  struct Wrong {
    Command command;
    Code code;
    std::string words;
  };
  Posting both;
  const unsigned good = both.prepared, gone = both.prepare({0}, {0});
  CHECK_OK(both.reader->forget(gone));
  CHECK_EQ(both.reader->forget(gone).code(), Code::kInvalidArgument);
  CHECK_EQ(both.reader->forget(77).code(), Code::kInvalidArgument);
  const std::vector<Wrong> all = {
      {{what_of(77, 1), 0, 0, 0}, Code::kInvalidArgument, "write 77, which is not prepared"},
      {{what_of(gone, 1), 0, 0, 0}, Code::kInvalidArgument, "which is not prepared (any more)"},
      {{what_of(1u << 16, 1), 0, 0, 0}, Code::kInvalidArgument, "write 65535"},
      {{~0u, ~0u, ~0u - 1, 0}, Code::kInvalidArgument, "write 65535"},
      {{what_of(good, 0), 0, 0, 0}, Code::kOutOfRange, "0 pairs from pair 0 on, but 4 are"},
      {{what_of(good, 5), 0, 0, 0}, Code::kOutOfRange, "5 pairs from pair 0 on, but 4 are"},
      {{what_of(good, 1), 4, 0, 0}, Code::kOutOfRange, "1 pairs from pair 4 on, but 4 are"},
      {{what_of(good, 2), 3, 0, 0}, Code::kOutOfRange, "2 pairs from pair 3 on, but 4 are"},
      {{what_of(good, 1), ~0u, 0, 0}, Code::kOutOfRange, "from pair 4294967295 on"},
      {{what_of(good, 70000), 0, 0, 0}, Code::kOutOfRange, "65535 pairs"},
      {{what_of(good, 1), 0, kLayers, 0}, Code::kOutOfRange, "layer 3, but write 0 has 0 to 2"},
      {{what_of(good, 1), 0, ~0u - 1, 0}, Code::kOutOfRange, "layer 4294967294"},
  };
  std::uint64_t num_ended = 0;
  for (const Wrong& wrong : all) {
    Command& at = both.ring->commands[both.ring->tail % both.ring->num_commands];
    at.what = wrong.command.what;
    at.pair = wrong.command.pair;
    at.layer = wrong.command.layer;
    store_release(&at.number, kThere | both.ring->tail);
    ++both.ring->tail;
    REQUIRE(both.ended(++num_ended));
    const CommandReader::Failure failure = both.failure();
    CHECK_EQ(failure.status.code(), wrong.code);
    CHECK_HAS(failure.status.message(), wrong.words);
    CHECK_EQ(failure.index, num_ended - 1);
    CHECK_EQ(failure.pair, wrong.command.pair);
    CHECK_EQ(failure.layer, wrong.command.layer);
  }
  CHECK_EQ(both.reader->counts().failed, all.size());
  CHECK_EQ(num_failed(both.ring), all.size());
  CHECK_EQ(both.bytes_in(), 0u);
  both.stays_usable(num_ended);
}

TEST(behind_a_command_that_never_comes_all_wait_and_the_agent_does_not) {
  Posting both(4);
  ++both.ring->tail;  // a kernel took the place and ended before it wrote
  for (int i = 0; i < 3; ++i) REQUIRE(both.post(0, 0));
  CHECK(!both.post(0, 0, 1, 5));
  const auto handle = both.write({Trigger::create(), 0});
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  CHECK_EQ(both.reader->counts().taken, 0u);
}

// ---- what becomes of commands when something ends --------------------------------------------------

TEST(a_lease_that_ended_fails_the_command_that_came_behind_it_and_no_other) {
  Posting both;
  REQUIRE(both.post(1));
  REQUIRE(both.ended(1));
  both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.revoke(now, both.write_lease); });
  REQUIRE(await([&] {
    return both.dst.runtime->with_engine(
        [&](Engine& engine, Time) { return engine.lease_state(both.write_lease) == LeaseState::kRevoked; });
  }));
  const std::uint64_t before = both.bytes_in();
  REQUIRE(both.post(0));
  REQUIRE(both.ended(2));
  const CommandReader::Failure failure = both.failure();
  // As for a write that is posted then, the end of the right may be known or not.
  const Code code = failure.status.code();
  CHECK(code == Code::kLeaseEnded || code == Code::kNotPermitted);
  CHECK_EQ(failure.index, 1u);
  CHECK_EQ(both.bytes_in(), before);
  both.dst.grant(both.here, wire::LeaseMode::kWrite);
  // The agent may hear of the grant later than of the next command; until then that command is refused, as a
  // write would be.
  std::uint64_t count = 2;
  REQUIRE(await([&] {
    REQUIRE(both.post(0));
    REQUIRE(both.ended(++count));
    return both.reader->take_failures().empty();
  }));
  CHECK(both.arrived(0, 0));
}

TEST(a_peer_that_goes_fails_what_is_under_way_and_what_comes_later) {
  Posting both;
  {
    const Standstill still(*both.dst.runtime);
    for (unsigned pair = 0; pair < kBlocks; ++pair) REQUIRE(both.post(pair));
    REQUIRE(await([&] { return both.reader->counts().taken == kBlocks; }));
    both.src.runtime->with_engine([&](Engine& engine, Time now) {
      engine.end_session(now, both.there, Code::kPeerSilent, "the test ended it");
    });
    REQUIRE(both.ended(kBlocks));
  }
  for (const CommandReader::Failure& failure : both.reader->take_failures())
    CHECK_EQ(failure.status.code(), Code::kPeerSilent);
  REQUIRE(both.post(0));
  REQUIRE(both.ended(kBlocks + 1));
  CHECK_EQ(both.failure().status.code(), Code::kPeerSilent);
  CHECK_EQ(both.reader->counts().failed, kBlocks + 1);
  // The same ring may still write to another peer.
  CHECK_OK(both.src.runtime->check_alive());
}

TEST(a_region_that_is_deregistered_fails_the_commands_that_name_it) {
  Posting both;
  REQUIRE_OK(both.src.runtime->deregister_region(both.src.region));
  REQUIRE(both.post(0));
  REQUIRE(both.ended(1));
  CHECK_EQ(both.failure().status.code(), Code::kUnknownRegion);
}

TEST(failures_that_nobody_reads_are_counted_and_the_newest_kept) {
  Posting both;
  both.prepared = 9;
  const unsigned all = CommandReader::kMostFailures + 10;
  cuda_threads::launch(1, 1, 0, [&] {
    for (unsigned i = 0; i < all; ++i) start(both.ring, both.prepared, i, 0, 1, kForever);
  });
  REQUIRE(both.ended(all));
  CHECK_EQ(both.reader->counts().failed, all);
  const auto failures = both.reader->take_failures();
  REQUIRE_EQ(failures.size(), CommandReader::kMostFailures);
  CHECK_EQ(failures.front().pair, 10u);
  CHECK_EQ(failures.back().pair, all - 1);
}

TEST(a_ring_that_is_closed_takes_no_more_while_kernels_still_post) {
  CommandRing* ring = nullptr;
  std::atomic<bool> over = false;
  std::atomic<unsigned> num_posted = 0, num_full = 0;
  std::jthread kernel;
  {
    Posting both(8);
    ring = both.ring;
    kernel = std::jthread([&, prepared = both.prepared] {
      cuda_threads::launch(2, 1, 0, [&] {
        while (!over) ++(start(ring, prepared, 0, 0, 1, 10) ? num_posted : num_full);
      });
    });
    REQUIRE(await([&] { return both.reader->counts().ended >= 20; }));
    both.src.runtime->close_command_ring(*both.reader);
    const std::uint64_t taken = both.reader->counts().taken;
    REQUIRE(both.ended(taken));  // transfers that were posted still end
    const unsigned full = num_full;
    REQUIRE(await([&] { return num_full > full; }));
    CHECK_EQ(both.reader->counts().taken, taken);
    CHECK_EQ(both.reader->counts().failed, 0u);
    PreparedWrite write;
    CHECK_EQ(both.reader->prepare(std::move(write)).status().code(), Code::kClosed);
  }
  // The end of its agent does not take the memory away either.
  const unsigned full = num_full;
  CHECK(await([&] { return num_full > full + 10; }));
  over = true;
}

TEST(an_agent_that_closes_ends_its_commands_and_takes_no_more) {
  Posting both;
  {
    const Standstill still(*both.dst.runtime);
    REQUIRE(both.post(0));
    REQUIRE(await([&] { return both.reader->counts().taken == 1; }));
    both.src.runtime->close(kSecond);
  }
  CHECK_EQ(both.reader->counts().ended, 1u);
  CHECK_EQ(both.failure().status.code(), Code::kClosed);
  REQUIRE(both.post(1, 0, 1, 5));
  CHECK(!both.reader->has_news());
  CHECK_EQ(both.src.runtime->open_command_ring(4).status().code(), Code::kClosed);
}

// ---- making one -----------------------------------------------------------------------------------

TEST(a_ring_that_cannot_be_made_says_why_and_leaves_nothing) {
  Ends both;
  for (const std::uint32_t wrong : {0u, 3u, 1000u, 2 * CommandMemory::kMost, ~0u})
    CHECK_EQ(both.src.runtime->open_command_ring(wrong).status().code(), Code::kInvalidArgument);
  const int contexts = emulated::device().num_contexts;
  emulated::device().most_host_nbytes = 1024;
  const auto no_pinned = both.src.runtime->open_command_ring(1024);
  CHECK_REFUSED(no_pinned.status(), Code::kSystem, "cuMemHostAlloc of a command ring for 1024");
  emulated::device().most_host_nbytes = SIZE_MAX;
  emulated::device().most_nbytes = 8;
  const auto no_device = both.src.runtime->open_command_ring(1024);
  CHECK_REFUSED(no_device.status(), Code::kSystem, "cuMemAlloc of a command ring");
  emulated::device().most_nbytes = SIZE_MAX;
  emulated::device().stream_error = emulated::kLaunchFailed;
  const auto failed = both.src.runtime->open_command_ring(1024);
  CHECK_EQ(failed.status().code(), Code::kSystem);
  emulated::device().stream_error = 0;
  CHECK_EQ(emulated::device().num_contexts.load(), contexts);
  CHECK_OK(both.src.runtime->open_command_ring(1024));
}

TEST(numbers_of_prepared_writes_are_given_out_again_the_oldest_first) {
  CommandReader reader(1, CommandMemory::create(4).value(), [](std::uint64_t) {});
  for (std::uint32_t i = 0; i < kTooMany; ++i) CHECK_EQ(reader.prepare({}).value(), i);
  CHECK_EQ(reader.prepare({}).status().code(), Code::kExhausted);
  CHECK_OK(reader.forget(7));
  CHECK_OK(reader.forget(3));
  CHECK_EQ(reader.prepare({}).value(), 7u);
  CHECK_EQ(reader.prepare({}).value(), 3u);
}

}  // namespace
}  // namespace kvxfer
