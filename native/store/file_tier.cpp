#include "store/file_tier.h"

#include <algorithm>
#include <cassert>
#include <cerrno>

#include "kvxfer/status.h"

namespace kvxfer::store {
namespace {

// So many errors without a success between them are the disk's, not a block's.
constexpr std::uint32_t kMostErrors = 4;
// A segment for which the disk had no room is tried again after so many times of retry_ns.
constexpr std::uint64_t kReopenAfter = 12;
// How many times longer a sync may stand still than a read or a write.
constexpr std::uint64_t kSyncTakes = 6;

bool is_of_room(int error) noexcept { return error == ENOSPC || error == EDQUOT; }

}  // namespace

FileTier::FileTier(const Options& options)
    : options_(options),
      index_(options.num_segments, options.segment_nbytes, options.seed),
      segment_ids_(options.num_segments),
      next_id_(options.seed) {}

std::unique_ptr<FileJob> FileTier::make_job(FileJob::Kind kind, SlotIndex::Ref ref, std::uint64_t ticket,
                                            std::uint64_t now) {
  auto job = std::make_unique<FileJob>();
  job->kind = kind;
  job->ref = ref;
  if (ref != SlotIndex::kNone) job->place = index_[ref].place;
  job->ticket = ticket;
  job->asked_ns = now;
  return job;
}

// ---- what callers ask ------------------------------------------------------------------------------

FileTier::Answer FileTier::write(const PageDigest& digest, std::uint32_t salt, std::string_view key,
                                 std::span<std::byte> page, bool durable, std::uint64_t ticket,
                                 std::uint64_t now) {
  tick(now);
  if (const SlotIndex::Ref known = index_.known(digest); known != SlotIndex::kNone) {
    index_.touch(known);
    return Answer::kThere;
  }
  if (health_ != Health::kUp) return ++counts_.refused_out, Answer::kOut;
  if (!index_.knows_salt(salt)) return Answer::kNoRoom;
  if (num_waiting() + num_running() >= options_.most_jobs ||
      written_nbytes_ + page.size() > std::max<std::uint64_t>(options_.most_written_nbytes, page.size()))
    return ++counts_.refused_busy, Answer::kBusy;

  SlotIndex::Reserved reserved = index_.reserve(digest, salt, page.size());
  counts_.evicted += reserved.evicted.size();
  evicted_.insert(evicted_.end(), reserved.evicted.begin(), reserved.evicted.end());
  for (const SlotIndex::Ref leaving : reserved.leaving) erase(leaving, 0, now);
  if (reserved.ref == SlotIndex::kNone) return ++counts_.refused_no_room, Answer::kNoRoom;
  if (reserved.cuts) begin_cut(index_[reserved.ref].place.segment, now);

  auto job = make_job(FileJob::Kind::kWrite, reserved.ref, ticket, now);
  job->durable = durable;
  job->page = page;
  job->head.digest = digest;
  job->head.segment_id = segment_ids_[job->place.segment];
  job->head.generation = index_[reserved.ref].used_at;
  job->head.nbytes = page.size();
  job->head.salt = salt;
  job->head.set_key(key);
  written_nbytes_ += page.size();
  const auto cutting = cutting_.find(job->place.segment);
  (cutting == cutting_.end() ? writes_.emplace_back() : cutting->second.emplace_back()) = std::move(job);
  return Answer::kBegun;
}

FileTier::Answer FileTier::read(const PageDigest& digest, std::span<std::byte> page, std::uint64_t worth_ns,
                                std::uint64_t ticket, std::uint64_t now) {
  tick(now);
  const SlotIndex::Ref ref = index_.find(digest);
  if (ref == SlotIndex::kNone || index_.slot_nbytes(ref) != page.size()) return Answer::kMissing;
  if (health_ == Health::kOut) return ++counts_.refused_out, Answer::kOut;
  if (num_waiting() + num_running() >= options_.most_jobs) return ++counts_.refused_busy, Answer::kBusy;
  if (worth_ns != 0 && read_ns(page.size()) > worth_ns) return ++counts_.refused_slow, Answer::kTooSlow;
  index_.hold(ref);
  auto job = make_job(FileJob::Kind::kRead, ref, ticket, now);
  job->page = page;
  job->head.digest = digest;
  job->head.page_crc = index_[ref].page_crc;
  reads_.push_back(std::move(job));
  return Answer::kBegun;
}

FileTier::Answer FileTier::drop(const PageDigest& digest, std::uint64_t ticket, std::uint64_t now) {
  tick(now);
  const SlotIndex::Ref ref = index_.known(digest);
  if (ref == SlotIndex::kNone) return Answer::kMissing;
  ++counts_.dropped;
  if (index_.drop(ref))
    erase(ref, ticket, now);
  else
    drops_[ref] = ticket;
  return Answer::kBegun;
}

FileTier::Answer FileTier::sync(const PageDigest& digest, std::uint64_t ticket, std::uint64_t now) {
  tick(now);
  const SlotIndex::Ref ref = index_.find(digest);
  if (ref == SlotIndex::kNone) return Answer::kMissing;
  if (health_ != Health::kUp) return ++counts_.refused_out, Answer::kOut;
  index_.hold(ref);
  auto job = make_job(FileJob::Kind::kSync, ref, ticket, now);
  job->durable = true;
  writes_.push_back(std::move(job));
  return Answer::kBegun;
}

void FileTier::tick(std::uint64_t now) {
  if (health_ != Health::kOut) {
    for (const auto& job : running_) {
      if (!has_stalled(*job, now)) continue;
      const std::uint64_t stood_s = (now - job->begun_ns) / 1'000'000'000;
      go_out("a read or write has stood still for " + std::to_string(stood_s) + " s", now);
      break;
    }
  }
  if (!closed_.empty() && now >= reopen_at_ns_) {
    std::erase_if(closed_, [this](std::uint32_t segment) { return index_.open_segment(segment); });
  }
}

std::uint64_t FileTier::read_ns(std::uint64_t nbytes) const noexcept {
  // While pages are written, every second turn is theirs.
  const std::size_t ahead = reads_.size() + std::min(reads_.size() + 1, writes_.size()) + running_.size();
  const double turns = 1.0 + static_cast<double>(ahead) / options_.depth;
  return static_cast<std::uint64_t>(ns_per_byte_ * static_cast<double>(nbytes) * turns);
}

// ---- jobs ------------------------------------------------------------------------------------------

FileJob* FileTier::next(std::uint64_t now) {
  tick(now);
  std::unique_ptr<FileJob> job;
  if (health_ != Health::kUp && !is_closed_ && !is_probing_ && now >= probe_at_ns_ && !has_stalled(now)) {
    job = make_job(FileJob::Kind::kProbe, SlotIndex::kNone, 0, now);
    is_probing_ = true;
  } else if (health_ == Health::kOut) {
    return nullptr;
  } else {
    const bool reads = !reads_.empty() && (writes_.empty() || !was_read_);
    std::deque<std::unique_ptr<FileJob>>& from = reads ? reads_ : writes_;
    if (from.empty()) return nullptr;
    job = std::move(from.front());
    from.pop_front();
    was_read_ = reads;
  }
  job->begun_ns = now;
  running_.push_back(std::move(job));
  return running_.back().get();
}

void FileTier::done(FileJob* ended, std::uint64_t now) {
  const auto at = std::find_if(running_.begin(), running_.end(),
                               [ended](const auto& each) { return each.get() == ended; });
  assert(at != running_.end());
  const std::unique_ptr<FileJob> job = std::move(*at);
  *at = std::move(running_.back());
  running_.pop_back();
  if (job->error != 0) {
    note_error(*job, now);
  } else if (job->kind != FileJob::Kind::kProbe) {
    errors_in_row_ = 0;
  }
  switch (job->kind) {
    case FileJob::Kind::kCut: cut_done(*job, now); break;
    case FileJob::Kind::kWrite: write_done(*job, now); break;
    case FileJob::Kind::kRead: read_done(*job, now); break;
    case FileJob::Kind::kErase: erase_done(*job); break;
    case FileJob::Kind::kSync: sync_done(*job, job->error == 0 ? End::kDone : End::kFailed, now); break;
    case FileJob::Kind::kProbe:
      is_probing_ = false;
      probe_at_ns_ = now + options_.retry_ns;
      if (job->error == 0) come_back();
      break;
  }
  if (health_ == Health::kOut) fail_waiting(now);
}

void FileTier::begin_cut(std::uint32_t segment, std::uint64_t now) {
  auto job = make_job(FileJob::Kind::kCut, SlotIndex::kNone, 0, now);
  job->place.segment = segment;
  segment_ids_[segment] = next_id_++;
  job->segment = {segment_ids_[segment], index_.segment_slot_nbytes(segment), index_.num_slots(segment)};
  cutting_[segment];
  writes_.push_back(std::move(job));
}

void FileTier::cut_done(FileJob& job, std::uint64_t now) {
  auto waiting = cutting_.extract(job.place.segment);
  for (auto& write : waiting.mapped()) {
    if (job.error == 0)
      writes_.push_back(std::move(write));
    else
      fail_write(*write, is_of_room(job.error) ? End::kFailed : End::kOut, job.error, now);
  }
  if (job.error != 0) close_segment(job.place.segment, now);
}

void FileTier::close_segment(std::uint32_t segment, std::uint64_t now) {
  index_.close_segment(segment);
  closed_.push_back(segment);
  reopen_at_ns_ = now + kReopenAfter * options_.retry_ns;
}

void FileTier::fail_write(FileJob& job, End how, int error, std::uint64_t now) {
  written_nbytes_ -= job.page.size();
  end(job.ticket, how, error);
  if (index_.is_dropped(job.ref))
    release(job.ref, now);
  else
    index_.abort(job.ref, error == EIO);
}

void FileTier::write_done(FileJob& job, std::uint64_t now) {
  if (job.error != 0) {
    ++counts_.write_errors;
    fail_write(job, End::kFailed, job.error, now);
    return;
  }
  written_nbytes_ -= job.page.size();
  ++counts_.written;
  const bool is_dropped = index_.is_dropped(job.ref);
  end(job.ticket, is_dropped ? End::kGone : End::kDone);
  if (is_dropped)
    release(job.ref, now);
  else
    index_.commit(job.ref, job.head.page_crc);
}

void FileTier::read_done(FileJob& job, std::uint64_t now) {
  const std::uint64_t took_ns = now - job.begun_ns;
  const bool is_gone = index_[job.ref].state != SlotIndex::State::kWhole;
  if (job.error != 0) {
    ++counts_.read_errors;
    end(job.ticket, End::kFailed, job.error);
  } else if (!job.is_whole) {
    ++counts_.damaged;
    end(job.ticket, End::kDamaged);
  } else {
    ++counts_.read;
    read_us_[num_reads_++ % read_us_.size()] = static_cast<std::uint32_t>((now - job.asked_ns) / 1000);
    // Jobs beside it took their share of the time: it is that of one turn of all.
    ns_per_byte_ += (static_cast<double>(took_ns) / static_cast<double>(job.page.size()) - ns_per_byte_) / 16;
    end(job.ticket, is_gone ? End::kGone : End::kDone);
  }
  if ((job.error != 0 || !job.is_whole) && !is_gone) {
    failed_.insert(job.ref);
    index_.drop(job.ref);
  }
  release(job.ref, now);
}

void FileTier::sync_done(FileJob& job, End how, std::uint64_t now) {
  end(job.ticket, how == End::kDone && index_.is_dropped(job.ref) ? End::kGone : how, job.error);
  release(job.ref, now);
}

void FileTier::release(SlotIndex::Ref ref, std::uint64_t now) {
  index_.release(ref);
  if (index_.is_leaving(ref)) erase(ref, take_drop(ref), now);
}

void FileTier::erase(SlotIndex::Ref ref, std::uint64_t ticket, std::uint64_t now) {
  auto job = make_job(FileJob::Kind::kErase, ref, ticket, now);
  job->durable = ticket != 0;
  if (health_ == Health::kOut && ticket != 0) end(std::exchange(job->ticket, 0), End::kOut);
  writes_.push_back(std::move(job));
}

void FileTier::erase_done(FileJob& job) {
  if (job.ticket != 0) end(job.ticket, job.error == 0 ? End::kDone : End::kFailed, job.error);
  const bool failed = failed_.erase(job.ref) != 0;
  index_.give_back(job.ref, failed || job.error == EIO);
}

std::uint64_t FileTier::take_drop(SlotIndex::Ref ref) {
  const auto found = drops_.find(ref);
  if (found == drops_.end()) return 0;
  const std::uint64_t ticket = found->second;
  drops_.erase(found);
  return ticket;
}

// ---- a disk that fails -----------------------------------------------------------------------------

bool FileTier::has_stalled(const FileJob& job, std::uint64_t now) const noexcept {
  // Whoever syncs waits for what all others of the machine have written.
  return now - job.begun_ns >= options_.stalled_ns * (job.durable ? kSyncTakes : 1);
}

bool FileTier::has_stalled(std::uint64_t now) const noexcept {
  return std::any_of(running_.begin(), running_.end(),
                     [&](const auto& job) { return has_stalled(*job, now); });
}

void FileTier::note_error(const FileJob& job, std::uint64_t now) {
  if (job.kind == FileJob::Kind::kProbe) return;
  if (is_of_room(job.error) && job.kind == FileJob::Kind::kCut) return;  // less room is no fault
  if (job.error == EROFS && health_ == Health::kUp) {
    health_ = Health::kReadOnly;
    why_ = "the file system is read-only";
    probe_at_ns_ = now + options_.retry_ns;
    return;
  }
  if (++errors_in_row_ >= kMostErrors && health_ != Health::kOut)
    go_out("reads and writes fail: " + words_of(job.error), now);
}

void FileTier::go_out(std::string why, std::uint64_t now) {
  health_ = Health::kOut;
  why_ = std::move(why);
  probe_at_ns_ = now + options_.retry_ns;
  ++counts_.times_out;
  fail_waiting(now);
}

void FileTier::close(std::uint64_t now) {
  is_closed_ = true;
  health_ = Health::kOut;
  why_ = "it is closed";
  fail_waiting(now);
}

void FileTier::come_back() {
  if (is_closed_) return;
  health_ = Health::kUp;
  why_.clear();
  errors_in_row_ = 0;
}

void FileTier::fail_waiting(std::uint64_t now) {
  for (const auto& job : std::exchange(reads_, {})) {
    end(job->ticket, End::kOut);
    release(job->ref, now);
  }
  for (auto& [segment, waiting] : cutting_)
    for (const auto& job : std::exchange(waiting, {})) fail_write(*job, End::kOut, 0, now);
  std::deque<std::unique_ptr<FileJob>> kept;
  for (auto& job : std::exchange(writes_, {})) {
    if (job->kind == FileJob::Kind::kWrite) {
      fail_write(*job, End::kOut, 0, now);
    } else if (job->kind == FileJob::Kind::kSync) {
      sync_done(*job, End::kOut, now);
    } else if (job->kind == FileJob::Kind::kCut) {
      job->error = EIO;
      cut_done(*job, now);
    } else {  // heads of pages that are gone are erased when the disk is back
      if (job->ticket != 0) end(std::exchange(job->ticket, 0), End::kOut);
      kept.push_back(std::move(job));
    }
  }
  for (auto& job : kept) writes_.push_back(std::move(job));
}

// ---- recovery --------------------------------------------------------------------------------------

bool FileTier::found_heads(std::uint32_t segment, std::span<const std::byte> bytes) {
  SegmentHead head;
  std::uint32_t version = 0;
  if (segment >= segment_ids_.size() || decode(bytes, head, version) != SegmentState::kCut) return false;
  if (head.slot_nbytes == 0 || head.slot_nbytes % kBlockNbytes != 0 ||
      head.slot_nbytes > options_.segment_nbytes)
    return false;
  index_.found_segment(segment, head.slot_nbytes);
  segment_ids_[segment] = head.id;
  for (std::uint32_t slot = 0; slot < index_.num_slots(segment); ++slot) {
    if (head_offset(slot) + kSlotHeadNbytes > bytes.size()) break;
    const auto found = decode_slot(bytes.subspan(head_offset(slot), kSlotHeadNbytes));
    if (!found || found->segment_id != head.id || found->nbytes != head.slot_nbytes) continue;
    std::optional<Place> overtaken;
    // A salt that is lost may be another's some day.
    if (!index_.knows_salt(found->salt) || !index_.found({segment, slot}, *found, overtaken))
      overtaken = Place{segment, slot};
    if (overtaken) stale_.push_back(*overtaken);
  }
  return true;
}

std::uint64_t FileTier::read_ns_of(double of) const {
  std::vector<std::uint32_t> times(
      read_us_.begin(),
      read_us_.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(num_reads_, read_us_.size())));
  if (times.empty()) return 0;
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(of * static_cast<double>(times.size() - 1));
  std::nth_element(times.begin(), at, times.end());
  return std::uint64_t{*at} * 1000;
}

}  // namespace kvxfer::store
