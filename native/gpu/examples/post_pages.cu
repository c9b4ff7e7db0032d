// A kernel whose CTAs each compute pages of a cache, and start the transfer of each as soon as it is there.
// To be copied; tests run it as it stands.
//
//   with agent.command_ring() as ring:
//       prepared = ring.prepare_write(region, remote, src_blocks, dst_blocks, notify=b"req-42")
//       post_pages<<<num_ctas, num_threads>>>(pages, num_words, table, num_pairs, seed, ring.address,
//                                             prepared.number, layer, num_lost)
//       ring.ended_blocking(num_pairs, timeout_s=5)      # or: await ring.ended(num_pairs)
//
// `pages` is the layer, `table` its src_blocks: the pair that a command names is the place in both tables.
#include "kvxfer/device.cuh"

extern "C" __global__ void post_pages(unsigned* pages, unsigned num_words, const unsigned* table,
                                      unsigned num_pairs, unsigned seed, kvxfer::CommandRing* ring,
                                      unsigned prepared, unsigned layer, unsigned* num_lost) {
  for (unsigned pair = blockIdx.x; pair < num_pairs; pair += gridDim.x) {
    unsigned* page = pages + static_cast<unsigned long long>(table[pair]) * num_words;
    for (unsigned at = threadIdx.x; at < num_words; at += blockDim.x) page[at] = seed + table[pair] + at;
    __syncthreads();
    // The host is behind: what was not posted is counted, for whoever launched this to write by agent.write().
    if (threadIdx.x == 0 && !kvxfer::start(ring, prepared, pair, layer)) atomicAdd(num_lost, 1);
  }
}
