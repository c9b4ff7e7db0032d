// A file of one or two secrets, one a line. Errors about the file reveal no byte of them.
#pragma once

#include <cstddef>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer {

// 128 bits (kvxfer/shared_secret.py). Two lines of 2 KiB are longer than any real secret.
inline constexpr std::size_t kMinSecretNbytes = 16;
inline constexpr std::size_t kMaxSecretFileNbytes = 4096;

struct Secrets {
  std::string first, second;  // `second`: "" for none
  bool operator==(const Secrets&) const = default;
};

// kInvalidArgument: the file cannot be read, or has no line, three lines, or a line that is too short.
Result<Secrets> read_secret_file(const std::string& path);

}  // namespace kvxfer
