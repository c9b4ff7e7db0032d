#include "core/frame_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/fork_guard.h"

namespace kvxfer {
namespace {

constexpr std::size_t kReadNbytes = 64 * 1024;

}  // namespace

FrameSocket::FrameSocket(Reactor& reactor, UniqueFd fd, Owner& owner, bool connecting, bool exact)
    : reactor_(reactor), fd_(std::move(fd)), owner_(owner), connecting_(connecting), exact_(exact) {
  guard_fd(fd_.get());
}

FrameSocket::~FrameSocket() { close(); }

Status FrameSocket::start() {
  writing_ = connecting_ || out_begin_ < out_.size();
  return reactor_.add(fd_.get(), EPOLLIN | (writing_ ? EPOLLOUT : 0u), *this);
}

void FrameSocket::want(bool write) {
  if (write == writing_) return;
  writing_ = write;
  reactor_.modify(fd_.get(), EPOLLIN | (write ? EPOLLOUT : 0u));
}

void FrameSocket::send(wire::Bytes frame) {
  if (!fd_) return;
  if (out_begin_ == out_.size()) {
    out_ = std::move(frame);
    out_begin_ = 0;
  } else {
    out_.insert(out_.end(), frame.begin(), frame.end());
  }
}

void FrameSocket::flush() {
  while (fd_ && !connecting_ && out_begin_ < out_.size()) {
    const ssize_t sent =
        ::send(fd_.get(), out_.data() + out_begin_, out_.size() - out_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      out_begin_ += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (out_.size() - out_begin_ > kMaxUnsent) return fail("it does not read what it is sent");
      return want(true);
    } else if (errno != EINTR) {
      return fail(std::strerror(errno));
    }
  }
  if (fd_ && !connecting_) want(false);
}

void FrameSocket::close() noexcept {
  if (!fd_) return;
  if (!connecting_ && out_begin_ < out_.size())
    (void)!::send(fd_.get(), out_.data() + out_begin_, out_.size() - out_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
  reactor_.remove(fd_.get());
  unguard_fd(fd_.get());
  fd_.reset();
}

UniqueFd FrameSocket::release() noexcept {
  reactor_.remove(fd_.get());
  unguard_fd(fd_.get());
  return std::move(fd_);
}

void FrameSocket::fail(const std::string& why) {
  if (!fd_) return;
  reactor_.remove(fd_.get());
  unguard_fd(fd_.get());
  fd_.reset();
  owner_.on_closed(why);
}

void FrameSocket::on_ready(std::uint32_t events) {
  if (connecting_) {
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return fail(std::strerror(error));
    if ((events & EPOLLOUT) == 0) return;
    connecting_ = false;
  }
  if (events & EPOLLOUT) flush();
  if (fd_ && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read();
}

void FrameSocket::read() {
  // A bounded number of reads: one loud peer must not keep the gate.
  for (int round = 0; fd_ && round < 8; ++round) {
    std::size_t wanted = kReadNbytes;
    const wire::ByteSpan have(in_.data() + in_begin_, in_end_ - in_begin_);
    if (exact_) {
      const Result<wire::Header> header = wire::decode_header(have, owner_.max_body());
      if (!header.ok() && header.status().code() != Code::kAgain) return fail(header.status().message());
      wanted = (header.ok() ? header.value().frame_nbytes() : wire::kHeaderNbytes) - have.size();
    }
    if (in_begin_ != 0) {
      std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
      in_end_ -= in_begin_;
      in_begin_ = 0;
    }
    if (in_.size() < in_end_ + wanted) in_.resize(in_end_ + wanted);
    const ssize_t got = ::recv(fd_.get(), in_.data() + in_end_, wanted, MSG_DONTWAIT);
    if (got == 0) return fail("it closed the connection");
    if (got < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
      return fail(std::strerror(errno));
    }
    in_end_ += static_cast<std::size_t>(got);
    while (fd_ && deliver()) {}
    if (static_cast<std::size_t>(got) < wanted && !exact_) return;
  }
}

bool FrameSocket::deliver() {
  const wire::ByteSpan have(in_.data() + in_begin_, in_end_ - in_begin_);
  const Result<wire::Header> header = wire::decode_header(have, owner_.max_body());
  if (!header.ok()) {
    if (header.status().code() != Code::kAgain) fail(header.status().message());
    return false;
  }
  const std::size_t nbytes = header.value().frame_nbytes();
  if (have.size() < nbytes) return false;
  in_begin_ += nbytes;
  owner_.on_frame(have.first(nbytes));
  return true;
}

}  // namespace kvxfer
