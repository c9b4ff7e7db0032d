// Instructions at which threads wait for each other. If a thread does not arrive, a device hangs; here the
// program ends, and prints which threads wait where.
#pragma once

#include <array>
#include <atomic>

#include "cta.h"

namespace ptx {

// Records where a thread waits, for as long as it waits.
class Waiting {
 public:
  explicit Waiting(const Place& at) : where_(cta().thread(threadIdx.x).waits_at) {
    where_.store(&at, std::memory_order_relaxed);
  }
  ~Waiting() { where_.store(nullptr, std::memory_order_relaxed); }

 private:
  std::atomic<const Place*>& where_;
};

// Waits at barrier `index` for `num_threads` threads; with 0, for all threads of the CTA that have not ended.
inline void bar_sync(const Place& at, u32 index, u32 num_threads) {
  Cta& all = cta();
  if (index >= all.met.size()) trap(at, "barrier %u of 16", index);
  if (num_threads % cuda_threads::kWarp != 0 || num_threads > all.num_threads)
    trap(at, "%u threads, which are not so many warps of the CTA", num_threads);
  const Waiting waiting(at);
  std::atomic<u64>& met = all.met[index];
  const u64 times = met.fetch_add(1, std::memory_order_acq_rel) >> 32;
  wait_until(
      [&] {
        u64 seen = met.load(std::memory_order_acquire);
        if (seen >> 32 != times) return true;
        const u32 awaited =
            num_threads != 0 ? num_threads : all.num_threads - all.num_ended.load(std::memory_order_relaxed);
        if (static_cast<u32>(seen) < awaited) return false;
        return met.compare_exchange_strong(seen, (times + 1) << 32, std::memory_order_acq_rel) ||
               seen >> 32 != times;
      },
      [&] {
        trap(at, "not all threads come to barrier %u: %s", index,
             all.absent(at, [](u32) { return true; }).c_str());
      });
}
inline void bar_sync_all(const Place& at, u32 index) { bar_sync(at, index, 0); }

inline bool is_in(u32 mask, u32 of_lane) { return mask >> of_lane & 1; }

// Returns which of the warp's threads exist and have not ended.
inline u32 lanes_to_await(u32 mask) {
  const u32 first = threadIdx.x - lane();
  u32 awaited = 0;
  for (u32 k = 0; k < cuda_threads::kWarp; ++k)
    if (is_in(mask, k) && first + k < cta().num_threads &&
        !cta().thread(first + k).has_ended.load(std::memory_order_relaxed))
      awaited |= 1u << k;
  return awaited;
}

[[noreturn]] inline void nobody_comes(const Place& at, u32 mask) {
  const u32 warp = threadIdx.x / cuda_threads::kWarp;
  trap(at, "not all lanes of the mask 0x%x come: %s", mask,
       cta()
           .absent(
               at,
               [&](u32 t) { return t / cuda_threads::kWarp == warp && is_in(mask, t % cuda_threads::kWarp); })
           .c_str());
}

// The values that the threads of one mask have exchanged. A lane may be at the next exchange while others
// still read its value of this one, so there are two of each. All threads of a mask have taken part in
// equally many exchanges.
struct Meeting {
  std::atomic<u32> mask = 0;
  std::atomic<u64> given[2][cuda_threads::kWarp] = {};  // times (16 bits), line (16), value (32)
  u32 times[cuda_threads::kWarp] = {};  // each used by its lane alone
  std::atomic<u64> met{0};  // for bar.warp.sync, like the CTA's
};

struct Meetings {
  static constexpr u32 kMost = 64;
  std::array<Meeting, kMost> all;

