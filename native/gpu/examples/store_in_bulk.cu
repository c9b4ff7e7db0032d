// Kernels that store pages directly into another process's memory: in bulk on sm_90 and later, through
// registers on other GPUs, from one source. Copy them into your code; tests run them unchanged. The other end
// is the same as in store_pages.cu.
//
//   with StoreOffer.receive(sock).map() as there, StoreOffer.receive(sock).map() as word:
//       # With the shared memory that a ring needs:
//       store_pages_in_bulk<<<num_ctas, num_threads, kvxfer.gpu.store_ring_nbytes()>>>(
//           there.address, mine, table, num_pages, page_nbytes, word.share())
//       # Or, with the shared memory that two pages need:
//       rotate_and_store<<<num_ctas, num_threads, 2 * page_nbytes>>>(
//           there.address, keys, cosines, sines, table, num_pages, page_tokens, head_dim, word.share())
//       torch.cuda.synchronize()               # before the mappings end
#include "kvxfer/device.cuh"

// Like store_pages: stores page `table[i]` of ours as page i of theirs, and then adds gridDim.x to their
// word.
extern "C" __global__ void store_pages_in_bulk(char* theirs, const char* ours, const unsigned* table,
                                               unsigned num_pages, unsigned long long page_nbytes,
                                               unsigned* their_word) {
  kvxfer::PageStores<> stores(static_cast<kvxfer::StoreRing<>*>(kvxfer::shared_memory()));
  for (unsigned page = blockIdx.x; page < num_pages; page += gridDim.x)
    stores.store(theirs + page * page_nbytes, ours + table[page] * page_nbytes, page_nbytes);
  stores.arrive(their_word);
}

// Like the end of a projection: computes a page in shared memory, and stores it while it computes the next
// one. Here it rotates keys by their positions (RoPE, halves of a head). Shapes: keys[num_pages *
// page_tokens][head_dim] in the order of tokens; cosines and sines[num_pages * page_tokens][head_dim / 2].
// Page i becomes page `table[i]` of theirs.
extern "C" __global__ void rotate_and_store(float* theirs, const float* keys, const float* cosines,
                                            const float* sines, const unsigned* table, unsigned num_pages,
                                            unsigned page_tokens, unsigned head_dim, unsigned* their_word) {
  const unsigned long long page_size = page_tokens * head_dim;
  const unsigned half = head_dim / 2;
  float* const pages = static_cast<float*>(kvxfer::shared_memory());  // two, used in turn
  kvxfer::PageStores<> stores;  // needs no ring: nothing is stored from the device's memory
  unsigned turn = 0;
  for (unsigned page = blockIdx.x; page < num_pages; page += gridDim.x, turn ^= 1) {
    float* const rotated = pages + turn * page_size;
    stores.wait_until_read<1>();  // the page before the last, which lay there
    for (unsigned at = threadIdx.x; at < page_tokens * half; at += blockDim.x) {
      const unsigned token = at / half, pair = at % half;
      const float* const key = keys + page * page_size + token * head_dim;
      const unsigned long long angle = page * (page_size / 2) + at;
      rotated[token * head_dim + pair] = key[pair] * cosines[angle] - key[pair + half] * sines[angle];
      rotated[token * head_dim + pair + half] = key[pair] * sines[angle] + key[pair + half] * cosines[angle];
    }
    stores.store(theirs + table[page] * page_size, rotated, page_size * sizeof(float));
  }
  stores.arrive(their_word);
}
