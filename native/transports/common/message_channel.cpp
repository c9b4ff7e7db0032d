#include "transports/common/message_channel.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvxfer {

SharedFd share_copy_of(int fd) { return share(UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0))); }

std::size_t MessageChannel::num_unread() const noexcept {
  int unread_nbytes = 0;
  if (::ioctl(socket_.get(), SIOCOUTQ, &unread_nbytes) != 0) return SIZE_MAX;
  return outbox_.size() + (static_cast<std::size_t>(unread_nbytes) + incoming_.size() - 1) / incoming_.size();
}

void MessageChannel::queue(std::span<const std::byte> message, SharedFd attached) {
  outbox_.push_back({{message.begin(), message.end()}, std::move(attached)});
}

ssize_t MessageChannel::send(msghdr& message) noexcept {
  if (cipher_ != nullptr) return cipher_->send({message.msg_iov, message.msg_iovlen});
  return ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t MessageChannel::receive(msghdr& message) noexcept {
  if (cipher_ == nullptr) return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  message.msg_controllen = 0;
  return cipher_->receive({message.msg_iov, message.msg_iovlen});
}

Status MessageChannel::failure(const char* call) const {
  if (cipher_ != nullptr && errno == EPROTO) return {Code::kRailFailed, cipher_->why()};
  return Status::from_errno(call, errno);
}

Status MessageChannel::flush() {
  if (cipher_ != nullptr && cipher_->has_unsent()) static_cast<void>(cipher_->send({}));
  while (!outbox_.empty()) {
    Outgoing& next = outbox_.front();
    iovec rest{next.message.data() + sent_nbytes_, next.message.size() - sent_nbytes_};
    msghdr header{};
    header.msg_iov = &rest;
    header.msg_iovlen = 1;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
    if (next.attached != nullptr && sent_nbytes_ == 0) {  // a descriptor goes with the first byte
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = next.attached->get();
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    const ssize_t sent = send(header);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (sent < 0 && errno == ETOOMANYREFS)
      return {Code::kRailFailed,
              "too many descriptors are in flight between processes of this user: raise "
              "RLIMIT_NOFILE"};
    if (sent < 0) return failure("sendmsg");
    sent_nbytes_ += static_cast<std::size_t>(sent);
    if (sent_nbytes_ < next.message.size()) continue;
    sent_nbytes_ = 0;
    outbox_.pop_front();
  }
  return {};
}

Status MessageChannel::flush(Reactor& reactor) {
  if (Status flushed = flush(); !flushed.ok()) return flushed;
  if (const bool needs_room = wants_room(); needs_room != std::exchange(watches_room_, needs_room))
    reactor.modify(socket_.get(), needs_room ? EPOLLIN | EPOLLOUT : EPOLLIN);
  return {};
}

Result<MessageChannel::Received> MessageChannel::receive() {
  for (;;) {
    // Reads no further than this message: the next one may bring a descriptor of its own.
    iovec rest{incoming_.data() + incoming_nbytes_, incoming_.size() - incoming_nbytes_};
    msghdr header{};
    header.msg_iov = &rest;
    header.msg_iovlen = 1;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t received = receive(header);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received{};
    if (received < 0) return failure("recvmsg");
    if (received == 0) return Status(Code::kRailFailed, "it closed its end");

    // Take every descriptor that arrived before judging, so that none is left open.
    bool too_many = false;
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
        UniqueFd arrived(fd);
        too_many = too_many || incoming_fd_;
        incoming_fd_ = std::move(arrived);
      }
    }
    if (too_many) return Status(Code::kRailFailed, "it sent two descriptors in one message");
    if (header.msg_flags & MSG_CTRUNC)
      return Status(Code::kRailFailed,
                    "a descriptor could not be received: this process has as many files open as "
                    "RLIMIT_NOFILE allows, or the peer sent several at once");

    incoming_nbytes_ += static_cast<std::size_t>(received);
    if (incoming_nbytes_ < incoming_.size()) continue;
    incoming_nbytes_ = 0;
    return Received{incoming_, std::move(incoming_fd_)};
  }
}

}  // namespace kvxfer
