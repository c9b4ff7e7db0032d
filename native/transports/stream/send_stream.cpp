// The sending half of one stream rail.
#include "transports/stream/send_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>

namespace kvxfer::stream {
namespace {

// The kernel's limit for one call; with more it returns EMSGSIZE.
constexpr std::size_t kMaxIovecs = IOV_MAX;

// Pads a piece that was cancelled on its way, because the peer was told its length. 64 KiB: nine iovecs for a
// piece of half a MiB.
constexpr std::array<std::byte, 64 * 1024> kZeros{};

// Bytes gathered for one system call: few enough to be in the L2 cache still when the kernel copies them.
constexpr std::uint64_t kGatheredNbytes = 256 * 1024;

}  // namespace

std::uint64_t SendStream::push(const Work& work, const std::byte* packed) {
  Frame frame;
  frame.work = work.id;
  frame.move = work.move;
  frame.packed = packed;
  frame.gathered = frame.packed == nullptr && gathers_src(*frame.move->program);
  if (frame.packed == nullptr) frame.work_of_a_byte = work_of_a_byte(*frame.move->program);
  if (frame.gathered) {
    frame.packer = Packer(*frame.move, work.piece);
    frame.least_room = Packer::least_room(*frame.move->program);
  } else if (frame.packed == nullptr)
    frame.cursor = RunCursor(*frame.move, work.piece, Side::kSrc);
  frame.header.transfer = work.move->transfer;
  frame.header.nbytes = piece_nbytes(*work.move->program, work.move->grid.piece(work.piece));
  frame.header.piece = frame.trailer.piece = work.piece;
  frames_.push_back(std::move(frame));
  left_nbytes_ += frames_.back().nbytes();
  return num_gone_ + frames_.size() - 1;
}

void SendStream::cancel(std::uint64_t number, CompletionQueue& completions) {
  if (number < num_gone_ || frames_[number - num_gone_].cancelled) return;
  Frame& frame = frames_[number - num_gone_];
  if (window_nbytes_ != 0) clear_window();  // it may name pages of this work
  frame.cancelled = true;
  frame.trailer.end = PieceEnd::kEnded;
  if (frame.sent == 0) left_nbytes_ -= std::exchange(frame.header.nbytes, 0);  // the trailer is enough
  // If part of the trailer is out already, it said `held`, and that was true: every page had been read. The
  // rest of those eight bytes must then stay the same, or the peer takes the stream for broken.
  if (frame.sent > sizeof(PieceHeader) + frame.header.nbytes) frame.trailer.end = PieceEnd::kHeld;
  frame.move.reset();
  completions.work(frame.work, Code::kCancelled);
}

Step SendStream::write(const StreamSocket& socket, std::uint64_t max_work, CompletionQueue& completions) {
  fill_window(max_work);
  const std::uint64_t work = std::max(kCallWork, window_nbytes_ * window_work_of_a_byte_);
  const ssize_t count = socket.send(std::span(window_).subspan(first_iovec_));
  if (count < 0) {
    const int error = errno;
    if (error == EAGAIN || error == EWOULDBLOCK) return {{}, 0, work, true};
    return {socket.failure("sendmsg", error), 0, work, false};
  }
  const auto nbytes = static_cast<std::uint64_t>(count);
  const bool would_block = nbytes < window_nbytes_;
  consume(nbytes, completions);
  return {{}, nbytes, work, would_block};
}

void SendStream::fail(Code code, const std::string& detail, CompletionQueue& completions) {
  for (const Frame& frame : frames_)
    if (!frame.cancelled) completions.work(frame.work, code, detail);
  left_nbytes_ = 0;
  num_gone_ += frames_.size();
  frames_.clear();
  num_named_ = 0;
  window_.clear();
  first_iovec_ = 0;
  window_nbytes_ = 0;
  gathered_left_ = 0;
}

// Makes the window name up to max_work, after what earlier calls left in it.
void SendStream::fill_window(std::uint64_t max_work) {
  if (first_iovec_ != 0) {
    window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(first_iovec_));
    first_iovec_ = 0;
  }
  if (window_nbytes_ == 0) window_work_of_a_byte_ = 1;
  while (num_named_ < frames_.size()) {
    Frame& frame = frames_[num_named_];
    window_work_of_a_byte_ = std::max(window_work_of_a_byte_, frame.work_of_a_byte);
    const std::uint64_t max_nbytes = std::max<std::uint64_t>(1, max_work / window_work_of_a_byte_);
    if (window_nbytes_ >= max_nbytes) break;
    name_frame(frame, max_nbytes);
    if (frame.named < frame.nbytes()) break;
    ++num_named_;
  }
}

