// Pinned memory that is never given back: streams and kernels come to what lies there at any time, and are not
// asked.
#pragma once

#include <cstddef>
#include <string_view>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Returns memory that the host and every device reach, for as long as the process lives. `of` says in errors what
// for. From any thread.
Result<void*> allocate_kept(const Driver& driver, int device, std::size_t nbytes, std::string_view of);

}  // namespace kvxfer::gpu
