// Frames from one process to another of the same host, through memory that both have mapped: this takes a
// quarter of a microsecond, a socket three.
//
// A ring has one writer and one reader. The reader makes the memory and passes it over an authenticated
// socket. The ring is used beside that socket: frames that do not fit go over the socket, and numbers in the
// frames say which one comes next. Each end keeps its own place to itself and only publishes it. The place
// that the other end publishes is a claim: it is checked against the capacity, and frames are copied out
// before they are looked at. So an end that scribbles over the memory ends its own session and nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/control/wire.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// An OFFER of 3,500 pages fits. Both processes count the ring as theirs, for each peer and direction.
inline constexpr std::size_t kRingNbytes = 32 * 1024;

struct RingMemory {
  // Bytes ever written, and ever read. Each has one writer, so they are on cache lines of their own.
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::atomic<std::uint32_t> asleep;  // the reader looks at the socket alone
  alignas(64) std::byte bytes[kRingNbytes];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct UnmapRing { void operator()(RingMemory* memory) const noexcept; };
using MappedRing = std::unique_ptr<RingMemory, UnmapRing>;

class RingReader {
 public:
  static Result<std::unique_ptr<RingReader>> create();

  UniqueFd take_fd() noexcept { return std::move(fd_); }  // for the writer

  // Copies the frame with this number out if it is the oldest. False if there is none, or another one. An
  // error is the writer's fault.
  Result<bool> next(std::uint64_t sequence, std::uint32_t max_body, wire::Bytes& frame);
  bool empty() const noexcept { return memory_->written.load(std::memory_order_acquire) == read_; }

  // From this call until wake_up() the writer announces its writes over the socket. Look again after the
  // call: frames that were written before it are not announced.
  void fall_asleep() noexcept { memory_->asleep.store(1, std::memory_order_seq_cst); }
  void wake_up() noexcept { memory_->asleep.store(0, std::memory_order_relaxed); }
  // True if the frame with this number is there, or something that next() refuses.
  bool has(std::uint64_t sequence) const noexcept;

 private:
  RingReader() = default;
  void copy_out(std::uint64_t at, std::byte* to, std::size_t nbytes) const noexcept;

  UniqueFd fd_;
  MappedRing memory_;
  std::uint64_t read_ = 0;
};

class RingWriter {
 public:
  // kUnsupported if the descriptor is not of the kind that a reader makes.
  static Result<std::unique_ptr<RingWriter>> map(int fd);

  bool push(wire::ByteSpan frame) noexcept;  // false: no room
  // After push: true if the reader has to be told over the socket; once for each sleep.
  bool reader_sleeps() noexcept;

 private:
  RingWriter() = default;

  MappedRing memory_;
  std::uint64_t written_ = 0;
};

}  // namespace kvxfer
