// Shareable memory without a name: a memfd of fixed size that only its creator writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Makes a memfd of nbytes that can still be sealed. extra_flags: MFD_HUGETLB and the like. On failure the
// Status names the call.
Result<UniqueFd> create_memfd(const std::string& name, std::size_t nbytes, unsigned extra_flags = 0);

// Seals against shrinking and growing, against new writers and hole punching (a peer maps it read-only or
// not at all; existing writable mappings stay writable), and against further seals. Map the memory writable
// and fill it first: peers refuse memory with holes. Linux before 5.1 cannot seal against writers and holes:
// then seals_of lacks that seal, and peers do not map the memory.
Status seal_memfd(int fd);

// True if fd is memory that can no longer become smaller.
bool is_sealed_against_shrinking(int fd) noexcept;
// True if, besides, none of its present pages can be removed (Linux 5.1). Then reading a mapping of the
// filled memory raises no SIGBUS and takes no memory.
bool is_sealed_against_holes(int fd) noexcept;

// The seals in force: "grow", "shrink", "future-write", "seal". Empty for other kinds of files.
std::vector<std::string> seals_of(int fd);

}  // namespace kvxfer
