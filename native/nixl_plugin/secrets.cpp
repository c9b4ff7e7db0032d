#include "nixl_plugin/secrets.h"

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "core/system/random.h"

namespace kvxfer::nixl {
namespace {

constexpr std::size_t kMostNbytes = 4096;
constexpr std::size_t kLeastNbytes = 32;

Status bad(const std::string& words) {
  return {Code::kInvalidArgument, words + "; or give both agents a secret by KVXFER_SECRET_FILE"};
}

std::string environment(const char* name) {
  const char* const found = std::getenv(name);
  return found == nullptr ? "" : found;
}

std::string stripped(std::string text) {
  const char* const blanks = " \t\r\n";
  text.erase(0, std::min(text.find_first_not_of(blanks), text.size()));
  text.erase(text.find_last_not_of(blanks) + 1);
  return text;
}

std::string read_all(int fd) {
  std::string out(kMostNbytes, '\0');
  const ssize_t num = ::read(fd, out.data(), out.size());
  out.resize(num < 0 ? 0 : static_cast<std::size_t>(num));
  return out;
}

Result<std::filesystem::path> user_folder() {
  struct stat found{};
  const std::string runtime = environment("XDG_RUNTIME_DIR"), cache = environment("XDG_CACHE_HOME");
  if (runtime.starts_with('/') && ::stat(runtime.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
      found.st_uid == ::geteuid())
    return std::filesystem::path(runtime) / "kvxfer";
  if (cache.starts_with('/')) return std::filesystem::path(cache) / "kvxfer";
  std::string home = environment("HOME");
  if (home.empty())
    if (const passwd* const entry = ::getpwuid(::geteuid())) home = entry->pw_dir;
  if (home.empty())
    return bad(
        "neither XDG_RUNTIME_DIR nor XDG_CACHE_HOME nor HOME names a folder for this user's own secret");
  return std::filesystem::path(home) / ".cache" / "kvxfer";
}

// "" if there is no file.
Result<std::string> read_own(int folder, const std::filesystem::path& path) {
  const UniqueFd file(::openat(folder, "secret", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) {
    if (errno == ENOENT) return std::string();
    return bad(path.string() + " cannot be read: " + words_of(errno));
  }
  struct stat found{};
  if (::fstat(file.get(), &found) != 0 || found.st_uid != ::geteuid() || !S_ISREG(found.st_mode))
    return bad(path.string() + " is not this user's own file");
  if ((found.st_mode & 0077) != 0)
    return bad("others may read " + path.string() + ": delete it, and a new secret is made (mode 0600)");
  std::string secret = stripped(read_all(file.get()));
  if (secret.size() < kLeastNbytes)
    return bad(path.string() + " holds no secret: delete it, and a new one is made");
  return secret;
}

Status make_own(int folder, const std::filesystem::path& path) {
  std::array<std::byte, 40> drawn{};
  if (Status status = fill_random(drawn); !status.ok()) return status;
  std::string hex;
  for (const std::byte each : drawn) {
    constexpr char kDigits[] = "0123456789abcdef";
    hex += kDigits[std::to_integer<int>(each >> 4)];
    hex += kDigits[std::to_integer<int>(each & std::byte{15})];
  }
  const std::string own = ".secret-" + hex.substr(0, 16), secret = hex.substr(16) + "\n";
  const UniqueFd file(::openat(folder, own.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool written =
      file && ::write(file.get(), secret.data(), secret.size()) == static_cast<ssize_t>(secret.size());
  // Creates the file whole or not at all, and never replaces one that another process made.
  const bool linked = written && (::linkat(folder, own.c_str(), folder, "secret", 0) == 0 || errno == EEXIST);
  const int error = errno;
  ::unlinkat(folder, own.c_str(), 0);
  return linked ? Status() : bad(path.string() + " cannot be made: " + std::strerror(error));
}

Result<std::string> user_secret() {
  const Result<std::filesystem::path> place = user_folder();
  if (!place.ok()) return place.status();
  std::error_code ignored;
  std::filesystem::create_directories(place.value().parent_path(), ignored);
  (void)::mkdir(place.value().c_str(), 0700);
  const UniqueFd folder(::open(place.value().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found{};
  if (!folder || ::fstat(folder.get(), &found) != 0 || found.st_uid != ::geteuid() ||
      (found.st_mode & 0022) != 0)
    return bad(
        place.value().string() +
        " cannot hold this user's own secret: it must be a folder of this user that others cannot write to");
  const std::filesystem::path path = place.value() / "secret";
  Result<std::string> secret = read_own(folder.get(), path);
  if (!secret.ok() || !secret.value().empty()) return secret;
  if (Status made = make_own(folder.get(), path); !made.ok()) return made;
  return read_own(folder.get(), path);
}

}  // namespace

Status find_secret(RuntimeOptions& options) {
  if (const std::string path = environment("KVXFER_SECRET_FILE"); !path.empty()) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) return {Code::kInvalidArgument, "KVXFER_SECRET_FILE " + path + ": " + words_of(errno)};
    std::istringstream lines(read_all(file.get()));
    std::vector<std::string> secrets;
    for (std::string line; std::getline(lines, line);)
      if (line = stripped(line); !line.empty()) secrets.push_back(line);
    if (secrets.empty() || secrets.size() > 2)
      return {Code::kInvalidArgument,
              "KVXFER_SECRET_FILE " + path + " must hold one or two secrets, one per line"};
    options.secret = secrets.front();
    if (secrets.size() == 2) options.second_secret = secrets.back();
    options.secret_file = std::filesystem::absolute(path).string();
    return {};
  }
  options.secret = environment("KVXFER_SECRET");
  if (!options.secret.empty()) return {};
  Result<std::string> own = user_secret();
  if (!own.ok()) return own.status();
  options.user_secret = std::move(own).value();
  return {};
}

}  // namespace kvxfer::nixl
