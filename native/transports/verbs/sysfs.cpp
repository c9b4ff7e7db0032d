#include "transports/verbs/sysfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <memory>

#include "kvxfer/transport.h"

namespace kvxfer::verbs::sysfs {
namespace {

constexpr bool is_digit(char letter) noexcept { return letter >= '0' && letter <= '9'; }

// The end of the run of digits, or of non-digits, that begins at `from`.
std::size_t end_of_run(std::string_view text, std::size_t from) noexcept {
  std::size_t end = from;
  while (end < text.size() && is_digit(text[end]) == is_digit(text[from])) ++end;
  return end;
}

std::string_view without_zeros(std::string_view digits) noexcept {
  const std::size_t first = digits.find_first_not_of('0');
  return first == std::string_view::npos ? std::string_view() : digits.substr(first);
}

// Negative: left comes first.
int compare_runs(std::string_view left, std::string_view right) noexcept {
  if (!is_digit(left[0]) || !is_digit(right[0])) return left.compare(right);
  const std::string_view high = without_zeros(left), low = without_zeros(right);
  if (high.size() != low.size()) return high.size() < low.size() ? -1 : 1;
  return high.compare(low);
}

std::atomic<const char*> replacement{nullptr};

}  // namespace

const char* root() noexcept {
  const char* const other = replacement.load();
  return other == nullptr ? "/sys" : other;
}

void replace_root(const char* other) noexcept { replacement.store(other); }

std::string read_line(const std::string& path) {
  // Without O_NONBLOCK this would wait for a pipe that stands in the tree.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return {};
  std::array<char, 4096> page;
  ssize_t nbytes;
  do {
    nbytes = ::read(file.get(), page.data(), page.size());
  } while (nbytes < 0 && errno == EINTR);
  if (nbytes <= 0) return {};
  std::string_view line(page.data(), static_cast<std::size_t>(nbytes));
  line = line.substr(0, line.find_first_of(std::string_view("\n\0", 2)));
  const std::size_t first = line.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return std::string(line.substr(first, line.find_last_not_of(" \t\r") - first + 1));
}

std::optional<std::int64_t> read_number(const std::string& path, int base) {
  const std::string line = read_line(path);
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(line.c_str(), &end, base);
  if (end == line.c_str() || errno != 0) return std::nullopt;
  return number;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), &::closedir);
  if (entries == nullptr) return names;
  while (const dirent* entry = ::readdir(entries.get()))
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  std::sort(names.begin(), names.end(), natural_less);
  return names;
}

std::optional<int> index_of(std::string_view name) noexcept {
  int index = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  if (error != std::errc() || end != name.data() + name.size() || index < 0) return std::nullopt;
  return index;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::vector<std::string> resolve(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), &::free);
  std::vector<std::string> parts;
  if (real == nullptr) return parts;
  std::string_view rest(real.get());
  while (!rest.empty()) {
    const std::size_t end = rest.find('/');
    if (end != 0) parts.emplace_back(rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  return parts;
}

bool natural_less(std::string_view left, std::string_view right) noexcept {
  const std::string_view whole_left = left, whole_right = right;
  while (!left.empty() && !right.empty()) {
    const std::size_t left_end = end_of_run(left, 0), right_end = end_of_run(right, 0);
    const int order = compare_runs(left.substr(0, left_end), right.substr(0, right_end));
    if (order != 0) return order < 0;
    left.remove_prefix(left_end);
    right.remove_prefix(right_end);
  }
  if (left.empty() != right.empty()) return left.empty();
  return whole_left < whole_right;  // "01" and "1": any fixed order will do
}

}  // namespace kvxfer::verbs::sysfs
