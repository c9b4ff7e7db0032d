// What encrypts one connected socket: bytes of callers in, ciphertext on the socket, and back.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <span>
#include <string>

namespace kvxfer {

// One thread at a time. The socket does not block and is its owner's, who closes it after this.
class Cipher {
 public:
  virtual ~Cipher() = default;

  // Fills `into` in order. Returns how many bytes came, 0 at the stream's end, or -1 with errno: EAGAIN until the
  // socket is readable again. Fewer than asked: all that has come is read, and the socket says when there is more.
  // As many as asked: call again, even where the socket is not readable.
  virtual ssize_t receive(std::span<const iovec> into) noexcept = 0;

  // Returns how many bytes it took, of which a part may wait here still (has_unsent()), or -1 with errno: EAGAIN until
  // the socket is writable again. What it took is not read any more. Without bytes it sends what waits, and returns 0.
  virtual ssize_t send(std::span<const iovec> bytes) noexcept = 0;
  // After fewer than were asked: the peer's bytes come in crumbs, and more wait here, of which the socket says nothing.
  virtual bool has_unread() const noexcept = 0;
  // True: call send() when the socket is writable, with or without bytes.
  virtual bool has_unsent() const noexcept = 0;

  // After EPROTO, in words.
  virtual std::string why() const = 0;
};

}  // namespace kvxfer
