// Does bulk copies instead of a device's copy hardware, at any time and in any order.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace cuda_threads {

// While a test sets this, engines do nothing.
inline std::atomic<bool> engines_rest = false;

// A copy does one step whenever its turn comes, until a step reports that it was the last.
//
// An engine's work is ordered before a thread's only by what the thread waits for. So there is no lock here,
// and no wake-up.
class StepEngine {
 public:
  using Step = std::function<bool()>;

  StepEngine() : thread_([this](std::stop_token stop) { run(stop); }) {}

  void submit(Step step) {
    auto* posted = new Posted{std::move(step), posted_.load(std::memory_order_relaxed)};
    while (!posted_.compare_exchange_weak(posted->next, posted, std::memory_order_release,
                                          std::memory_order_relaxed)) {}
  }

 private:
  struct Posted {
    Step step;
    Posted* next;
  };

  void run(std::stop_token stop) {
    std::minstd_rand random;
    std::vector<std::unique_ptr<Posted>> under_way;
    while (!stop.stop_requested()) {
      // Sometimes pauses so long that the kernel and the other engine overtake anything that they do not wait
      // for.
      const bool long_rest = random() % 16 == 0;
      if (under_way.empty() || random() % 4 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(long_rest ? 3000 : 20));
      for (Posted* copy = posted_.exchange(nullptr, std::memory_order_acquire); copy != nullptr;
           copy = copy->next)
        under_way.emplace_back(copy);
      if (under_way.empty() || engines_rest.load(std::memory_order_relaxed)) continue;
      std::swap(under_way[random() % under_way.size()], under_way.back());
      if (under_way.back()->step()) under_way.pop_back();
    }
  }

  std::atomic<Posted*> posted_ = nullptr;
  std::jthread thread_;
};

}  // namespace cuda_threads
