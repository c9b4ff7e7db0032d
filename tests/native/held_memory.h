// Memory that holds agents' copy threads: each waits in its first store to a page until let_on. The thread
// that drives, and all others, find it as any memory (userfaultfd).
#pragma once

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kvxfer/transport.h"

namespace kvxfer::testing {

class HeldMemory {
 public:
  // Whether the kernel lets this process hold its own threads, also inside system calls.
  static bool is_possible() { return static_cast<bool>(open()); }

  explicit HeldMemory(std::size_t nbytes)
      : nbytes_(nbytes), faults_(open()), end_(::eventfd(0, EFD_CLOEXEC)) {
    void* const memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    REQUIRE(::madvise(memory, nbytes, MADV_NOHUGEPAGE) == 0);
    data_ = static_cast<std::byte*>(memory);
    uffdio_register range{};
    range.range = {reinterpret_cast<std::uintptr_t>(memory), nbytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    REQUIRE(::ioctl(faults_.get(), UFFDIO_REGISTER, &range) == 0);
    handler_ = std::thread([this] { handle(); });
  }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;
  ~HeldMemory() {
    let_on();
    const std::uint64_t one = 1;
    (void)!::write(end_.get(), &one, sizeof one);
    handler_.join();
    ::munmap(data_, nbytes_);
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t nbytes() const noexcept { return nbytes_; }

  void await_held(std::size_t num) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, std::chrono::minutes(2), [&] { return held_.size() >= num; }));
  }
  // The same, but returns false where it is over before that.
  template <class IsOver>
  bool await_held(std::size_t num, IsOver&& is_over) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(5), [&] { return held_.size() >= num; }))
      if (is_over()) return false;
    return true;
  }
  std::size_t num_held() {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }
  // How many pages threads have got.
  std::size_t num_given() {
    const std::lock_guard lock(mutex_);
    return num_given_;
  }
  // Lets the held threads go on, and holds none from now on.
  void let_on() {
    const std::lock_guard lock(mutex_);
    holds_ = false;
    for (const std::uint64_t page : held_) give(page);
    held_.clear();
  }

 private:
  static UniqueFd open() {
    UniqueFd faults(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK)));
    uffdio_api api{};
    api.api = UFFD_API;
    api.features = UFFD_FEATURE_THREAD_ID;
    if (faults && ::ioctl(faults.get(), UFFDIO_API, &api) != 0) faults.reset();
    return faults;
  }
  static bool copies(std::uint32_t thread) {
    std::string name;
    std::ifstream("/proc/self/task/" + std::to_string(thread) + "/comm") >> name;
    return name.starts_with("kvxfer-copy-");
  }

  void give(std::uint64_t page) {
    uffdio_zeropage zeros{};
    zeros.range = {page, kPageNbytes};
    ++num_given_;
    if (::ioctl(faults_.get(), UFFDIO_ZEROPAGE, &zeros) != 0)
      ::ioctl(faults_.get(), UFFDIO_WAKE, &zeros.range);
  }

  void handle() {
    for (;;) {
      pollfd ready[] = {{faults_.get(), POLLIN, 0}, {end_.get(), POLLIN, 0}};
      ::poll(ready, 2, -1);
      uffd_msg message{};
      while (::read(faults_.get(), &message, sizeof message) == sizeof message) {
        if (message.event != UFFD_EVENT_PAGEFAULT) continue;
        const std::uint64_t page = message.arg.pagefault.address / kPageNbytes * kPageNbytes;
        const bool is_copying = copies(message.arg.pagefault.feat.ptid);
        const std::lock_guard lock(mutex_);
        if (is_copying && holds_)
          held_.push_back(page);
        else
          give(page);
        changed_.notify_all();
      }
      if (ready[1].revents != 0) return;
    }
  }

  static constexpr std::uint64_t kPageNbytes = 4096;

  const std::size_t nbytes_;
  std::byte* data_ = nullptr;
  UniqueFd faults_, end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> held_;
  std::size_t num_given_ = 0;
  bool holds_ = true;
  std::thread handler_;
};

}  // namespace kvxfer::testing
