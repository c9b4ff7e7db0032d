// The names of the transports that brought a transfer, in the order in which they came. They are constants
// of the transports' kinds, so they are not copied.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace kvxfer {

class RailNames {
 public:
  // True if the name is new. With more than kMost names, every call for a further one returns true.
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
