// Pages in files: what is read is what was parked, whatever the disk and the process do in between. The disk is
// made up, so that a seed replays each order of ends, each crash and each loss of power.
#include "store/file_tier.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "check.h"

namespace kvxfer::store {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::size_t kSector = 512;

struct Crashed {};

// Files whose unsynced sectors a loss of power may take away, in any combination.
class MadeUpDisk final : public Files {
 public:
  explicit MadeUpDisk(std::uint64_t seed) : random_(seed) {}

  int make(std::uint32_t) override { return step(); }
  int write_page(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) override {
    return write(segment, offset, bytes);
  }
  int read_page(std::uint32_t segment, std::uint64_t offset, std::span<std::byte> bytes) override {
    if (const int error = step()) return error;
    for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = byte(segment, offset + at);
    return 0;
  }
  int write_head(std::uint32_t segment, std::uint64_t offset, std::span<const std::byte> bytes) override {
    return write(segment | kHeads, offset, bytes);
  }
  int sync(std::uint32_t segment) override {
    if (const int error = step()) return error;
    std::erase_if(unsynced_, [&](const Write& each) { return (each.file & ~kHeads) == segment; });
    return 0;
  }
  int probe() override { return step(); }

  std::vector<std::byte> heads(std::uint32_t segment) const {
    const auto found = files_.find(segment | kHeads);
    return found == files_.end() ? std::vector<std::byte>() : found->second;
  }
  // The process ends in so many calls from now; 0: not at all.
  void crash_in(std::uint64_t calls) { calls_left_ = calls; }
  void fail(unsigned percent, int error) { percent_ = percent, error_ = error; }
  void stand_still(bool still) { stands_still_ = still; }
  bool stands_still() const { return stands_still_; }
  // Some of what was not synced is gone: each sector has what it had before.
  void lose_power() {
    while (!unsynced_.empty()) {
      const Write write = std::move(unsynced_.back());
      unsynced_.pop_back();
      if (random_.chance(50)) put(write.file, write.offset, write.before);
    }
  }
  void forget_unsynced() { unsynced_.clear(); }
  void flip_a_bit() {
    auto at = files_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random_.below(files_.size() + 1)));
    if (at == files_.end() || at->second.empty()) return;
    at->second[random_.below(at->second.size())] ^= std::byte{1} << random_.below(8);
  }

 private:
  static constexpr std::uint32_t kHeads = 1u << 31;
  struct Write {
    std::uint32_t file;
    std::uint64_t offset;
    std::vector<std::byte> before;
  };

  int step() {
    if (calls_left_ != 0 && --calls_left_ == 0) throw Crashed();
    return percent_ != 0 && random_.chance(percent_) ? error_ : 0;
  }
  std::byte byte(std::uint32_t file, std::uint64_t at) {
    const std::vector<std::byte>& bytes = files_[file];
    return at < bytes.size() ? bytes[at] : std::byte{0};
  }
  void put(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) {
    std::vector<std::byte>& all = files_[file];
    if (all.size() < offset + bytes.size()) all.resize(offset + bytes.size());
    std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  int write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) {
    // A write that fails, or in which the process ends, has written some of its sectors.
    int error = 0;
    bool crashes = false;
    try {
      error = step();
    } catch (const Crashed&) {
      crashes = true;
    }
    for (std::size_t at = 0; at < bytes.size(); at += kSector) {
      if ((crashes || error != 0) && random_.chance(50)) continue;
      const auto part = bytes.subspan(at, std::min(kSector, bytes.size() - at));
      Write write{file, offset + at, {}};
      for (std::size_t i = 0; i < part.size(); ++i) write.before.push_back(byte(file, offset + at + i));
      unsynced_.push_back(std::move(write));
      put(file, offset + at, part);
    }
    if (crashes) throw Crashed();
    return error;
  }

  check::Random random_;
  std::map<std::uint32_t, std::vector<std::byte>> files_;
  std::vector<Write> unsynced_;
  std::uint64_t calls_left_ = 0;
  unsigned percent_ = 0;
  int error_ = 0;
  bool stands_still_ = false;
};

