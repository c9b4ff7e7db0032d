// Shareable memory without a name: a memfd whose size is fixed and which only its creator writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A memfd of nbytes that can still be sealed. extra_flags: MFD_HUGETLB and the like. On failure
// the Status names the call.
Result<UniqueFd> create_memfd(const std::string& name, std::size_t nbytes, unsigned extra_flags = 0);

// Seals against shrinking and growing, against new writers and the punching of holes (a peer maps it
// read-only or not at all; writable mappings that exist stay so) and against further seals. Map the memory
// writable and fill it first: peers refuse memory with holes. Linux before 5.1 cannot seal against writers
// and holes: that seal is then missing from seals_of, and peers do not map the memory.
Status seal_memfd(int fd);

// True where fd is memory that can no longer get smaller.
bool is_sealed_against_shrinking(int fd) noexcept;
// True where, besides, no page of it that is there can go (Linux 5.1): reading a mapping of it, once it is
// filled, raises no SIGBUS and takes no memory.
bool is_sealed_against_holes(int fd) noexcept;

// Seals in force: "grow", "shrink", "future-write", "seal". Empty for other kinds of files.
std::vector<std::string> seals_of(int fd);

}  // namespace kvxfer
