// A tier of pages in files: decides which page is written where, which is read, which goes, and whether the disk
// is fit to be used. It does no I/O and reads no clock: a host takes its jobs by next(), runs them with
// perform(), and hands them back to done(). So a test replays any order of ends, and any crash, from a seed.
//
// A page is found when it is whole, and from the call of drop() on it is not. A page that comes back damaged, or
// not at all, is gone: the caller hears that, and never sees its bytes as a page. A disk that fails time after
// time, or that answers nothing for a while, takes the tier out. Then reads and writes are refused at once,
// and a probe now and then finds out when it can come back.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/file_job.h"
#include "store/slot_index.h"

namespace kvxfer::store {

class FileTier {
 public:
  struct Options {
    std::uint32_t num_segments = 0;
    std::uint64_t segment_nbytes = 0;
    std::uint64_t seed = 0;  // random; also the origin of segments' ids
    std::uint64_t stalled_ns = 10'000'000'000;  // a read or write that takes longer takes the tier out
    std::uint64_t retry_ns = 5'000'000'000;  // between probes
    std::uint64_t most_written_nbytes = std::uint64_t{256} << 20;  // that wait or are being written
    std::uint32_t most_jobs = 1 << 15;
    std::uint32_t depth = 16;  // jobs that the host runs at a time
  };

  enum class Answer : std::uint8_t {
    kBegun,  // ends() will have its ticket
    kThere,  // write: it is there, or is being written
    kMissing,  // read, drop: it is not there
    kNoRoom,  // write: everything is in use, or the tenant's bound is less
    kBusy,  // too much waits already
    kOut,  // the tier is out, or takes no pages
    kTooSlow,  // read: it would take longer than is worth
  };
  enum class End : std::uint8_t {
    kDone,
    kGone,  // read: it was dropped meanwhile
    kDamaged,  // read: the checksum differs
    kFailed,  // the disk said an error
    kOut,  // the tier went out before it began
  };
  struct Ended {
    std::uint64_t ticket;
    End end;
    int error;
  };
  enum class Health : std::uint8_t { kUp, kReadOnly, kOut };

  struct Counts {
    std::uint64_t written = 0, read = 0;  // pages
    std::uint64_t hits = 0, misses = 0;  // of count_look_up
    std::uint64_t evicted = 0, dropped = 0;
    std::uint64_t damaged = 0;  // checksums that differed
    std::uint64_t read_errors = 0, write_errors = 0;
    std::uint64_t refused_no_room = 0, refused_busy = 0, refused_out = 0, refused_slow = 0;
    std::uint64_t times_out = 0;
  };

  explicit FileTier(const Options& options);

  SlotIndex& index() noexcept { return index_; }

  // ---- what callers ask; `now` ascends -----------------------------------------------------------

  // Begins to keep a page. Its memory stays as it is until the ticket has ended.
  Answer write(const PageDigest& digest, std::uint32_t salt, std::string_view key, std::span<std::byte> page,
               bool durable, std::uint64_t ticket, std::uint64_t now);
  // Begins to read a page; until the ticket has ended, bytes land in `page`. `worth_ns`: a page that takes
  // longer by read_ns() is refused; 0 for any.
  Answer read(const PageDigest& digest, std::span<std::byte> page, std::uint64_t worth_ns,
              std::uint64_t ticket, std::uint64_t now);
  // From now on the page is not found. When the ticket has ended, nobody reads it, and no restart finds it.
  Answer drop(const PageDigest& digest, std::uint64_t ticket, std::uint64_t now);
  // A page that is there is durable when the ticket has ended.
  Answer sync(const PageDigest& digest, std::uint64_t ticket, std::uint64_t now);
  // Takes a tier out whose oldest job has stood still for too long.
  void tick(std::uint64_t now);

  // For good: what waits ends as kOut, and everything is refused.
  void close(std::uint64_t now);

  // How long reading one more page will take, by what is known of the disk.
  std::uint64_t read_ns(std::uint64_t nbytes) const noexcept;
  // Takes what has ended since the last call.
  void take_ends(std::vector<Ended>& into) { into.swap(ends_), ends_.clear(); }
  bool has_ends() const noexcept { return !ends_.empty(); }
  // Pages that were evicted since the last call.
  void take_evicted(std::vector<SlotIndex::Gone>& into) { into.swap(evicted_), evicted_.clear(); }