PageDigest digest_of(std::uint64_t key) {
  PageDigest digest{};
  std::memcpy(digest.data(), &key, sizeof key);
  return digest;
}

// A daemon with a tier, and what its callers were told: the model that every answer is compared with.
class Story {
 public:
  static constexpr std::uint64_t kKeys = 60;
  static constexpr std::uint32_t kSegments = 4;
  static constexpr std::uint64_t kSegmentNbytes = 16 * kBlockNbytes;

  explicit Story(std::uint64_t seed) : random_(seed), disk_(seed + 1) { start(); }

  void run(unsigned steps) {
    for (unsigned i = 0; i < steps; ++i) {
      now_ += random_.below(kSecond / 100);
      const std::uint64_t what = random_.below(100);
      if (what < 30)
        write();
      else if (what < 55)
        read();
      else if (what < 62)
        drop();
      else if (what < 63)
        disk_.flip_a_bit(), is_harmed_ = true;
      else if (what < 64)
        disk_.fail(random_.chance(70) ? 0 : 20, random_.chance(80) ? EIO : ENOSPC);
      else if (what < 65)
        crash(random_.chance(50));
      else
        job();
      hear();
      tier_->index().check();
    }
    disk_.fail(0, 0);
    while (!tier_->is_idle()) {
      now_ += kSecond;
      job();
      hear();
    }
    CHECK(asked_.empty());  // every ticket has ended
  }

  std::uint64_t num_hits = 0, num_found_again = 0, num_crashes = 0, num_kept = 0;

 private:
  enum class Verb { kWrite, kRead, kDrop };
  struct Asked {
    Verb verb;
    std::uint64_t key;
    std::uint64_t version;
    std::vector<std::byte> page;
  };
  struct Known {
    std::uint64_t version = 1;  // of what is written next
    std::uint64_t fenced = 0;  // no version up to it may come back
    std::uint64_t durable = 0;  // was acknowledged as that, and neither dropped nor evicted since
  };

  std::uint64_t nbytes_of(std::uint64_t key) const { return (1 + key % 2) * kBlockNbytes; }
  void fill(std::uint64_t key, std::uint64_t version, std::vector<std::byte>& page) const {
    check::Random content(key * 1000 + version);
    content.fill(reinterpret_cast<std::uint64_t*>(page.data()), page.size() / 8);
  }

  void start() {
    tier_ = std::make_unique<FileTier>(FileTier::Options{.num_segments = kSegments,
                                                         .segment_nbytes = kSegmentNbytes,
                                                         .seed = random_.next(),
                                                         .most_written_nbytes = 20 * kBlockNbytes,
                                                         .depth = 4});
    for (std::uint32_t salt = 0; salt < 3; ++salt) tier_->index().set_tenant(salt, salt);
    for (std::uint32_t segment = 0; segment < kSegments; ++segment)
      tier_->found_heads(segment, disk_.heads(segment));
    for (const Place& stale : tier_->found_all()) {
      const SlotHeadBytes none{};
      (void)disk_.write_head(stale.segment, head_offset(stale.slot), none);
    }
    tier_->index().set_bound(2, 6 * kBlockNbytes);
    tier_->index().check();
    std::vector<PageDigest> digests;
    for (std::uint64_t key = 0; key < kKeys; ++key) digests.push_back(digest_of(key));
    std::vector<SlotIndex::Ref> refs(digests.size());
    tier_->index().find(digests, refs);
    for (std::size_t i = 0; i < refs.size(); ++i) CHECK_EQ(refs[i], tier_->index().find(digests[i]));
    for (const auto& [key, known] : known_) {
      const bool there = tier_->index().find(digest_of(key)) != SlotIndex::kNone;
      num_found_again += there;
      // A durable page is there, unless its bytes were harmed meanwhile: that shows when it is read.
      if (known.durable > known.fenced && !is_harmed_) {
        CHECK(there);
        ++num_kept;
      }
    }
  }

