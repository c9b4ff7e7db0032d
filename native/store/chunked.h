// An array that grows without moving what it has: ten million entries never stand still for a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace kvxfer::store {

template <class T, std::size_t kChunk>
class Chunked {
  static_assert((kChunk & (kChunk - 1)) == 0);

 public:
  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t at) noexcept { return chunks_[at / kChunk][at % kChunk]; }
  const T& operator[](std::size_t at) const noexcept { return chunks_[at / kChunk][at % kChunk]; }
  void push_back(const T& value) {
    if (size_ == chunks_.size() * kChunk) chunks_.push_back(std::make_unique<T[]>(kChunk));
    (*this)[size_++] = value;
  }

 private:
  std::size_t size_ = 0;
  std::vector<std::unique_ptr<T[]>> chunks_;
};

}  // namespace kvxfer::store
