// For kernels: tells kvxfer from inside that pages are final, and has it move some.
//
// Compile with the folder that kvxfer.gpu.include_path() returns; nothing of others is included, and no library
// is linked.
//
// A transfer that was posted waits for a word of a kvxfer.Trigger (`trigger.share()`, passed to the kernel as
// a pointer), in pinned memory. It goes when the word holds what it waits for (`after=`):
//
//   __global__ void layer(..., unsigned* word) {
//     ...                      // stores of every thread, to pages of the cache
//     kvxfer::arrive(word);    // by every thread, behind its last store
//   }
//
// With `num_ctas` CTAs a launch: after=trigger.at(num_ctas) waits for one of them, and
// after=trigger.by_layer(num_ctas, num_ctas) for one a layer. gpu/examples/write_layer.cu is such a kernel.
//
// A transfer that nobody posted is started by a command in a ring (kvxfer.CommandRing, `ring.address`): a kernel
// says which pairs of blocks of a write that the host has prepared go, and in which layer.
// gpu/examples/post_pages.cu is such a kernel.
//
// Or a kernel stores pages into another process's memory by itself, without kvxfer in between
// (kvxfer.gpu.offer_stores): store_page(), and arrive() at a word that lies there as well. Or a PageStores, which
// takes pages from shared memory, too, and stores them in bulk where the GPU can (both in device_stores.cuh). What
// it stores there no lease and no fence stops. gpu/examples/store_pages.cu has both ends, and store_in_bulk.cu
// a kernel that stores what it has just computed.
#pragma once

#include "kvxfer/command.h"
#include "kvxfer/device_memory.cuh"
#include "kvxfer/device_stores.cuh"
#include "kvxfer/device_threads.cuh"

namespace kvxfer {

// Stores a value that is more than what the word holds. Called by one thread: what it wrote, and what it has
// learnt by a barrier that others wrote, is seen by whoever sees the value.
__device__ inline void fire(unsigned* word, unsigned value) {
  __threadfence_system();
  store_release(word, value);
}

// Adds one for the whole CTA, to a word of the host's or of a peer's. Called by every thread of it, behind its
// last store and outside of branches that not all of them take: there is a barrier in it. Any number of CTAs may
// arrive at a word, in any order.
__device__ inline void arrive(unsigned* word) { arrive(word, this_cta()); }

// Has `num_pairs` pairs of blocks go, from `pair` on, of the write that the host has prepared under this number
// (`prepared.number`): their bytes of one layer, numbered model-wide, or of every layer that was prepared.
// Called by one thread of whichever CTA, kernel or stream: what it wrote, and what it has learnt by a barrier
// that others wrote, is what goes. The pages stay as they are until the command has ended.
//
// False where the ring is full and stays so for `num_looks` looks at the host's count, each of which crosses the
// bus: nothing is posted then, ever. True says that the host will find the command, not that it is a good one:
// what is wrong with it the host says (CommandRing.take_failures). A ring that is closed takes what still fits, and
// moves nothing.
__device__ inline bool start(CommandRing* ring, unsigned prepared, unsigned pair,
                             unsigned layer = kEveryLayer, unsigned num_pairs = 1,
                             unsigned num_looks = 1000) {
  const unsigned num_commands = ring->num_commands;
  unsigned number = load_acquire_on_device(&ring->tail);
  for (unsigned looks = 0;;) {
    // Signed: others may be further by now than what this thread has seen.
    if (static_cast<int>(number - load_acquire_on_device(&ring->seen)) < static_cast<int>(num_commands)) {
      // Not an addition: that could not be taken back where the ring is full.
      const unsigned found = atomicCAS(&ring->tail, number, number + 1);
      if (found == number) break;
      number = found;
    } else {
      if (looks++ > num_looks) return false;
      // Whoever reads it from here knows that the host has read what lay there before. It may fall behind
      // what another thread stored: then it is looked up again.
      store_release_on_device(&ring->seen, load_acquire(&ring->counts->taken.value));
      number = load_acquire_on_device(&ring->tail);
    }
  }
  Command* command = ring->commands + (number & (num_commands - 1));
  __threadfence_system();
  command->what = what_of(prepared, num_pairs);
  command->pair = pair;
  command->layer = layer;
  store_release(&command->number, kThere | number);
  return true;
}

// How many of the ring's commands have ended, for good or bad, whoever posted them: a count of all there ever
// were, that begins again behind 2^32. The pages of an ended one may be written to again.
__device__ inline unsigned num_ended(const CommandRing* ring) {
  return load_acquire(&ring->counts->ended.value);
}

// How many of those that num_ended() last counted, and perhaps of later ones, did not bring all of their bytes.
__device__ inline unsigned num_failed(const CommandRing* ring) {
  return load_acquire(&ring->counts->failed.value);
}

// Until so many have ended; false where they have not after so many looks, each of which crosses the bus.
__device__ inline bool wait_until_ended(const CommandRing* ring, unsigned count, unsigned num_looks) {
  while (static_cast<int>(num_ended(ring) - count) < 0)
    if (num_looks-- == 0) return false;
  return true;
}

// Until a word that others arrive at, or fire, is at least `value`; false where it is not after so many looks.
// Called by one thread: behind a barrier the others see what was stored before, too.
__device__ inline bool wait_for(const unsigned* word, unsigned value, unsigned num_looks) {
  while (load_acquire(word) < value)
    if (num_looks-- == 0) return false;
  return true;
}

}  // namespace kvxfer
