// The threads that copy for an agent: one pool for the rails of all kinds.
#pragma once

#include <memory>

#include "core/copy/copy_workers.h"
#include "kvxfer/transport_kind.h"

namespace kvxfer {

// Null where the driving thread copies alone (copy_threads is 1).
inline std::shared_ptr<CopyWorkers> copy_workers_of(const RailParts& parts) {
  if (parts.copy_threads < 2) return nullptr;
  return parts.shared.get<CopyWorkers>([&] {
    return std::make_shared<CopyWorkers>(parts.reactor,
                                         CopyWorkers::Options{.num_threads = parts.copy_threads});
  });
}

}  // namespace kvxfer