  void write() {
    const std::uint64_t key = random_.below(kKeys);
    Asked asked{Verb::kWrite, key, known_[key].version, std::vector<std::byte>(nbytes_of(key))};
    fill(key, asked.version, asked.page);
    const bool durable = random_.chance(30);
    const auto answer = tier_->write(digest_of(key), static_cast<std::uint32_t>(key % 3), std::to_string(key),
                                     asked.page, durable, ++ticket_, now_);
    if (answer != FileTier::Answer::kBegun) return;
    if (durable) durable_.insert(ticket_);
    asked_.emplace(ticket_, std::move(asked));
  }
  void read() {
    const std::uint64_t key = random_.below(kKeys);
    Asked asked{Verb::kRead, key, known_[key].fenced, std::vector<std::byte>(nbytes_of(key))};
    if (tier_->read(digest_of(key), asked.page, 0, ++ticket_, now_) == FileTier::Answer::kBegun)
      asked_.emplace(ticket_, std::move(asked));
  }
  void drop() {
    const std::uint64_t key = random_.below(kKeys);
    Known& known = known_[key];
    // What is written from now on is another page, which must not be mistaken for the dropped one.
    const std::uint64_t version = known.version++;
    known.durable = 0;
    if (tier_->drop(digest_of(key), ++ticket_, now_) == FileTier::Answer::kBegun)
      asked_.emplace(ticket_, Asked{Verb::kDrop, key, version, {}});
  }
  void job() {
    if (running_.size() < 4)
      if (FileJob* const job = tier_->next(now_)) running_.push_back(job);
    if (running_.empty() || disk_.stands_still()) return;
    random_.shuffle(running_);
    FileJob* const job = running_.back();
    running_.pop_back();
    perform(*job, disk_);
    if (job->error != 0) is_harmed_ = true;
    tier_->done(job, now_);
  }
  void hear() {
    std::vector<FileTier::Ended> ends;
    std::vector<SlotIndex::Gone> evicted;
    tier_->take_evicted(evicted);
    for (const SlotIndex::Gone& gone : evicted) {
      std::uint64_t key;
      std::memcpy(&key, gone.digest.data(), sizeof key);
      known_[key].durable = 0;
    }
    tier_->take_ends(ends);
    for (const FileTier::Ended& ended : ends) {
      const auto found = asked_.find(ended.ticket);
      if (found == asked_.end()) continue;
      const Asked asked = std::move(found->second);
      asked_.erase(found);
      Known& known = known_[asked.key];
      if (ended.end == FileTier::End::kDamaged || ended.end == FileTier::End::kFailed) known.durable = 0;
      if (asked.verb == Verb::kDrop && ended.end == FileTier::End::kDone)
        known.fenced = std::max(known.fenced, asked.version);
      if (asked.verb == Verb::kWrite && ended.end == FileTier::End::kDone &&
          durable_.contains(ended.ticket) && tier_->index().find(digest_of(asked.key)) != SlotIndex::kNone &&
          asked.version == known.version)
        known.durable = asked.version;
      if (asked.verb == Verb::kRead && ended.end == FileTier::End::kDone) {
        ++num_hits;
        bool is_one = false;
        std::vector<std::byte> wanted(asked.page.size());
        for (std::uint64_t version = asked.version + 1; version <= known.version && !is_one; ++version) {
          fill(asked.key, version, wanted);
          is_one = wanted == asked.page;
        }
        CHECK(is_one);  // a page of this key that no drop before the read has fenced
      }
    }
  }
  void crash(bool of_power) {
    ++num_crashes;
    for (FileJob* const job : running_) {
      disk_.crash_in(1 + random_.below(4));
      try {
        perform(*job, disk_);
      } catch (const Crashed&) {}
    }
    disk_.crash_in(0);
    if (of_power) disk_.lose_power();
    disk_.forget_unsynced();  // a page cache has written everything by the time of the next crash
    running_.clear();
    asked_.clear();
    durable_.clear();
    start();
    is_harmed_ = false;
    for (auto& [key, known] : known_)
      if (tier_->index().find(digest_of(key)) == SlotIndex::kNone) known.durable = 0;
  }

