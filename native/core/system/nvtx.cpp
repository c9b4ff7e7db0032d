#include "core/system/nvtx.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <mutex>

namespace kvxfer::nvtx {
namespace {

// The places that a tool stores to. It may keep their addresses and store again, so they stay.
struct Module {
  std::array<Function, 16> functions{};
  std::array<Place, 17> places{};  // one null behind the last
};

std::array<Module, kLastModule + 1>& modules() {
  static std::array<Module, kLastModule + 1> all;
  return all;
}

int get_module(int module, Place** places, unsigned* count) {
  if (module < kCoreModule || module > kLastModule) return 0;
  if (places != nullptr) *places = modules()[static_cast<std::size_t>(module)].places.data();
  if (count != nullptr) *count = kNumPlaces[module];
  return 1;
}

const void* export_table(std::uint32_t table) {
  static constexpr CallbacksTable callbacks{sizeof callbacks, get_module};
  static constexpr VersionTable version{sizeof version, kVersion, 0, [](std::uint32_t) {}};
  if (table == kCallbacksTable) return &callbacks;
  if (table == kVersionTable) return &version;
  return nullptr;
}

template <class F>
F stored(unsigned place) {
  return reinterpret_cast<F>(modules()[kSecondCoreModule].functions[place]);
}

void look() {
  // A process with more rights than its caller must not load a library that its caller names.
  const char* path = ::secure_getenv(kPathVariable);
  if (path == nullptr || *path == '\0') return;
  void* library = ::dlopen(path, RTLD_LAZY);
  if (library == nullptr) return;  // the tool reports its own errors, as with NVIDIA's headers
  const auto initialize = reinterpret_cast<InitializeInjection>(::dlsym(library, kInitializeInjection));
  for (std::size_t module = 0; module < modules().size(); ++module)
    for (unsigned place = 1; place < kNumPlaces[module]; ++place)
      modules()[module].places[place] = &modules()[module].functions[place];
  if (initialize == nullptr || initialize(export_table) == 0) {
    ::dlclose(library);
    return;
  }
  const auto start = stored<StartRange>(kRangeStart);
  const auto end = stored<EndRange>(kRangeEnd);
  if (start == nullptr || end == nullptr) return;  // a tool that does not use ranges
  const auto create = stored<CreateDomain>(kDomainCreate);
  static Tool listening{create != nullptr ? create("kvxfer") : nullptr, start, end};
  the_tool.store(&listening, std::memory_order_release);
}

}  // namespace

void attach() {
  static std::once_flag once;
  std::call_once(once, look);
}

}  // namespace kvxfer::nvtx
