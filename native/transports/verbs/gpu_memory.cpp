#include "transports/verbs/gpu_memory.h"

#include <unistd.h>

#include <cstdio>

namespace kvxfer::verbs {

Result<std::shared_ptr<const GpuMemory>> GpuMemory::create(const GpuPart& part) {
  Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(*part.driver, part.device);
  if (!context.ok()) return context.status();
  const std::shared_ptr<GpuMemory> made(new GpuMemory(*part.driver, std::move(context).value(), part.device));
  if (Status asked = made->ask(); !asked.ok()) return asked;
  return std::shared_ptr<const GpuMemory>(made);
}

Status GpuMemory::ask() {
  gpu::Device device = 0;
  if (const int error = driver_.device_get(&device, device_); error != 0)
    return driver_.status(error, "cuDeviceGet");
  // A driver that does not know an attribute lacks the feature that it reports.
  const auto attribute = [&](int which) {
    int value = 0;
    return driver_.device_attribute(&value, which, device) == 0 ? value : 0;
  };
  char address[32];
  std::snprintf(
      address, sizeof address, "%04x:%02x:%02x.0", static_cast<unsigned>(attribute(gpu::kPciDomain)),
      static_cast<unsigned>(attribute(gpu::kPciBus)), static_cast<unsigned>(attribute(gpu::kPciDevice)));
  pci_address_ = address;
  exports_ = driver_.range_handle != nullptr && attribute(gpu::kDmabufSupported) != 0;
  if (attribute(gpu::kWritesOrdering) >= gpu::kSeenByOwner) return {};
  needs_flush_ =
      driver_.flush_remote_writes != nullptr && (attribute(gpu::kFlushOptions) & gpu::kFlushByHost) != 0;
  if (!needs_flush_)
    why_not_written_ =
        "GPU " + std::to_string(device_) +
        " may see a NIC's writes out of order, and its driver cannot flush them (CUDA 11.3 and later can)";
  return {};
}

Result<GpuMemory::Dmabuf> GpuMemory::dmabuf_of(const std::byte* memory, std::size_t nbytes) const {
  if (!exports_)
    return Status(Code::kUnsupported,
                  "the driver of GPU " + std::to_string(device_) +
                      " cannot export one: that needs CUDA 11.7 and NVIDIA's open kernel modules");
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uint64_t first = address / page * page;
  const std::uint64_t end = (address + nbytes + page - 1) / page * page;
  const gpu::ContextScope scope(driver_, context_.get());
  int fd = -1;
  if (const int error = driver_.range_handle(&fd, first, end - first, gpu::kDmabufHandle, 0); error != 0)
    return driver_.status(error, "cuMemGetHandleForAddressRange");
  return Dmabuf{UniqueFd(fd), address - first};
}

std::size_t GpuMemory::left_of_allocation(const std::byte* memory) const {
  const gpu::ContextScope scope(driver_, context_.get());
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  gpu::Address base = 0;
  std::size_t nbytes = 0;
  if (driver_.address_range(&base, &nbytes, address) != 0) return 0;
  return address - base < nbytes ? nbytes - (address - base) : 0;
}

Status GpuMemory::flush() const {
  const gpu::ContextScope scope(driver_, context_.get());
  constexpr int kCurrentContext = 0;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
  return driver_.status(driver_.flush_remote_writes(kCurrentContext, gpu::kSeenByOwner),
                        "cuFlushGPUDirectRDMAWrites");
}

}  // namespace kvxfer::verbs
