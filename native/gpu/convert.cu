// Copies loops whose elements change their dtype: gathers, converts and scatters them in one pass.
#include "gpu/convert.cuh"
#include "gpu/convert_job.h"
#include "gpu/copy_job.h"
#include "gpu/kernel.cuh"
#include "gpu/memory.cuh"

namespace kvxfer::gpu {

// How many vectors a lane loads before it converts the first one.
inline constexpr std::uint32_t kRound = kAtomsPerRound / kWarp;

// ---- places ----

// What a warp works on: a slice, or a part of a slice, and its runs.
struct Work {
  const CopyJob& job;
  const JobLoop& loop;
  const ConvertLoop& convert;
  Slice slice;
  std::uint32_t first_run;    // of the layer
  std::uint32_t first_index;  // of the slice's first atom in its run
  WarpMemory& memory;
};

__device__ inline Work work_on(const CopyJob& job, const ConvertJob& conversions, const Slice& slice,
                               WarpMemory& memory) {
  const JobLoop& loop = job.loops[slice.loop];
  const std::uint32_t run = loop.atoms_per_run.quotient(slice.first_atom);
  return {job,   loop, conversions.loops[slice.loop],
          slice, run,  slice.first_atom - run * loop.atoms_per_run.value,
          memory};
}

__device__ inline std::uint32_t num_runs(const Work& work) {
  return work.loop.atoms_per_run.quotient(work.first_index + work.slice.num_atoms - 1) + 1;
}

// An atom of the slice.
struct Atom {
  std::uint32_t run;    // of the slice
  std::uint32_t index;  // in its run
};

__device__ inline Atom atom_at(const Work& work, std::uint32_t atom) {
  const std::uint32_t run = work.loop.atoms_per_run.quotient(work.first_index + atom);
  return {run, work.first_index + atom - run * work.loop.atoms_per_run.value};
}

// The same for the hot loops: everything is in registers, and atoms are counted from the beginning of the
// first run.
struct WholeAtom {
  std::uint32_t run;  // 0 after the slice's end, since run 0 always exists
  std::uint32_t index;
  bool is_one;  // false: there is no such atom, or it is cut short
};

struct Rows {
  std::uint32_t begin, end;
  std::uint32_t per_run, multiplier, shift;
  std::uint32_t whole_per_run;  // atoms

