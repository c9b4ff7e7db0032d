// The socket of one stream: plain, or behind a cipher.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <span>
#include <string>
#include <string_view>

#include "kvxfer/cipher.h"
#include "kvxfer/status.h"

namespace kvxfer::stream {

class StreamSocket {
 public:
  StreamSocket(int fd, Cipher* cipher) noexcept : fd_(fd), cipher_(cipher) {}

  // Like sendmsg and readv on a non-blocking socket: the number of bytes, or -1 with errno.
  ssize_t send(std::span<iovec> bytes) const noexcept {
    if (cipher_ != nullptr) return cipher_->send(bytes);
    msghdr message{};
    message.msg_iov = bytes.data();
    message.msg_iovlen = bytes.size();
    ssize_t count;
    do {
      count = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    return count;
  }
  ssize_t receive(std::span<iovec> into) const noexcept {
    if (cipher_ != nullptr) return cipher_->receive(into);
    ssize_t count;
    do {
      count = ::readv(fd_, into.data(), static_cast<int>(into.size()));
    } while (count < 0 && errno == EINTR);
    return count;
  }
  // Whether bytes are waiting although a read returned fewer than were asked for.
  bool has_unread() const noexcept { return cipher_ != nullptr && cipher_->has_unread(); }
  Status failure(std::string_view call, int error) const {
    if (cipher_ != nullptr && error == EPROTO) return {Code::kRailFailed, cipher_->why()};
    return Status::from_errno(call, error);
  }

 private:
  int fd_;
  Cipher* cipher_;
};

}  // namespace kvxfer::stream
