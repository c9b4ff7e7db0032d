#include "core/control/frame_socket.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>

namespace kvxfer {
namespace {

constexpr std::size_t kReadNbytes = 64 * 1024;

// The rest of a turn is copied if it is no larger than a frame of the handshake, so that it takes only as
// much memory as it needs while it waits.
constexpr std::size_t kMostCopiedNbytes = wire::kHeaderNbytes + wire::kMaxHandshakeBody + wire::kMacNbytes;

// A buffer that grew for a large frame is kept for the next one if it is no larger than this.
constexpr std::size_t kMostKeptNbytes = 1024 * 1024;

// The most frames of one peer in a turn: a loud peer must not keep the gate. 64 frames are answered in 0.1
// ms or so.
constexpr int kTurnFrames = 64;

// Wakes the reader of a ring: a header of zeros, which no frame has.
constexpr std::array<std::byte, wire::kHeaderNbytes> kWake{};

// Says in words what came instead of a frame; the first bytes show a record of TLS.
std::string stranger_in_words(wire::ByteSpan have, const Status& status) {
  const bool is_tls = have.size() >= 2 && (have[0] == std::byte{0x15} || have[0] == std::byte{0x16}) &&
                      have[1] == std::byte{0x03};
  if (!is_tls) return status.message();
  return "it speaks TLS, but this agent has no certificates: give certificates to both agents (option tls) "
         "or to neither";
}

const std::string kNoMemory = "there is not enough memory to handle its frames";

bool is_local(int fd) noexcept {
  int domain = 0;
  socklen_t nbytes = sizeof domain;
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &nbytes) == 0 && domain == AF_UNIX;
}

}  // namespace

FrameSocket::FrameSocket(Reactor& reactor, UniqueFd fd, Owner& owner, bool connecting, bool exact,
                         std::unique_ptr<tls::Channel> channel)
    : reactor_(reactor),
      fd_(std::move(fd)),
      owner_(owner),
      connecting_(connecting),
      exact_(exact),
      local_(!exact && is_local(fd_.get())),
      channel_(std::move(channel)) {
  fd_.guard();
  if (channel_ != nullptr) channel_->use(fd_.get());
}

FrameSocket::~FrameSocket() { close(); }

Status FrameSocket::start() {
  writing_ = connecting_ || channel_ != nullptr || out_begin_ < out_.size();
  return reactor_.add(fd_.get(), EPOLLIN | (writing_ ? EPOLLOUT : 0u), *this);
}

bool FrameSocket::hung_up() const noexcept {
  pollfd asked{.fd = fd_.get(), .events = POLLRDHUP, .revents = 0};
  return ::poll(&asked, 1, 0) == 1;
}

void FrameSocket::want(bool write) {
  if (write == writing_) return;
  writing_ = write;
  reactor_.modify(fd_.get(), EPOLLIN | (write ? EPOLLOUT : 0u));
}

void FrameSocket::send(wire::Bytes&& frame) {
  if (!fd_) return;
  if (out_begin_ == out_.size()) {
    if (outbox_ != nullptr && !offered_ && outbox_->push(frame)) {
      pushed_ = true;
      return;
    }
    out_ = std::move(frame);
    out_begin_ = 0;
  } else {
    // If the reader always leaves a byte, what it has read must not pile up: at most as much again is
    // kept.
    if (out_begin_ > out_.size() / 2) {
      out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_begin_));
      out_begin_ = 0;
    }
    out_.insert(out_.end(), frame.begin(), frame.end());
  }
}

