// Transfers that wait for a GPU: for streams, events, graphs and kernels, over an emulated driver.
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "cuda_threads.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_ends.h"

#include "gpu/examples/write_layer.cu"

namespace kvxfer {
namespace {

using namespace gpu_ends;

After taken(Result<After> after) {
  REQUIRE_OK(after);
  return std::move(after).value();
}

TEST(a_transfer_waits_for_what_a_stream_was_given_and_for_nothing_later) {
  gpu::EventHandle busy, later;
  ModelStream stream;
  Ends both;
  stream.hold(busy);
  both.produce(stream, 7);
  const auto handle = both.write(taken(both.src.runtime->after_stream(stream.get())));
  stream.hold(later);
  both.produce(stream, 9);
  REQUIRE(both.has_descriptor());
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(static_cast<int>(both.first_byte()), 0);
  CHECK_EQ(handle->outcome(), Outcome::kPending);
  busy.fire();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  CHECK_EQ(static_cast<int>(both.first_byte(3, kLayers - 1)), 7);
  later.fire();
  stream.synchronize();
}

TEST(transfers_that_wait_for_events_do_not_wait_for_each_other) {
  gpu::EventHandle first, second, over;
  over.fired = true;
  Ends both;
  const auto waits = both.write(taken(both.src.runtime->after_event(&first)), {0});
  const auto goes = both.write(taken(both.src.runtime->after_event(&second)), {1});
  const auto went = both.write(taken(both.src.runtime->after_event(&over)), {2});
  REQUIRE(ends(went));
  second.fire();
  REQUIRE(ends(goes));
  CHECK_EQ(goes->outcome(), Outcome::kDone);
  CHECK_EQ(waits->outcome(), Outcome::kPending);
  first.fire();
  REQUIRE(ends(waits));
  CHECK_EQ(waits->outcome(), Outcome::kDone);
}

TEST(streams_of_another_gpu_and_of_captures_are_refused_in_words) {
  Ends both;
  Runtime& agent = *both.src.runtime;
  ModelStream stream;
  stream.get()->context = reinterpret_cast<gpu::Context>(&both);
  CHECK_REFUSED(agent.after_stream(stream.get()).status(), Code::kInvalidArgument,
                "on GPU 1, but the agent's GPU is 0");
  const auto trigger = agent.make_trigger();
  REQUIRE_OK(trigger);
  CHECK_REFUSED(agent.record(*trigger.value(), stream.get(), 1), Code::kInvalidArgument, "on GPU 1");
  stream.get()->context = emulated::own_context();
  stream.get()->capturing = true;
  CHECK_REFUSED(agent.after_stream(stream.get()).status(), Code::kInvalidArgument, "is being captured");
  CHECK(stream.get()->captured.empty());
  gpu::EventHandle event;
  event.captured = true;
  CHECK_REFUSED(agent.after_event(&event).status(), Code::kInvalidArgument, "while a graph was captured");
}

TEST(a_device_that_failed_is_told_when_the_transfer_would_be_posted) {
  Ends both;
  ModelStream stream;
  emulated::device().stream_error = emulated::kLaunchFailed;
  CHECK_REFUSED(both.src.runtime->after_stream(stream.get()).status(), Code::kSystem, "cuStreamWriteValue32");
  emulated::device().stream_error = 0;
}

TEST(a_graph_that_was_captured_fires_its_trigger_whenever_it_runs) {
  Ends both;
  ModelStream stream;
  const auto made = both.src.runtime->make_trigger();
  REQUIRE_OK(made);
  const std::shared_ptr<Trigger>& trigger = made.value();
  stream.get()->capturing = true;
  CHECK_OK(both.src.runtime->record(*trigger, stream.get(), 1));
  stream.get()->capturing = false;
  REQUIRE_EQ(stream.get()->captured.size(), 1u);
  for (unsigned char run = 1; run <= 3; ++run) {
    trigger->reset();
    const auto handle = both.write({trigger});
    REQUIRE(both.has_descriptor());
    CHECK_EQ(handle->outcome(), Outcome::kPending);
    both.produce(stream, run);
    emulated::enqueue(stream.get(), stream.get()->captured.front());
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_EQ(static_cast<int>(both.first_byte()), static_cast<int>(run));
  }
}

TEST(a_stream_may_store_long_after_its_transfer_and_its_agent_are_gone) {
  gpu::EventHandle busy;
  ModelStream stream;
  std::uint32_t* word = nullptr;
  {
    Ends both;
    stream.hold(busy);
    const After after = taken(both.src.runtime->after_stream(stream.get()));
    word = after.trigger->share_once();
    const auto handle = both.write(after);
    both.src.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle->id()); });
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kCancelled);
  }
  // The word is not reused before the stream has stored to it.
  Ends both;
  std::vector<std::shared_ptr<Trigger>> others;
  for (int i = 0; i < 200; ++i) {
    auto made = both.src.runtime->make_trigger();
    REQUIRE_OK(made);
    others.push_back(std::move(made).value());
  }
  busy.fire();
  stream.synchronize();
  CHECK_EQ(std::atomic_ref(*word).load(), 1u);
  for (const auto& trigger : others) CHECK_EQ(trigger->value(), 0u);
}

