// Reads other processes' memory for one thread, by process_vm_readv and a buffer.
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
  // Fetches some pairs of a piece. Long runs go straight into their pages. Every run costs the kernel a
  // look-up, so short runs come through a buffer: one read takes a block's bytes from the first run to the
  // last, gaps included (they belong to the same block); they are spread and converted from there. The bytes
  // count only if the memory's check_alive() succeeds afterwards.
  Status fetch_pairs(const ForeignMemory& memory, const Move& move, const Piece& pairs,
                     std::uint64_t remote_base);
  // Reads bytes at an address of the process, at most SlicedCopy::kChunkNbytes. They are valid until the next
  // call.
  Result<const std::byte*> read(const ForeignMemory& memory, std::uint64_t address, std::size_t nbytes);

 private:
  // The most runs of one call (IOV_MAX), on either side.
  static constexpr std::size_t kMaxRuns = 1024;

  // A cell that is to be read into the buffer, with its strides there.
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
  Status read_runs(const ForeignMemory& memory, std::size_t num_runs);
  Status read_buffer(const ForeignMemory& memory);

  std::array<iovec, kMaxRuns> local_{};
  std::array<iovec, kMaxRuns> remote_{};
  std::vector<iovec> named_;  // the reads that fill the buffer, in its order
  std::vector<std::byte> buffer_;  // empty until runs are short
  std::size_t buffer_nbytes_ = 0;  // bytes that named_ fills
  std::vector<Fetched> fetched_;
};

// One reader for each thread that copies, by the thread's number. The thread makes it when it first reads
// such memory.
using ForeignReaders = std::vector<std::unique_ptr<ForeignReader>>;

}  // namespace kvxfer::shm
