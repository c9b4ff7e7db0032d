// One piece of work on a tier's files, as whatever thread runs it does it: see perform().
#pragma once

#include <cstdint>
#include <span>

#include "store/slot_format.h"
#include "store/slot_index.h"

namespace kvxfer::store {

// The files of a tier. Each call returns 0 or an errno; less than all bytes is EIO. Calls for different
// segments, and for different bytes of one, may run at the same time on several threads.
class Files {
 public:
  virtual ~Files() = default;
  virtual int make(std::uint32_t segment) = 0;  // its room on the disk, if it has none yet
  virtual int write_page(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual int read_page(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) = 0;
  virtual int write_head(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  // What was written to it is there after a loss of power.
  virtual int sync(std::uint32_t segment) = 0;
  // Whether a block can be written and read back.
  virtual int probe() = 0;
};

struct FileJob {
  enum class Kind : std::uint8_t { kCut, kWrite, kRead, kErase, kSync, kProbe };

  Kind kind = Kind::kProbe;
  bool durable = false;  // ends when a loss of power would not undo it
  SlotIndex::Ref ref = SlotIndex::kNone;
  Place place;
  std::span<std::byte> page;  // of kWrite and kRead: aligned to a block, and unchanged until it has ended
  SlotHead head;  // of kWrite; its page_crc is computed. Of kRead: what must come
  SegmentHead segment;  // of kCut
  std::uint64_t ticket = 0;  // the caller's
  std::uint64_t asked_ns = 0;
  std::uint64_t begun_ns = 0;

  int error = 0;
  bool is_whole = true;  // of kRead: the page is what was written
};

// Runs a job. The order is what recovery relies on: the old head goes, then the page comes, then its head.
void perform(FileJob& job, Files& files);

}  // namespace kvxfer::store
