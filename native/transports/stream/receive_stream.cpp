// The receiving half of one stream rail.
#include "transports/stream/receive_stream.h"

#include <algorithm>
#include <cerrno>
#include <climits>

#include "core/copy/pack.h"

namespace kvxfer::stream {
namespace {

// Two iovecs are left for the trailer and the next header, which the call that ends a piece also reads.
constexpr std::size_t kMaxRunIovecs = IOV_MAX - 2;

}  // namespace

bool ReceiveStream::push(const Work& work, std::byte* packed) {
  const std::uint64_t nbytes = piece_nbytes(*work.move->program, work.move->grid.piece(work.piece));
  const Posted posted{work.id, work.move, packed, nbytes};
  if (!posted_.try_emplace(Key{work.move->transfer, work.piece}, posted).second) return false;
  awaited_nbytes_ += nbytes;
  return true;
}

void ReceiveStream::cancel(WorkId id, TransferId transfer, std::uint32_t piece,
                           CompletionQueue& completions) {
  const auto found = posted_.find(Key{transfer, piece});
  if (found == posted_.end() || found->second.work != id) return;
  if (landing() && landing_.work == id) {
    clear_window();  // it names pages of this work
    landing_ = {};
  }
  awaited_nbytes_ -= found->second.nbytes;
  posted_.erase(found);
  completions.work(id, Code::kCancelled);
}

Step ReceiveStream::read(const StreamSocket& socket, std::uint64_t max_work, std::span<std::byte> scratch,
                         CompletionQueue& completions) {
  const std::uint64_t work_of_a_byte = landing() && landing_.packed == nullptr ? work_of_a_byte_ : 1;
  fill_window(std::max<std::uint64_t>(1, max_work / work_of_a_byte), scratch);
  const std::uint64_t work = std::max(kCallWork, window_nbytes_ * work_of_a_byte);
  std::uint64_t asked = window_nbytes_;
  const std::size_t num_runs = window_.size();
  const bool to_the_end = in_piece_ && data_have_ + window_nbytes_ == header_.nbytes;
  if (to_the_end) {
    window_.push_back(
        {reinterpret_cast<std::byte*>(&trailer_) + trailer_have_, sizeof trailer_ - trailer_have_});
    asked += sizeof trailer_ - trailer_have_;
  }
  // While a piece is on its way, header_ is still that piece's; the next header is read beside it.
  if (to_the_end || !in_piece_) {
    window_.push_back(
        {reinterpret_cast<std::byte*>(&next_header_) + header_have_, sizeof next_header_ - header_have_});
    asked += sizeof next_header_ - header_have_;
  }
  const ssize_t count = socket.receive(std::span(window_).subspan(first_iovec_));
  const int error = errno;
  window_.resize(num_runs);
  if (count < 0) {
    if (error == EAGAIN || error == EWOULDBLOCK) return {{}, 0, work, true};
    return {socket.failure("readv", error), 0, work, false};
  }
  if (count == 0) {
    const char* where = in_piece_ || header_have_ != 0 ? "the peer closed its end in the middle of a piece"
                                                       : "the peer closed its end";
    return {Status(Code::kPeerLost, where), 0, work, false};
  }

  const bool would_block = static_cast<std::uint64_t>(count) < asked && !socket.has_unread();
  Step step{{}, static_cast<std::uint64_t>(count), work, would_block};
  std::uint64_t left = step.nbytes;
  const std::uint64_t data = std::min(left, window_nbytes_);
  if (scatters()) cursor_.scatter(scratch.data(), data);
  consume(data);
  if (scatters()) clear_window();  // other peers use scratch after this call
  left -= data;
  if (to_the_end) {
    const std::uint64_t taken = std::min<std::uint64_t>(left, sizeof trailer_ - trailer_have_);
    trailer_have_ += taken;
    left -= taken;
    if (trailer_have_ == sizeof trailer_) step.status = end_piece(completions);
    if (!step.status.ok()) return step;
  }
  header_have_ += left;
  if (header_have_ == sizeof next_header_) step.status = begin_piece();
  return step;
}

void ReceiveStream::fail(Code code, const std::string& detail, CompletionQueue& completions) {
  for (const auto& [key, posted] : posted_) completions.work(posted.work, code, detail);
  posted_.clear();
  awaited_nbytes_ = 0;
  landing_ = {};
  clear_window();
}

// Makes the window name the next bytes of the piece, after what earlier calls left in it.
void ReceiveStream::fill_window(std::uint64_t max_nbytes, std::span<std::byte> scratch) {
  if (!in_piece_) return;
  if (first_iovec_ != 0) {
    window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(first_iovec_));
    first_iovec_ = 0;
  }
  while (window_nbytes_ < max_nbytes && window_.size() < kMaxRunIovecs) {
    const std::uint64_t unnamed = header_.nbytes - data_have_ - window_nbytes_;
    std::uint64_t nbytes = std::min(unnamed, max_nbytes - window_nbytes_);
    if (nbytes == 0) return;
    if (landing() && landing_.packed != nullptr) {
      window_.push_back({landing_.packed + data_have_ + window_nbytes_, nbytes});
    } else if (landing() && !scatters_) {
      nbytes = cursor_.append(window_, kMaxRunIovecs, nbytes);
      if (nbytes == 0) return;
    } else {
      if (scatters_ && !window_.empty()) return;  // scratch has one place for each byte
      nbytes = std::min<std::uint64_t>(nbytes, scratch.size());
      window_.push_back({scratch.data(), nbytes});
    }
    window_nbytes_ += nbytes;
  }
}