void SendStream::name_frame(Frame& frame, std::uint64_t max_nbytes) {
  const std::uint64_t header_end = sizeof frame.header;
  const std::uint64_t data_end = header_end + frame.header.nbytes;
  if (frame.named < header_end) {
    if (window_.size() >= kMaxIovecs) return;
    name(reinterpret_cast<const std::byte*>(&frame.header) + frame.named, header_end - frame.named, frame);
  }
  while (frame.named < data_end) {
    if (window_nbytes_ >= max_nbytes || window_.size() >= kMaxIovecs) return;
    const std::uint64_t room = std::min(data_end - frame.named, max_nbytes - window_nbytes_);
    if (frame.cancelled) {
      name(kZeros.data(), std::min<std::uint64_t>(room, kZeros.size()), frame);
      continue;
    }
    if (frame.packed != nullptr) {
      name(frame.packed + (frame.named - header_end), room, frame);
      continue;
    }
    if (frame.gathered) {
      if (!name_gathered(frame)) return;
      continue;
    }
    const std::uint64_t nbytes = frame.cursor.append(window_, kMaxIovecs, room);
    frame.named += nbytes;
    window_nbytes_ += nbytes;
    if (nbytes == 0) return;
  }
  if (window_.size() >= kMaxIovecs) return;
  name(reinterpret_cast<const std::byte*>(&frame.trailer) + (frame.named - data_end),
       frame.nbytes() - frame.named, frame);
}

// Gathers the next bytes of the frame and names them. False while earlier gathered bytes are still to be
// sent.
bool SendStream::name_gathered(Frame& frame) {
  if (gathered_left_ != 0) return false;
  const std::uint64_t room = std::max(kGatheredNbytes / frame.work_of_a_byte, frame.least_room);
  if (gathered_.size() < room) gathered_.resize(std::max(room, kGatheredNbytes));
  gathered_left_ = frame.packer.pack(gathered_.data(), room);
  name(gathered_.data(), gathered_left_, frame);
  return gathered_left_ != 0;
}

void SendStream::name(const void* bytes, std::uint64_t nbytes, Frame& frame) {
  window_.push_back({const_cast<void*>(bytes), nbytes});
  frame.named += nbytes;
  window_nbytes_ += nbytes;
}

// Drops what the window names and has not sent; fill_window names it anew.
void SendStream::clear_window() {
  for (std::size_t i = 0; i < frames_.size() && frames_[i].named != 0; ++i) {
    Frame& frame = frames_[i];
    frame.named = frame.sent;
    if (frame.cancelled || frame.packed != nullptr) continue;
    const std::uint64_t out = frame.sent > sizeof frame.header
                                  ? std::min(frame.sent - sizeof frame.header, frame.header.nbytes)
                                  : 0;
    if (frame.gathered) {
      frame.packer = Packer(*frame.move, frame.header.piece);
      frame.packer.skip(out);
    } else {
      frame.cursor = RunCursor(*frame.move, frame.header.piece, Side::kSrc);
      frame.cursor.skip(out);
    }
  }
  num_named_ = 0;
  window_.clear();
  first_iovec_ = 0;
  window_nbytes_ = 0;
  gathered_left_ = 0;
}

void SendStream::consume(std::uint64_t nbytes, CompletionQueue& completions) {
  window_nbytes_ -= nbytes;
  left_nbytes_ -= nbytes;
  for (std::uint64_t left = nbytes; left != 0;) {
    iovec& first = window_[first_iovec_];
    const std::uint64_t taken = std::min<std::uint64_t>(left, first.iov_len);
    if (first.iov_base >= gathered_.data() && first.iov_base < gathered_.data() + gathered_.size())
      gathered_left_ -= taken;
    first.iov_base = static_cast<std::byte*>(first.iov_base) + taken;
    first.iov_len -= taken;
    left -= taken;
    if (first.iov_len == 0) ++first_iovec_;
  }
  for (std::uint64_t left = nbytes; left != 0;) {
    Frame& frame = frames_.front();
    const std::uint64_t taken = std::min(left, frame.nbytes() - frame.sent);
    frame.sent += taken;
    left -= taken;
    if (frame.sent < frame.nbytes()) break;
    if (!frame.cancelled) completions.work(frame.work, Code::kOk);
    frames_.pop_front();
    ++num_gone_;
    --num_named_;
  }
}

}  // namespace kvxfer::stream
