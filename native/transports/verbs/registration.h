// Our memory as the device knows it, and a peer's memory as the peer described it: spans, each with a key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/keyed_spans.h"
#include "transports/verbs/device.h"
#include "transports/verbs/gpu_memory.h"

namespace kvxfer::verbs {

using KeyedSpan = KeyedSpanOf<std::uint32_t>;
using KeyedSpans = KeyedSpansOf<std::uint32_t>;

// Memory stays registered while this object lives, which may be longer than the rail.
class Registration {
 public:
  // Merges spans that touch, up to what the device takes in one registration. kExhausted: this process may
  // lock no more memory; the message says what raises the limit. `gpu`: the GPU whose memory it may be; null:
  // none.
  static Result<std::shared_ptr<const Registration>> create(std::shared_ptr<const Device> device,
                                                            const LocalRegion& region,
                                                            const GpuMemory* gpu = nullptr);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const KeyedSpans& local() const noexcept { return local_; }  // with keys for our own requests
  const KeyedSpans& remote() const noexcept { return remote_; }  // with keys for peers' requests
  RegionKeys keys() const;  // remote(), as sent to peers
  // Why the device may not write it; "" where it may.
  const std::string& why_not_written() const noexcept { return why_not_written_; }

 private:
  explicit Registration(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  Status add(std::byte* base, std::uint64_t offset, std::uint64_t nbytes, const GpuMemory* gpu);
  Result<abi::MemoryRegion*> add_to_device(std::byte* memory, std::uint64_t nbytes);
  // Registers as much of the memory as one registration can hold, and puts that length into `nbytes`.
  Result<abi::MemoryRegion*> add_of_gpu(const GpuMemory& gpu, std::byte* memory, std::uint64_t& nbytes);
  abi::MemoryRegion* try_dmabuf(const GpuMemory& gpu, std::byte* memory, std::uint64_t nbytes,
                                std::string& why_not) const;
  abi::MemoryRegion* try_memory(std::byte* memory, std::uint64_t nbytes) const;
  unsigned access() const noexcept;

  const std::shared_ptr<const Device> device_;
  std::vector<abi::MemoryRegion*> regions_;
  KeyedSpans local_, remote_;
  std::string why_not_written_;
};

// The spans that a peer gave for its region. Every number is the peer's, so they may be unusable; the error
// says why.
Result<KeyedSpans> spans_of(const RemoteRegion& region);

}  // namespace kvxfer::verbs
