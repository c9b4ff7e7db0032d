// Makes an agent's rails of streams. If the agent has a GPU, they also carry its pages.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvxfer/transport_kind.h"

namespace kvxfer::stream {

// kInvalidArgument: the agent's staging arena is too small. One arena serves the rails of all kinds.
Result<std::vector<std::unique_ptr<Transport>>> make_rails(const RailParts& parts, const TransportKind& kind,
                                                           std::int64_t num_rails);

}  // namespace kvxfer::stream
