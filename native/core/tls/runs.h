// The rest of a caller's runs of memory.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "core/in_room.h"

namespace kvxfer::tls {

struct Runs {
  // The most runs in one call, or in one record. With many short runs a record holds less.
  static constexpr std::size_t kMost = 1024;

  std::span<const iovec> runs;
  std::size_t at = 0;  // in the first run

  bool empty() noexcept {
    while (!runs.empty() && at == runs.front().iov_len) {
      runs = runs.subspan(1);
      at = 0;
    }
    return runs.empty();
  }
  // Appends the next runs, up to `nbytes`, to `out`, which has room for kMost, and moves past them.
  // Returns how many bytes.
  std::size_t take(std::size_t nbytes, std::vector<iovec>& out) noexcept {
    std::size_t taken = 0;
    while (taken < nbytes && !empty() && out.size() < kMost) {
      const std::size_t length = std::min(runs.front().iov_len - at, nbytes - taken);
      add_in_room(out, iovec{static_cast<std::byte*>(runs.front().iov_base) + at, length});
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
