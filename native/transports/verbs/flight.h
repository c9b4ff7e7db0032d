// A work with requests that are posted or will be next; and a queue of such works.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/request_cursor.h"
#include "transports/verbs/registration.h"

namespace kvxfer::verbs {

using RequestCursor = RequestCursorOf<std::uint32_t>;

struct Flight {
  Work work;
  std::shared_ptr<const KeyedSpans> remote;  // held, because its region may be detached meanwhile
  RequestCursor cursor;
  std::uint64_t end = 0;  // position in its queue pair behind its last request
  std::optional<std::uint32_t> scratch;  // kFetch: where the fence word lands
  std::uint32_t number = 0;  // kSend: announces the piece at its destination
  bool is_confirming = false;  // kFetch: its bytes are in, and this READs the fence word
  bool is_cancelled = false;
  bool is_proof = false;      // no work: a queue pair's first READ, which proves that it works
  bool to_gpu = false;        // its bytes land there
  bool is_posted = false;     // all requests are posted, or no more will be
  std::chrono::steady_clock::time_point due_at{};  // set when it is cancelled
  Code code = Code::kOk;      // result, once its requests have ended
  std::string why;

  // Posts nothing more of this flight.
  void stop(Code its_code, std::string_view its_why) noexcept {
    is_posted = true;
    if (code != Code::kOk) return;
    code = its_code;
    try {
      why = its_why;
    } catch (const std::bad_alloc&) {  // the code is enough
    }
  }
};

// First in, first out; keeps its memory.
template <class T>
class Ring {
 public:
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t index) noexcept { return slots_[(first_ + index) & (slots_.size() - 1)]; }
  const T& operator[](std::size_t index) const noexcept {
    return slots_[(first_ + index) & (slots_.size() - 1)];
  }
  T& front() noexcept { return (*this)[0]; }
  T& back() noexcept { return (*this)[size_ - 1]; }
  const T& back() const noexcept { return (*this)[size_ - 1]; }
  T& push(T&& item) {
    if (size_ == slots_.size()) grow();
    ++size_;
    return back() = std::move(item);
  }
  void pop() noexcept {
    front() = T();
    first_ = (first_ + 1) & (slots_.size() - 1);
    --size_;
  }
  void pop_back() noexcept {
    back() = T();
    --size_;
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 4 : 2 * slots_.size());
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    first_ = 0;
  }
  std::vector<T> slots_;  // a power of two
  std::size_t first_ = 0, size_ = 0;
};

}  // namespace kvxfer::verbs
