// What one thread reads other processes' memory with, process_vm_readv and a buffer.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/copy/sliced_copy.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "transports/shm/foreign_memory.h"

namespace kvxfer::shm {

class ForeignReader {
 public:
  // Some pairs of a piece, straight into their pages where runs are long. Every run costs the kernel a look-up, so
  // short ones come through a buffer: a block's bytes from the first run to the last in one read,
  // gaps and all (they are the same block's), and are spread and converted from there. It counts only if the memory's
  // check_alive() says so afterwards.
  Status fetch_pairs(const ForeignMemory& memory, const Move& move, const Piece& pairs,
                     std::uint64_t remote_base);
  // Bytes at an address of the process, until the next call: at most SlicedCopy::kChunkNbytes.
  Result<const std::byte*> read(const ForeignMemory& memory, std::uint64_t address, std::size_t nbytes);

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

  Status fetch_runs(const ForeignMemory& memory, const Move& move, const Piece& piece,
                    std::uint64_t remote_base);
  Status fetch_cells(const ForeignMemory& memory, const Move& move, const Piece& piece,
                     std::uint64_t remote_base);
  std::size_t name(std::uint64_t at, const std::uint32_t* counts, std::uint64_t* strides,
                   std::uint64_t nbytes, std::uint64_t block_stride);
  Status land(const ForeignMemory& memory, const Move& move);
  Status read_runs(const ForeignMemory& memory, std::size_t num_runs) noexcept;
  Status read_buffer(const ForeignMemory& memory) noexcept;

  std::array<iovec, kMaxRuns> local_{};
  std::array<iovec, kMaxRuns> remote_{};
  std::vector<iovec> named_;  // what the buffer is filled from, in its order
  std::vector<std::byte> buffer_;  // empty until runs are short
  std::size_t buffer_nbytes_ = 0;  // that named_ fills
  std::vector<Fetched> fetched_;
};

// One for each thread that copies, by its number: made by that thread when it first reads such memory.
using ForeignReaders = std::vector<std::unique_ptr<ForeignReader>>;

}  // namespace kvxfer::shm
