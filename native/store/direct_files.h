// A tier's files in a directory: `lock`, `format`, and of each segment `NNNNN.pages` and `NNNNN.heads`.
//
// Pages pass by the page cache (O_DIRECT) where the file system can; heads lie in it, so that they survive the
// process, and the disk takes many of them at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "store/file_job.h"

namespace kvxfer::store {

class DirectFiles final : public Files {
 public:
  // What the directory's `format` says, or what it says from now on.
  struct Shape {
    std::uint64_t segment_nbytes = 0;
    std::uint32_t num_segments = 0;
  };

  // Makes the directory (0700) if there is none. kRefused: another process uses it; it is of another version;
  // it is not this user's alone. kSystem: a system call failed.
  //
  // Segments keep the size that they were made with. If fewer are asked for than there are, the last ones are
  // removed with their pages.
  static Result<std::unique_ptr<DirectFiles>> open(const std::string& directory, std::uint64_t nbytes);

  const Shape& shape() const noexcept { return shape_; }
  bool is_direct() const noexcept { return direct_; }
  // Why pages go through the page cache; "" if they do not.
  const std::string& why_not_direct() const noexcept { return why_not_direct_; }

  // Another process may have the directory; nothing of it runs here any more.
  void unlock() noexcept { lock_.reset(); }

  // Gives the heads of each segment that there is, in one piece.
  Status read_all_heads(const std::function<void(std::uint32_t, std::span<const std::byte>)>& each) const;

  int make(std::uint32_t segment) override;
  int write_page(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) override;
  int read_page(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) override;
  int write_head(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) override;
  int read_head(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) const;
  int sync(std::uint32_t segment) override;
  int probe() override;

 private:
  struct Opened { UniqueFd pages, heads; };

  DirectFiles() = default;
  std::string path(std::uint32_t segment, const char* ending) const;
  Status read_format(std::uint64_t nbytes);
  Status open_existing();
  void look_for_direct();
  int open_pages(std::uint32_t segment, int flags, UniqueFd& into) const;
  // The segment's descriptors; null if it was never made. They stay open until the end.
  Opened* opened(std::uint32_t segment) const noexcept {
    return segments_[segment].load(std::memory_order_acquire);
  }

  std::string directory_;
  UniqueFd directory_fd_, lock_, probe_;
  Shape shape_;
  bool direct_ = false;
  std::string why_not_direct_;
  std::mutex making_;
  std::vector<std::unique_ptr<Opened>> made_;
  std::vector<std::atomic<Opened*>> segments_;
};

}  // namespace kvxfer::store
