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

// Seals against shrinking and growing (a peer's mapping never meets a missing page), against new
// writers (a peer maps it read-only or not at all; writable mappings that exist stay so) and
// against further seals. Map the memory writable first. Linux before 5.1 cannot seal against new
// writers: that seal is then missing from seals_of.
Status seal_memfd(int fd);

// True where fd is memory that can no longer get smaller: reading a mapping of it raises no SIGBUS.
bool is_sealed_against_shrinking(int fd) noexcept;

// Seals in force: "grow", "shrink", "future-write", "seal". Empty for other kinds of files.
std::vector<std::string> seals_of(int fd);

}  // namespace kvxfer
