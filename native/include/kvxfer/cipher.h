// Encrypts one connected socket: callers' bytes go in, ciphertext goes out on the socket, and back.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <span>
#include <string>

namespace kvxfer {

// Used by one thread at a time. The socket does not block. It belongs to the cipher's owner, which closes it
// after the cipher is gone.
class Cipher {
 public:
  virtual ~Cipher() = default;

  // Fills `into` in order. Returns how many bytes came, 0 at the stream's end, or -1 with errno: EAGAIN
  // until the socket is readable again. If fewer bytes came than were asked for, all that had arrived is
  // read, and the socket becomes readable when there is more. If as many came as were asked for, call it
  // again, even if the socket is not readable.
  virtual ssize_t receive(std::span<const iovec> into) noexcept = 0;

  // Returns how many bytes it took, or -1 with errno: EAGAIN until the socket is writable again. It does
  // not read again the bytes that it took; a part of them may still wait here (has_unsent()). Called
  // without bytes, it sends what waits and returns 0.
  virtual ssize_t send(std::span<const iovec> bytes) noexcept = 0;
  // True if receive() returned fewer bytes than were asked for and yet more wait here: the peer sends its
  // bytes in crumbs. The socket does not announce these bytes.
  virtual bool has_unread() const noexcept = 0;
  // True: call send() when the socket is writable, with or without bytes.
  virtual bool has_unsent() const noexcept = 0;

  // The reason in words, after EPROTO.
  virtual std::string why() const = 0;
};

}  // namespace kvxfer
