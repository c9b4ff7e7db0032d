// GPU memory that another process's kernels store to: exported by one end, mapped by the other.
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings/convert.h"
#include "gpu/shared_memory.h"

namespace kvxfer::python {
namespace {

using namespace nb::literals;

nb::tuple export_allocation(std::uint64_t address) {
  const gpu::Driver* driver = take(gpu::Driver::load());
  gpu::ExportedMemory memory = take([&] {
    const WithoutGil released;
    return gpu::export_memory(*driver, address);
  }());
  return nb::make_tuple(static_cast<std::uint32_t>(memory.kind), memory.base, memory.nbytes,
                        from_bytes(memory.handle), memory.fd.release());
}

class PyPeerMapping {
 public:
  PyPeerMapping(int device, std::uint32_t kind, std::uint64_t nbytes, const nb::bytes& handle, int fd) {
    driver_ = take(gpu::Driver::load());
    gpu::ExportedMemory memory;
    if (handle.size() != memory.handle.size()) raise({Code::kInvalidArgument, "a handle has 64 bytes"});
    memory.kind = static_cast<gpu::HandleKind>(kind);
    memory.nbytes = nbytes;
    std::memcpy(memory.handle.data(), handle.c_str(), handle.size());
    if (fd >= 0) memory.fd.reset(::dup(fd));
    context_.emplace(take(gpu::PrimaryContext::retain(*driver_, device)));
    mapped_.emplace(take([&] {
      const WithoutGil released;
      return gpu::PeerMemory::map(*driver_, context_->get(), device, memory, gpu::PeerAccess::kStore);
    }()));
  }
  ~PyPeerMapping() { close(); }
  std::uint64_t address() const { return mapped_ ? mapped_->address() : 0; }
  void close() {
    // Taken under the lock, because another thread may close it as well.
    std::optional<gpu::PeerMemory> mapped = std::exchange(mapped_, std::nullopt);
    if (!mapped) return;
    const WithoutGil released;
    const gpu::ContextScope scope(*driver_, context_->get());
    driver_->context_synchronize();  // a kernel that still stores would fault
    mapped.reset();
  }

 private:
  const gpu::Driver* driver_ = nullptr;
  std::optional<gpu::PrimaryContext> context_;
  std::optional<gpu::PeerMemory> mapped_;
};

}  // namespace

void define_gpu_stores(nb::module_& module) {
  module.def("gpu_export", &export_allocation, "address"_a);
  nb::class_<PyPeerMapping>(module, "GpuPeerMapping")
      .def(nb::init<int, std::uint32_t, std::uint64_t, const nb::bytes&, int>(), "device"_a, "kind"_a,
           "nbytes"_a, "handle"_a, "fd"_a)
      .def_prop_ro("address", &PyPeerMapping::address)
      .def("close", &PyPeerMapping::close);
}

}  // namespace kvxfer::python
