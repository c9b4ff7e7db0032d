// A rail's socket for everything but pages. It carries whole messages of one size; on a unix socket each may
// bring one descriptor.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "core/system/fork_guard.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A descriptor of ours that goes to peers.
using SharedFd = std::shared_ptr<const GuardedFd>;
inline SharedFd share(UniqueFd fd) { return std::make_shared<const GuardedFd>(std::move(fd)); }
SharedFd share_copy_of(int fd);  // holds no descriptor if the process can open no more

class MessageChannel {
 public:
  MessageChannel(UniqueFd socket, std::size_t message_nbytes, std::shared_ptr<Cipher> cipher = nullptr)
      : socket_(std::move(socket)), cipher_(std::move(cipher)), incoming_(message_nbytes) {}
  int fd() const noexcept { return socket_.get(); }
  GuardedFd release() noexcept { return std::move(socket_); }  // ends the channel, not the socket
  void close() noexcept {  // also drops descriptors that were not sent yet
    socket_ = {};
    outbox_.clear();
  }

  void queue(std::span<const std::byte> message, SharedFd attached = nullptr);
  // Writes what the socket takes. Not ok: the channel is dead.
  Status flush();
  // As flush(), for a socket that this reactor watches: it also watches for room while more is to be written.
  Status flush(Reactor& reactor);
  std::size_t num_queued() const noexcept { return outbox_.size(); }
  // The messages that the peer has not read, at most; over TCP those that its host has not taken. Until they
  // are read the kernel holds their descriptors.
  std::size_t num_unread() const noexcept;

  struct Received {
    std::span<const std::byte> message;  // valid until the next call; empty: no whole message yet
    UniqueFd fd;  // if one came with it
  };
  // The next whole message. Not ok: the peer closed the socket, or sent more descriptors than it may.
  Result<Received> receive();

 private:
  struct Outgoing {
    std::vector<std::byte> message;
    SharedFd attached;  // held until the message is sent
  };
  ssize_t send(msghdr& message) noexcept;
  ssize_t receive(msghdr& message) noexcept;
  bool wants_room() const noexcept {
    return !outbox_.empty() || (cipher_ != nullptr && cipher_->has_unsent());
  }
  Status failure(const char* call) const;  // by errno

  GuardedFd socket_;
  std::shared_ptr<Cipher> cipher_;  // null: the socket is plain. Descriptors need a plain one
  std::deque<Outgoing> outbox_;
  std::size_t sent_nbytes_ = 0;  // of outbox_.front()
  bool watches_room_ = false;
  std::vector<std::byte> incoming_;
  std::size_t incoming_nbytes_ = 0;
  UniqueFd incoming_fd_;
};

}  // namespace kvxfer