// Sends as much of the rest as the socket takes; the descriptor of a ring goes with the first byte.
ssize_t FrameSocket::transmit() {
  std::byte* const rest = out_.data() + out_begin_;
  const std::size_t nbytes = out_.size() - out_begin_;
  if (channel_ != nullptr) {
    const iovec bytes{rest, nbytes};
    return channel_->send({&bytes, 1});
  }
  if (!offered_) return ::send(fd_.get(), rest, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  iovec bytes{rest, nbytes};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = offered_.get();
  std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno != ETOOMANYREFS) return sent;
  offered_.reset();  // the mapping stays
  if (sent >= 0) return sent;
  inbox_.reset();  // too many descriptors are under way: it goes without one
  errno = EINTR;
  return -1;
}

template <class Work>
bool FrameSocket::attempt(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    fail(kNoMemory);
    return false;
  }
}

void FrameSocket::flush() {
  attempt([this] { return transmit_all(), true; });
}

void FrameSocket::transmit_all() {
  if (std::exchange(pushed_, false) && outbox_->reader_sleeps() && out_begin_ == out_.size()) {
    out_.assign(kWake.begin(), kWake.end());
    out_begin_ = 0;
  }
  if (connecting_ || is_securing()) return;
  if (channel_ != nullptr && channel_->has_unsent()) static_cast<void>(channel_->send({}));
  while (fd_ && out_begin_ < out_.size()) {
    const ssize_t sent = transmit();
    if (sent > 0) {
      out_begin_ += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const std::size_t left = out_.size() - out_begin_;
      unread_.release();
      unread_ = Charge::take(budget_, Resource::kBytes, left);
      if (left > kMaxUnsent || !unread_)
        return fail("it does not read its socket: " + std::to_string(left) + " bytes are unsent");
      return want(true);
    } else if (errno == EPIPE || errno == ECONNRESET) {
      // It closed. Its last words, perhaps with the reason, may be unread: the reader comes to them,
      // and then to the end.
      out_.clear();
      out_begin_ = 0;
    } else if (errno != EINTR) {
      return fail(reason(errno));
    }
  }
  if (fd_) {
    unread_.release();
    want(channel_ != nullptr && channel_->has_unsent());
  }
}

void FrameSocket::close() noexcept {
  if (!fd_) return;
  // The peer is not to read a ring of ours any more, and last words do not wait for one.
  offered_.reset();
  if (!connecting_ && !is_securing() && out_begin_ < out_.size()) (void)!transmit();
  reactor_.remove(fd_.get());
  fd_.reset();
}

Status FrameSocket::redial(UniqueFd fd, bool connecting) {
  if (fd_) reactor_.remove(fd_.get());
  fd_ = std::move(fd);
  fd_.guard();
  if (channel_ != nullptr) channel_->use(fd_.get());
  connecting_ = connecting;
  return start();
}

UniqueFd FrameSocket::release() noexcept {
  reactor_.remove(fd_.get());
  return std::move(fd_);
}

void FrameSocket::fail(const std::string& why) {
  if (!fd_) return;
  reactor_.remove(fd_.get());
  fd_.reset();
  owner_.on_closed(why);
}

void FrameSocket::on_ready(std::uint32_t events) {
  if (connecting_) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return static_cast<void>(attempt([&] { return fail(words_of(error)), true; }));
    if ((events & EPOLLOUT) == 0) return;
    connecting_ = false;
  }
  if (is_securing()) return static_cast<void>(attempt([this] { return wait_for_turn(), true; }));
  if (events & EPOLLOUT) flush();
  if (fd_ && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) attempt([this] { return read(), true; });
}

// What the last turn left comes first in the buffer, unless it is so large that it has a buffer of its own.
void FrameSocket::borrow_buffer() {
  if (in_.size() > kMostCopiedNbytes) return;
  std::vector<std::byte>& buffer = owner_.read_buffer();
  if (buffer.size() < in_end_) buffer.resize(kMostCopiedNbytes);
  std::copy_n(in_.begin(), in_end_, buffer.begin());
  in_.swap(buffer);
  room_.release();
}

