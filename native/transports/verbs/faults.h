// Why a request failed, in words: whose fault it most likely is, and what to do.
#pragma once

#include <string>

#include "transports/verbs/library.h"

namespace kvxfer::verbs {

// Not of flushes, which follow another error.
std::string words_of(const Library& library, const abi::WorkCompletion& completion);

}  // namespace kvxfer::verbs
