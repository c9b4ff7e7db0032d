// Reading and writing little-endian fields. The reader never throws and never reads past its bytes. After
// the first field that is wrong, everything reads as zero, and status() names that field.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvxfer/status.h"

namespace kvxfer::wire {

static_assert(std::endian::native == std::endian::little, "fields are copied as they lie in memory");

// Has no padding, so that its bytes are its whole value.
template <class T>
inline constexpr bool kPlain = std::has_unique_object_representations_v<T> || std::is_same_v<T, float>;

// The longest prefix of `text` that is well-formed UTF-8 (RFC 3629).
inline std::size_t utf8_prefix(std::string_view text) noexcept {
  std::size_t at = 0;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  while (at < text.size()) {
    const unsigned char lead = byte(at);
    std::size_t nbytes = 1;
    unsigned low = 0x80, high = 0xbf;  // of the second byte
    if (lead >= 0x80) {
      if (lead < 0xc2 || lead > 0xf4) return at;
      nbytes = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
      if (lead == 0xe0) low = 0xa0;   // shorter forms exist
      if (lead == 0xed) high = 0x9f;  // surrogates
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;  // beyond U+10FFFF
    }
    if (text.size() - at < nbytes) return at;
    for (std::size_t i = 1; i < nbytes; ++i) {
      if (byte(at + i) < low || byte(at + i) > high) return at;
      low = 0x80;
      high = 0xbf;
    }
    at += nbytes;
  }
  return at;
}

class Writer {
 public:
  explicit Writer(std::size_t expected_nbytes) : bytes_(expected_nbytes) {}

  template <class T>
    requires std::is_integral_v<T> || std::is_enum_v<T>
  void number(T value) {
    if (bytes_.size() - num_ < sizeof value) grow(sizeof value);
    std::memcpy(bytes_.data() + num_, &value, sizeof value);  // one store, since the length is known here
    num_ += sizeof value;
  }

  // A whole record or array of bytes as it lies in memory.
  template <class T>
  void raw(const T& value) {
    static_assert(kPlain<T>);
    append(&value, sizeof value);
  }

  // A u32 count, then the items as they lie in memory.
  template <class T>
  void table(std::span<const T> items) {
    static_assert(kPlain<T>);
    number(static_cast<std::uint32_t>(items.size()));
    append(items.data(), items.size_bytes());
  }
  void text(std::string_view value) { table(std::span(value.data(), value.size())); }

  // Words for people: cut at max_nbytes. Bytes that are not UTF-8 become "?", so that the sentence of an
  // error never makes a frame that its receiver refuses.
  void words(std::string_view value, std::size_t max_nbytes) {
    std::string clean;
    while (!value.empty()) {
      const std::size_t good = utf8_prefix(value);
      clean += value.substr(0, good);
      value.remove_prefix(good);
      if (value.empty() || clean.size() >= max_nbytes) break;
      clean += '?';
      value.remove_prefix(1);
    }
    text(std::string_view(clean).substr(0, utf8_prefix(std::string_view(clean).substr(0, max_nbytes))));
  }

  std::vector<std::byte> take() {
    bytes_.resize(num_);
    return std::move(bytes_);
  }

 private:
  void append(const void* data, std::size_t nbytes) {
    if (nbytes == 0) return;
    if (bytes_.size() - num_ < nbytes) grow(nbytes);
    std::memcpy(bytes_.data() + num_, data, nbytes);
    num_ += nbytes;
  }

  [[gnu::noinline, gnu::cold]] void grow(std::size_t nbytes) { bytes_.resize(2 * num_ + nbytes); }

  std::vector<std::byte> bytes_;
  std::size_t num_ = 0;  // bytes written; the rest of bytes_ is room
};

class Reader {
 public:
  Reader(std::string_view frame, std::span<const std::byte> bytes) : frame_(frame), left_(bytes) {}

  bool ok() const noexcept { return status_.ok(); }
  bool has_more() const noexcept { return ok() && !left_.empty(); }
  const Status& status() const noexcept { return status_; }

  // Only the first complaint counts. `field` and the frame say where it belongs: "OFFER.src_blocks: ...".
  // Never inlined, so that reading a number stays short.
  [[gnu::noinline, gnu::cold]] void fail(std::string_view field, std::string_view what) {
    if (!ok()) return;
    status_ =
        Status(Code::kProtocol, std::string(frame_) + "." + std::string(field) + ": " + std::string(what));
    left_ = {};
  }

  template <class T>
    requires std::is_integral_v<T> && (!std::is_same_v<T, bool>)
  T number(std::string_view field) {
    T value = 0;
    if (room(field, sizeof value)) take(&value, sizeof value);
    return value;
  }

  template <class T>
    requires std::is_unsigned_v<T>
  T number(std::string_view field, T least, T most) {
    const T value = number<T>(field);
    if (!ok() || (value >= least && value <= most)) return value;
    fail_range(field, value, least, most);
    return 0;
  }

  bool boolean(std::string_view field) { return number<std::uint8_t>(field, 0, 1) != 0; }

  template <std::size_t N>
  std::array<std::byte, N> array(std::string_view field) {
    std::array<std::byte, N> value{};
    if (room(field, N)) take(value.data(), N);
    return value;
  }

  // A count of items that take at least item_nbytes each. It is within its bound, and the bytes for the
  // items are there, so that a vector of this size is never larger than the frame justifies.
  std::size_t count(std::string_view field, std::string_view items, std::size_t at_most,
                    std::size_t item_nbytes) {
    const std::size_t n = number<std::uint32_t>(field);
    if (!ok()) return 0;
    if (n > at_most) {
      fail(field, std::to_string(n) + " " + std::string(items) + ", at most " + std::to_string(at_most));
      return 0;
    }
    if (n * item_nbytes > left_.size()) {  // n is below 2^32: no overflow
      fail(field, std::to_string(n) + " " + std::string(items) + ", but the frame ends after " +
                      std::to_string(left_.size()) + " more bytes");
      return 0;
    }
    return n;
  }

  template <class T>
  std::vector<T> table(std::string_view field, std::string_view items, std::size_t at_most) {
    static_assert(kPlain<T>);
    std::vector<T> value(count(field, items, at_most, sizeof(T)));
    if (!value.empty()) take(value.data(), value.size() * sizeof(T));
    return value;
  }

  std::string text(std::string_view field, std::size_t max_nbytes) {
    std::string value(count(field, "bytes", max_nbytes, 1), '\0');
    if (!value.empty()) take(value.data(), value.size());
    if (utf8_prefix(value) != value.size()) {
      fail(field, "not UTF-8");
      value.clear();
    }
    return value;
  }

  void end() {
    if (ok() && !left_.empty())
      status_ = Status(Code::kProtocol, std::string(frame_) + ": " + std::to_string(left_.size()) +
                                            " bytes after the last field");
  }

 private:
  [[gnu::noinline, gnu::cold]] void fail_range(std::string_view field, std::uint64_t value,
                                               std::uint64_t least, std::uint64_t most) {
    fail(field, std::to_string(value) + ", must be " + std::to_string(least) + " to " + std::to_string(most));
  }
  bool room(std::string_view field, std::size_t nbytes) {
    if (!ok()) return false;
    if (left_.size() >= nbytes) return true;
    fail(field, "the frame ends before it");
    return false;
  }
  void take(void* into, std::size_t nbytes) {
    std::memcpy(into, left_.data(), nbytes);
    left_ = left_.subspan(nbytes);
  }

  std::string_view frame_;
  std::span<const std::byte> left_;
  Status status_;
};

}  // namespace kvxfer::wire