  check::Random random_;
  MadeUpDisk disk_;
  std::unique_ptr<FileTier> tier_;
  std::uint64_t now_ = kSecond, ticket_ = 0;
  std::map<std::uint64_t, Known> known_;
  std::map<std::uint64_t, Asked> asked_;
  std::set<std::uint64_t> durable_;
  std::vector<FileJob*> running_;
  bool is_harmed_ = false;  // an error or a flipped bit since the start
};

TEST(no_crash_and_no_fault_gives_a_wrong_page) {
  std::uint64_t num_hits = 0, num_found_again = 0, num_kept = 0;
  for (std::uint64_t i = 0; i < 60; ++i) {
    Story story(check::seed() * 1000 + i);
    story.run(600);
    num_hits += story.num_hits;
    num_found_again += story.num_found_again;
    num_kept += story.num_kept;
  }
  // The model has looked at something.
  CHECK(num_hits > 1000);
  CHECK(num_found_again > 1000);
  CHECK(num_kept > 100);
}

// ---- a disk that does not work ----------------------------------------------------------------------

struct Tier {
  explicit Tier(std::uint32_t num_segments = 2)
      : tier({.num_segments = num_segments, .segment_nbytes = 8 * kBlockNbytes, .depth = 4}) {
    for (std::uint32_t tenant = 0; tenant < 2; ++tenant) tier.index().set_tenant(tenant, tenant);
  }
  FileTier::Answer write(std::uint64_t key, std::uint32_t salt = 0) {
    return tier.write(digest_of(key), salt, "", page, false, ++ticket, now);
  }
  FileTier::Answer read(std::uint64_t key, std::uint64_t worth_ns = 0) {
    return tier.read(digest_of(key), page, worth_ns, ++ticket, now);
  }
  // Runs all jobs, and returns how the last ticket has ended.
  FileTier::End run() {
    while (FileJob* const job = tier.next(now)) {
      perform(*job, disk);
      tier.done(job, now);
    }
    std::vector<FileTier::Ended> ends;
    tier.take_ends(ends);
    REQUIRE(!ends.empty());
    return ends.back().end;
  }
  bool has(std::uint64_t key) { return tier.index().find(digest_of(key)) != SlotIndex::kNone; }

  MadeUpDisk disk{1};
  FileTier tier;
  std::vector<std::byte> page = std::vector<std::byte>(kBlockNbytes);
  std::uint64_t now = kSecond, ticket = 0;
};

