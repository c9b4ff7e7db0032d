// Random bytes that cannot be guessed.
#pragma once

#include <cstddef>
#include <span>

#include "kvxfer/status.h"

namespace kvxfer {

// Fills `bytes` by getrandom, or from /dev/urandom where a sandbox forbids that. kSystem where both are forbidden.
Status fill_random(std::span<std::byte> bytes);

}  // namespace kvxfer
