// A tier of pages in a directory's files: a FileTier, and threads that do its I/O. Any thread may call it. No call
// waits for the disk except open() and close().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kvxfer/status.h"
#include "store/direct_files.h"
#include "store/file_tier.h"

namespace kvxfer::store {

class PageFiles {
 public:
  struct Options {
    std::string directory;
    std::uint64_t nbytes = 0;  // of all pages together
    std::uint32_t num_threads = 16;
    // The tenant of each salt that there is, by the salt's number: pages of others are not found again.
    std::vector<std::uint32_t> tenant_of_salt;
    std::uint64_t stalled_ns = 10'000'000'000;
    std::uint64_t retry_ns = 5'000'000'000;
  };
  struct Figures {
    FileTier::Counts counts;
    FileTier::Health health = FileTier::Health::kUp;
    std::string why;
    std::uint64_t nbytes = 0, used_nbytes = 0, num_pages = 0, num_resting = 0;
    std::uint32_t num_running = 0, num_waiting = 0;
    std::uint64_t read_p50_ns = 0, read_p99_ns = 0;
  };

  // Finds what is in the directory. Errors are DirectFiles::open's.
  static Result<std::shared_ptr<PageFiles>> open(const Options& options);
  // Reads and writes that run go on in their threads, which touch nothing else of the process by then.
  ~PageFiles();
  PageFiles(const PageFiles&) = delete;
  PageFiles& operator=(const PageFiles&) = delete;

  const DirectFiles& files() const noexcept;
  // Readable when take() has something.
  int event_fd() const noexcept;

  FileTier::Answer write(const PageDigest& digest, std::uint32_t salt, std::string_view key,
                         std::span<std::byte> page, bool durable, std::uint64_t ticket);
  FileTier::Answer read(const PageDigest& digest, std::span<std::byte> page, std::uint64_t worth_ns,
                        std::uint64_t ticket);
  FileTier::Answer sync(const PageDigest& digest, std::uint64_t ticket);
  FileTier::Answer drop(const PageDigest& digest, std::uint64_t ticket);
  // For each digest whether its page is there; `counts`: as a look-up, and as a use of what is there.
  std::vector<bool> look_up(std::span<const PageDigest> digests, bool counts);
  void set_tenant(std::uint32_t salt, std::uint32_t tenant);
  void set_bound(std::uint32_t tenant, std::uint64_t most_nbytes);
  std::uint64_t tenant_nbytes(std::uint32_t tenant) const;
  std::uint64_t read_ns(std::uint64_t nbytes) const;
  Figures figures();
  void take(std::vector<FileTier::Ended>& ends, std::vector<SlotIndex::Gone>& evicted);

  struct Listed {
    Place place;
    SlotHead head;
  };
  // Whole pages in the order of their places, `most` of them from `from` on; of one tenant if one is given.
  // Reads their heads, so it may wait for the disk.
  std::vector<Listed> list(Place from, std::optional<std::uint32_t> tenant, std::size_t most) const;

  // Begins nothing more, fails what waits, and waits for what runs, but not longer than `within_ns`. False: the disk
  // still reads or writes pages, whose memory must stay.
  bool close(std::uint64_t within_ns);

 private:
  struct State;
  PageFiles() = default;

  // The threads own it, too: one may be inside a system call that never returns.
  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace kvxfer::store
