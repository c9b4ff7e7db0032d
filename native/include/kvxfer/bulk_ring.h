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
