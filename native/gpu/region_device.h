// Checks on which GPU a region lies.
#pragma once

#include <string>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::gpu {

// kUnsupported if the region is known to lie on another GPU than `device`. A kernel that accessed it would
// fault, which ends the context.
inline Status check_device(const LocalRegion& region, int device) {
  if (region.device < 0 || region.device == device) return {};
  return {Code::kUnsupported, "the region lies on GPU " + std::to_string(region.device) +
                                  ", but this rail serves GPU " + std::to_string(device)};
}

}  // namespace kvxfer::gpu
