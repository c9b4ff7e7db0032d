// What is left of a caller's runs of memory.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace kvxfer::tls {

struct Runs {
  // For one call, or one record; where they are shorter, there is less in it.
  static constexpr std::size_t kMost = 1024;

  std::span<const iovec> runs;
  std::size_t at = 0;  // of the first

  bool empty() noexcept {
    while (!runs.empty() && at == runs.front().iov_len) {
      runs = runs.subspan(1);
      at = 0;
    }
    return runs.empty();
  }
  // Appends the next up to `nbytes` to `out`, which has room for kMost, and goes past them. Returns how many.
  std::size_t take(std::size_t nbytes, std::vector<iovec>& out) noexcept {
    std::size_t taken = 0;
    while (taken < nbytes && !empty() && out.size() < kMost) {
      const std::size_t length = std::min(runs.front().iov_len - at, nbytes - taken);
      out.push_back({static_cast<std::byte*>(runs.front().iov_base) + at, length});
      at += length;
      taken += length;
    }
    return taken;
  }
  void skip(std::size_t nbytes) noexcept {
    while (nbytes != 0 && !empty()) {
      const std::size_t length = std::min(runs.front().iov_len - at, nbytes);
      at += length;
      nbytes -= length;
    }
  }
};

}  // namespace kvxfer::tls
