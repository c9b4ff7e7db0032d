// Memory of ours as the device knows it, and memory of a peer's as it told us: spans, each under a key.
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

// Registered for as long as this lives, which may be longer than the rail.
class Registration {
 public:
  // As wide as spans allow: those that touch are one, up to what the device takes. kExhausted: this process may lock
  // no more memory, in words with what raises the limit. `gpu`: whose memory it may be; null: none.
  static Result<std::shared_ptr<const Registration>> create(std::shared_ptr<const Device> device,
                                                            const LocalRegion& region,
                                                            const GpuMemory* gpu = nullptr);
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  const KeyedSpans& local() const noexcept { return local_; }  // with keys for requests of ours
  const KeyedSpans& remote() const noexcept { return remote_; }  // for those of peers
  RegionKeys keys() const;  // remote(), as it goes to peers
  // Why the device may not write it; "" where it may.
  const std::string& why_not_written() const noexcept { return why_not_written_; }

 private:
  explicit Registration(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  Status add(std::byte* base, std::uint64_t offset, std::uint64_t nbytes, const GpuMemory* gpu);
  Result<abi::MemoryRegion*> add_to_device(std::byte* memory, std::uint64_t nbytes);
  // As much of it as is one registration, which `nbytes` is then.
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

// What a peer told of its region, or in words why that is nothing to read by: every number of it is the peer's.
Result<KeyedSpans> spans_of(const RemoteRegion& region);

}  // namespace kvxfer::verbs
