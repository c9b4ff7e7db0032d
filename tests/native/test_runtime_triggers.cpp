// Transfers that wait for a word of memory, which any thread may store: two agents in one process.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent_pair.h"
#include "check.h"

namespace kvxfer::runtime_triggers_test {
namespace {

using namespace agent_pair;

constexpr std::uint32_t kBlocks = 8, kLayers = 4;
constexpr Time kMillisecond = 1'000'000;
const std::vector<std::string> kTransports = {"loopback", "shm", "unix"};

std::shared_ptr<Trigger> over(std::uint32_t* word, std::shared_ptr<const void> keepalive = nullptr) {
  auto made = Trigger::create_over(word, std::move(keepalive));
  REQUIRE_OK(made);
  return made.value();
}
// Stores as another process or a GPU does: no agent is told.
void store(std::uint32_t& word, std::uint32_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

struct Ends : Pair<> {
  explicit Ends(const std::string& transport)
      : Pair({.transports = {transport}, .layout = {kBlocks, 8 * 1024, kLayers}}) {
    check::Random random(check::seed());
    fill_source(random);
  }
  // Copies some blocks to the same block numbers, in every layer.
  std::shared_ptr<Handle> post(bool write, After after, std::vector<std::uint32_t> blocks = {1, 3, 6},
                               Time timeout_ns = 2 * kBound) {
    return Pair::post(write, std::move(after), std::move(blocks), timeout_ns);
  }
  bool untouched() {
    return dst.runtime->with_engine([&](Engine& engine, Time) {
      for (const std::byte byte : dst.memory)
        if (byte != std::byte{}) return false;
      return engine.stats().pieces_in == 0;
    });
  }
};

// Runs a test on each transport, posted by either end.
template <class Do>
void on_all(Do&& run) {
  for (const std::string& transport : kTransports)
    for (const bool write : {true, false}) {
      Ends both(transport);
      run(both, write);
    }
}

// Announced by the trigger, or stored into its word by somebody who tells no agent.
TEST(a_transfer_is_posted_at_once_and_goes_when_its_trigger_fires) {
  for (const bool announced : {true, false})
    on_all([&](Ends& both, bool write) {
      std::uint32_t word = 0;
      const auto trigger = announced ? Trigger::create() : over(&word);
      const auto handle = both.post(write, {trigger});
      REQUIRE(both.has_descriptor());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      CHECK(both.untouched());
      CHECK_EQ(handle->outcome(), Outcome::kPending);
      announced ? trigger->fire(1) : std::thread([&] { store(word, 1); }).join();
      REQUIRE(ends(handle));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
      for (std::uint32_t layer = 0; layer < kLayers; ++layer)
        for (const std::uint32_t block : {1, 3, 6}) CHECK(both.arrived(block, layer));
      CHECK(!both.arrived(0, 0));
    });
}

TEST(who_sleeps_already_looks_at_the_words_of_what_is_posted_next) {
  on_all([](Ends& both, bool write) {
    // The thread sleeps until the first transfer's deadline. The second one's is later, and wakes nothing.
    const auto first = both.post(write, {Trigger::create()}, {0}, 2 * kBound);
    REQUIRE(both.has_descriptor());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::uint32_t word = 0;
    const auto handle = both.post(write, {over(&word)}, {1}, 4 * kBound);
    REQUIRE(both.has_descriptor(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    store(word, 1);
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_EQ(first->outcome(), Outcome::kPending);
  });
}

TEST(a_word_that_is_shared_while_a_transfer_waits_is_looked_at_from_then_on) {
  on_all([](Ends& both, bool write) {
    const auto trigger = Trigger::create();
    const auto handle = both.post(write, {trigger});
    REQUIRE(both.has_descriptor());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    store(*trigger->share(), 1);
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  });
}

TEST(a_trigger_that_fired_before_holds_nothing_back_though_it_is_reset_at_once) {
  on_all([](Ends& both, bool write) {
    const auto trigger = Trigger::create();
    trigger->fire(1);
    const auto handle = both.post(write, {trigger});
    trigger->reset();
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  });
}

TEST(fired_while_it_is_posted_no_wake_up_is_lost) {
  for (const bool announced : {true, false}) {
    Ends both("loopback");
    for (int round = 0; round < 200; ++round) {
      const auto trigger = Trigger::create();
      std::uint32_t* word = announced ? nullptr : trigger->share();
      std::atomic<bool> go{false};
      std::thread device([&] {
        go.wait(false);
        announced ? trigger->fire(1) : store(*word, 1);
      });
      go = true;
      go.notify_one();
      const auto handle = both.post(round % 2 == 0, {trigger});
      device.join();
      REQUIRE(ends(handle));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
  }
}

TEST(layers_go_one_by_one_as_the_word_grows_and_values_may_be_jumped_over) {
  on_all([](Ends& both, bool write) {
    std::uint32_t word = 0;
    const auto handle = both.post(write, {over(&word), 10, 5}, {2});
    REQUIRE(both.has_descriptor());
    const auto has = [&](std::uint32_t layer) { return both.arrived(2, layer); };
    store(word, 9);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(both.untouched());
    store(word, 14);
    CHECK(await([&] { return has(0); }));
    CHECK(!has(1));
    store(word, 20);
    CHECK(await([&] { return has(1) && has(2); }));
    CHECK(!has(3));
    CHECK_EQ(handle->outcome(), Outcome::kPending);
    store(word, 4'000'000'000);
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK(has(3));
  });
}

TEST(a_trigger_that_never_fires_ends_its_transfer_at_the_deadline_with_no_byte_moved) {
  on_all([](Ends& both, bool write) {
    std::uint32_t word = 0;
    const auto handle = both.post(write, {over(&word), 2}, {1}, 300 * kMillisecond);
    store(word, 1);  // not enough
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kFailed);
    CHECK_EQ(handle->status().code(), Code::kDeadline);
    CHECK(both.quiet());
    CHECK(both.untouched());
    store(word, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(both.untouched());
  });
}

TEST(a_transfer_that_ends_while_it_waits_moves_nothing_though_its_trigger_fires_later) {
  const struct {
    const char* what;
    Code code;
    void (*end)(Ends& both, bool write, const Handle& handle);
  } ways[] = {
      {"cancelled", Code::kCancelled,
       [](Ends& both, bool write, const Handle& handle) { both.end(write).runtime->cancel(handle); }},
      {"the peer leaves", Code::kPeerLost,
       [](Ends& both, bool write, const Handle&) { both.end(!write).runtime->close(kBound); }},
      {"its agent closes", Code::kClosed,
       [](Ends& both, bool write, const Handle&) { both.end(write).runtime->close(kBound); }},
  };
  for (const auto& way : ways) {
    std::printf("  %s\n", way.what);
    on_all([&](Ends& both, bool write) {
      const auto trigger = Trigger::create();
      const auto handle = both.post(write, {trigger});
      REQUIRE(both.has_descriptor());
      way.end(both, write, *handle);
      REQUIRE(ends(handle));
      CHECK_EQ(handle->status().code(), way.code);
      CHECK_EQ(handle->outcome(), way.code == Code::kCancelled ? Outcome::kCancelled : Outcome::kFailed);
      if (way.code == Code::kClosed) both.end(write).runtime.reset();  // then the trigger's bell is gone
      trigger->fire(1);
      if (way.code == Code::kCancelled) CHECK(both.quiet());
      if (way.code != Code::kClosed) CHECK(both.untouched());
    });
  }
}

TEST(one_trigger_lets_many_transfers_of_several_agents_go) {
  Ends both("unix");
  const auto trigger = Trigger::create();
  std::vector<std::shared_ptr<Handle>> handles;
  for (std::uint32_t block = 0; block < kBlocks; ++block)
    handles.push_back(both.post(block % 2 == 0, {trigger, 1 + block % 2, 0}, {block}));
  REQUIRE(both.has_descriptor(kBlocks));
  trigger->fire(1);
  for (std::uint32_t block = 0; block < kBlocks; block += 2) REQUIRE(ends(handles[block]));
  for (std::uint32_t block = 1; block < kBlocks; block += 2)
    CHECK_EQ(handles[block]->outcome(), Outcome::kPending);
  trigger->fire(2);
  for (const auto& handle : handles) {
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
}

TEST(a_word_stays_until_the_transfers_that_wait_for_it_have_ended_whoever_lets_it_go) {
  on_all([](Ends& both, bool write) {
    auto word = std::make_shared<std::uint32_t>(0);
    const std::weak_ptr<std::uint32_t> watched = word;
    std::uint32_t& there = *word;
    const auto handle = both.post(write, {over(&there, std::move(word))});
    REQUIRE(both.has_descriptor());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    REQUIRE(!watched.expired());
    store(there, 1);
    REQUIRE(ends(handle));
    // The owner may take its own locks when the trigger is released, so that does not happen under the gate:
    // the next wait releases it.
    const auto next = Trigger::create();
    next->fire(1);
    REQUIRE(await([&] {
      REQUIRE(ends(both.post(write, {next}, {0})));
      return watched.expired();
    }));
  });
}

TEST(a_caller_who_sleeps_while_it_drives_sees_what_is_stored_or_fired) {
  for (const bool announced : {true, false}) {
    Ends both("loopback");
    for (const bool write : {true, false})
      for (int round = 0; round < 20; ++round) {
        const auto trigger = Trigger::create();
        std::uint32_t* word = announced ? nullptr : trigger->share();
        const auto handle = both.post(write, {trigger});
        std::atomic<bool> over{false};
        // The caller drives before and after the store; it may be asleep when the store comes.
        std::thread driver([&] {
          both.end(write).runtime->wait([&] { return handle->outcome() != Outcome::kPending; }, kBound);
          over = true;
        });
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        announced ? trigger->fire(1) : store(*word, 1);
        CHECK(await([&] { return over.load(); }));
        driver.join();
        CHECK_EQ(handle->outcome(), Outcome::kDone);
      }
  }
}

TEST(an_event_loop_leaves_words_that_nobody_announces_to_the_thread) {
  Ends both("shm");
  for (const bool write : {true, false})
    for (int round = 0; round < 20; ++round) {
      std::uint32_t word = 0;
      const auto handle = both.post(write, {over(&word)});
      both.src.runtime->serve();
      both.dst.runtime->serve();
      store(word, 1);
      REQUIRE(ends(handle));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
}

TEST(words_of_triggers_that_only_fire_are_used_again_and_shared_ones_never) {
  std::uint32_t* word = nullptr;
  {
    const auto shared = Trigger::create();
    word = shared->share();
    store(*word, 7);
    CHECK_EQ(shared->value(), 7);
  }
  std::vector<std::shared_ptr<Trigger>> kept;
  for (int i = 0; i < 300; ++i) {
    kept.push_back(Trigger::create());
    CHECK_EQ(kept.back()->value(), 0);
  }
  store(*word, 9);  // as by a graph that outlived its trigger
  for (const auto& trigger : kept) CHECK_EQ(trigger->value(), 0);
  // A word that is shared for one store is free once the store has come.
  std::uint32_t* awaited = Trigger::create()->share_once();
  std::vector<std::uint32_t*> seen;
  const auto comes_back = [&] {
    kept.clear();
    for (int i = 0; i < 600; ++i) kept.push_back(Trigger::create());
    bool found = false;
    for (const auto& trigger : kept) {
      trigger->fire(1);
      found = found || std::atomic_ref(*awaited).load() == 1;
    }
    return found;
  };
  CHECK(!comes_back());
  store(*awaited, 1);
  for (const auto& trigger : kept) trigger->reset();
  kept.clear();
  std::vector<std::shared_ptr<Trigger>> all;
  while (std::atomic_ref(*awaited).load() != 0) {
    all.push_back(Trigger::create());
    REQUIRE(all.size() < 10'000);
  }
}

TEST(what_is_no_word_is_refused) {
  alignas(8) std::byte memory[8] = {};
  const auto made = Trigger::create_over(reinterpret_cast<std::uint32_t*>(memory + 2), nullptr);
  CHECK_EQ(made.status().code(), Code::kInvalidArgument);
}

TEST(an_agent_without_a_gpu_says_so_of_streams) {
  Ends both("loopback");
  const auto after = both.src.runtime->after_stream(nullptr);
  CHECK_REFUSED(after.status(), Code::kUnsupported, "has no GPU");
  CHECK_EQ(both.src.runtime->after_event(nullptr).status().code(), Code::kUnsupported);
  CHECK_EQ(both.src.runtime->record(*Trigger::create(), nullptr, 1).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace kvxfer::runtime_triggers_test
