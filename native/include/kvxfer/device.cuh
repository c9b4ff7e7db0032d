// Device functions for CUDA kernels: a kernel reports to kvxfer that pages are final, starts transfers, or
// stores pages into another process's memory.
//
// Compile with the include folder that kvxfer.gpu.include_path() returns. This header includes kvxfer's own
// headers alone, and needs no library.
//
// A posted transfer can wait for a word of a kvxfer.Trigger. The word lies in pinned host memory; pass
// `trigger.share()` to the kernel as a pointer. The transfer starts when the word has reached the value that
// it waits for (`after=`):
//
//   __global__ void layer(..., unsigned* word) {
//     ...                      // every thread stores its part of the pages
//     kvxfer::arrive(word);    // every thread calls it, after its last store
//   }
//
// If a launch has `num_ctas` CTAs, after=trigger.at(num_ctas) waits for one launch, and
// after=trigger.by_layer(num_ctas, num_ctas) waits for one launch per layer. gpu/examples/write_layer.cu is
// such a kernel.
//
// A kernel can also start a transfer itself, by a command in a ring (kvxfer.CommandRing; pass `ring.address`
// to the kernel). The host prepares a write; the command says which pairs of its blocks the host transfers,
// and in which layer. gpu/examples/post_pages.cu is such a kernel.
//
// A kernel can also store pages into another process's memory itself, without kvxfer in between
// (kvxfer.gpu.offer_stores). It calls store_page(), and then arrive() on a word that lies in that memory. Or
// it uses a PageStores, which also takes pages from shared memory, and stores them in bulk where the GPU can
// (both are in device_stores.cuh). No lease and no fence stops these stores. gpu/examples/store_pages.cu has
// the kernels of both ends; store_in_bulk.cu has a kernel that stores what it has just computed.
#pragma once

#include "kvxfer/command.h"
#include "kvxfer/device_memory.cuh"
#include "kvxfer/device_stores.cuh"
#include "kvxfer/device_threads.cuh"

namespace kvxfer {

// Stores a value, which must be larger than what the word holds. One thread calls it. A reader that acquires
// the value also sees what this thread wrote before, and what other threads wrote before a barrier that this
// thread has passed.
__device__ inline void fire(unsigned* word, unsigned value) {
  __threadfence_system();
  store_release(word, value);
}

// Adds one to a word for the whole CTA. The word lies in the host's memory or in a peer's. Every thread of
// the CTA calls it, after its last store and outside of divergent branches: it contains a barrier. Any number
// of CTAs may arrive at one word, in any order.
__device__ inline void arrive(unsigned* word) { arrive(word, this_cta()); }

// Posts a command: the host transfers `num_pairs` pairs of blocks, from `pair` on, of the write that it has
// prepared under this number (`prepared.number`). The command moves their bytes of one layer, numbered
// model-wide, or of every prepared layer (kEveryLayer). One thread calls it, of any CTA, kernel or stream.
// The transfer reads what this thread wrote before the call, and what other threads wrote before a barrier
// that this thread has passed. Do not write to the pages until the command has ended.
//
// Returns false if the ring stays full for `num_looks` reads of the host's count, each of which crosses the
// bus. Then the command is not posted. True means that the host will find the command, not that the command
// is valid: the host reports its errors (CommandRing.take_failures). A closed ring accepts commands while it
// has room, and moves nothing.
__device__ inline bool start(CommandRing* ring, unsigned prepared, unsigned pair,
                             unsigned layer = kEveryLayer, unsigned num_pairs = 1,
                             unsigned num_looks = 1000) {
  const unsigned num_commands = ring->num_commands;
  unsigned number = load_acquire_on_device(&ring->tail);
  for (unsigned looks = 0;;) {
    // Signed: other threads may have moved `seen` past `number` since this thread read the tail.
    if (static_cast<int>(number - load_acquire_on_device(&ring->seen)) < static_cast<int>(num_commands)) {
      // Not an atomic addition, which could not be taken back if the ring is full.
      const unsigned found = atomicCAS(&ring->tail, number, number + 1);
      if (found == number) break;
      number = found;
    } else {
      if (looks++ > num_looks) return false;
      // A thread that acquires `seen` knows that the host has read the slots before it. This store may
      // replace another thread's newer value; then the host's count is read again.
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

// Returns how many of the ring's commands have ended, with or without an error, whichever thread posted them.
// The count covers the ring's whole life, and wraps to 0 at 2^32. The pages of an ended command may be
// written to again.
__device__ inline unsigned num_ended(const CommandRing* ring) {
  return load_acquire(&ring->counts->ended.value);
}

// Returns how many ended commands did not bring all of their bytes: of those that the last num_ended()
// counted, and perhaps of later ones.
__device__ inline unsigned num_failed(const CommandRing* ring) {
  return load_acquire(&ring->counts->failed.value);
}

// Waits until `count` commands have ended. Returns false if they have not after `num_looks` reads of the
// host's count, each of which crosses the bus.
__device__ inline bool wait_until_ended(const CommandRing* ring, unsigned count, unsigned num_looks) {
  while (static_cast<int>(num_ended(ring) - count) < 0)
    if (num_looks-- == 0) return false;
  return true;
}

// Waits until a word that others arrive at, or fire, is at least `value`. Returns false if it is not after
// `num_looks` reads. The calling thread sees what was stored before the word; the other threads of its CTA
// see it after a barrier.
__device__ inline bool wait_for(const unsigned* word, unsigned value, unsigned num_looks) {
  while (load_acquire(word) < value)
    if (num_looks-- == 0) return false;
  return true;
}

}  // namespace kvxfer