void FrameSocket::return_buffer() {
  const std::size_t left = fd_ ? in_end_ - in_begin_ : 0;
  std::vector<std::byte> rest;
  if (left > kMostCopiedNbytes)
    rest.swap(in_);
  else
    rest.assign(in_.data() + in_begin_, in_.data() + in_begin_ + left);
  if (std::vector<std::byte>& buffer = owner_.read_buffer();
      buffer.capacity() < in_.capacity() && in_.capacity() <= kMostKeptNbytes)
    in_.swap(buffer);
  in_ = std::move(rest);
  if (left <= kMostCopiedNbytes) {
    in_begin_ = 0;
    in_end_ = left;
  }
  room_.release();
  if (left == 0) return;
  room_ = Charge::take(budget_, Resource::kBytes, in_.capacity());
  if (!room_) fail("there is no room for its next frame: " + budget_->in_words(Resource::kBytes));
}

void FrameSocket::read() {
  borrow_buffer();
  read_all();
  return_buffer();
}

void FrameSocket::read_all() {
  // A bounded number of reads, and no further read before what was read has been delivered.
  for (int round = 0; fd_ && !has_more_ && round < 8; ++round) {
    // From a stranger no more than a frame of the handshake.
    std::size_t wanted = std::min(kReadNbytes, wire::kHeaderNbytes + owner_.max_body() + wire::kMacNbytes);
    const wire::ByteSpan have(in_.data() + in_begin_, in_end_ - in_begin_);
    if (exact_) {
      const Result<wire::Header> header = wire::decode_header(have, owner_.max_body());
      if (!header.ok() && header.status().code() != Code::kAgain)
        return fail(stranger_in_words(have, header.status()));
      wanted = (header.ok() ? header.value().frame_nbytes() : wire::kHeaderNbytes) - have.size();
    }
    if (in_begin_ != 0) {
      std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
      in_end_ -= in_begin_;
      in_begin_ = 0;
    }
    if (!make_room(in_end_ + wanted)) return;
    const ssize_t got = receive(in_.data() + in_end_, wanted);
    if (got <= 0) {
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
      const std::string why = got == 0
                                  ? "it closed the connection without a goodbye: it was killed, or it crashed"
                                  : reason(errno);
      while (fd_ && deliver()) {}  // first the frames that the peer wrote to the ring before that
      return fail(why);
    }
    in_end_ += static_cast<std::size_t>(got);
    // Whatever frame it is: any frame over the socket also announces what is in the ring.
    if (inbox_ != nullptr) owner_.on_announced();
    take_turn();
    const bool has_unread = channel_ != nullptr && channel_->has_unread();
    if (static_cast<std::size_t>(got) < wanted && !exact_ && !has_unread) return;
  }
  // A channel may have read more than it passed on; the socket does not announce that.
  if (channel_ != nullptr && fd_ && !has_more_) wait_for_turn();
}

void FrameSocket::charge(std::shared_ptr<Budget> budget) {
  room_.release();  // taken anew at the end of the turn, when the peer has proved something
  budget_ = std::move(budget);
}

bool FrameSocket::make_room(std::size_t nbytes) {
  if (in_.capacity() < nbytes) {
    const std::size_t room = std::max(nbytes, 2 * in_.capacity());
    room_.release();
    room_ = Charge::take(budget_, Resource::kBytes, room);
    if (!room_) {
      fail("there is no room for its next frame: " + budget_->in_words(Resource::kBytes));
      return false;
    }
    in_.reserve(room);
  }
  if (in_.size() < nbytes) in_.resize(nbytes);
  return true;
}

ssize_t FrameSocket::receive(std::byte* into, std::size_t nbytes) {
  if (channel_ != nullptr) {
    const iovec bytes{into, nbytes};
    return channel_->receive({&bytes, 1});
  }
  // An offer comes once; the kernel closes descriptors that were not asked for.
  if (!local_ || outbox_ != nullptr || arrived_) return ::recv(fd_.get(), into, nbytes, MSG_DONTWAIT);
  iovec bytes{into, nbytes};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  // Room for one: the kernel drops others.
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return got;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      arrived_ = UniqueFd(fd);
    }
  }
  if (arrived_ && inbox_ != nullptr) use_ring(std::move(arrived_));
  return got;
}

