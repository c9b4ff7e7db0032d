// A rail's unix socket for what is not pages: whole messages of one size, each with at most one descriptor.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

using SharedFd = std::shared_ptr<const UniqueFd>;

class MessageChannel {
 public:
  MessageChannel(UniqueFd socket, std::size_t message_nbytes)
      : socket_(std::move(socket)), incoming_(message_nbytes) {}
  int fd() const noexcept { return socket_.get(); }
  UniqueFd release() noexcept { return std::move(socket_); }  // the end of the channel, not of the socket

  void queue(std::span<const std::byte> message, SharedFd attached = nullptr);
  // Writes what the socket takes. Not ok: the channel is dead.
  Status flush();
  // The same, of a socket that this reactor watches: for room as well, while there is more to write.
  Status flush(Reactor& reactor);
  bool wants_write() const noexcept { return !outbox_.empty(); }
  std::size_t num_queued() const noexcept { return outbox_.size(); }

  struct Received {
    std::span<const std::byte> message;  // until the next call; empty: nothing whole has come yet
    UniqueFd fd;                         // if one came with it
  };
  // The next whole message. Not ok: closed, or more descriptors than may come.
  Result<Received> receive();

 private:
  struct Outgoing {
    std::vector<std::byte> message;
    SharedFd attached;  // held until it is on its way
  };
  UniqueFd socket_;
  std::deque<Outgoing> outbox_;
  std::size_t sent_nbytes_ = 0;  // of outbox_.front()
  bool watches_room_ = false;
  std::vector<std::byte> incoming_;
  std::size_t incoming_nbytes_ = 0;
  UniqueFd incoming_fd_;
};

}  // namespace kvxfer
