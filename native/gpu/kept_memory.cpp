#include "gpu/kept_memory.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvxfer::gpu {
namespace {

// Pinned memory ends with its context, so the contexts are kept too. They are never destroyed, since that
// memory may outlive every other object of the process.
struct Contexts {
  std::mutex mutex;
  std::vector<PrimaryContext> all;
};
Contexts& contexts() {
  static auto* kept = new Contexts;
  return *kept;
}

}  // namespace

Result<void*> allocate_kept(const Driver& driver, int device, std::size_t nbytes, std::string_view of) {
  Result<PrimaryContext> context = PrimaryContext::retain(driver, device);
  if (!context.ok()) return context.status();
  const ContextScope scope(driver, context.value().get());
  void* memory = nullptr;
  if (const int error = driver.host_allocate(&memory, nbytes, kPortable | kDeviceMap); error != 0)
    return driver.status(error, "cuMemHostAlloc of " + std::string(of));
  const std::lock_guard lock(contexts().mutex);
  contexts().all.push_back(std::move(context).value());
  return memory;
}

}  // namespace kvxfer::gpu
