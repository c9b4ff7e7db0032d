// A kernel whose CTAs compute pages of a cache, and start the transfer of each page as soon as it is
// computed. Copy it into your code; tests run it unchanged.
//
//   with agent.command_ring() as ring:
//       prepared = ring.prepare_write(region, remote, src_blocks, dst_blocks, notify=b"req-42")
//       post_pages<<<num_ctas, num_threads>>>(pages, num_words, table, num_pairs, seed, ring.address,
//                                             prepared.number, layer, num_lost)
//       ring.ended_blocking(num_pairs, timeout_s=5)      # or: await ring.ended(num_pairs)
//
// `pages` is the layer's memory, and `table` holds src_blocks. A command names a pair by its index in both
// tables.
#include "kvxfer/device.cuh"

extern "C" __global__ void post_pages(unsigned* pages, unsigned num_words, const unsigned* table,
                                      unsigned num_pairs, unsigned seed, kvxfer::CommandRing* ring,
                                      unsigned prepared, unsigned layer, unsigned* num_lost) {
  for (unsigned pair = blockIdx.x; pair < num_pairs; pair += gridDim.x) {
    unsigned* page = pages + static_cast<unsigned long long>(table[pair]) * num_words;
    for (unsigned at = threadIdx.x; at < num_words; at += blockDim.x) page[at] = seed + table[pair] + at;
    __syncthreads();
    // start() returns false if the host is behind. Count the pages that were not posted, so that the caller
    // can write them by agent.write().
    if (threadIdx.x == 0 && !kvxfer::start(ring, prepared, pair, layer)) atomicAdd(num_lost, 1);
  }
}
