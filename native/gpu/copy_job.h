// The arguments of a kernel: part of a transfer, divided into slices for warps and atoms for lanes. Host and
// device share this header; tests compare the host's build with numpy.
//
// A run consists of *atoms*. One lane moves one atom at a time: 16 bytes (fewer if memory is not aligned), a
// bulk copy, or some elements that change their dtype. Atoms of one loop and layer are numbered pair by pair
// and run by run. A *slice* is a number of consecutive atoms that one warp takes. Every lane finds its place
// from an atom's number, so short runs fill lanes as well as long ones do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvxfer/number.h"

namespace kvxfer::gpu {

inline constexpr std::uint32_t kWarp = 32;

// Computes n / value for any n below 2^31, by a product and a shift. It is exact because the multiplier's
// error, which is below value, times n stays below 2^shift.
struct Divisor {
  std::uint32_t value = 1, multiplier = 1u << 31, shift = 31;

  KVXFER_HD std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * multiplier >> shift);
  }
};

// One side of a loop (copy_program.h: CopyLoop), in bytes.
struct Side {
  std::uint64_t address;  // where the loop's first layer lies
  std::uint64_t layer_stride;
  std::uint64_t block_stride;
  std::uint64_t unit_stride;
  std::uint64_t strides[2];
  Divisor units;               // of a block
  std::uint32_t atom_nbytes;   // from an atom to the next one of the same run
};

// One loop's share of a launch.
struct JobLoop {
  Side src, dst;
  std::uint32_t first_layer;  // counted from the loop's first
  std::uint32_t first_pair;   // in the tables
  std::uint32_t num_atoms;    // of a layer
  std::uint32_t slice_end;    // of this loop and of all loops before it
  Divisor slices_per_layer;
  Divisor atoms_per_pair;
  Divisor atoms_per_run;
  Divisor runs_per_row;             // counts[1]
  std::uint32_t atoms_per_slice;
  std::uint32_t last_atom_nbytes;   // of a run, at the source
  std::uint32_t in_one_run;         // 1: no slice has atoms of two runs
};

// Twelve loops and as many conversions fit into the 4 KiB that every architecture accepts as a kernel's
// arguments. Programs with more loops are launched as several jobs.
inline constexpr std::uint32_t kMaxLoops = 12;

struct CopyJob {
  const std::uint32_t* src_ids;
  const std::uint32_t* dst_ids;
  // When the last CTA has stored its last byte, it stores `done_value` to *done, released at system scope.
  // Null: the kernel does not report its end. `arrivals` counts CTAs, and is 0 before and after the launch.
  std::uint32_t* arrivals;
  std::uint64_t* done;
  std::uint64_t done_value;
  std::uint32_t num_slices;
  std::uint32_t num_loops;
  JobLoop loops[kMaxLoops];
};

// A slice of a launch; slice_at() finds it from its number.
struct Slice {
  std::uint32_t loop;        // index into job.loops
  std::uint32_t layer;       // counted from the loop's first
  std::uint32_t first_atom;  // of the layer
  std::uint32_t num_atoms;
};

KVXFER_HD inline Slice slice_at(const CopyJob& job, std::uint32_t index) {
  std::uint32_t k = 0, begin = 0;
  while (index >= job.loops[k].slice_end) begin = job.loops[k++].slice_end;
  const JobLoop& loop = job.loops[k];
  const std::uint32_t within = index - begin;
  const std::uint32_t layer = loop.slices_per_layer.quotient(within);
  const std::uint32_t first = (within - layer * loop.slices_per_layer.value) * loop.atoms_per_slice;
  const std::uint32_t left = loop.num_atoms - first;
  return {k, loop.first_layer + layer, first, left < loop.atoms_per_slice ? left : loop.atoms_per_slice};
}

// The place of an atom: its pair, its run in the pair, and its index in the run.
struct AtomPlace {
  std::uint32_t pair;   // in the tables
  std::uint32_t i, j;   // of the run
  std::uint32_t index;  // in the run
};

KVXFER_HD inline AtomPlace place_of(const JobLoop& loop, std::uint32_t atom) {
  const std::uint32_t pair = loop.atoms_per_pair.quotient(atom);
  const std::uint32_t of_pair = atom - pair * loop.atoms_per_pair.value;
  const std::uint32_t run = loop.atoms_per_run.quotient(of_pair);
  const std::uint32_t i = loop.runs_per_row.quotient(run);
  return {loop.first_pair + pair, i, run - i * loop.runs_per_row.value,
          of_pair - run * loop.atoms_per_run.value};
}

// Returns the atom's address on one side. `id` is the pair's id on that side.
KVXFER_HD inline std::uint64_t address_of(const Side& side, const AtomPlace& place, std::uint32_t id,
                                          std::uint32_t layer) {
  const std::uint32_t block = side.units.quotient(id);
  const std::uint32_t unit = id - block * side.units.value;
  return side.address + layer * side.layer_stride + block * side.block_stride + unit * side.unit_stride +
         place.i * side.strides[0] + place.j * side.strides[1] +
         std::uint64_t{place.index} * side.atom_nbytes;
}

// Returns the atom's length at the source.
KVXFER_HD inline std::uint32_t src_nbytes_of(const JobLoop& loop, const AtomPlace& place) {
  return place.index + 1 == loop.atoms_per_run.value ? loop.last_atom_nbytes : loop.src.atom_nbytes;
}

}  // namespace kvxfer::gpu