// The arguments of a launch.
struct LayerArguments {
  unsigned* layer;
  unsigned num_words, seed;
  unsigned* word;
};

constexpr unsigned kCtas = 3;

TEST(kernels_let_layer_after_layer_go_from_inside) {
  Ends both;
  ModelStream stream;
  const auto made = both.src.runtime->make_trigger();
  REQUIRE_OK(made);
  unsigned* word = made.value()->share();
  gpu::FunctionHandle kernel{[](unsigned num_ctas, unsigned num_threads, unsigned, void** arguments) {
                               const auto& given = *static_cast<LayerArguments*>(arguments[0]);
                               cuda_threads::launch(num_ctas, num_threads, 0, write_layer, given.layer,
                                                    given.num_words, given.seed, given.word);
                             },
                             {sizeof(LayerArguments)}};
  const auto handle = both.write({made.value(), kCtas, kCtas});
  gpu::EventHandle between;
  for (unsigned layer = 0; layer < kLayers; ++layer) {
    LayerArguments given{reinterpret_cast<unsigned*>(both.src.memory.data() + layer * kLayerNbytes),
                         kLayerNbytes / sizeof(unsigned), 1000 * (layer + 1), word};
    void* arguments[] = {&given};
    REQUIRE_EQ(emulated::driver().launch(&kernel, kCtas, 1, 1, 8, 1, 1, 0, stream.get(), arguments, nullptr),
               0);
    if (layer == 0) stream.hold(between);
  }
  // Nothing of a layer moves before its kernel has run, although the layer before it has arrived.
  const auto words_of = [&](unsigned layer) {
    return both.dst.runtime->with_engine([&](Engine&, Time) {
      std::vector<unsigned> words(kLayerNbytes / sizeof(unsigned));
      std::memcpy(words.data(), both.dst.memory.data() + layer * kLayerNbytes, kLayerNbytes);
      return words;
    });
  };
  const auto is_there = [&](unsigned layer) {
    const std::vector<unsigned> words = words_of(layer);
    for (unsigned at = 0; at < words.size(); ++at)
      if (words[at] != 1000 * (layer + 1) + at) return false;
    return true;
  };
  // The test does not read memory to which a copy may be under way: the agent reports when a layer has
  // arrived.
  REQUIRE(await([&] {
    return both.dst.runtime->with_engine([](Engine& engine, Time) { return engine.stats().pieces_in; }) == 1;
  }));
  CHECK(is_there(0));
  CHECK_EQ(words_of(1).back(), 0u);
  CHECK_EQ(handle->outcome(), Outcome::kPending);
  between.fire();
  REQUIRE(ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  for (unsigned layer = 0; layer < kLayers; ++layer) CHECK(is_there(layer));
}

TEST(a_thread_fires_for_its_whole_cta) {
  unsigned word = 0;
  std::vector<unsigned> written(64);
  std::thread device([&] {
    cuda_threads::launch(1, 32, 0, [&] {
      written[threadIdx.x] = threadIdx.x + 1;
      __syncthreads();
      if (threadIdx.x == 31) fire(&word, 5);
    });
  });
  while (std::atomic_ref(word).load(std::memory_order_acquire) != 5) std::this_thread::yield();
  for (unsigned i = 0; i < 32; ++i) CHECK_EQ(written[i], i + 1);
  device.join();
}

}  // namespace
}  // namespace kvxfer
