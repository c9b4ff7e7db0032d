// Names the runs of a cell, and then those of the next, some runs ahead of the copy or conversion.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvxfer/copy_program.h"

namespace kvxfer {

class RunsAhead {
 public:
  // `src`, `next`: where run (0, 0) of the cell, and of the loop's next cell, lies at the source; null if
  // there is no next cell. The loop has runs, and outlives this.
  RunsAhead(const CopyLoop& loop, const std::byte* src, const std::byte* next,
            std::uint64_t ahead_nbytes) noexcept
      : loop_(loop), cell_(src), next_(next) {
    const std::uint64_t ahead = num_ahead(loop, ahead_nbytes);
    i_ = static_cast<std::uint32_t>(ahead / loop.counts[1]);
    j_ = static_cast<std::uint32_t>(ahead % loop.counts[1]);
    turn_at_end();
  }

  // How many runs ahead that is: at most the cell's own number.
  static std::uint64_t num_ahead(const CopyLoop& loop, std::uint64_t ahead_nbytes) noexcept {
    return std::min<std::uint64_t>(ahead_nbytes / loop.nbytes + 1,
                                   std::uint64_t{loop.counts[0]} * loop.counts[1]);
  }

  // The next run; null after the last.
  const std::byte* pop() noexcept {
    if (cell_ == nullptr) return nullptr;
    const std::byte* run = cell_ + i_ * loop_.src_strides[0] + j_ * loop_.src_strides[1];
    if (++j_ == loop_.counts[1]) {
      j_ = 0;
      ++i_;
      turn_at_end();
    }
    return run;
  }

 private:
  void turn_at_end() noexcept {
    if (i_ != loop_.counts[0]) return;
    cell_ = next_;
    next_ = nullptr;
    i_ = j_ = 0;
  }

  const CopyLoop& loop_;
  const std::byte* cell_;
  const std::byte* next_;
  std::uint32_t i_ = 0, j_ = 0;
};

}  // namespace kvxfer
