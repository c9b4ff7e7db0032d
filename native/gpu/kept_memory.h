// Pinned memory that is never given back, since streams and kernels may access it at any time.
#pragma once

#include <cstddef>
#include <string_view>

#include "gpu/driver.h"
#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Returns memory that the host and every device can reach until the process ends. Errors name `of`, the
// memory's purpose. Callable from any thread.
Result<void*> allocate_kept(const Driver& driver, int device, std::size_t nbytes, std::string_view of);

}  // namespace kvxfer::gpu
