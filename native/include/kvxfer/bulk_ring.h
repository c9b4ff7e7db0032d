// Shared memory that bulk copies go through, as kernels and the host see it: who launches a kernel gives as
// much (sizeof, alignof). Both compile this; nothing is included.
#pragma once

namespace kvxfer::bulk {

// An mbarrier, by which loads tell that they are there.
struct Barrier { unsigned long long bits; };

// Stages one after the other, and what tells that each is loaded. Bulk copies want 16 bytes, 128 is a line.
template <unsigned num_stages, unsigned stage_nbytes>
struct alignas(128) Ring {
  static_assert(num_stages >= 2, "one stage is stored while others are loaded");
  static_assert(stage_nbytes % 128 == 0);
  unsigned char stages[num_stages][stage_nbytes];
  Barrier loaded[num_stages];
};

}  // namespace kvxfer::bulk

namespace kvxfer {

// What a kernel gives to a PageStores (device_stores.cuh) of its shared memory, and to nothing else: as an
// array that it declares, or at a multiple of 128 of what it is launched with (kvxfer.gpu.store_ring_nbytes).
// With four stages 33,024 bytes, 24 KiB of which are on their way while the fourth stage is stored. By
// arithmetic that is 24 GB/s a CTA where bytes take a microsecond to come; it has not been measured.
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
