// How pages lie in files, so that whoever reads them back knows what is whole.
//
// A segment has two files. `.pages` holds slots of one size, each with one page. `.heads` holds the segment's
// own head in its first block, and then a head of each slot, which says whose page the slot holds. A head is
// written after its page. So a head that is whole, is of its segment's present format and has a checksum that
// its page confirms, names that page; anything else names none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

namespace kvxfer::store {

// A page's key, of which equal digests mean the same page.
using PageDigest = std::array<std::uint8_t, 16>;

inline constexpr std::uint32_t kFormatVersion = 1;
// Slots begin at multiples of it, and pages that are kept in files are as large as some of them.
inline constexpr std::size_t kBlockNbytes = 4096;
inline constexpr std::size_t kSegmentHeadNbytes = kBlockNbytes;
inline constexpr std::size_t kSlotHeadNbytes = 256;
inline constexpr std::size_t kMostKeyNbytes = 192;

using SlotHeadBytes = std::array<std::byte, kSlotHeadNbytes>;
using SegmentHeadBytes = std::array<std::byte, kSegmentHeadNbytes>;

// `id` is another one each time that the segment is cut anew, so that heads of before no longer count.
struct SegmentHead {
  std::uint64_t id = 0;
  std::uint64_t slot_nbytes = 0;
  std::uint32_t num_slots = 0;
};

struct SlotHead {
  PageDigest digest{};
  std::uint64_t segment_id = 0;
  std::uint64_t generation = 0;  // ascends with each write: of two pages of one key the later counts
  std::uint64_t nbytes = 0;
  std::uint32_t salt = 0;  // the number of the key's other parts, which the caller keeps
  std::uint32_t page_crc = 0;  // crc_of_page
  std::uint16_t key_nbytes = 0;
  bool key_is_cut = false;  // `key` is only the beginning
  std::array<char, kMostKeyNbytes> key{};

  void set_key(std::string_view text) noexcept;
  std::string_view key_text() const noexcept { return {key.data(), key_nbytes}; }
};

// Over the digest and the page, so that another page in the same place never passes.
std::uint32_t crc_of_page(const PageDigest& digest, std::span<const std::byte> page) noexcept;

SegmentHeadBytes encode(const SegmentHead& head) noexcept;
SlotHeadBytes encode(const SlotHead& head) noexcept;

enum class SegmentState : std::uint8_t {
  kEmpty,  // never cut, or its head is torn
  kCut,
  kOtherFormat,  // of another version of kvxfer
};
// `head` is set if the segment is cut.
SegmentState decode(std::span<const std::byte> bytes, SegmentHead& head, std::uint32_t& version) noexcept;
// None if the bytes are no whole head.
std::optional<SlotHead> decode_slot(std::span<const std::byte> bytes) noexcept;

// The offset of a slot's head in `.heads`.
constexpr std::uint64_t head_offset(std::uint32_t slot) noexcept {
  return kSegmentHeadNbytes + std::uint64_t{slot} * kSlotHeadNbytes;
}

}  // namespace kvxfer::store
