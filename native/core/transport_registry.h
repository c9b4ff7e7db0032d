// The transports of this build, looked up and checked against what a caller names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/transport_kind.h"

namespace kvxfer {

const TransportKind* find_transport_kind(std::string_view name) noexcept;  // nullptr: none of that name

// "a, b": those of this build whose rails reach it.
std::string names_reaching(MemoryKind memory);

// The kinds that an agent uses which names these, nearest first: a partial one brings those beside it.
// kInvalidArgument for no name, or one that no transport of this build has.
Result<std::vector<const TransportKind*>> transports_in_use(const std::vector<std::string>& names);

// Every one is an option of a transport of this build, of its type and within its range. Not ok
// (kInvalidArgument): the first that is not, and what would fit.
Status check_options(const NamedOptions& options);

}  // namespace kvxfer
