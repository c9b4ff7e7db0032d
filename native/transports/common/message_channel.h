// A rail's socket for what is not pages: whole messages of one size, each with at most one descriptor where it is a
// unix socket.
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
SharedFd share_copy_of(int fd);  // points to no descriptor where there is no room for one

class MessageChannel {
 public:
  MessageChannel(UniqueFd socket, std::size_t message_nbytes, std::shared_ptr<Cipher> cipher = nullptr)
      : socket_(std::move(socket)), cipher_(std::move(cipher)), incoming_(message_nbytes) {}
  int fd() const noexcept { return socket_.get(); }
  GuardedFd release() noexcept { return std::move(socket_); }  // the end of the channel, not of the socket
  void close() noexcept {  // with the descriptors that were to go out
    socket_ = {};
    outbox_.clear();
  }

  void queue(std::span<const std::byte> message, SharedFd attached = nullptr);
  // Writes what the socket takes. Not ok: the channel is dead.
  Status flush();
  // The same, of a socket that this reactor watches: for room as well, while there is more to write.
  Status flush(Reactor& reactor);
  std::size_t num_queued() const noexcept { return outbox_.size(); }
  // Has the peer read all that was queued? Until then the kernel holds the descriptors that it has not.
  bool is_read() const noexcept;

  struct Received {
    std::span<const std::byte> message;  // until the next call; empty: nothing whole has come yet
    UniqueFd fd;  // if one came with it
  };
  // The next whole message. Not ok: closed, or more descriptors than may come.
  Result<Received> receive();

 private:
  struct Outgoing {
    std::vector<std::byte> message;
    SharedFd attached;  // held until it is on its way
  };
  ssize_t send(msghdr& message) noexcept;
  ssize_t receive(msghdr& message) noexcept;
  bool wants_room() const noexcept {
    return !outbox_.empty() || (cipher_ != nullptr && cipher_->has_unsent());
  }
  Status failure(const char* call) const;  // by errno

  GuardedFd socket_;
  std::shared_ptr<Cipher> cipher_;  // null: the socket is plain. Descriptors go over plain ones alone
  std::deque<Outgoing> outbox_;
  std::size_t sent_nbytes_ = 0;  // of outbox_.front()
  bool watches_room_ = false;
  std::vector<std::byte> incoming_;
  std::size_t incoming_nbytes_ = 0;
  UniqueFd incoming_fd_;
};

}  // namespace kvxfer