// Drops what the window names and has not received; fill_window names it anew, in scratch.
void ReceiveStream::clear_window() {
  window_.clear();
  first_iovec_ = 0;
  window_nbytes_ = 0;
}

void ReceiveStream::consume(std::uint64_t nbytes) {
  window_nbytes_ -= nbytes;
  data_have_ += nbytes;
  while (nbytes != 0) {
    iovec& first = window_[first_iovec_];
    const std::uint64_t taken = std::min<std::uint64_t>(nbytes, first.iov_len);
    first.iov_base = static_cast<std::byte*>(first.iov_base) + taken;
    first.iov_len -= taken;
    nbytes -= taken;
    if (first.iov_len == 0) ++first_iovec_;
  }
}

Status ReceiveStream::begin_piece() {
  header_ = next_header_;
  header_have_ = 0;
  if (header_.magic != PieceHeader::kMagic || header_.reserved != 0 || header_.reserved2 != 0)
    return Status(Code::kProtocol, "the peer sent bytes that are not a piece's header");
  if (header_.nbytes > kMaxPieceNbytes)
    return Status(Code::kProtocol, "the peer announced a piece of " + std::to_string(header_.nbytes) +
                                       " bytes; the limit is " + std::to_string(kMaxPieceNbytes));
  in_piece_ = true;
  data_have_ = 0;
  trailer_have_ = 0;
  clear_window();
  const auto found = posted_.find(Key{header_.transfer, header_.piece});
  if (found == posted_.end()) return {};  // cancelled, or fenced: to scratch
  const std::uint64_t expected = found->second.nbytes;
  if (header_.nbytes != 0 && header_.nbytes != expected)
    return Status(Code::kProtocol, "the peer announced " + std::to_string(header_.nbytes) +
                                       " bytes for piece " + std::to_string(header_.piece) + " of transfer " +
                                       std::to_string(header_.transfer) + ", but its program has " +
                                       std::to_string(expected));
  landing_ = found->second;
  work_of_a_byte_ = work_of_a_byte(*landing_.move->program);
  scatters_ = landing_.packed == nullptr && scatters_dst(*landing_.move->program);
  cursor_ = RunCursor(*landing_.move, header_.piece, Side::kDst);
  return {};
}

Status ReceiveStream::end_piece(CompletionQueue& completions) {
  in_piece_ = false;
  const Posted landed = std::exchange(landing_, {});
  if (trailer_.piece != header_.piece ||
      (trailer_.end != PieceEnd::kHeld && trailer_.end != PieceEnd::kEnded))
    return Status(Code::kProtocol, "the peer sent bytes that are not a piece's trailer");
  if (!landed.move) return {};
  if (trailer_.end == PieceEnd::kHeld && header_.nbytes != landed.nbytes)
    return Status(Code::kProtocol, "the peer reported a piece as whole, but sent none of its bytes");
  awaited_nbytes_ -= landed.nbytes;
  posted_.erase(Key{header_.transfer, header_.piece});
  if (trailer_.end == PieceEnd::kHeld)
    completions.work(landed.work, Code::kOk);
  else
    completions.work(landed.work, Code::kLeaseEnded,
                     "the right to the source's pages ended while they were sent");
  return {};
}

}  // namespace kvxfer::stream
