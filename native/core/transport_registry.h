// The transports of this build: finds them by name, and checks the names and options that a caller gives.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/transport_kind.h"

namespace kvxfer {

const TransportKind* find_transport_kind(std::string_view name) noexcept;  // nullptr: none of that name

// "a, b": the transports of this build whose rails reach that memory.
std::string names_reaching(MemoryKind memory);

// The kinds that an agent with these names uses, nearest first; a partial kind brings those beside it.
// kInvalidArgument for no name, or for one that no transport of this build has.
Result<std::vector<const TransportKind*>> transports_in_use(const std::vector<std::string>& names);

// Ok if each one is an option of a transport of this build, of its type and within its range. Else
// kInvalidArgument names the first that is not, and what would fit.
Status check_options(const NamedOptions& options);

}  // namespace kvxfer
