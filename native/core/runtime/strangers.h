// What connections may hold that have proved nothing: one budget for all, of which the oldest gives way.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/wire.h"
#include "kvxfer/budget.h"

namespace kvxfer {

// An eighth of the descriptors that the process may have, and 64 at least, of which each has two frames of the
// handshake here at most.
inline std::shared_ptr<Budget> budget_of_strangers() {
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  const std::uint64_t num = std::clamp<std::uint64_t>(descriptors.rlim_cur / 8, 64, 1024);
  Budget::Amounts limits{};
  limits[static_cast<std::size_t>(Resource::kDescriptors)] = num;
  limits[static_cast<std::size_t>(Resource::kBytes)] =
      num * 2 * (wire::kHeaderNbytes + wire::kMaxHandshakeBody + wire::kMacNbytes);
  return std::make_shared<Budget>(limits);
}

}  // namespace kvxfer
