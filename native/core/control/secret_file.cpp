#include "core/control/secret_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "kvxfer/transport.h"

namespace kvxfer {
namespace {

std::string_view without_end(std::string_view text, std::string_view end) {
  const std::size_t last = text.find_last_not_of(end);
  return text.substr(0, last == text.npos ? 0 : last + 1);
}

}  // namespace

Result<Secrets> read_secret_file(const std::string& path) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "the secret's file (" + path + ") " + why);
  };
  // Non-blocking, so that a FIFO in its place holds up nothing.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return bad("cannot be read: " + words_of(errno));
  std::array<char, kMaxSecretFileNbytes + 1> bytes;
  std::size_t nbytes = 0;
  while (nbytes < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + nbytes, bytes.size() - nbytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return bad("cannot be read: " + words_of(errno));
    if (got == 0) break;
    nbytes += static_cast<std::size_t>(got);
  }
  if (nbytes > kMaxSecretFileNbytes)
    return bad("has more than " + std::to_string(kMaxSecretFileNbytes) + " bytes: write one or two lines");
  std::string_view left = without_end({bytes.data(), nbytes}, "\r\n");
  Secrets secrets;
  for (std::string* const into : {&secrets.first, &secrets.second}) {
    const std::size_t end = left.find('\n');
    *into = without_end(left.substr(0, end), "\r");
    if (into->size() < kMinSecretNbytes)
      return bad("has a line of " + std::to_string(into->size()) + " bytes, but a secret has at least " +
                 std::to_string(kMinSecretNbytes));
    if (end == left.npos) return secrets;
    left.remove_prefix(end + 1);
  }
  return bad("has more than two lines: write one or two secrets, one per line");
}

}  // namespace kvxfer
