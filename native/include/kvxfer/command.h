// A command ring, as its host and the kernels that fill it see it. Both compile this; nothing is included.
#pragma once

#if defined(__CUDACC__)
#define KVXFER_HD __host__ __device__
#else
#define KVXFER_HD
#endif

namespace kvxfer {

// Some pairs of a prepared write, in one layer or in every one.
struct alignas(16) Command {
  unsigned what;   // upper 16 bits: the prepared write's number; lower 16 bits: how many pairs
  unsigned pair;   // the first pair, counted in the prepared write's tables
  unsigned layer;  // numbered model-wide, or kEveryLayer
  unsigned number;  // kThere, and how many commands came before this one. Stored last, released
};

inline constexpr unsigned kThere = 1u << 31;
inline constexpr unsigned kEveryLayer = ~0u;
// A number that does not fit becomes this one. No host accepts it.
inline constexpr unsigned kTooMany = 0xffff;

KVXFER_HD constexpr unsigned what_of(unsigned prepared, unsigned num_pairs) {
  return (prepared < kTooMany ? prepared : kTooMany) << 16 | (num_pairs < kTooMany ? num_pairs : kTooMany);
}

// The host's counts, each on a cache line of its own. A count wraps to 0 at 2^32.
struct alignas(64) CommandCount { unsigned value; };
struct CommandCounts {
  CommandCount taken;   // commands that left the ring
  CommandCount ended;   // of those: commands whose transfers have ended, or that were refused
  CommandCount failed;  // of those: commands that did not bring all of their bytes; stored before `ended`
};

// The struct through which kernels find all parts of the ring. It lies in the memory of their GPU; commands
// and counts lie in the host's memory.
struct CommandRing {
  Command* commands;
  const CommandCounts* counts;
  unsigned num_commands;  // a power of two
  unsigned tail;          // the next command's number
  unsigned seen;          // `taken` as a kernel saw it last
};

}  // namespace kvxfer
