// A kernel that writes a layer of a cache and reports it: kvxfer moves the layer once the last CTA has
// stored. Copy it into your code; tests run it unchanged.
//
//   trigger = agent.trigger()
//   transfer = agent.write(..., after=trigger.by_layer(num_ctas, num_ctas))
//   for layer in layers:
//       write_layer<<<num_ctas, num_threads>>>(layer, num_words, seed, trigger.share())
#include "kvxfer/device.cuh"

extern "C" __global__ void write_layer(unsigned* layer, unsigned num_words, unsigned seed, unsigned* word) {
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned at = first; at < num_words; at += gridDim.x * blockDim.x) layer[at] = seed + at;
  kvxfer::arrive(word);
}
