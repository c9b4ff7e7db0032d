// Replaces kvxfer/device.cuh: its functions are those of ptx/device_functions.cu, translated from PTX and
// linked. All others come from the header itself.
#pragma once

#define fire fire_of_the_header
#define start start_of_the_header
#define wait_until_ended wait_until_ended_of_the_header
#define store_page store_page_of_the_header
#define wait_for wait_for_of_the_header
#include "../../../../../native/include/kvxfer/device.cuh"
#undef fire
#undef start
#undef wait_until_ended
#undef store_page
#undef wait_for

extern "C" {
void kvxfer_device_fire(unsigned* word, unsigned value);
void kvxfer_device_start(unsigned* posted, kvxfer::CommandRing* ring, unsigned prepared, unsigned pair,
                         unsigned layer, unsigned num_pairs, unsigned num_looks);
void kvxfer_device_wait_until_ended(unsigned* ended, const kvxfer::CommandRing* ring, unsigned count,
                                    unsigned num_looks);
void kvxfer_device_store_page(void* to, const void* from, unsigned long long nbytes, unsigned lane,
                              unsigned num_lanes);
void kvxfer_device_wait_for(unsigned* came, const unsigned* word, unsigned value, unsigned num_looks);
}

namespace kvxfer {

inline void fire(unsigned* word, unsigned value) { kvxfer_device_fire(word, value); }
inline bool start(CommandRing* ring, unsigned prepared, unsigned pair, unsigned layer = kEveryLayer,
                  unsigned num_pairs = 1, unsigned num_looks = 1000) {
  unsigned posted = 0;
  kvxfer_device_start(&posted, ring, prepared, pair, layer, num_pairs, num_looks);
  return posted != 0;
}
inline bool wait_until_ended(const CommandRing* ring, unsigned count, unsigned num_looks) {
  unsigned ended = 0;
  kvxfer_device_wait_until_ended(&ended, ring, count, num_looks);
  return ended != 0;
}
inline void store_page(void* to, const void* from, unsigned long long nbytes, unsigned lane,
                       unsigned num_lanes) {
  kvxfer_device_store_page(to, from, nbytes, lane, num_lanes);
}
inline bool wait_for(const unsigned* word, unsigned value, unsigned num_looks) {
  // Tests also wait outside of kernels.
  if (cuda_threads::this_cta == nullptr) return wait_for_of_the_header(word, value, num_looks);
  unsigned came = 0;
  kvxfer_device_wait_for(&came, word, value, num_looks);
  return came != 0;
}

}  // namespace kvxfer
