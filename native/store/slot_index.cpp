#include "store/slot_index.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdlib>
#include <utility>

namespace kvxfer::store {
namespace {

constexpr std::uint32_t kNoSegment = UINT32_MAX;
// A place is given a second try: a write that failed may succeed once the disk has moved the block.
constexpr std::uint32_t kMostFailures = 2;

std::uint64_t word(const PageDigest& digest, std::size_t at) noexcept {
  std::uint64_t found;
  std::memcpy(&found, digest.data() + 8 * at, 8);
  return found;
}
std::uint64_t mixed(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
std::uint64_t number_of(Place place) noexcept { return std::uint64_t{place.segment} << 32 | place.slot; }

}  // namespace

SlotIndex::SlotIndex(std::uint32_t num_segments, std::uint64_t segment_nbytes, std::uint64_t seed)
    : segment_nbytes_(segment_nbytes), seed_{mixed(seed + 1), mixed(seed + 2)}, segments_(num_segments) {
  for (std::size_t i = 0; i < std::size_t{1} << level_; ++i) buckets_.push_back(kNone);
}

void SlotIndex::set_tenant(std::uint32_t salt, std::uint32_t tenant) {
  if (salt >= tenant_of_salt_.size()) tenant_of_salt_.resize(salt + 1, 0);
  tenant_of_salt_[salt] = tenant;
  if (tenant >= tenants_.size()) tenants_.resize(tenant + 1);
}

void SlotIndex::set_bound(std::uint32_t tenant, std::uint64_t most_nbytes) {
  if (tenant >= tenants_.size()) tenants_.resize(tenant + 1);
  tenants_[tenant].most_nbytes = most_nbytes;
}

std::uint64_t SlotIndex::tenant_nbytes(std::uint32_t tenant) const noexcept {
  return tenant < tenants_.size() ? tenants_[tenant].nbytes : 0;
}

// ---- pages by digest -------------------------------------------------------------------------------

std::uint64_t SlotIndex::hash(const PageDigest& digest) const noexcept {
  return mixed(mixed(word(digest, 0) ^ seed_[0]) + (word(digest, 1) ^ seed_[1]));
}

std::size_t SlotIndex::bucket_of(std::uint64_t hash) const noexcept {
  const std::size_t wide = hash & ((std::size_t{2} << level_) - 1);
  return wide < buckets_.size() ? wide : hash & ((std::size_t{1} << level_) - 1);
}

SlotIndex::Ref SlotIndex::find_from(Ref ref, const PageDigest& digest) const noexcept {
  while (ref != kNone && entries_[ref].digest != digest) ref = entries_[ref].next_of_hash;
  return ref;
}

SlotIndex::Ref SlotIndex::known(const PageDigest& digest) const noexcept {
  return find_from(buckets_[bucket_of(hash(digest))], digest);
}

SlotIndex::Ref SlotIndex::find(const PageDigest& digest) const noexcept {
  const Ref ref = known(digest);
  return ref != kNone && entries_[ref].state == State::kWhole ? ref : kNone;
}

void SlotIndex::find(std::span<const PageDigest> digests, std::span<Ref> refs) const noexcept {
  // A million entries lie in no cache. A processor keeps some ten to twenty such accesses running.
  constexpr std::size_t kAtATime = 16;
  for (std::size_t first = 0; first < digests.size(); first += kAtATime) {
    const std::size_t count = std::min(kAtATime, digests.size() - first);
    const auto asked = digests.subspan(first, count);
    const auto into = refs.subspan(first, count);
    std::array<const Ref*, kAtATime> buckets;
    for (std::size_t i = 0; i < count; ++i) {
      buckets[i] = &buckets_[bucket_of(hash(asked[i]))];
      __builtin_prefetch(buckets[i]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      into[i] = *buckets[i];
      if (into[i] != kNone) __builtin_prefetch(&entries_[into[i]]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      into[i] = find_from(into[i], asked[i]);
      if (into[i] != kNone && entries_[into[i]].state != State::kWhole) into[i] = kNone;
    }
  }
}

void SlotIndex::insert(Ref ref) {
  if (++num_known_ > buckets_.size()) split();
  Ref& first = buckets_[bucket_of(hash(entries_[ref].digest))];
  entries_[ref].next_of_hash = first;
  first = ref;
}

void SlotIndex::erase(Ref ref) {
  Ref* at = &buckets_[bucket_of(hash(entries_[ref].digest))];
  while (*at != ref) at = &entries_[*at].next_of_hash;
  *at = entries_[ref].next_of_hash;
  --num_known_;
}

void SlotIndex::split() {
  const std::size_t from = buckets_.size() - (std::size_t{1} << level_);
  buckets_.push_back(kNone);
  Ref ref = std::exchange(buckets_[from], kNone);
  while (ref != kNone) {
    const Ref next = entries_[ref].next_of_hash;
    Ref& first = buckets_[bucket_of(hash(entries_[ref].digest))];
    entries_[ref].next_of_hash = first;
    first = ref;
    ref = next;
  }
  if (buckets_.size() == std::size_t{2} << level_) ++level_;
}

// ---- pages that may be evicted, the least recently used first --------------------------------------

void SlotIndex::set_idle(Ref ref, bool idle) {
  Entry& entry = entries_[ref];
  if (entry.is_idle == idle) return;
  entry.is_idle = idle;
  Segment& segment = segments_[entry.place.segment];
  const auto link = [&](auto& list, Ref Entry::* older, Ref Entry::* newer) {
    if (idle) {
      entry.*older = list.newest;
      entry.*newer = kNone;
      (list.newest == kNone ? list.oldest : entries_[list.newest].*newer) = ref;
      list.newest = ref;
    } else {
      (entry.*older == kNone ? list.oldest : entries_[entry.*older].*newer) = entry.*newer;
      (entry.*newer == kNone ? list.newest : entries_[entry.*newer].*older) = entry.*older;
    }
  };
  link(classes_[segment.slot_nbytes], &Entry::older, &Entry::newer);
  link(tenant_of(entry.salt), &Entry::older_of_tenant, &Entry::newer_of_tenant);
  segment.num_busy += idle ? -1 : 1;
}

void SlotIndex::touch(Ref ref) {
  Entry& entry = entries_[ref];
  entry.used_at = segments_[entry.place.segment].used_at = ++tick_;
  if (!entry.is_idle) return;
  set_idle(ref, false);
  set_idle(ref, true);
}

// ---- places ----------------------------------------------------------------------------------------

void SlotIndex::add_room(std::uint32_t number) {
  Segment& segment = segments_[number];
  if (segment.has_room || segment.is_closed || segment.free.empty()) return;
  segment.has_room = true;
  classes_[segment.slot_nbytes].with_room.push_back(number);
}

void SlotIndex::forget_failures(std::uint32_t segment) {
  for (auto it = num_failures_.begin(); it != num_failures_.end();) {
    const bool here = it->first >> 32 == segment;
    num_resting_ -= here && it->second >= kMostFailures;
    it = here ? num_failures_.erase(it) : std::next(it);
  }
}

void SlotIndex::cut(std::uint32_t number, std::uint64_t slot_nbytes, std::vector<Gone>& evicted) {
  Segment& segment = segments_[number];
  for (const Ref ref : segment.refs) {
    if (ref == kNone) continue;
    evicted.push_back({entries_[ref].digest, entries_[ref].salt});
    forget(ref);
    free_entry(ref);
  }
  if (segment.has_room) std::erase(classes_[segment.slot_nbytes].with_room, number);
  forget_failures(number);
  segment.slot_nbytes = slot_nbytes;
  segment.num_slots = static_cast<std::uint32_t>(segment_nbytes_ / slot_nbytes);
  segment.num_busy = 0;
  segment.has_room = false;
  segment.refs.assign(segment.num_slots, kNone);
  segment.free.resize(segment.num_slots);
  for (std::uint32_t slot = 0; slot < segment.num_slots; ++slot)
    segment.free[slot] = segment.num_slots - 1 - slot;
  add_room(number);
}

std::uint32_t SlotIndex::segment_to_cut(std::uint64_t before) const noexcept {
  std::uint32_t found = kNoSegment;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    if (segment.is_closed || segment.num_busy != 0 || segment.used_at >= before) continue;
    if (found == kNoSegment || segment.used_at < segments_[found].used_at) found = number;
  }
  return found;
}

std::optional<Place> SlotIndex::take_place(std::uint64_t slot_nbytes, Reserved& reserved) {
  Class& mine = classes_[slot_nbytes];
  if (mine.with_room.empty()) {
    // A segment that was never used has the time 0.
    const std::uint64_t oldest = mine.oldest == kNone ? UINT64_MAX : entries_[mine.oldest].used_at;
    const std::uint32_t number = segment_to_cut(oldest);
    if (number != kNoSegment) {
      cut(number, slot_nbytes, reserved.evicted);
      reserved.cuts = true;
    } else if (mine.oldest != kNone) {
      const Ref ref = mine.oldest;
      reserved.evicted.push_back({entries_[ref].digest, entries_[ref].salt});
      forget(ref);
      give_back(ref);
    } else {
      return std::nullopt;
    }
  }
  const std::uint32_t number = mine.with_room.back();
  Segment& segment = segments_[number];
  const Place place{number, segment.free.back()};
  segment.free.pop_back();
  if (segment.free.empty()) {
    segment.has_room = false;
    mine.with_room.pop_back();
  }
  return place;
}

SlotIndex::Ref SlotIndex::make_entry() {
  if (free_entries_.empty()) {
    entries_.push_back({});
    return static_cast<Ref>(entries_.size() - 1);
  }
  const Ref ref = free_entries_.back();
  free_entries_.pop_back();
  entries_[ref] = {};
  return ref;
}

bool SlotIndex::make_room_of(Tenant& tenant, std::uint64_t nbytes, Reserved& reserved) {
  if (nbytes > tenant.most_nbytes) return false;
  while (tenant.nbytes + nbytes > tenant.most_nbytes) {
    const Ref ref = tenant.oldest;
    if (ref == kNone) return false;
    reserved.evicted.push_back({entries_[ref].digest, entries_[ref].salt});
    forget(ref);
    reserved.leaving.push_back(ref);
  }
  return true;
}

SlotIndex::Reserved SlotIndex::reserve(const PageDigest& digest, std::uint32_t salt,
                                       std::uint64_t slot_nbytes) {
  assert(known(digest) == kNone && salt < tenant_of_salt_.size());
  Reserved reserved;
  if (slot_nbytes == 0 || slot_nbytes > segment_nbytes_) return reserved;
  if (!make_room_of(tenant_of(salt), slot_nbytes, reserved)) return reserved;
  const std::optional<Place> place = take_place(slot_nbytes, reserved);
  if (!place) return reserved;
  reserved.ref = make_entry();
  Entry& entry = entries_[reserved.ref];
  entry.digest = digest;
  entry.salt = salt;
  entry.place = *place;
  entry.state = State::kWriting;
  Segment& segment = segments_[place->segment];
  segment.refs[place->slot] = reserved.ref;
  entry.used_at = segment.used_at = ++tick_;
  ++segment.num_busy;
  used_nbytes_ += slot_nbytes;
  tenant_of(salt).nbytes += slot_nbytes;
  insert(reserved.ref);
  return reserved;
}

void SlotIndex::commit(Ref ref, std::uint32_t page_crc) {
  Entry& entry = entries_[ref];
  assert(entry.state == State::kWriting);
  entry.state = State::kWhole;
  entry.page_crc = page_crc;
  ++num_pages_;
  num_failures_.erase(number_of(entry.place));
  entry.used_at = segments_[entry.place.segment].used_at = ++tick_;
  set_idle(ref, true);
}

void SlotIndex::abort(Ref ref, bool failed) {
  assert(entries_[ref].state == State::kWriting);
  forget(ref);
  give_back(ref, failed);
}

// It is found no more, and counts no more; its place is still taken.
void SlotIndex::forget(Ref ref) {
  Entry& entry = entries_[ref];
  set_idle(ref, false);
  erase(ref);
  if (entry.state == State::kWhole) --num_pages_;
  entry.state = State::kLeaving;
  tenant_of(entry.salt).nbytes -= slot_nbytes(ref);
  used_nbytes_ -= slot_nbytes(ref);
}

void SlotIndex::hold(Ref ref) {
  ++entries_[ref].num_holds;
  set_idle(ref, false);
}

void SlotIndex::release(Ref ref) {
  Entry& entry = entries_[ref];
  if (--entry.num_holds > 0) return;
  if (entry.state == State::kDropped) {
    entry.state = State::kLeaving;
  } else if (entry.state == State::kWhole) {
    entry.used_at = segments_[entry.place.segment].used_at = ++tick_;
    set_idle(ref, true);
  }
}

bool SlotIndex::drop(Ref ref) {
  Entry& entry = entries_[ref];
  entry.num_holds += entry.state == State::kWriting;  // its writer's
  forget(ref);
  if (entry.num_holds > 0) entry.state = State::kDropped;
  return is_leaving(ref);
}

void SlotIndex::free_entry(Ref ref) {
  entries_[ref].state = State::kFree;
  free_entries_.push_back(ref);
}

void SlotIndex::give_back(Ref ref, bool failed) {
  const Place place = entries_[ref].place;
  assert(is_leaving(ref) && entries_[ref].num_holds == 0);
  Segment& segment = segments_[place.segment];
  --segment.num_busy;
  segment.refs[place.slot] = kNone;
  free_entry(ref);
  if (failed && ++num_failures_[number_of(place)] >= kMostFailures) {
    ++num_resting_;
    return;
  }
  segment.free.push_back(place.slot);
  add_room(place.segment);
}

void SlotIndex::close_segment(std::uint32_t number) {
  Segment& segment = segments_[number];
  if (segment.has_room) std::erase(classes_[segment.slot_nbytes].with_room, number);
  segment.has_room = false;
  segment.is_closed = true;
}

bool SlotIndex::open_segment(std::uint32_t number) {
  Segment& segment = segments_[number];
  if (segment.num_busy != 0) return false;
  forget_failures(number);
  segment = {};
  return true;
}

std::optional<SlotIndex::Ref> SlotIndex::first_from(Place from, std::optional<std::uint32_t> tenant) const {
  for (; from.segment < segments_.size(); ++from.segment, from.slot = 0) {
    const std::vector<Ref>& refs = segments_[from.segment].refs;
    for (; from.slot < refs.size(); ++from.slot) {
      const Ref ref = refs[from.slot];
      if (ref == kNone || entries_[ref].state != State::kWhole) continue;
      if (!tenant || tenant_of_salt_[entries_[ref].salt] == *tenant) return ref;
    }
  }
  return std::nullopt;
}

// ---- recovery --------------------------------------------------------------------------------------

void SlotIndex::found_segment(std::uint32_t number, std::uint64_t slot_nbytes) {
  std::vector<Gone> none;
  cut(number, slot_nbytes, none);
}

bool SlotIndex::found(Place place, const SlotHead& head, std::optional<Place>& overtaken) {
  tick_ = std::max(tick_, head.generation);
  Ref ref = known(head.digest);
  if (ref != kNone) {
    if (entries_[ref].used_at >= head.generation) return false;
    overtaken = entries_[ref].place;
    drop(ref);
    give_back(ref);
  }
  ref = make_entry();
  Entry& entry = entries_[ref];
  entry.digest = head.digest;
  entry.salt = head.salt;
  entry.page_crc = head.page_crc;
  entry.place = place;
  entry.used_at = head.generation;
  entry.state = State::kWhole;
  Segment& segment = segments_[place.segment];
  segment.refs[place.slot] = ref;
  segment.used_at = std::max(segment.used_at, head.generation);
  ++segment.num_busy;
  ++num_pages_;
  used_nbytes_ += segment.slot_nbytes;
  tenant_of(head.salt).nbytes += segment.slot_nbytes;
  insert(ref);
  return true;
}

void SlotIndex::found_all() {
  std::vector<Ref> found;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    Segment& segment = segments_[number];
    if (segment.has_room) std::erase(classes_[segment.slot_nbytes].with_room, number);
    segment.has_room = false;
    segment.free.clear();
    for (std::uint32_t slot = segment.num_slots; slot-- > 0;)
      if (segment.refs[slot] == kNone) segment.free.push_back(slot);
    add_room(number);
    for (const Ref ref : segment.refs)
      if (ref != kNone) found.push_back(ref);
  }
  std::sort(found.begin(), found.end(),
            [this](Ref a, Ref b) { return entries_[a].used_at < entries_[b].used_at; });
  for (const Ref ref : found) set_idle(ref, true);
}

void SlotIndex::check() const {
  const auto require = [](bool holds) {
    if (!holds) std::abort();
  };
  std::uint64_t num_pages = 0, used_nbytes = 0;
  std::vector<std::uint64_t> nbytes_of(tenants_.size());
  std::map<std::uint64_t, std::size_t> num_idle;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    std::uint32_t num_busy = 0, num_taken = 0;
    for (std::uint32_t slot = 0; slot < segment.refs.size(); ++slot) {
      const Ref ref = segment.refs[slot];
      if (ref == kNone) continue;
      const Entry& entry = entries_[ref];
      const bool counts = entry.state == State::kWriting || entry.state == State::kWhole;
      ++num_taken;
      require(entry.state != State::kFree && entry.place == Place{number, slot});
      require(counts == (known(entry.digest) == ref));
      require(entry.is_idle == (entry.state == State::kWhole && entry.num_holds == 0));
      num_pages += entry.state == State::kWhole;
      num_busy += !entry.is_idle;
      num_idle[segment.slot_nbytes] += entry.is_idle;
      used_nbytes += counts ? segment.slot_nbytes : 0;
      if (counts) nbytes_of[tenant_of_salt_[entry.salt]] += segment.slot_nbytes;
    }
    std::uint32_t num_resting = 0;
    for (const auto& [place, times] : num_failures_)
      num_resting += place >> 32 == number && times >= kMostFailures;
    require(num_busy == segment.num_busy);
    require(segment.num_slots == num_taken + num_resting + segment.free.size());
    require(segment.has_room == (!segment.free.empty() && !segment.is_closed));
  }
  for (const auto& [slot_nbytes, each] : classes_) {
    std::size_t count = 0;
    std::uint64_t last = 0;
    for (Ref ref = each.oldest; ref != kNone; ref = entries_[ref].newer, ++count) {
      require(entries_[ref].used_at > last);
      last = entries_[ref].used_at;
    }
    require(count == num_idle[slot_nbytes]);
  }
  for (std::size_t i = 0; i < tenants_.size(); ++i) require(nbytes_of[i] == tenants_[i].nbytes);
  require(num_pages == num_pages_ && used_nbytes == used_nbytes_);
}

}  // namespace kvxfer::store
