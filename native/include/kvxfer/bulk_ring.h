// Shared memory that bulk copies go through, as kernels and the host see it. The host gives a kernel this
// much memory at its launch (sizeof, alignof). Host and kernels both compile this file, so it includes
// nothing.
#pragma once

namespace kvxfer::bulk {

// An mbarrier: loads report through it that they have arrived.
struct Barrier { unsigned long long bits; };

// The stages, one after the other, and for each the barrier that says when it is loaded. Bulk copies need
// addresses that are multiples of 16; a cache line has 128 bytes.
template <unsigned num_stages, unsigned stage_nbytes>
struct alignas(128) Ring {
  static_assert(num_stages >= 2, "one stage is stored while others are loaded");
  static_assert(stage_nbytes % 128 == 0);
  unsigned char stages[num_stages][stage_nbytes];
  Barrier loaded[num_stages];
};

}  // namespace kvxfer::bulk

namespace kvxfer {

// The part of its shared memory that a kernel gives to one PageStores (device_stores.cuh), and to nothing
// else. It is an array that the kernel declares, or lies at a multiple of 128 in the shared memory that the
// kernel is launched with (kvxfer.gpu.store_ring_nbytes). With four stages it has 33,024 bytes; 24 KiB of
// them are on their way while the fourth stage is stored. By arithmetic that is 24 GB/s a CTA if bytes take
// a microsecond to come; it has not been measured.
inline constexpr unsigned kStoreStageNbytes = 8 * 1024;
inline constexpr unsigned kStoreStages = 4;
template <unsigned num_stages = kStoreStages>
struct StoreRing {
  struct Place {
    void* to;
    unsigned nbytes;
  };
  bulk::Ring<num_stages, kStoreStageNbytes> ring;
  Place places[num_stages];  // where each stage goes
};
static_assert(sizeof(StoreRing<>) == 33024 && alignof(StoreRing<>) == 128);

}  // namespace kvxfer
