// Memory of a GPU, as a NIC takes part in it: handed over as a dmabuf, and seen by the GPU once it is flushed.
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

  // Whole pages of the host, in which the memory begins at an offset.
  struct Dmabuf {
    UniqueFd fd;
    std::uint64_t offset = 0;
  };
  // Of memory that lies in one allocation. Not ok: in words why there is none.
  Result<Dmabuf> dmabuf_of(const std::byte* memory, std::size_t nbytes) const;
  // From there to the end of its allocation; 0 where that is not known.
  std::size_t left_of_allocation(const std::byte* memory) const;

  int device() const noexcept { return device_; }
  const std::string& pci_address() const noexcept { return pci_address_; }  // "0000:1b:00.0"
  // Why a NIC may not write it, "" where it may: the GPU might see old bytes for ever.
  const std::string& why_not_written() const noexcept { return why_not_written_; }
  // What a NIC has written the GPU sees after a flush alone, which waits for a few microseconds.
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