TEST(errors_in_a_row_take_the_tier_out_and_a_probe_brings_it_back) {
  Tier at;
  CHECK(at.write(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  at.disk.fail(100, EIO);
  for (std::uint64_t key = 2; key < 6; ++key) {
    CHECK(at.tier.health() == FileTier::Health::kUp);
    CHECK(at.write(key) == FileTier::Answer::kBegun);
    CHECK(at.run() != FileTier::End::kDone);
  }
  CHECK(at.tier.health() == FileTier::Health::kOut);
  CHECK(at.read(1) == FileTier::Answer::kOut);
  CHECK(at.write(9) == FileTier::Answer::kOut);
  at.now += 6 * kSecond;
  CHECK(at.tier.next(at.now)->kind == FileJob::Kind::kProbe);
  CHECK(at.tier.next(at.now) == nullptr);  // one at a time
}

TEST(a_disk_that_stands_still_takes_the_tier_out_and_ends_what_waits) {
  Tier at;
  CHECK(at.write(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  CHECK(at.read(1) == FileTier::Answer::kBegun);
  FileJob* const stuck = at.tier.next(at.now);
  REQUIRE(stuck != nullptr);
  CHECK(at.read(1) == FileTier::Answer::kBegun);
  at.now += 11 * kSecond;
  at.tier.tick(at.now);
  CHECK(at.tier.health() == FileTier::Health::kOut);
  CHECK(at.tier.why().find("stood still for 11 s") != std::string::npos);
  std::vector<FileTier::Ended> ends;
  at.tier.take_ends(ends);
  REQUIRE(ends.size() == 1);  // what waited; the memory of the other is still in use
  CHECK(ends[0].end == FileTier::End::kOut);
  at.now += 60 * kSecond;
  CHECK(at.tier.next(at.now) == nullptr);  // no probe beside a job that stands still
  perform(*stuck, at.disk);
  at.tier.done(stuck, at.now);
  CHECK(at.run() == FileTier::End::kDone);
  CHECK(at.tier.health() == FileTier::Health::kUp);
  CHECK(at.read(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
}

TEST(a_file_system_that_is_read_only_takes_no_pages_and_gives_those_that_are_there) {
  Tier at;
  CHECK(at.write(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  at.disk.fail(100, EROFS);
  CHECK(at.write(2) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kFailed);
  at.disk.fail(0, 0);
  CHECK(at.tier.health() == FileTier::Health::kReadOnly);
  CHECK(at.write(3) == FileTier::Answer::kOut);
  CHECK(at.read(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
}

TEST(a_full_disk_leaves_the_segments_that_there_are) {
  Tier at;
  for (std::uint64_t key = 0; key < 8; ++key) CHECK(at.write(key) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  at.disk.fail(100, ENOSPC);  // for the second segment
  CHECK(at.write(8) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kFailed);
  at.disk.fail(0, 0);
  CHECK(at.tier.health() == FileTier::Health::kUp);
  CHECK(at.write(9) == FileTier::Answer::kBegun);  // in place of the oldest
  CHECK(at.run() == FileTier::End::kDone);
  CHECK(at.has(9) && !at.has(0) && at.has(1));
  at.now += 100 * kSecond;
  CHECK(at.write(10) == FileTier::Answer::kBegun);  // the second is tried again
  CHECK(at.run() == FileTier::End::kDone);
  CHECK(at.has(1) && at.has(10));
}

TEST(a_tenant_makes_room_among_its_own_pages_and_a_slow_load_is_refused) {
  Tier at;
  for (std::uint64_t key = 0; key < 3; ++key) CHECK(at.write(key, 1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  at.tier.index().set_bound(0, 2 * kBlockNbytes);
  for (std::uint64_t key = 10; key < 13; ++key) {
    CHECK(at.write(key, 0) == FileTier::Answer::kBegun);
    at.run();
  }
  CHECK(at.has(0) && at.has(1) && at.has(2));
  CHECK(!at.has(10) && at.has(11) && at.has(12));
  CHECK_EQ(at.tier.index().tenant_nbytes(0), 2 * kBlockNbytes);
  CHECK(at.read(11, 1) == FileTier::Answer::kTooSlow);
  CHECK(at.read(11, kSecond) == FileTier::Answer::kBegun);
}

TEST(a_place_that_fails_twice_rests_until_its_segment_is_cut_anew) {
  Tier at(1);
  CHECK(at.write(1) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  at.disk.fail(100, EIO);
  for (int round = 0; round < 2; ++round) {
    CHECK_EQ(at.tier.index().num_resting(), 0u);
    CHECK(at.write(2) == FileTier::Answer::kBegun);
    CHECK(at.run() == FileTier::End::kFailed);
  }
  at.disk.fail(0, 0);
  CHECK_EQ(at.tier.index().num_resting(), 1u);
  for (std::uint64_t key = 2; key < 9; ++key) CHECK(at.write(key) == FileTier::Answer::kBegun);
  CHECK(at.run() == FileTier::End::kDone);
  CHECK(!at.has(1) && at.has(8));  // seven places are left of eight
  at.tier.index().check();
}

}  // namespace
}  // namespace kvxfer::store
