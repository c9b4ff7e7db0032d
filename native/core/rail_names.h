// Names of the transports that brought a transfer, as they came. They are constants of their kinds, so that none is
// copied.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace kvxfer {

class RailNames {
 public:
  // True where it was not known before; of more than kMost at each call.
  bool add(std::string_view name) noexcept {
    for (const std::string_view known : all())
      if (known.data() == name.data() || known == name) return false;
    if (num_ < kMost) names_[num_++] = name;
    return true;
  }
  std::span<const std::string_view> all() const noexcept { return {names_.data(), num_}; }

 private:
  static constexpr std::size_t kMost = 4;  // a record has room for few more
  std::array<std::string_view, kMost> names_{};
  std::size_t num_ = 0;
};

}  // namespace kvxfer
