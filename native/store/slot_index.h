// Which page lies in which slot of a tier, and which page goes when another needs its place. No I/O, no clock.
//
// A tier is cut into segments of equal size, and a segment into slots of one size until it is cut anew. To make
// room the index takes, in this order: a free slot, a segment without pages, the least recently used page of the
// same size, or a whole segment whose newest use is older than that page's. A tenant that has a bound makes room
// among its own pages.
//
// An entry takes 64 bytes, and with its place in the tables about 80.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "store/chunked.h"
#include "store/slot_format.h"

namespace kvxfer::store {

struct Place {
  std::uint32_t segment = 0;
  std::uint32_t slot = 0;
  friend bool operator==(const Place&, const Place&) = default;
};

class SlotIndex {
 public:
  // An entry's number. It is another page's after the entry's place was given back.
  using Ref = std::uint32_t;
  static constexpr Ref kNone = UINT32_MAX;

  enum class State : std::uint8_t {
    kFree,
    kWriting,  // has a place; find() does not return it
    kWhole,
    kDropped,  // not found any more, and still read
    kLeaving,  // not found any more; its head is being erased
  };

  struct alignas(64) Entry {  // a cache line
    PageDigest digest{};
    std::uint64_t used_at = 0;  // ascends with each use
    std::uint32_t page_crc = 0;
    std::uint32_t salt = 0;
    Place place;
    Ref next_of_hash = kNone;
    Ref older = kNone, newer = kNone;  // idle pages of its size
    Ref older_of_tenant = kNone, newer_of_tenant = kNone;  // idle pages of its tenant
    std::uint16_t num_holds = 0;
    State state = State::kFree;
    bool is_idle = false;
  };

  struct Gone {
    PageDigest digest;
    std::uint32_t salt;
  };

  struct Reserved {
    Ref ref = kNone;  // kNone: there is no room
    bool cuts = false;  // its segment was cut anew for it: everything else in it is gone
    std::vector<Gone> evicted;
    // To make room for the tenant alone: erase their heads, then call give_back.
    std::vector<Ref> leaving;
  };

  // `seed` is secret from those who choose keys, who could make all of them share a bucket.
  SlotIndex(std::uint32_t num_segments, std::uint64_t segment_nbytes, std::uint64_t seed);

  // Salts belong to tenants, which are counted and bounded. Tenants are numbers from 0 on without gaps.
  void set_tenant(std::uint32_t salt, std::uint32_t tenant);
  bool knows_salt(std::uint32_t salt) const noexcept { return salt < tenant_of_salt_.size(); }
  void set_bound(std::uint32_t tenant, std::uint64_t most_nbytes);

  Ref find(const PageDigest& digest) const noexcept;  // that is whole
  // The same of several; `refs` has as many places. Waits for memory once for all of them, not for each.
  void find(std::span<const PageDigest> digests, std::span<Ref> refs) const noexcept;
  Ref known(const PageDigest& digest) const noexcept;  // also one that is being written
  const Entry& operator[](Ref ref) const noexcept { return entries_[ref]; }
  std::uint64_t slot_nbytes(Ref ref) const noexcept {
    return segments_[entries_[ref].place.segment].slot_nbytes;
  }

  // Gives a place to a page that is not known. End it by commit() or abort().
  Reserved reserve(const PageDigest& digest, std::uint32_t salt, std::uint64_t slot_nbytes);
  void commit(Ref ref, std::uint32_t page_crc);
  // Nothing can be written to its place any more. A place that `failed` for the second time rests until its
  // segment is cut anew.
  void abort(Ref ref, bool failed = false);

  void hold(Ref ref);  // its place stays
  void release(Ref ref);  // also a use
  // A page is not known any more. It is leaving at once, or with its last release(), which one that is being
  // written has to get instead of commit() or abort(): then erase its head, and call give_back.
  bool drop(Ref ref);
  bool is_dropped(Ref ref) const noexcept { return entries_[ref].state == State::kDropped; }
  bool is_leaving(Ref ref) const noexcept { return entries_[ref].state == State::kLeaving; }
  void give_back(Ref ref, bool failed = false);
  void touch(Ref ref);

  // The first whole page from `from` on, in the order of places; of one tenant if one is given.
  std::optional<Ref> first_from(Place from, std::optional<std::uint32_t> tenant) const;

