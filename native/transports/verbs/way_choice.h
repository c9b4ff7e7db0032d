// Decides whether a peer's pieces come faster by READ or by WRITE, from measurements of earlier pieces.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace kvxfer::verbs {

class WayChoice {
 public:
  using Clock = std::chrono::steady_clock;

  // How the next piece is to come. Of each 64 pieces the last 8 come the other way, so that it is measured as
  // well.
  bool by_write() const noexcept { return prefers_write() != (num_landed_ % kPeriod >= kPeriod - kTrial); }
  // READ unless WRITE is clearly faster, because a fence of a READ costs the peer nothing.
  bool prefers_write() const noexcept {
    const auto [read, write] = cost_;
    return read > 0 && write > 0 && write < 0.95 * read;
  }
  // "WRITE (measured: READ 10.9 GB/s, WRITE 12.1 GB/s)"
  std::string in_words() const {
    const auto rate = [](double cost) -> std::string {
      if (cost <= 0) return "not yet";
      char words[32];
      std::snprintf(words, sizeof words, "%.3g GB/s", 1 / cost);  // a byte in a nanosecond is 1 GB/s
      return words;
    };
    return std::string(prefers_write() ? "WRITE" : "READ") + " (measured: READ " + rate(cost_[0]) +
           ", WRITE " + rate(cost_[1]) + ")";
  }
  // `others`: pieces of this peer that are still under way. With them, the time until the next piece lands
  // measures this way alone.
  void landed(bool by_write, std::uint64_t nbytes, std::size_t others, Clock::time_point now) noexcept {
    if (has_others_ && by_write == last_by_write_ && nbytes != 0) {
      const double each =
          std::chrono::duration<double, std::nano>(now - last_at_).count() / static_cast<double>(nbytes);
      double& cost = cost_[by_write ? 1 : 0];
      cost = cost == 0 ? each : (7 * cost + each) / 8;
    }
    ++num_landed_;
    last_by_write_ = by_write;
    last_at_ = now;
    has_others_ = others != 0;
  }

 private:
  static constexpr std::uint64_t kPeriod = 64, kTrial = 8;

  std::array<double, 2> cost_{};  // ns per byte by READ, by WRITE; 0: not known
  std::uint64_t num_landed_ = 0;
  bool last_by_write_ = false, has_others_ = false;
  Clock::time_point last_at_{};
};

}  // namespace kvxfer::verbs