  __device__ WholeAtom atom(std::uint32_t number) const {
    const auto run = static_cast<std::uint32_t>(std::uint64_t{number} * multiplier >> shift);
    const std::uint32_t index = number - run * per_run;
    return {number < end ? run : 0, index, number < end && index < whole_per_run};
  }
};

__device__ inline std::uint32_t num_elements(const Work& work, Atom atom) {
  if (atom.index + 1 != work.loop.atoms_per_run.value) return kAtomElements;
  return work.loop.last_atom_nbytes / static_cast<std::uint32_t>(itemsize(work.convert.conversion.src_dtype));
}

__device__ inline Rows rows_of(const Work& work) {
  const JobLoop& loop = work.loop;
  const std::uint32_t per_run = loop.atoms_per_run.value;
  return {work.first_index,
          work.first_index + work.slice.num_atoms,
          per_run,
          loop.atoms_per_run.multiplier,
          loop.atoms_per_run.shift,
          loop.last_atom_nbytes == loop.src.atom_nbytes ? per_run : per_run - 1};
}

__device__ inline const std::byte* src_of(const Work& work, Atom atom) {
  return work.memory.runs[atom.run].src + std::uint64_t{atom.index} * work.loop.src.atom_nbytes;
}
__device__ inline std::byte* dst_of(const Work& work, Atom atom) {
  return work.memory.runs[atom.run].dst + std::uint64_t{atom.index} * work.loop.dst.atom_nbytes;
}

// ---- memory, at any alignment ----

__device__ inline bool is_aligned(const std::byte* at, std::size_t nbytes) {
  return reinterpret_cast<std::uintptr_t>(at) % nbytes == 0;
}

__device__ inline std::uint32_t load_bits(const std::byte* at, std::size_t nbytes) {
  if (nbytes == 4 && is_aligned(at, 4)) return *reinterpret_cast<const unsigned*>(at);
  if (nbytes == 2 && is_aligned(at, 2)) return *reinterpret_cast<const unsigned short*>(at);
  std::uint32_t bits = 0;
  for (std::uint32_t k = 0; k < nbytes; ++k) bits |= static_cast<std::uint32_t>(at[k]) << 8 * k;
  return bits;
}

__device__ inline void store_bits(std::byte* at, std::uint32_t bits, std::size_t nbytes) {
  if (nbytes == 4 && is_aligned(at, 4)) {
    *reinterpret_cast<unsigned*>(at) = bits;
  } else if (nbytes == 2 && is_aligned(at, 2)) {
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(bits);
  } else {
    for (std::uint32_t k = 0; k < nbytes; ++k) at[k] = static_cast<std::byte>(bits >> 8 * k & 0xff);
  }
}

// ---- runs ----

// Returns where a run's scale is: its address, or its index in the program's table.
__device__ inline std::uint64_t scale_place(std::uint64_t first, std::uint64_t layer_stride,
                                            std::uint64_t block_stride, const std::uint64_t (&strides)[2],
                                            const AtomPlace& place, std::uint32_t layer,
                                            std::uint32_t block) {
  return first + layer * layer_stride + block * block_stride + place.i * strides[0] + place.j * strides[1];
}

__device__ inline float load_scale(const float* scales, ScalePlace where, std::uint64_t place) {
  if (where == ScalePlace::kNone) return 1;
  if (where == ScalePlace::kProgram) return scales[place];
  return number::float_of(load_bits(reinterpret_cast<const std::byte*>(place), sizeof(float)));
}

__device__ inline AtomPlace place_of_run(const Work& work, std::uint32_t run) {
  return place_of(work.loop, (work.first_run + run) * work.loop.atoms_per_run.value);
}

// Finds the slice's runs; each lane finds one. Scales that are not known yet are 1.
__device__ inline void find_runs(const Work& work, const float* scales) {
  const Conversion& conversion = work.convert.conversion;
  __syncwarp();  // the previous slice's runs are no longer needed
  if (const std::uint32_t index = lane_index(); index < num_runs(work)) {
    const AtomPlace place = place_of_run(work, index);
    const std::uint32_t layer = work.slice.layer;
    const std::uint32_t src_id = work.job.src_ids[place.pair], dst_id = work.job.dst_ids[place.pair];
    Run run;
    run.src = reinterpret_cast<const std::byte*>(address_of(work.loop.src, place, src_id, layer));
    run.dst = reinterpret_cast<std::byte*>(address_of(work.loop.dst, place, dst_id, layer));
    run.src_scale = load_scale(
        scales, conversion.src_scales,
        scale_place(conversion.src_offset, conversion.src_layer_stride, conversion.src_block_stride,
                    conversion.src_strides, place, layer, work.loop.src.units.quotient(src_id)));
    run.dst_scale = 1;
    if (!conversion.finds_scales())
      run.dst_scale = load_scale(
          scales, conversion.dst_scales,
          scale_place(conversion.dst_offset, conversion.dst_layer_stride, conversion.dst_block_stride,
                      conversion.dst_strides, place, layer, work.loop.dst.units.quotient(dst_id)));
    const Factors factors = factors_of(conversion, run.src_scale, run.dst_scale);
    run.factors[0] = factors.high;
    run.factors[1] = factors.low;
    work.memory.runs[index] = run;
  }
  __syncwarp();
}

// ---- granules ----

// The largest magnitudes of granules: of all granules in a warp's slice, or of the one granule that a CTA
// has.
struct Granules {
  std::uint32_t* amax;
  const ConvertLoop& convert;
  bool of_cta;

