// A peer process's own memory, read by the kernel for us (process_vm_readv): for tensors that the
// engine allocated and that lie in no pool.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/copy/sliced_copy.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::shm {

// What a process says about itself, for its peers to try on.
struct Probe {
  std::uint64_t address = 0;
  std::array<std::byte, 16> bytes{};
};

class ForeignMemory {
 public:
  ForeignMemory() = default;

  // Reads the peer's probe. Where that fails, refusal() says in words why and what to change.
  ForeignMemory(pid_t pid, uid_t uid, const Probe& probe);

  const std::string& refusal() const noexcept { return refusal_; }  // empty: it can be read

  // Some pairs of a piece, straight into their pages where runs are long. Every run costs the kernel a look-up, so
  // short ones come through a buffer: a block's bytes from the first run to the last in one read,
  // gaps and all (they are the same block's), and are spread and converted from there. kRailFailed: the process is gone. kSystem: it, or we,
  // unmapped part of the region. It counts only if check_alive() says so afterwards.
  Status fetch_pairs(const Move& move, const Piece& pairs, std::uint64_t remote_base);
  // Bytes at an address of the process, until the next call: at most SlicedCopy::kChunkNbytes.
  Result<const std::byte*> read(std::uint64_t address, std::size_t nbytes);
  // kRailFailed: the process has ended.
  Status check_alive() const;

 private:
  // What one call takes (IOV_MAX) on either side.
  static constexpr std::size_t kMaxRuns = 1024;

  // A cell whose source is on its way into the buffer, with strides as they are there.
  struct Fetched {
    Cell cell;
    CopyLoop loop;
    const Conversion* conversion;  // null: bytes as they are
    std::size_t src, scales;  // places in the buffer
    std::uint64_t scale_strides[2];
  };

  Status fetch_runs(const Move& move, const Piece& piece, std::uint64_t remote_base);
  Status fetch_cells(const Move& move, const Piece& piece, std::uint64_t remote_base);
  std::size_t name(std::uint64_t at, const std::uint32_t* counts, std::uint64_t* strides,
                   std::uint64_t nbytes, std::uint64_t block_stride);
  Status land(const Move& move);
  Status read_runs(std::size_t num_runs) noexcept;
  Status read_buffer() noexcept;
  Status read_failed(int error) const;

  pid_t pid_ = 0;
  // Readable once the process has ended: until then nobody else can have its number.
  UniqueFd pidfd_;
  std::string refusal_ = "it has not introduced itself yet";
  std::array<iovec, kMaxRuns> local_{};
  std::array<iovec, kMaxRuns> remote_{};
  std::vector<iovec> named_;  // what the buffer is filled from, in its order
  std::vector<std::byte> buffer_;  // empty until runs are short
  std::size_t buffer_nbytes_ = 0;  // that named_ fills
  std::vector<Fetched> fetched_;
};

// A region in it.
class ForeignSource final : public CopySource {
 public:
  ForeignSource(ForeignMemory& memory, std::uint64_t base) noexcept : memory_(memory), base_(base) {}
  Status copy(const Move& move, const Piece& pairs) override {
    return memory_.fetch_pairs(move, pairs, base_);
  }
  Result<const std::byte*> read(std::uint64_t offset, std::size_t nbytes) override {
    return memory_.read(base_ + offset, nbytes);
  }

 private:
  ForeignMemory& memory_;
  const std::uint64_t base_;
};

}  // namespace kvxfer::shm
