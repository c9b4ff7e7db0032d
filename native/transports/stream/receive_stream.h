// The receiving half of one stream rail. Pieces with long runs land straight in the pages that were posted
// for them. Pieces with short runs are scattered from scratch within the call, so scratch is free when the
// call returns. Bytes that no work waits for also go to scratch. Pieces that were posted packed land as they
// come.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/copy/run_cursor.h"
#include "transports/common/completion_queue.h"
#include "transports/stream/piece_frame.h"
#include "transports/stream/step.h"
#include "transports/stream/stream_socket.h"

namespace kvxfer::stream {

class ReceiveStream {
 public:
  // `packed`: where the piece is to land packed; null: in its pages. False: a work already waits for the same
  // piece.
  bool push(const Work& work, std::byte* packed);

  // From here on no byte lands in the work's pages. Does nothing where this work does not wait for the piece.
  void cancel(WorkId id, TransferId transfer, std::uint32_t piece, CompletionQueue& completions);

  // Makes at most one readv, of at most max_work bytes of pages; of fewer if runs are so short that
  // scattering them costs more. kProtocol: the peer's bytes are no pieces. kPeerLost: the end of the stream.
  // `scratch` is used during the call alone.
  Step read(const StreamSocket& socket, std::uint64_t max_work, std::span<std::byte> scratch,
            CompletionQueue& completions);

  // Completes all works that are left, with `code`.
  void fail(Code code, const std::string& detail, CompletionQueue& completions);

  // Bytes until the piece on its way in is whole; 0 between pieces.
  std::uint64_t missing_nbytes() const noexcept {
    return in_piece_ ? header_.nbytes - data_have_ + sizeof trailer_ - trailer_have_ : 0;
  }

  std::size_t size() const noexcept { return posted_.size(); }
  std::uint64_t awaited_nbytes() const noexcept {
    return awaited_nbytes_;
  }  // of the pieces that works wait for

 private:
  struct Key {
    TransferId transfer;
    std::uint32_t piece;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    // Transfers and pieces are both numbered one by one; the multiplier keeps their sums apart.
    std::size_t operator()(const Key& key) const noexcept {
      return key.transfer * 0x9e37'79b9'7f4a'7c15u + key.piece;
    }
  };
  struct Posted {
    WorkId work;
    std::shared_ptr<const Move> move;
    std::byte* packed = nullptr;  // null: in its pages
    std::uint64_t nbytes = 0;     // of the piece
  };

  bool landing() const noexcept { return landing_.move != nullptr; }
  bool scatters() const noexcept { return landing() && scatters_; }
  void fill_window(std::uint64_t max_nbytes, std::span<std::byte> scratch);
  void clear_window();
  void consume(std::uint64_t nbytes);
  Status begin_piece();
  Status end_piece(CompletionQueue& completions);

  std::unordered_map<Key, Posted, KeyHash> posted_;  // including the one that is landing
  std::uint64_t awaited_nbytes_ = 0;

  // Between pieces in_piece_ is false.
  bool in_piece_ = false;
  PieceHeader header_;            // of the piece on its way in
  PieceHeader next_header_;       // filling up
  PieceTrailer trailer_;
  std::uint64_t header_have_ = 0;  // of next_header_
  std::uint64_t trailer_have_ = 0;
  std::uint64_t data_have_ = 0;   // of header_.nbytes
  Posted landing_{};              // no move: to scratch
  std::uint64_t work_of_a_byte_ = 1;  // of the landing piece
  bool scatters_ = false;         // the landing piece's runs are short
  RunCursor cursor_;              // behind the bytes that the window names or that were scattered

  std::vector<iovec> window_;     // from first_iovec_ on: where the next bytes of the piece go
  std::size_t first_iovec_ = 0;
  std::uint64_t window_nbytes_ = 0;
};

}  // namespace kvxfer::stream