bool FrameSocket::share_memory() {
  if (!local_) return false;
  Result<std::unique_ptr<RingReader>> inbox = RingReader::create();
  if (!inbox.ok()) return false;  // the socket alone does, too
  inbox_ = std::move(inbox).value();
  offered_ = inbox_->take_fd();
  if (arrived_) use_ring(std::move(arrived_));
  return true;
}

void FrameSocket::use_ring(UniqueFd fd) {
  // An offer that cannot be used counts as none.
  if (Result<std::unique_ptr<RingWriter>> outbox = RingWriter::map(fd.get()); outbox.ok())
    outbox_ = std::move(outbox).value();
}

bool FrameSocket::read_ring() {
  if (!fd_ || inbox_ == nullptr || inbox_->empty()) return false;
  bool any = false;
  attempt([&] {
    for (int i = 0; i < kTurnFrames && fd_ && deliver(); ++i) any = true;
    return true;
  });
  return any;
}

void FrameSocket::take_turn() {
  for (int i = 0; i < kTurnFrames; ++i)
    if (!fd_ || !deliver()) return;
  if (fd_) wait_for_turn();
}

void FrameSocket::wait_for_turn() {
  if (std::exchange(has_more_, true)) return;
  owner_.on_more();
}

void FrameSocket::read_more() {
  has_more_ = false;
  attempt([this] {
    if (is_securing()) return secure(), true;
    take_turn();
    return_buffer();
    if (channel_ != nullptr && fd_ && !has_more_) read();
    return true;
  });
}

void FrameSocket::secure() {
  switch (channel_->shake_hands()) {
    case tls::Channel::Step::kAgain: return want(channel_->has_unsent());
    case tls::Channel::Step::kFailed: return fail(reason(errno));
    case tls::Channel::Step::kDone: break;
  }
  owner_.on_secure();
  if (fd_) transmit_all();
  if (fd_) read();
}

std::string FrameSocket::reason(int error) const {
  const std::string why = channel_ != nullptr && error == EPROTO ? channel_->why() : "";
  return why.empty() ? words_of(error) : why;
}

bool FrameSocket::fall_asleep() noexcept {
  if (!fd_ || inbox_ == nullptr) return true;
  inbox_->fall_asleep();
  return !inbox_->has(num_delivered_);
}

void FrameSocket::wake_up() noexcept {
  if (inbox_ != nullptr) inbox_->wake_up();
}

bool FrameSocket::deliver() {
  if (inbox_ != nullptr) {
    // The number says whether the ring's frame or the socket's comes next.
    const Result<bool> next = inbox_->next(num_delivered_, owner_.max_body(), from_ring_);
    if (!next.ok()) {
      fail(next.status().message());
      return false;
    }
    if (next.value()) {
      ++num_delivered_;
      owner_.on_frame(from_ring_);
      return true;
    }
    while (in_end_ - in_begin_ >= kWake.size() &&
           std::equal(kWake.begin(), kWake.end(), in_.data() + in_begin_))
      in_begin_ += kWake.size();
  }
  const wire::ByteSpan have(in_.data() + in_begin_, in_end_ - in_begin_);
  if (have.size() < wire::kHeaderNbytes) return false;
  const Result<wire::Header> header = wire::decode_header(have, owner_.max_body());
  if (!header.ok()) {
    fail(stranger_in_words(have, header.status()));
    return false;
  }
  const std::size_t nbytes = header.value().frame_nbytes();
  if (have.size() < nbytes) return false;
  in_begin_ += nbytes;
  ++num_delivered_;
  owner_.on_frame(have.first(nbytes));
  return true;
}

}  // namespace kvxfer
