#include "core/system/random.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kvxfer/transport.h"

namespace kvxfer {
namespace {

// Reads until everything is there. An interrupted read is repeated; any other error ends it. Returns 0 or
// errno.
template <class Read>
int fill_by(std::span<std::byte> bytes, const Read& read) {
  while (!bytes.empty()) {
    const ssize_t got = read(bytes);
    if (got > 0)
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    else if (got == 0 || errno != EINTR)
      return got == 0 ? EIO : errno;
  }
  return 0;
}

}  // namespace

Status fill_random(std::span<std::byte> bytes) {
  const int refused =
      fill_by(bytes, [](std::span<std::byte> rest) { return ::getrandom(rest.data(), rest.size(), 0); });
  if (refused == 0) return {};
  const UniqueFd device(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  const int unread = !device ? errno : fill_by(bytes, [&](std::span<std::byte> rest) {
    return ::read(device.get(), rest.data(), rest.size());
  });
  if (unread == 0) return {};
  return {Code::kSystem, std::string("no random bytes are available: getrandom says ") +
                             std::strerror(refused) + " and /dev/urandom " + std::strerror(unread) +
                             "; allow one of the two in the sandbox"};
}

}  // namespace kvxfer
