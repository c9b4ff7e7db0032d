// What a test asks of a transport at once and an agent step by step.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "kvxfer/transport.h"

namespace kvxfer::testing {

// Posts works until one is not accepted.
struct Posted {
  std::size_t accepted = 0;  // a prefix
  Code code = Code::kOk;  // of the first that was not
};
inline Posted post_all(Transport& transport, PeerId peer, std::span<const Work> works) {
  Posted posted;
  for (; posted.accepted < works.size(); ++posted.accepted) {
    posted.code = transport.post(peer, works[posted.accepted]);
    if (posted.code != Code::kOk) break;
  }
  return posted;
}

// Both steps of a registration.
inline Result<RegionKeys> register_memory(Transport& transport, const LocalRegion& region) {
  Pinned pinned;
  if (transport.capabilities().pins) {
    Result<Pinned> prepared = transport.prepare(region);
    if (!prepared.ok()) return prepared.status();
    pinned = std::move(prepared).value();
  }
  return transport.register_memory(region, pinned);
}

}  // namespace kvxfer::testing
