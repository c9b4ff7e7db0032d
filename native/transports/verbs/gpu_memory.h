// A GPU's memory as a NIC uses it: passed as a dmabuf, and visible to the GPU only after a flush.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "gpu/driver.h"
#include "gpu/gpu_part.h"
#include "kvxfer/transport.h"

namespace kvxfer::verbs {

class GpuMemory {
 public:
  static Result<std::shared_ptr<const GpuMemory>> create(const GpuPart& part);

  // Whole pages of the host. The memory begins at an offset in them.
  struct Dmabuf {
    UniqueFd fd;
    std::uint64_t offset = 0;
  };
  // For memory within one allocation. Not ok: says why there is no dmabuf.
  Result<Dmabuf> dmabuf_of(const std::byte* memory, std::size_t nbytes) const;
  // Bytes from there to the end of the allocation; 0 where that is not known.
  std::size_t left_of_allocation(const std::byte* memory) const;

  int device() const noexcept { return device_; }
  const std::string& pci_address() const noexcept { return pci_address_; }  // "0000:1b:00.0"
  // Why a NIC must not write this memory; "" where it may. The GPU might never see the new bytes.
  const std::string& why_not_written() const noexcept { return why_not_written_; }
  // Whether the GPU sees a NIC's writes only after a flush, which takes a few microseconds.
  bool needs_flush() const noexcept { return needs_flush_; }
  Status flush() const;

 private:
  GpuMemory(const gpu::Driver& driver, gpu::PrimaryContext context, int device)
      : driver_(driver), context_(std::move(context)), device_(device) {}
  Status ask();

  const gpu::Driver& driver_;
  const gpu::PrimaryContext context_;
  const int device_;
  std::string pci_address_;
  bool exports_ = false, needs_flush_ = false;
  std::string why_not_written_;
};

}  // namespace kvxfer::verbs
