// Exceptions other than std::bad_alloc: nothing in the core throws them on purpose.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer {

inline Status mistake_in_words(const std::exception& mistake) noexcept {
  try {
    return {Code::kInternal,
            std::string("a mistake of kvxfer's (") + mistake.what() + "): please report this"};
  } catch (const std::bad_alloc&) {
    return {Code::kInternal, {}};
  }
}

}  // namespace kvxfer
