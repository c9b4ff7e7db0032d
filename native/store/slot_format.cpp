#include "store/slot_format.h"

#include <algorithm>

#include "core/copy/crc32c.h"

namespace kvxfer::store {
namespace {

// The byte order of this machine is part of it: files do not move to a machine of the other.
constexpr std::uint64_t kMagic = 0x3167'6573'7866'766b;  // "kvfxseg1"
constexpr std::uint32_t kSlotMagic = 0x746f'6c73;        // "slot"

struct SegmentBytes {
  std::uint64_t magic;
  std::uint32_t version, num_slots;
  std::uint64_t id, slot_nbytes;
  std::uint32_t crc;  // of all before it
};

struct SlotBytes {
  std::uint32_t magic, crc;  // the crc is of all behind it
  PageDigest digest;
  std::uint64_t segment_id, generation, nbytes;
  std::uint32_t salt, page_crc;
  std::uint16_t key_nbytes, key_is_cut;
  std::uint32_t unused;
  std::array<char, kMostKeyNbytes> key;
};
static_assert(sizeof(SlotBytes) == kSlotHeadNbytes);

std::uint32_t crc_of(const SegmentBytes& head) noexcept {
  return crc32c(0, reinterpret_cast<const std::byte*>(&head), offsetof(SegmentBytes, crc));
}
std::uint32_t crc_of(const SlotBytes& head) noexcept {
  constexpr std::size_t kFirst = offsetof(SlotBytes, digest);
  return crc32c(0, reinterpret_cast<const std::byte*>(&head) + kFirst, sizeof head - kFirst);
}

}  // namespace

void SlotHead::set_key(std::string_view text) noexcept {
  key_is_cut = text.size() > kMostKeyNbytes;
  key_nbytes = static_cast<std::uint16_t>(std::min(text.size(), kMostKeyNbytes));
  std::copy_n(text.data(), key_nbytes, key.data());
}

std::uint32_t crc_of_page(const PageDigest& digest, std::span<const std::byte> page) noexcept {
  const std::uint32_t crc = crc32c(0, reinterpret_cast<const std::byte*>(digest.data()), digest.size());
  return crc32c(crc, page.data(), page.size());
}

SegmentHeadBytes encode(const SegmentHead& head) noexcept {
  SegmentBytes raw{};
  raw.magic = kMagic;
  raw.version = kFormatVersion;
  raw.num_slots = head.num_slots;
  raw.id = head.id;
  raw.slot_nbytes = head.slot_nbytes;
  raw.crc = crc_of(raw);
  SegmentHeadBytes bytes{};
  std::memcpy(bytes.data(), &raw, sizeof raw);
  return bytes;
}

SlotHeadBytes encode(const SlotHead& head) noexcept {
  SlotBytes raw{};
  raw.magic = kSlotMagic;
  raw.digest = head.digest;
  raw.segment_id = head.segment_id;
  raw.generation = head.generation;
  raw.nbytes = head.nbytes;
  raw.salt = head.salt;
  raw.page_crc = head.page_crc;
  raw.key_nbytes = head.key_nbytes;
  raw.key_is_cut = head.key_is_cut;
  std::copy_n(head.key.data(), head.key_nbytes, raw.key.data());
  raw.crc = crc_of(raw);
  SlotHeadBytes bytes;
  std::memcpy(bytes.data(), &raw, sizeof raw);
  return bytes;
}

SegmentState decode(std::span<const std::byte> bytes, SegmentHead& head, std::uint32_t& version) noexcept {
  SegmentBytes raw{};
  if (bytes.size() < sizeof raw) return SegmentState::kEmpty;
  std::memcpy(&raw, bytes.data(), sizeof raw);
  if (raw.magic != kMagic || raw.crc != crc_of(raw)) return SegmentState::kEmpty;
  version = raw.version;
  if (raw.version != kFormatVersion) return SegmentState::kOtherFormat;
  head = {raw.id, raw.slot_nbytes, raw.num_slots};
  return SegmentState::kCut;
}

std::optional<SlotHead> decode_slot(std::span<const std::byte> bytes) noexcept {
  SlotBytes raw{};
  if (bytes.size() < sizeof raw) return std::nullopt;
  std::memcpy(&raw, bytes.data(), sizeof raw);
  if (raw.magic != kSlotMagic || raw.crc != crc_of(raw) || raw.key_nbytes > kMostKeyNbytes)
    return std::nullopt;
  SlotHead head;
  head.digest = raw.digest;
  head.segment_id = raw.segment_id;
  head.generation = raw.generation;
  head.nbytes = raw.nbytes;
  head.salt = raw.salt;
  head.page_crc = raw.page_crc;
  head.key_is_cut = raw.key_is_cut != 0;
  head.key_nbytes = raw.key_nbytes;
  head.key = raw.key;
  return head;
}

}  // namespace kvxfer::store
