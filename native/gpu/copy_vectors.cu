// Copies runs by vectors of up to 16 bytes, at any alignment and on every architecture.
#include "gpu/copy_job.h"
#include "gpu/kernel.cuh"
#include "gpu/memory.cuh"

namespace kvxfer::gpu {

// How many vectors a lane copies in a round. Lanes take neighbouring vectors, so that a warp loads whole
// lines if runs are long enough. All loads of a round are in flight before the first store, since bytes in
// flight determine the speed. Narrow vectors serve odd alignments, which are slow anyway; there short rounds
// save code.
template <class Vector>
constexpr std::uint32_t kRound = sizeof(Vector) == 16 ? 8 : 2;

template <class Vector>
__device__ inline const Vector* src_at(const CopyJob& job, const Slice& slice, const AtomPlace& place) {
  return reinterpret_cast<const Vector*>(
      address_of(job.loops[slice.loop].src, place, job.src_ids[place.pair], slice.layer));
}

template <class Vector>
__device__ inline Vector* dst_at(const CopyJob& job, const Slice& slice, const AtomPlace& place) {
  return reinterpret_cast<Vector*>(
      address_of(job.loops[slice.loop].dst, place, job.dst_ids[place.pair], slice.layer));
}

// Copies a slice that lies in one run; its place is found once.
template <class Vector>
__device__ inline void copy_run(const CopyJob& job, const JobLoop& loop, const Slice& slice) {
  const AtomPlace place = place_of(loop, slice.first_atom);
  const Vector* from = src_at<Vector>(job, slice, place);
  Vector* to = dst_at<Vector>(job, slice, place);
  for (std::uint32_t first = lane_index(); first < slice.num_atoms; first += kRound<Vector> * kWarp) {
    Vector values[kRound<Vector>];
#pragma unroll
    for (std::uint32_t k = 0; k < kRound<Vector>; ++k)
      if (first + k * kWarp < slice.num_atoms) values[k] = load_streamed(from + first + k * kWarp);
#pragma unroll
    for (std::uint32_t k = 0; k < kRound<Vector>; ++k)
      if (first + k * kWarp < slice.num_atoms) store_streamed(to + first + k * kWarp, values[k]);
  }
}

// Copies a slice of several runs. Every lane finds the place of each of its vectors, separately for source
// and destination, since the values for both sides do not fit into the registers at once.
template <class Vector>
__device__ inline void copy_runs(const CopyJob& job, const JobLoop& loop, const Slice& slice) {
#pragma unroll 1
  for (std::uint32_t first = lane_index(); first < slice.num_atoms; first += kRound<Vector> * kWarp) {
    Vector values[kRound<Vector>];
#pragma unroll
    for (std::uint32_t k = 0; k < kRound<Vector>; ++k) {
      const std::uint32_t atom = first + k * kWarp;
      if (atom < slice.num_atoms)
        values[k] = load_streamed(src_at<Vector>(job, slice, place_of(loop, slice.first_atom + atom)));
    }
    const std::uint32_t again = forgotten(first);
#pragma unroll
    for (std::uint32_t k = 0; k < kRound<Vector>; ++k) {
      const std::uint32_t atom = again + k * kWarp;
      if (atom < slice.num_atoms)
        store_streamed(dst_at<Vector>(job, slice, place_of(loop, slice.first_atom + atom)), values[k]);
    }
  }
}

template <class Vector>
__device__ inline void copy_slice(const CopyJob& job, const Slice& slice) {
  const JobLoop& loop = job.loops[slice.loop];
  if (loop.in_one_run)
    copy_run<Vector>(job, loop, slice);
  else
    copy_runs<Vector>(job, loop, slice);
}

}  // namespace kvxfer::gpu

// One CTA per multiprocessor has 64 KiB in flight, which is enough. For two CTAs ptxas would spill registers
// on sm_90.
extern "C" __global__ void __launch_bounds__(512, 1)
    kvxfer_copy_vectors(const __grid_constant__ kvxfer::gpu::CopyJob job) {
  using namespace kvxfer::gpu;
  for_each_slice(job, [&](const Slice& slice) {
    switch (job.loops[slice.loop].src.atom_nbytes) {
      case 16: return copy_slice<uint4>(job, slice);
      case 8: return copy_slice<uint2>(job, slice);
      case 4: return copy_slice<unsigned>(job, slice);
      case 2: return copy_slice<unsigned short>(job, slice);
      default: return copy_slice<unsigned char>(job, slice);
    }
  });
  tell_done(job);
}
