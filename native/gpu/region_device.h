// On which GPU a region lies.
#pragma once

#include <string>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::gpu {

// kUnsupported where it is known to lie on another GPU than the one with this index. A kernel that was sent there would
// fault, and take the context with it.
inline Status check_device(const LocalRegion& region, int device) {
  if (region.device < 0 || region.device == device) return {};
  return {Code::kUnsupported, "the region lies on GPU " + std::to_string(region.device) +
                                  ", and this rail is one of GPU " + std::to_string(device)};
}

}  // namespace kvxfer::gpu
