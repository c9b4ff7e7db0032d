// Launches and engine copies of an emulated driver that wait until a test lets them begin.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>

#include "check.h"
#include "emulated_kernels.h"

namespace emulated {

// Lets launches run: all of them, or as many as a test says.
class Launches {
 public:
  void let(std::int64_t more) {
    const std::lock_guard lock(mutex_);
    left_ = more;
    changed_.notify_all();
  }
  void let_all() { let(INT64_MAX); }
  // `num_ctas`: of the kernel; 0: by copy engines.
  void begin(unsigned num_ctas = 0) {
    std::unique_lock lock(mutex_);
    ctas_.insert(num_ctas);
    ++num_begun_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return left_ > 0; });
    --left_;
  }
  void end() {
    const std::lock_guard lock(mutex_);
    ++num_ended_;
    changed_.notify_all();
  }
  // Waits until so many have begun since reset(), and one less has ended: the last is under way and does not
  // move.
  void await_held(int number) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, std::chrono::seconds(30),
                              [&] { return num_begun_ == number && num_ended_ == number - 1; }));
  }
  int num_begun() {
    const std::lock_guard lock(mutex_);
    return num_begun_;
  }
  // Of those that began since reset().
  std::set<unsigned> ctas() {
    const std::lock_guard lock(mutex_);
    return ctas_;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    ctas_.clear();
    num_begun_ = num_ended_ = 0;
    left_ = INT64_MAX;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t left_ = INT64_MAX;
  int num_begun_ = 0, num_ended_ = 0;
  std::set<unsigned> ctas_;
};

inline Launches& launches() {
  static Launches one;
  return one;
}

// Copy engines are held as kernels are.
inline const bool engines_are_held = [] {
  device().engine_begins = [] { launches().begin(); };
  device().engine_ends = [] { launches().end(); };
  return true;
}();

inline FunctionHandle held_copy{[](unsigned num_ctas, unsigned, unsigned, void** arguments) {
                                  launches().begin(num_ctas);
                                  copy_on_host(*static_cast<CopyJob*>(arguments[0]));
                                  launches().end();
                                },
                                {sizeof(CopyJob)}};

}  // namespace emulated
