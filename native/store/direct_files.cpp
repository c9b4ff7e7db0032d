#include "store/direct_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace kvxfer::store {
namespace {

// Like the slabs of a pool of memory, so that a few sizes of pages share a tier; but a file for each is not
// worth less than this.
constexpr std::uint64_t kNumSegments = 64;
constexpr std::uint64_t kLeastSegmentNbytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kMostSegmentNbytes = std::uint64_t{16} << 30;

int write_all(int fd, std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n == 0 ? EIO : errno;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

int read_all(int fd, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    // A controller that was given up answers with no bytes and no error.
    if (n <= 0) return n == 0 ? EIO : errno;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

struct FreeBlock {
  void operator()(std::byte* block) const noexcept { std::free(block); }
};
std::unique_ptr<std::byte, FreeBlock> aligned_block() {
  return std::unique_ptr<std::byte, FreeBlock>(
      static_cast<std::byte*>(std::aligned_alloc(kBlockNbytes, kBlockNbytes)));
}

}  // namespace

std::string DirectFiles::path(std::uint32_t segment, const char* ending) const {
  char name[32];
  std::snprintf(name, sizeof name, "/%05" PRIu32 "%s", segment, ending);
  return directory_ + name;
}

Result<std::unique_ptr<DirectFiles>> DirectFiles::open(const std::string& directory, std::uint64_t nbytes) {
  auto files = std::unique_ptr<DirectFiles>(new DirectFiles);
  files->directory_ = directory;
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
    return Status::from_errno("mkdir " + directory, errno);
  files->directory_fd_ = UniqueFd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat found{};
  if (!files->directory_fd_ || ::fstat(files->directory_fd_.get(), &found) != 0)
    return Status::from_errno("open " + directory, errno);
  if (found.st_uid != ::geteuid() || (found.st_mode & 077) != 0)
    return Status(Code::kRefused, directory +
                                      " holds pages of all tenants, so it must be this user's alone: "
                                      "chown it to the daemon's user, and chmod 700");
  files->lock_ =
      UniqueFd(::open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!files->lock_) return Status::from_errno("open " + directory + "/lock", errno);
  if (::flock(files->lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Status::from_errno("flock " + directory + "/lock", errno);
    return Status(Code::kRefused, "another process keeps pages in " + directory + ": name another directory");
  }
  if (const Status status = files->read_format(nbytes); !status.ok()) return status;
  files->look_for_direct();
  if (const Status status = files->open_existing(); !status.ok()) return status;
  return files;
}

Status DirectFiles::read_format(std::uint64_t nbytes) {
  const std::string file = directory_ + "/format";
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return Status::from_errno("open " + file, errno);
  char text[128] = {};
  const ssize_t n = ::pread(fd.get(), text, sizeof text - 1, 0);
  if (n < 0) return Status::from_errno("read " + file, errno);
  std::uint32_t version = 0;
  std::uint64_t segment_nbytes = 0;
  if (n == 0) {
    segment_nbytes = std::clamp(nbytes / kNumSegments, kLeastSegmentNbytes, kMostSegmentNbytes);
    segment_nbytes = std::min(segment_nbytes, nbytes) / kBlockNbytes * kBlockNbytes;
    const std::string line = "kvxfer pages " + std::to_string(kFormatVersion) + "\nsegment_nbytes " +
                             std::to_string(segment_nbytes) + "\n";
    const auto bytes = std::as_bytes(std::span(line));
    if (const int error = write_all(fd.get(), 0, bytes)) return Status::from_errno("write " + file, error);
    if (::fdatasync(fd.get()) != 0) return Status::from_errno("fdatasync " + file, errno);
  } else if (std::sscanf(text, "kvxfer pages %" SCNu32 "\nsegment_nbytes %" SCNu64, &version,
                         &segment_nbytes) < 1 ||
             version != kFormatVersion) {
    return Status(Code::kRefused,
                  version == 0 ? directory_ + " holds no pages of kvxfer: name another directory"
                               : directory_ + " has format " + std::to_string(version) +
                                     ", and this kvxfer reads and writes " + std::to_string(kFormatVersion) +
                                     ": use the kvxfer that wrote it, or an empty directory");
  }
  if (segment_nbytes < kBlockNbytes || segment_nbytes % kBlockNbytes != 0)
    return Status(Code::kRefused, file + " is damaged: remove the directory, its pages are lost");
  if (nbytes < segment_nbytes)
    return Status(Code::kRefused, directory_ + " has segments of " + std::to_string(segment_nbytes) +
                                      " bytes, which is more than the " + std::to_string(nbytes) +
                                      " bytes that it may take: allow more, or name an empty directory");
  shape_ = {segment_nbytes, static_cast<std::uint32_t>(nbytes / segment_nbytes)};
  return {};
}

void DirectFiles::look_for_direct() {
  const std::string file = directory_ + "/probe";
  probe_ = UniqueFd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_DIRECT, 0600));
  const int error = probe_ ? probe() : errno;
  direct_ = error == 0;
  if (direct_) return;
  why_not_direct_ = "the file system of " + directory_ + " has no direct I/O: " + words_of(error);
  probe_ = UniqueFd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
}

int DirectFiles::open_pages(std::uint32_t segment, int flags, UniqueFd& into) const {
  const int direct = direct_ ? O_DIRECT : 0;
  into = UniqueFd(
      ::open(path(segment, ".pages").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | direct | flags, 0600));
  return into ? 0 : errno;
}

Status DirectFiles::open_existing() {
  segments_ = std::vector<std::atomic<Opened*>>(shape_.num_segments);
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory_, error)) {
    const std::string ending = file.path().extension();
    if (ending != ".pages" && ending != ".heads") continue;
    if (std::strtoul(file.path().stem().c_str(), nullptr, 10) >= shape_.num_segments)
      (void)::unlink(file.path().c_str());
  }
  if (error) return Status(Code::kSystem, "list " + directory_ + ": " + error.message());
  for (std::uint32_t segment = 0; segment < shape_.num_segments; ++segment) {
    auto opened = std::make_unique<Opened>();
    opened->heads = UniqueFd(::open(path(segment, ".heads").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!opened->heads) {
      if (errno == ENOENT) continue;
      return Status::from_errno("open " + path(segment, ".heads"), errno);
    }
    if (const int why = open_pages(segment, 0, opened->pages)) {
      if (why == ENOENT) continue;  // its heads name nothing; it is made anew
      return Status::from_errno("open " + path(segment, ".pages"), why);
    }
    segments_[segment].store(opened.get(), std::memory_order_release);
    made_.push_back(std::move(opened));
  }
  return {};
}

