#include "core/control/frame_ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/system/memfd.h"

namespace kvxfer {
namespace {

Result<MappedRing> map_ring(int fd) {
  void* memory = ::mmap(nullptr, sizeof(RingMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return Status::from_errno("mmap of a frame ring", errno);
  static_cast<void>(::madvise(memory, sizeof(RingMemory), MADV_DONTFORK));  // a child has no use for it
  return MappedRing(static_cast<RingMemory*>(memory));
}

}  // namespace

void UnmapRing::operator()(RingMemory* memory) const noexcept { ::munmap(memory, sizeof(RingMemory)); }

// ---- the reader ---------------------------------------------------------------------------------

Result<std::unique_ptr<RingReader>> RingReader::create() {
  Result<UniqueFd> fd = create_memfd("kvxfer-frames", sizeof(RingMemory));
  if (!fd.ok()) return fd.status();
  // Not sealed against writers: the peer writes to it.
  if (::fcntl(fd.value().get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return Status::from_errno("fcntl(F_ADD_SEALS)", errno);
  Result<MappedRing> memory = map_ring(fd.value().get());
  if (!memory.ok()) return memory.status();
  std::unique_ptr<RingReader> reader(new RingReader());
  reader->fd_ = std::move(fd).value();
  reader->memory_ = std::move(memory).value();
  return reader;
}

void RingReader::copy_out(std::uint64_t at, std::byte* to, std::size_t nbytes) const noexcept {
  const std::size_t from = at % kRingNbytes, first = std::min(nbytes, kRingNbytes - from);
  std::memcpy(to, memory_->bytes + from, first);
  std::memcpy(to + first, memory_->bytes, nbytes - first);
}

Result<bool> RingReader::next(std::uint64_t sequence, std::uint32_t max_body, wire::Bytes& frame) {
  const std::uint64_t there = memory_->written.load(std::memory_order_acquire) - read_;
  if (there == 0) return false;
  if (there < wire::kHeaderNbytes || there > kRingNbytes)
    return Status(Code::kProtocol,
                  "its frame ring reports an impossible fill of " + std::to_string(there) + " bytes");
  // Reads it once: it may change while we read.
  std::array<std::byte, wire::kHeaderNbytes> head;
  copy_out(read_, head.data(), head.size());
  Result<wire::Header> header = wire::decode_header(head, max_body);
  if (!header.ok()) return header.status();
  if (header.value().sequence != sequence) return false;
  const std::size_t nbytes = header.value().frame_nbytes();
  if (nbytes > there) return Status(Code::kProtocol, "a frame in its ring is longer than what was written");
  frame.resize(nbytes);
  std::ranges::copy(head, frame.begin());
  copy_out(read_ + head.size(), frame.data() + head.size(), nbytes - head.size());
  read_ += nbytes;
  memory_->read.store(read_, std::memory_order_release);
  return true;
}

bool RingReader::has(std::uint64_t sequence) const noexcept {
  const std::uint64_t there = memory_->written.load(std::memory_order_seq_cst) - read_;
  if (there == 0) return false;
  if (there < wire::kHeaderNbytes || there > kRingNbytes) return true;
  std::array<std::byte, wire::kHeaderNbytes> head;
  copy_out(read_, head.data(), head.size());
  try {
    const Result<wire::Header> header = wire::decode_header(head, wire::kMaxBody);
    return !header.ok() || header.value().sequence == sequence;
  } catch (const std::bad_alloc&) {  // for the words of what is wrong, which next() needs as well
    return true;
  }
}

// ---- the writer ---------------------------------------------------------------------------------

Result<std::unique_ptr<RingWriter>> RingWriter::map(int fd) {
  struct stat file{};
  if (::fstat(fd, &file) != 0) return Status::from_errno("fstat of a frame ring", errno);
  // Without this check, writing could end this process.
  if (!is_sealed_against_shrinking(fd) || file.st_size != static_cast<off_t>(sizeof(RingMemory)))
    return Status(Code::kUnsupported, "what the peer sent is not a frame ring of this release");
  Result<MappedRing> memory = map_ring(fd);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<RingWriter> writer(new RingWriter());
  writer->memory_ = std::move(memory).value();
  return writer;
}

bool RingWriter::push(wire::ByteSpan frame) noexcept {
  const std::uint64_t used = written_ - memory_->read.load(std::memory_order_acquire);
  if (used > kRingNbytes || frame.size() > kRingNbytes - used) return false;
  const std::size_t to = written_ % kRingNbytes, first = std::min(frame.size(), kRingNbytes - to);
  std::memcpy(memory_->bytes + to, frame.data(), first);
  std::memcpy(memory_->bytes, frame.data() + first, frame.size() - first);
  written_ += frame.size();
  // Sequentially consistent, as are the flag and its reader's second look: either this end sees the
  // flag or the reader sees the frame.
  memory_->written.store(written_, std::memory_order_seq_cst);
  return true;
}

bool RingWriter::reader_sleeps() noexcept {
  return memory_->asleep.load(std::memory_order_seq_cst) != 0 &&
         memory_->asleep.exchange(0, std::memory_order_seq_cst) != 0;
}

}  // namespace kvxfer
