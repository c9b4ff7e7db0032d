// The functions of kvxfer/device.cuh as kernels, so that tests which call them from their threads run the PTX.
#include "kvxfer/device.cuh"

extern "C" __global__ void kvxfer_device_fire(unsigned* word, unsigned value) { kvxfer::fire(word, value); }

extern "C" __global__ void kvxfer_device_start(unsigned* posted, kvxfer::CommandRing* ring, unsigned prepared,
                                               unsigned pair, unsigned layer, unsigned num_pairs,
                                               unsigned num_looks) {
  *posted = kvxfer::start(ring, prepared, pair, layer, num_pairs, num_looks);
}

extern "C" __global__ void kvxfer_device_wait_until_ended(unsigned* ended, const kvxfer::CommandRing* ring,
                                                          unsigned count, unsigned num_looks) {
  *ended = kvxfer::wait_until_ended(ring, count, num_looks);
}

extern "C" __global__ void kvxfer_device_store_page(void* to, const void* from, unsigned long long nbytes,
                                                    unsigned lane, unsigned num_lanes) {
  kvxfer::store_page(to, from, nbytes, lane, num_lanes);
}

extern "C" __global__ void kvxfer_device_wait_for(unsigned* came, const unsigned* word, unsigned value,
                                                  unsigned num_looks) {
  *came = kvxfer::wait_for(word, value, num_looks);
}
