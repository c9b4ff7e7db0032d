// A place where a test holds threads.
#pragma once

#include <condition_variable>
#include <mutex>

// Holds threads until they are let on, one by one.
class ThreadGate {
 public:
  void stand() {
    std::unique_lock lock(mutex_);
    ++num_standing_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return num_let_on_ != 0; });
    --num_let_on_;
    --num_standing_;
    changed_.notify_all();
  }
  void await_standing(int num) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_standing_ == num; });
  }
  void let_on(int num = 1) {
    const std::lock_guard lock(mutex_);
    num_let_on_ += num;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_standing_ = 0, num_let_on_ = 0;
};
