// Why a request failed, in words: the likeliest cause, and what to do.
#pragma once

#include <string>

#include "transports/verbs/library.h"

namespace kvxfer::verbs {

// Not for flushes, which only follow another error.
std::string words_of(const Library& library, const abi::WorkCompletion& completion);

}  // namespace kvxfer::verbs
