// Copies long runs on 16-byte boundaries by bulk copies through shared memory, on sm_90 and later. This way a
// few CTAs keep many bytes in flight without using registers for them.
#include "gpu/bulk_ring.h"
#include "gpu/copy_job.h"
#include "gpu/kernel.cuh"
#include "gpu/memory.cuh"
#include "kvxfer/device_bulk.cuh"

namespace kvxfer::gpu {

// A lane's part of a slice: one atom, or nothing.
struct Atom {
  AtomPlace place;
  std::uint32_t nbytes;
  std::uint32_t offset;  // in its stage
};

__device__ inline Atom atom_of_lane(const JobLoop& loop, const Slice& slice) {
  if (lane_index() >= slice.num_atoms) return {};
  const AtomPlace place = place_of(loop, slice.first_atom + lane_index());
  return {place, src_nbytes_of(loop, place), lane_index() * loop.src.atom_nbytes};
}

// The warp's n-th slice goes through stage n % kRingStages. Earlier stores from that stage must have read it.
__device__ inline void load_slice(const CopyJob& job, std::uint32_t index, Ring& ring, std::uint32_t n,
                                  std::uint64_t policy) {
  const Slice slice = slice_at(job, index);
  const JobLoop& loop = job.loops[slice.loop];
  const Atom atom = atom_of_lane(loop, slice);
  const std::uint32_t stage = n % kRingStages;
  const std::uint32_t nbytes = __reduce_add_sync(kAllLanes, atom.nbytes);
  if (lane_index() == 0) bulk::arrive_and_expect(&ring.loaded[stage], nbytes);
  if (atom.nbytes == 0) return;
  const std::uint64_t from = address_of(loop.src, atom.place, job.src_ids[atom.place.pair], slice.layer);
  bulk::load(ring.stages[stage] + atom.offset, reinterpret_cast<const void*>(from), atom.nbytes,
             &ring.loaded[stage], policy);
}

// Every lane stores what it has loaded, as its own group.
__device__ inline void store_slice(const CopyJob& job, std::uint32_t index, const Ring& ring, std::uint32_t n,
                                   std::uint64_t policy) {
  const Slice slice = slice_at(job, index);
  const JobLoop& loop = job.loops[slice.loop];
  const Atom atom = atom_of_lane(loop, slice);
  const std::uint32_t stage = n % kRingStages;
  if (atom.nbytes != 0) {
    const std::uint64_t to = address_of(loop.dst, atom.place, job.dst_ids[atom.place.pair], slice.layer);
    bulk::wait_for_phase(&ring.loaded[stage], n / kRingStages % 2);
    bulk::store(reinterpret_cast<void*>(to), ring.stages[stage] + atom.offset, atom.nbytes, policy);
  }
  bulk::end_group();
}

}  // namespace kvxfer::gpu

extern "C" __global__ void __launch_bounds__(kvxfer::gpu::kRings* kvxfer::gpu::kWarp)
    kvxfer_copy_bulk(const __grid_constant__ kvxfer::gpu::CopyJob job) {
  using namespace kvxfer::gpu;
  namespace bulk = kvxfer::bulk;
  Ring& ring = static_cast<Ring*>(kvxfer::shared_memory())[threadIdx.x / kWarp];
  if (lane_index() == 0) {
    for (bulk::Barrier& barrier : ring.loaded) bulk::init_barrier(&barrier);
    bulk::publish_shared_writes();
  }
  // Pages may come from a kernel that still runs, and has reported them by a word: it stored them through the
  // generic proxy.
  bulk::publish_global_writes();
  __syncwarp();

  const std::uint64_t policy = bulk::streamed_policy();
  const Share share = share_of_warp();
  std::uint32_t to_load = share.first, num_loaded = 0;
  const auto load_next = [&] {
    if (to_load >= job.num_slices) return;
    load_slice(job, to_load, ring, num_loaded++, policy);
    to_load += share.step;
  };
  while (num_loaded < kRingStages - 1 && to_load < job.num_slices) load_next();
  std::uint32_t num_stored = 0;
  for (std::uint32_t index = share.first; index < job.num_slices; index += share.step) {
    store_slice(job, index, ring, num_stored++, policy);
    bulk::wait_until_read<1>();  // the slice before, whose stage the next slice takes
    __syncwarp();  // by every lane
    load_next();
  }
  bulk::wait_until_stored();
  tell_done(job);
}