  // ---- recovery: before anything else ------------------------------------------------------------

  void found_segment(std::uint32_t segment, std::uint64_t slot_nbytes);
  // A whole page of a generation, which counts as its last use. False: a later one of its key is known, and
  // this slot is free. `overtaken` is the place of an earlier one, which is free now.
  bool found(Place place, const SlotHead& head, std::optional<Place>& overtaken);
  void found_all();

  // ---- figures -----------------------------------------------------------------------------------

  std::uint64_t num_pages() const noexcept { return num_pages_; }
  std::uint64_t used_nbytes() const noexcept { return used_nbytes_; }
  std::uint64_t tenant_nbytes(std::uint32_t tenant) const noexcept;
  std::uint64_t num_resting() const noexcept { return num_resting_; }
  std::uint32_t num_segments() const noexcept { return static_cast<std::uint32_t>(segments_.size()); }
  std::uint64_t segment_slot_nbytes(std::uint32_t segment) const noexcept {
    return segments_[segment].slot_nbytes;
  }
  std::uint32_t num_slots(std::uint32_t segment) const noexcept { return segments_[segment].num_slots; }
  // Nothing is placed in a segment from now on; its disk has no room for it, and it has no whole page.
  void close_segment(std::uint32_t segment);
  // It may be cut again. False: a page has still to leave it.
  bool open_segment(std::uint32_t segment);
  // Fails the process if counts and links disagree; tests call it.
  void check() const;

 private:
  struct Segment {
    std::uint64_t slot_nbytes = 0;
    std::uint64_t used_at = 0;
    std::uint32_t num_slots = 0;
    std::uint32_t num_busy = 0;  // pages that may not be evicted
    std::vector<std::uint32_t> free;  // the lowest is last
    std::vector<Ref> refs;  // by slot
    bool has_room = false;  // is in its class's list
    bool is_closed = false;
  };
  struct Class {
    Ref oldest = kNone, newest = kNone;
    std::vector<std::uint32_t> with_room;
  };
  struct Tenant {
    Ref oldest = kNone, newest = kNone;
    std::uint64_t nbytes = 0;
    std::uint64_t most_nbytes = UINT64_MAX;
  };

  std::uint64_t hash(const PageDigest& digest) const noexcept;
  std::size_t bucket_of(std::uint64_t hash) const noexcept;
  Ref find_from(Ref ref, const PageDigest& digest) const noexcept;
  void insert(Ref ref);
  void erase(Ref ref);
  void split();

  Tenant& tenant_of(std::uint32_t salt) noexcept { return tenants_[tenant_of_salt_[salt]]; }
  void set_idle(Ref ref, bool idle);
  void forget(Ref ref);
  Ref make_entry();
  void free_entry(Ref ref);
  void forget_failures(std::uint32_t segment);
  std::optional<Place> take_place(std::uint64_t slot_nbytes, Reserved& reserved);
  std::uint32_t segment_to_cut(std::uint64_t before) const noexcept;
  void cut(std::uint32_t segment, std::uint64_t slot_nbytes, std::vector<Gone>& evicted);
  void add_room(std::uint32_t segment);
  bool make_room_of(Tenant& tenant, std::uint64_t nbytes, Reserved& reserved);

  std::uint64_t segment_nbytes_;
  std::uint64_t seed_[2];
  std::vector<Segment> segments_;
  std::map<std::uint64_t, Class> classes_;  // by slot size
  std::vector<Tenant> tenants_;
  std::vector<std::uint32_t> tenant_of_salt_;
  Chunked<Entry, 4096> entries_;
  std::vector<Ref> free_entries_;
  // Linear hashing: one bucket is split with each page, so no page waits for all others.
  Chunked<Ref, 4096> buckets_;
  unsigned level_ = 6;
  std::unordered_map<std::uint64_t, std::uint32_t> num_failures_;  // of places that have failed
  std::uint64_t tick_ = 0;
  std::uint64_t num_pages_ = 0;
  std::uint64_t num_known_ = 0;
  std::uint64_t used_nbytes_ = 0;
  std::uint64_t num_resting_ = 0;
};

static_assert(sizeof(SlotIndex::Entry) <= 64);

}  // namespace kvxfer::store