  Meeting& of(const Place& at, u32 mask) {
    if (!is_in(mask, lane())) trap(at, "lane %u is not in the mask 0x%x that it names", lane(), mask);
    for (Meeting& each : all) {
      u32 seen = each.mask.load(std::memory_order_relaxed);
      if (seen == 0 && each.mask.compare_exchange_strong(seen, mask, std::memory_order_relaxed)) return each;
      if (seen == mask) return each;
    }
    trap(at, "a warp of more than %u masks", kMost);
  }
};

inline Meetings& meetings() {
  auto& notes = cuda_threads::this_warp->notes;
  return *static_cast<Meetings*>(notes.get());
}

// Orders memory among the threads of the mask.
inline void bar_warp_sync(const Place& at, u32 mask) {
  Meeting& here = meetings().of(at, mask);
  const Waiting waiting(at);
  const u64 times = here.met.fetch_add(1, std::memory_order_acq_rel) >> 32;
  wait_until(
      [&] {
        u64 seen = here.met.load(std::memory_order_acquire);
        if (seen >> 32 != times) return true;
        if (static_cast<u32>(seen) < popc(lanes_to_await(mask))) return false;
        return here.met.compare_exchange_strong(seen, (times + 1) << 32, std::memory_order_acq_rel) ||
               seen >> 32 != times;
      },
      [&] { nobody_comes(at, mask); });
}

// What each lane of the mask gave to an exchange. An exchange does not order memory, as on a device.
struct Given {
  std::array<u32, cuda_threads::kWarp> values{};
  u32 lanes = 0;  // lanes that gave a value
};

inline Given exchange(const Place& at, u32 mask, u32 value) {
  Meeting& here = meetings().of(at, mask);
  const Waiting waiting(at);
  const u64 times = ++here.times[lane()] & 0xffff, line = static_cast<u64>(at.line) & 0xffff;
  auto& given = here.given[times % 2];
  given[lane()].store(times << 48 | line << 32 | value, std::memory_order_relaxed);
  Given all;
  for (u32 k = 0; k < cuda_threads::kWarp; ++k) {
    if (!is_in(mask, k)) continue;
    u64 seen = 0;
    bool came = true;
    wait_until(
        [&] {
          // The order matters: a lane that has given its value and then ended counts as arrived.
          came = is_in(lanes_to_await(1u << k), k);
          seen = given[k].load(std::memory_order_relaxed);
          if (seen >> 48 == times) return came = true;
          return !came;
        },
        [&] { nobody_comes(at, mask); });
    if (!came) continue;
    if ((seen >> 32 & 0xffff) != line)
      trap(at, "lane %u is at line %u under the same mask 0x%x", k, static_cast<u32>(seen >> 32 & 0xffff),
           mask);
    all.values[k] = static_cast<u32>(seen);
    all.lanes |= 1u << k;
  }
  return all;
}

enum class Shuffle { kUp, kDown, kBfly, kIdx };
struct Shuffled {
  u32 value;
  bool is_in_range;
};
template <Shuffle kHow>
Shuffled shfl(const Place& at, u32 value, u32 b, u32 c, u32 mask) {
  const Given all = exchange(at, mask, value);
  const int own = static_cast<int>(lane()), by = b & 31;
  const u32 segment = c >> 8 & 31, clamp = c & 31;
  const int most = static_cast<int>((lane() & segment) | (clamp & ~segment));
  const int least = static_cast<int>(lane() & segment);
  int from = own;
  if (kHow == Shuffle::kUp) from = own - by;
  if (kHow == Shuffle::kDown) from = own + by;
  if (kHow == Shuffle::kBfly) from = own ^ by;
  if (kHow == Shuffle::kIdx) from = least | (by & ~static_cast<int>(segment));
  const bool is_in_range = kHow == Shuffle::kUp ? from >= most : from <= most;
  if (!is_in_range) from = own;
  if (!is_in(all.lanes, static_cast<u32>(from)))
    trap(at, "it takes the value of lane %d, which gives none under the mask 0x%x", from, mask);
  return {all.values[static_cast<u32>(from)], is_in_range};
}

template <class Fold>
u32 redux(const Place& at, u32 value, u32 mask, Fold&& fold) {
  const Given all = exchange(at, mask, value);
  u32 result = value;
  bool is_first = true;
  for (u32 k = 0; k < cuda_threads::kWarp; ++k) {
    if (!is_in(all.lanes, k)) continue;
    result = is_first ? all.values[k] : fold(result, all.values[k]);
    is_first = false;
  }
  return result;
}
inline u32 ballot(const Place& at, bool vote, u32 mask) {
  const Given all = exchange(at, mask, vote);
  u32 votes = 0;
  for (u32 k = 0; k < cuda_threads::kWarp; ++k)
    votes |= (is_in(all.lanes, k) && all.values[k] ? 1u : 0u) << k;
  return votes;
}
inline bool vote_any(const Place& at, bool vote, u32 mask) { return ballot(at, vote, mask) != 0; }
inline bool vote_all(const Place& at, bool vote, u32 mask) { return ballot(at, !vote, mask) == 0; }
// Threads need not run in lockstep, and here they never do.
inline u32 activemask() { return 1u << lane(); }

inline const bool warps_have_notes = [] {
  cuda_threads::notes_of_warps = []() -> std::shared_ptr<void> { return std::make_shared<Meetings>(); };
  return true;
}();

}  // namespace ptx
