// A litmus test of the chain that transfers rest on: stores of many lanes, tell_done, an acquire and a
// release by the host, a stream's wait for a word, and loads of a kernel after it. It repeats rounds of
//
//   stream A  wait(ack >= round - 1), say
//   host      acquires `done`, looks at what was said to it, writes its reply, releases the word
//   stream B  wait(word >= round), see, write(ack, round)
//
// In each round a kernel of one stream writes pages, and a kernel of another stream reads them. CUDA knows of
// no order between the two kernels, as after Transfer.wait_in. The host's part is bench/native/relay.h.
#include "gpu/kernel.cuh"
#include "gpu/litmus.h"

namespace kvxfer::gpu {
namespace {

__device__ inline void say(unsigned* pages, unsigned* said, unsigned num_words, unsigned round) {
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned at = first; at < num_words; at += gridDim.x * blockDim.x) {
    store_streamed(pages + at, litmus_word(round, at));
    store_streamed(said + at, litmus_word(round, at));
  }
}

}  // namespace
}  // namespace kvxfer::gpu

// `pages` lie in the device's memory, `said` in the host's pinned memory.
extern "C" __global__ void kvxfer_litmus_say(unsigned* pages, unsigned* said, unsigned num_words,
                                             unsigned round, unsigned* arrivals, std::uint64_t* done) {
  kvxfer::gpu::say(pages, said, num_words, round);
  kvxfer::gpu::tell_done(done, round, arrivals);
}

// The same without fences and without a release, for comparison. Its errors show what the fences are for;
// that it has none proves nothing.
extern "C" __global__ void kvxfer_litmus_say_unfenced(unsigned* pages, unsigned* said, unsigned num_words,
                                                      unsigned round, unsigned* arrivals,
                                                      std::uint64_t* done) {
  kvxfer::gpu::say(pages, said, num_words, round);
  __syncthreads();
  if (threadIdx.x == 0 && atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1)
    *static_cast<volatile std::uint64_t*>(done) = round;
}

extern "C" __global__ void kvxfer_litmus_see(const unsigned* pages, const unsigned* reply, unsigned num_words,
                                             unsigned round, kvxfer::gpu::LitmusWrong* wrong) {
  unsigned wrong_pages = 0, wrong_reply = 0;
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned at = first; at < num_words; at += gridDim.x * blockDim.x) {
    wrong_pages += pages[at] != kvxfer::gpu::litmus_word(round, at);
    wrong_reply += reply[at] != kvxfer::gpu::litmus_reply(round, at);
  }
  if (wrong_pages != 0) atomicAdd(&wrong->pages, wrong_pages);
  if (wrong_reply != 0) atomicAdd(&wrong->reply, wrong_reply);
}