  __device__ std::uint32_t index_of(std::uint32_t run) const {
    return of_cta ? 0 : convert.runs_per_granule.quotient(run);
  }
  __device__ void clear() const {
    if (!of_cta)
      amax[lane_index()] = 0;
    else if (threadIdx.x == 0)
      *amax = 0;
  }
  __device__ void put(std::uint32_t run, std::uint32_t magnitude) const {
    atomicMax(&amax[index_of(run)], magnitude);
  }
  // All lanes of a warp call it; a magnitude of 0 has no effect. Neighbouring lanes with atoms of one granule
  // put one number together.
  __device__ void put_all(std::uint32_t run, std::uint32_t magnitude) const {
    for (std::uint32_t lanes = 1; lanes < convert.lanes_per_granule; lanes *= 2)
      magnitude = max(magnitude, __shfl_xor_sync(0xffffffff, magnitude, lanes));
    if (magnitude != 0 && lane_index() % convert.lanes_per_granule == 0) put(run, magnitude);
  }
};

// Gives every run its granule's scale. Stores a scale to the region if its granule begins here.
__device__ inline void set_scales(const Work& work, const Granules& granules, bool begins_here) {
  const Conversion& conversion = work.convert.conversion;
  __syncwarp();
  if (const std::uint32_t index = lane_index(); index < num_runs(work)) {
    const std::uint32_t granule = granules.index_of(index);
    const float scale = scale_for(conversion.dst_dtype, granules.amax[granule]);
    Run& run = work.memory.runs[index];
    const Factors factors = factors_of(conversion, run.src_scale, scale);
    run.factors[0] = factors.high;
    run.factors[1] = factors.low;
    run.dst_scale = scale;
    if (begins_here && index == granule * work.convert.runs_per_granule.value) {
      const AtomPlace place = place_of_run(work, index);
      const std::uint64_t at =
          scale_place(conversion.dst_offset, conversion.dst_layer_stride, conversion.dst_block_stride,
                      conversion.dst_strides, place, work.slice.layer,
                      work.loop.dst.units.quotient(work.job.dst_ids[place.pair]));
      store_bits(reinterpret_cast<std::byte*>(at), number::bits_of(scale), sizeof scale);
    }
  }
  __syncwarp();
}

// ---- conversion ----

// Converts whole atoms. Returns a bit for each of the lane's atoms whose result is not right; the first atom
// has the lowest bit. An atom that is not whole is converted as zeros and not stored, which is cheaper than a
// branch.
template <Dtype kFrom, Dtype kTo>
__device__ inline std::uint32_t convert_vectors(const Work& work) {
  const Rows rows = rows_of(work);
  const bool saturate = work.convert.conversion.saturate != 0;
  std::uint32_t wrong = 0, bit = 1;
#pragma unroll 1
  for (std::uint32_t first = rows.begin + lane_index(); first < rows.end; first += kRound * kWarp) {
    Vector<kFrom> from[kRound] = {};
    WholeAtom atoms[kRound];
#pragma unroll
    for (std::uint32_t k = 0; k < kRound; ++k) {
      atoms[k] = rows.atom(first + k * kWarp);
      if (atoms[k].is_one)
        from[k] = load_streamed(reinterpret_cast<const Vector<kFrom>*>(work.memory.runs[atoms[k].run].src) +
                                atoms[k].index);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kRound; ++k, bit <<= 1) {
      const Run& run = work.memory.runs[atoms[k].run];
      Vector<kTo> to;
      if (!convert_vector<kFrom, kTo>(from[k], {run.factors[0], run.factors[1]}, saturate, to)) wrong |= bit;
      if (atoms[k].is_one) store_streamed(reinterpret_cast<Vector<kTo>*>(run.dst) + atoms[k].index, to);
    }
  }
  return wrong;
}

constexpr __device__ std::uint32_t pair_of(Dtype from, Dtype to) {
  return static_cast<std::uint32_t>(from) * kNumDtypes + static_cast<std::uint32_t>(to);
}

// Converts between the dtypes that caches are stored in and those that models compute in.
__device__ inline std::uint32_t convert_in_vectors(const Work& work) {
  if (!work.convert.in_vectors) return ~0u;
  switch (pair_of(work.convert.conversion.src_dtype, work.convert.conversion.dst_dtype)) {
#define KVXFER_PAIR(from, to) \
  case pair_of(Dtype::from, Dtype::to): return convert_vectors<Dtype::from, Dtype::to>(work)
    KVXFER_PAIR(kBf16, kE4m3);
    KVXFER_PAIR(kBf16, kE5m2);
    KVXFER_PAIR(kBf16, kInt8);
    KVXFER_PAIR(kF16, kE4m3);
    KVXFER_PAIR(kF16, kE5m2);
    KVXFER_PAIR(kF16, kInt8);
    KVXFER_PAIR(kE4m3, kBf16);
    KVXFER_PAIR(kE5m2, kBf16);
    KVXFER_PAIR(kInt8, kBf16);
    KVXFER_PAIR(kE4m3, kF16);
    KVXFER_PAIR(kE5m2, kF16);
    KVXFER_PAIR(kInt8, kF16);
#undef KVXFER_PAIR
    default: return ~0u;
  }
}

__device__ inline void convert_elements(const Work& work, Atom atom) {
  const Conversion& conversion = work.convert.conversion;
  const Run run = work.memory.runs[atom.run];
  const std::size_t src_nbytes = itemsize(conversion.src_dtype), dst_nbytes = itemsize(conversion.dst_dtype);
  const std::byte* from = src_of(work, atom);
  std::byte* to = dst_of(work, atom);
#pragma unroll 1
  for (std::uint32_t left = num_elements(work, atom); left != 0; --left) {
    store_bits(to, converted(load_bits(from, src_nbytes), conversion, run), dst_nbytes);
    from += src_nbytes;
    to += dst_nbytes;
  }
}

// Calls take(atom) for the lane's atoms that have a bit in `left`, and for atoms that are cut short at the
// end of a run.
template <class Take>
__device__ inline void for_each_left(const Work& work, std::uint32_t left, Take&& take) {
  if (left == 0 && work.loop.last_atom_nbytes == work.loop.src.atom_nbytes) return;
#pragma unroll 1
  for (std::uint32_t number = lane_index(); number < work.slice.num_atoms; number += kWarp, left >>= 1) {
    const Atom atom = atom_at(work, number);
    if ((left & 1) || num_elements(work, atom) != kAtomElements) take(atom);
  }
}

__device__ inline void convert_part(const Work& work) {
  for_each_left(work, convert_in_vectors(work), [&](Atom atom) { convert_elements(work, atom); });
}

// ---- scales that are found ----

__device__ inline std::uint32_t amax_of_elements(const Work& work, Atom atom) {
  const Conversion& conversion = work.convert.conversion;
  const Run run = work.memory.runs[atom.run];
  const std::size_t nbytes = itemsize(conversion.src_dtype);
  const std::byte* from = src_of(work, atom);
  std::uint32_t amax = 0;
#pragma unroll 1
  for (std::uint32_t left = num_elements(work, atom); left != 0; --left, from += nbytes)
    amax = max(amax, finite_magnitude(
                         scaled(to_float(conversion.src_dtype, load_bits(from, nbytes)), conversion, run)));
  return amax;
}

// Puts the magnitudes of whole vectors into `granules`. Returns a bit for each of the lane's atoms that has
// elements which are not finite. Loads go through the L1 cache, since everything is read once more.
template <Dtype kFrom>
__device__ inline std::uint32_t amax_of_vectors(const Work& work, const Granules& granules) {
  const Rows rows = rows_of(work);
  std::uint32_t wrong = 0, bit = 1;
#pragma unroll 1
  for (std::uint32_t first = rows.begin; first < rows.end; first += kRound * kWarp) {
    Vector<kFrom> from[kRound] = {};
    WholeAtom atoms[kRound];
#pragma unroll
    for (std::uint32_t k = 0; k < kRound; ++k) {
      atoms[k] = rows.atom(first + lane_index() + k * kWarp);
      if (atoms[k].is_one)
        from[k] = load_cached(reinterpret_cast<const Vector<kFrom>*>(work.memory.runs[atoms[k].run].src) +
                              atoms[k].index);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kRound; ++k, bit <<= 1) {
      std::uint32_t amax;
      if (!amax_of_vector<kFrom>(from[k], work.memory.runs[atoms[k].run].src_scale, amax)) {
        amax = 0;
        wrong |= bit;
      }
      granules.put_all(atoms[k].run, amax);
    }
  }
  return wrong;
}

__device__ inline void find_amax(const Work& work, const Granules& granules) {
  const Dtype dtype = work.convert.conversion.src_dtype;
  std::uint32_t left = ~0u;
  if (work.convert.in_vectors && dtype == Dtype::kBf16) left = amax_of_vectors<Dtype::kBf16>(work, granules);
  if (work.convert.in_vectors && dtype == Dtype::kF16) left = amax_of_vectors<Dtype::kF16>(work, granules);
  for_each_left(work, left, [&](Atom atom) { granules.put(atom.run, amax_of_elements(work, atom)); });
}

// ---- slices ----

// The parts of a slice that a warp takes. A CTA's granule has several parts; any other slice is one part.
struct Parts { std::uint32_t first, step, num, num_atoms; };

__device__ inline Parts parts_of(const ConvertJob& conversions, const Slice& slice) {
  if (conversions.team == Team::kOneWarp) return {0, 1, 1, slice.num_atoms};
  const std::uint32_t atoms = conversions.loops[slice.loop].atoms_per_part;
  return {threadIdx.x / kWarp, blockDim.x / kWarp, (slice.num_atoms + atoms - 1) / atoms, atoms};
}

__device__ inline Slice part_of(const Slice& slice, const Parts& parts, std::uint32_t part) {
  const std::uint32_t first = part * parts.num_atoms;
  return {slice.loop, slice.layer, slice.first_atom + first, min(parts.num_atoms, slice.num_atoms - first)};
}

__device__ inline void meet(const ConvertJob& conversions) {
  if (conversions.team == Team::kWholeCta)
    __syncthreads();
  else
    __syncwarp();
}

__device__ inline Granules granules_of(const ConvertJob& conversions, const Slice& slice,
                                       ConvertMemory& memory, WarpMemory& of_warp) {
  const bool of_cta = conversions.team == Team::kWholeCta;
  return {of_cta ? &memory.amax : of_warp.amax, conversions.loops[slice.loop], of_cta};
}

// The first pass over a slice: finds the granules' largest magnitudes. It leaves the runs of the last part
// that the warp took.
__device__ inline void look(const CopyJob& job, const ConvertJob& conversions, const Slice& slice,
                            ConvertMemory& memory, WarpMemory& of_warp) {
  const Granules granules = granules_of(conversions, slice, memory, of_warp);
  const Parts parts = parts_of(conversions, slice);
  meet(conversions);  // all are done with the previous slice
  granules.clear();
  meet(conversions);
#pragma unroll 1
  for (std::uint32_t part = parts.first; part < parts.num; part += parts.step) {
    const Work work = work_on(job, conversions, part_of(slice, parts, part), of_warp);
    find_runs(work, conversions.scales);
    find_amax(work, granules);
  }
  meet(conversions);
}

// Computes everything about a slice anew for each part, to keep the registers for the elements.
__device__ inline void convert_slice(const CopyJob& job, const ConvertJob& conversions, std::uint32_t index,
                                     ConvertMemory& memory) {
  WarpMemory& of_warp = memory.warps[threadIdx.x / kWarp];
  const Slice first = slice_at(job, index);
  if (conversions.loops[first.loop].conversion.finds_scales()) look(job, conversions, first, memory, of_warp);
#pragma unroll 1
  for (std::uint32_t part = 0;; ++part) {
    const Slice slice = slice_at(job, forgotten(index));
    const Parts parts = parts_of(conversions, slice);
    if (parts.first + part * parts.step >= parts.num) break;
    const Work work =
        work_on(job, conversions, part_of(slice, parts, parts.first + part * parts.step), of_warp);
    const bool finds = work.convert.conversion.finds_scales();
    if (!finds || parts.num > parts.step) find_runs(work, conversions.scales);
    if (finds)
      set_scales(work, granules_of(conversions, slice, memory, of_warp),
                 parts.first + part * parts.step == 0);
    convert_part(work);
  }
}

}  // namespace kvxfer::gpu

extern "C" __global__ void __launch_bounds__(512, 2)
    kvxfer_convert(const __grid_constant__ kvxfer::gpu::CopyJob job,
                   const __grid_constant__ kvxfer::gpu::ConvertJob conversions) {
  using namespace kvxfer::gpu;
  ConvertMemory& memory = *static_cast<ConvertMemory*>(kvxfer::shared_memory());
  const bool of_cta = conversions.team == Team::kWholeCta;
  const std::uint32_t num_warps = blockDim.x / kWarp;
  const std::uint32_t first = of_cta ? blockIdx.x : blockIdx.x * num_warps + threadIdx.x / kWarp;
  for (std::uint32_t index = first; index < job.num_slices;
       index += of_cta ? gridDim.x : gridDim.x * num_warps)
    convert_slice(job, conversions, index, memory);
  tell_done(job);
}