Status DirectFiles::read_all_heads(
    const std::function<void(std::uint32_t, std::span<const std::byte>)>& each) const {
  std::vector<std::byte> bytes;
  for (std::uint32_t segment = 0; segment < shape_.num_segments; ++segment) {
    const Opened* const files = opened(segment);
    if (files == nullptr) continue;
    struct stat found{};
    if (::fstat(files->heads.get(), &found) != 0)
      return Status::from_errno("fstat " + path(segment, ".heads"), errno);
    const std::uint64_t most = head_offset(static_cast<std::uint32_t>(shape_.segment_nbytes / kBlockNbytes));
    bytes.resize(std::min<std::uint64_t>(static_cast<std::uint64_t>(found.st_size), most));
    // What cannot be read names no page.
    if (read_all(files->heads.get(), 0, bytes) == 0) each(segment, bytes);
  }
  return {};
}

int DirectFiles::make(std::uint32_t segment) {
  const std::lock_guard lock(making_);
  if (opened(segment) != nullptr) return 0;
  auto files = std::make_unique<Opened>();
  files->heads =
      UniqueFd(::open(path(segment, ".heads").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!files->heads) return errno;
  if (const int error = open_pages(segment, O_CREAT, files->pages)) return error;
  const auto nbytes = static_cast<off_t>(shape_.segment_nbytes);
  int error = ::fallocate(files->pages.get(), 0, 0, nbytes) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP) error = ::ftruncate(files->pages.get(), nbytes) == 0 ? 0 : errno;
  if (error != 0) {
    (void)::unlink(path(segment, ".pages").c_str());
    return error;
  }
  if (::fsync(directory_fd_.get()) != 0) return errno;
  segments_[segment].store(files.get(), std::memory_order_release);
  made_.push_back(std::move(files));
  return 0;
}

int DirectFiles::write_page(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) {
  const Opened* const files = opened(segment);
  return files == nullptr ? ENOENT : write_all(files->pages.get(), offset, bytes);
}

int DirectFiles::read_page(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) {
  const Opened* const files = opened(segment);
  return files == nullptr ? ENOENT : read_all(files->pages.get(), offset, bytes);
}

int DirectFiles::write_head(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) {
  const Opened* const files = opened(segment);
  return files == nullptr ? ENOENT : write_all(files->heads.get(), offset, bytes);
}

int DirectFiles::read_head(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) const {
  const Opened* const files = opened(segment);
  return files == nullptr ? ENOENT : read_all(files->heads.get(), offset, bytes);
}

int DirectFiles::sync(std::uint32_t segment) {
  const Opened* const files = opened(segment);
  if (files == nullptr) return ENOENT;
  return ::fdatasync(files->pages.get()) == 0 && ::fdatasync(files->heads.get()) == 0 ? 0 : errno;
}

int DirectFiles::probe() {
  const auto block = aligned_block();
  if (!block || !probe_) return ENOMEM;
  const std::span<std::byte> bytes(block.get(), kBlockNbytes);
  constexpr std::byte kProbed{0x6b};
  std::fill(bytes.begin(), bytes.end(), kProbed);
  if (const int error = write_all(probe_.get(), 0, bytes)) return error;
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  if (const int error = read_all(probe_.get(), 0, bytes)) return error;
  return bytes.front() == kProbed && bytes.back() == kProbed ? 0 : EIO;
}

}  // namespace kvxfer::store
