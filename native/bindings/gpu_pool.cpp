// The process's pools of GPU memory that other processes can map, one for each device. torch's
// CUDAPluggableAllocator calls two functions of this library, by their names.
#include <sys/types.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "bindings/convert.h"
#include "gpu/memory_pool.h"

namespace kvxfer::python {
namespace {

using namespace nb::literals;

// Never destroyed. At the end of the process tensors are freed in any order, and the driver may go before
// this library. The process's end frees what is left.
class Pools {
 public:
  static Pools& get() {
    static auto* const pools = new Pools;
    return *pools;
  }

  Result<gpu::MemoryPool*> of(int device) {
    const std::lock_guard lock(mutex_);
    if (const auto found = pools_.find(device); found != pools_.end()) return found->second.get();
    const Result<const gpu::Driver*> driver = gpu::Driver::load();
    if (!driver.ok()) return driver.status();
    Result<std::unique_ptr<gpu::MemoryPool>> made = gpu::MemoryPool::create(*driver.value(), device);
    if (!made.ok()) return made.status();
    return (pools_[device] = std::move(made).value()).get();
  }
  // The device's pool, if there is one already.
  gpu::MemoryPool* find(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = pools_.find(device);
    return found == pools_.end() ? nullptr : found->second.get();
  }

  void* allocate(std::int64_t nbytes, int device) {
    Result<gpu::MemoryPool*> pool = of(device);
    Result<gpu::Address> address =
        pool.ok() ? pool.value()->allocate(static_cast<std::uint64_t>(nbytes)) : pool.status();
    if (address.ok()) return reinterpret_cast<void*>(address.value());
    const std::lock_guard lock(mutex_);
    failure_ = address.status().message();
    return nullptr;
  }
  void free(void* memory, int device) {
    gpu::MemoryPool* const pool = find(device);
    const Status status = pool != nullptr ? pool->free(reinterpret_cast<gpu::Address>(memory))
                                          : Status(Code::kInvalidArgument,
                                                   "memory of GPU " + std::to_string(device) +
                                                       " was freed, but no pool has allocated any on it");
    // torch has no way to receive an error from this call.
    if (!status.ok()) std::fprintf(stderr, "kvxfer: %s\n", status.message().c_str());
  }

  std::string take_failure() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, {});
  }

 private:
  std::mutex mutex_;
  std::map<int, std::unique_ptr<gpu::MemoryPool>> pools_;
  std::string failure_;  // why the last failed allocation failed
};

// Raises if the device cannot make memory that can be shared. torch would take that for a lack of memory.
void check_pool(int device) {
  const Status status = [&]() -> Status {
    const WithoutGil released;
    Result<gpu::MemoryPool*> pool = Pools::get().of(device);
    if (!pool.ok()) return pool.status();
    if (pool.value()->handle_types() != 0) return {};
    Result<gpu::Address> probe = pool.value()->allocate(1);
    return probe.ok() ? pool.value()->free(probe.value()) : probe.status();
  }();
  check(status);
}

std::uint64_t pool_nbytes(int device) {
  gpu::MemoryPool* const pool = Pools::get().find(device);
  return pool == nullptr ? 0 : pool->nbytes();
}

std::string pool_handles(int device) {
  gpu::MemoryPool* const pool = Pools::get().find(device);
  const int types = pool == nullptr ? 0 : pool->handle_types();
  if (types == 0) return "";
  return types & gpu::kFabricHandle ? "fabric" : "descriptor";
}

}  // namespace

void define_gpu_pool(nb::module_& m) {
  m.def("gpu_pool_check", &check_pool, "device"_a);
  m.def("gpu_pool_failure", [] { return Pools::get().take_failure(); });
  m.def("gpu_pool_nbytes", &pool_nbytes, "device"_a);
  m.def("gpu_pool_handles", &pool_handles, "device"_a);
}

}  // namespace kvxfer::python

#define KVXFER_SYMBOL extern "C" __attribute__((visibility("default")))

// Null: there is no memory. torch then frees what it caches and asks again; if that fails, it raises an
// error.
KVXFER_SYMBOL void* kvxfer_gpu_allocate(ssize_t nbytes, int device, void* stream) {
  static_cast<void>(stream);  // memory is ready for every stream when this returns
  return kvxfer::python::Pools::get().allocate(nbytes, device);
}

KVXFER_SYMBOL void kvxfer_gpu_free(void* memory, ssize_t nbytes, int device, void* stream) {
  static_cast<void>(nbytes);
  static_cast<void>(stream);  // this waits for all work of the device
  kvxfer::python::Pools::get().free(memory, device);
}