  // ---- what the host does ------------------------------------------------------------------------

  // A job to run now, or null.
  FileJob* next(std::uint64_t now);
  void done(FileJob* job, std::uint64_t now);

  // What recovery finds, before anything else: segments, then their slots' heads, then the end.
  // `bytes` are those of a `.heads`. False: no segment that this can use; it will be cut anew.
  bool found_heads(std::uint32_t segment, std::span<const std::byte> bytes);
  // Ends it. Returns slots whose heads have to be erased first: a later page of their key was found, or nobody
  // knows their salt.
  std::vector<Place> found_all() {
    index_.found_all();
    return std::exchange(stale_, {});
  }

  // ---- figures -----------------------------------------------------------------------------------

  Health health() const noexcept { return health_; }
  const std::string& why() const noexcept { return why_; }  // in words, of a tier that is not up
  const Counts& counts() const noexcept { return counts_; }
  void count_look_up(bool hit) noexcept { ++(hit ? counts_.hits : counts_.misses); }
  std::uint32_t num_running() const noexcept { return static_cast<std::uint32_t>(running_.size()); }
  std::uint32_t num_waiting() const noexcept {
    return static_cast<std::uint32_t>(reads_.size() + writes_.size());
  }
  bool is_idle() const noexcept { return running_.empty() && reads_.empty() && writes_.empty(); }
  // Of the last thousand reads, from the call to the end: the share `of` is not slower.
  std::uint64_t read_ns_of(double of) const;

 private:
  std::unique_ptr<FileJob> make_job(FileJob::Kind kind, SlotIndex::Ref ref, std::uint64_t ticket,
                                    std::uint64_t now);
  void end(std::uint64_t ticket, End end, int error = 0) { ends_.push_back({ticket, end, error}); }
  void begin_cut(std::uint32_t segment, std::uint64_t now);
  void cut_done(FileJob& job, std::uint64_t now);
  void close_segment(std::uint32_t segment, std::uint64_t now);
  void write_done(FileJob& job, std::uint64_t now);
  void fail_write(FileJob& job, End how, int error, std::uint64_t now);
  void read_done(FileJob& job, std::uint64_t now);
  void sync_done(FileJob& job, End how, std::uint64_t now);
  void release(SlotIndex::Ref ref, std::uint64_t now);
  void erase(SlotIndex::Ref ref, std::uint64_t ticket, std::uint64_t now);
  void erase_done(FileJob& job);
  std::uint64_t take_drop(SlotIndex::Ref ref);  // 0: none waits
  bool has_stalled(const FileJob& job, std::uint64_t now) const noexcept;
  bool has_stalled(std::uint64_t now) const noexcept;
  void note_error(const FileJob& job, std::uint64_t now);
  void go_out(std::string why, std::uint64_t now);
  void come_back();
  void fail_waiting(std::uint64_t now);

  Options options_;
  SlotIndex index_;
  std::vector<std::uint64_t> segment_ids_;
  // Writes that wait until their segment is cut.
  std::unordered_map<std::uint32_t, std::vector<std::unique_ptr<FileJob>>> cutting_;
  std::vector<std::uint32_t> closed_;  // segments for which the disk had no room
  std::uint64_t reopen_at_ns_ = 0;
  std::vector<Place> stale_;
  std::deque<std::unique_ptr<FileJob>> reads_, writes_;  // that wait
  std::vector<std::unique_ptr<FileJob>> running_;
  std::unordered_map<SlotIndex::Ref, std::uint64_t>
      drops_;  // tickets of drops that wait for readers or a writer
  std::set<SlotIndex::Ref> failed_;  // their places are counted as failed
  std::uint64_t written_nbytes_ = 0;  // that wait or are being written
  std::uint64_t next_id_;
  bool was_read_ = false;  // reads and writes take turns
  Health health_ = Health::kUp;
  std::string why_;
  bool is_closed_ = false;
  bool is_probing_ = false;
  std::uint64_t probe_at_ns_ = 0;
  std::uint32_t errors_in_row_ = 0;
  double ns_per_byte_ = 1.0;  // a GB/s, until it is known
  std::array<std::uint32_t, 1024> read_us_{};
  std::uint64_t num_reads_ = 0;
  std::vector<Ended> ends_;
  std::vector<SlotIndex::Gone> evicted_;
  Counts counts_;
};

}  // namespace kvxfer::store
