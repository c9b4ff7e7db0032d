// The registry of the program `registries`: every transport of this build and the toy, without the one that
// the environment's KVXFER_TEST_WITHOUT names.
#include <cstdlib>
#include <string_view>
#include <vector>

#include "kvxfer/transport_kind.h"

namespace kvxfer {

// The generated registry, which is compiled under this name.
std::span<const TransportKind* const> all_transport_kinds() noexcept;

std::span<const TransportKind* const> transport_kinds() noexcept {
  static const std::vector<const TransportKind*> kChosen = [] {
    const char* const left_out = std::getenv("KVXFER_TEST_WITHOUT");
    std::vector<const TransportKind*> chosen;
    bool found = left_out == nullptr;
    for (const TransportKind* kind : all_transport_kinds()) {
      if (left_out != nullptr && kind->name == left_out)
        found = true;
      else
        chosen.push_back(kind);
    }
    if (!found) std::abort();  // the test would run with every transport
    return chosen;
  }();
  return kChosen;
}

}  // namespace kvxfer
