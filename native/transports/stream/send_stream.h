// The sending half of one stream rail. Pieces go out in the order of their posts, as many in one system call
// as fit. Long runs go straight from their pages. Short runs, and runs that need conversion, are gathered
// into a buffer. The buffer belongs to this stream and waits for its socket alone, so no two transfers can
// wait for each other. A piece that was posted packed goes out as it lies.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/copy/pack.h"
#include "core/copy/run_cursor.h"
#include "transports/common/completion_queue.h"
#include "transports/stream/piece_frame.h"
#include "transports/stream/step.h"
#include "transports/stream/stream_socket.h"

namespace kvxfer::stream {

class SendStream {
 public:
  // `packed`: where the piece lies packed; null: in its pages. Returns the number by which it can be
  // cancelled.
  std::uint64_t push(const Work& work, const std::byte* packed);

  // From here on no page of the work is read. The trailer tells the peer. Does nothing if the piece is out
  // already.
  void cancel(std::uint64_t number, CompletionQueue& completions);

  // Makes at most one sendmsg, of at most max_work bytes; of fewer if runs are so short that naming them
  // costs more than sending them. Completes the works whose bytes are all in the socket.
  Step write(const StreamSocket& socket, std::uint64_t max_work, CompletionQueue& completions);

  // Completes all works that are left, with `code`.
  void fail(Code code, const std::string& detail, CompletionQueue& completions);

  bool empty() const noexcept { return frames_.empty(); }
  std::size_t size() const noexcept { return frames_.size(); }
  std::uint64_t left_nbytes() const noexcept { return left_nbytes_; }  // bytes that are still to be sent

 private:
  struct Frame {
    WorkId work = 0;
    std::shared_ptr<const Move> move;
    const std::byte* packed = nullptr;  // null: in its pages
    bool gathered = false;
    std::uint64_t work_of_a_byte = 1;
    std::uint64_t least_room = 0;  // room that its gathering needs in the buffer
    RunCursor cursor;  // behind the bytes that the window names; if gathered, it is `packer`'s
    Packer packer;
    PieceHeader header;
    PieceTrailer trailer;
    std::uint64_t named = 0;  // bytes of header, runs and trailer that the window names or has sent
    std::uint64_t sent = 0;
    bool cancelled = false;   // its work has completed, and its pages are not ours any more

    std::uint64_t nbytes() const noexcept { return sizeof header + header.nbytes + sizeof trailer; }
  };

  void fill_window(std::uint64_t max_work);
  void name_frame(Frame& frame, std::uint64_t max_nbytes);
  void name(const void* bytes, std::uint64_t nbytes, Frame& frame);
  bool name_gathered(Frame& frame);
  void clear_window();
  void consume(std::uint64_t nbytes, CompletionQueue& completions);

  // A deque: the window points into its headers and trailers, so they must not move.
  std::deque<Frame> frames_;
  std::uint64_t left_nbytes_ = 0;
  std::uint64_t num_gone_ = 0;  // frames that have left the queue; the number of its first frame
  std::size_t num_named_ = 0;  // frames at the front that the window names up to their end
  std::vector<iovec> window_;  // from first_iovec_ on: what the next sendmsg is given
  std::size_t first_iovec_ = 0;
  std::uint64_t window_nbytes_ = 0;
  std::uint64_t window_work_of_a_byte_ = 1;  // the greatest of the frames that the window names
  std::vector<std::byte> gathered_;  // empty until runs are short
  std::uint64_t gathered_left_ = 0;  // bytes of it that the window still names
};

}  // namespace kvxfer::stream
