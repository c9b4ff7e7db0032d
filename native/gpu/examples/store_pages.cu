// Kernels of two processes: one process stores pages directly into the other's memory. Copy them into your
// code; tests run them unchanged.
//
//   # The process that owns the memory. Every process that gets the handle may store there.
//   with kvxfer.gpu.shareable_memory():
//       pages, arrived = torch.zeros(...), torch.zeros(1, dtype=torch.int32, device="cuda")
//   for tensor in (pages, arrived):
//       kvxfer.gpu.offer_stores(tensor).send(sock)
//   read_pages<<<num_ctas, num_threads>>>(pages, num_words, arrived, num_ctas, num_looks, sums)
//
//   # The process that stores:
//   with StoreOffer.receive(sock).map() as there, StoreOffer.receive(sock).map() as word:
//       store_pages<<<num_ctas, num_threads>>>(there.address, mine, table, num_pages, page_nbytes, word.share())
//       torch.cuda.synchronize()               # before the mappings end
#include "kvxfer/device.cuh"

// Stores page `table[i]` of ours as page i of theirs, and then adds gridDim.x to their word.
extern "C" __global__ void store_pages(char* theirs, const char* ours, const unsigned* table,
                                       unsigned num_pages, unsigned long long page_nbytes,
                                       unsigned* their_word) {
  for (unsigned page = blockIdx.x; page < num_pages; page += gridDim.x)
    kvxfer::store_page(theirs + page * page_nbytes, ours + table[page] * page_nbytes, page_nbytes,
                       threadIdx.x, blockDim.x);
  kvxfer::arrive(their_word);
}

// Waits for the last CTA that stores, and adds up the words that it stored; a real kernel would use the
// pages. Adds nothing if the wait times out.
extern "C" __global__ void read_pages(const unsigned* pages, unsigned num_words, const unsigned* word,
                                      unsigned num_stored, unsigned num_looks, unsigned* sum) {
  if (!kvxfer::wait_for(word, num_stored, num_looks)) return;  // every thread waits for itself
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned own = 0;
  for (unsigned at = first; at < num_words; at += gridDim.x * blockDim.x) own += pages[at];
  atomicAdd(sum, own);
}
