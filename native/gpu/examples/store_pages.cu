// Kernels of two processes, of which one stores pages straight into the other's memory. To be copied; tests run
// them as they stand.
//
//   # The process whose memory it is: from here on it is whoever holds the handle who may store there.
//   with kvxfer.gpu.shareable_memory():
//       pages, arrived = torch.zeros(...), torch.zeros(1, dtype=torch.int32, device="cuda")
//   for tensor in (pages, arrived):
//       kvxfer.gpu.offer_stores(tensor).send(sock)
//   read_pages<<<num_ctas, num_threads>>>(pages, num_words, arrived, num_ctas, num_looks, sums)
//
//   # The other one:
//   with StoreOffer.receive(sock).map() as there, StoreOffer.receive(sock).map() as word:
//       store_pages<<<num_ctas, num_threads>>>(there.address, mine, table, num_pages, page_nbytes, word.share())
//       torch.cuda.synchronize()               # before the mappings go
#include "kvxfer/device.cuh"

// Page `table[i]` of ours becomes page i of theirs. Their word then holds gridDim.x more.
extern "C" __global__ void store_pages(char* theirs, const char* ours, const unsigned* table,
                                       unsigned num_pages, unsigned long long page_nbytes,
                                       unsigned* their_word) {
  for (unsigned page = blockIdx.x; page < num_pages; page += gridDim.x)
    kvxfer::store_page(theirs + page * page_nbytes, ours + table[page] * page_nbytes, page_nbytes,
                       threadIdx.x, blockDim.x);
  kvxfer::arrive(their_word);
}

// Waits for the last CTA that stores, and adds up what came: a stand-in for whoever uses the pages. Nothing
// where it did not come.
extern "C" __global__ void read_pages(const unsigned* pages, unsigned num_words, const unsigned* word,
                                      unsigned num_stored, unsigned num_looks, unsigned* sum) {
  if (!kvxfer::wait_for(word, num_stored, num_looks)) return;  // every thread for itself
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned own = 0;
  for (unsigned at = first; at < num_words; at += gridDim.x * blockDim.x) own += pages[at];
  atomicAdd(sum, own);
}
