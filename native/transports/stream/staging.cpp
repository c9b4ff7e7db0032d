#include "transports/stream/staging.h"

#include <string>
#include <utility>

namespace kvxfer {

Staging::~Staging() {
  sends_.reset();
  receives_.reset();
  if (memory_ == nullptr) return;
  const gpu::ContextScope scope(driver_, context_->get());
  driver_.host_free(memory_);
}

Status Staging::open() {
  if (is_open()) return {};
  if (!context_) {
    Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(driver_, options_.device);
    if (!context.ok()) return context.status();
    context_.emplace(std::move(context).value());
  }
  if (memory_ == nullptr) {
    const gpu::ContextScope scope(driver_, context_->get());
    int error = 0;
    void* memory = nullptr;
    std::uint64_t nbytes = options_.nbytes;
    for (; nbytes >= GpuPart::kLeastStagingNbytes; nbytes /= 2) {
      error = driver_.host_allocate(&memory, nbytes, gpu::kPortable | gpu::kDeviceMap);
      if (error == 0) break;
    }
    if (nbytes < GpuPart::kLeastStagingNbytes)
      return {Code::kExhausted, "pinned memory for staging pages of a GPU could not be allocated, not even " +
                                    std::to_string(GpuPart::kLeastStagingNbytes) +
                                    " bytes: " + driver_.status(error, "cuMemHostAlloc").message() +
                                    "; free host memory, or set staging_nbytes to 0 to work without staging"};
    memory_ = static_cast<std::byte*>(memory);
    nbytes_ = nbytes;
  }
  Result<Lane> sends = make_lane(memory_), receives = make_lane(memory_ + nbytes_ / 2);
  if (!sends.ok()) return sends.status();
  if (!receives.ok()) return receives.status();
  sends_.emplace(std::move(sends).value());
  receives_.emplace(std::move(receives).value());
  return {};
}

Result<Staging::Lane> Staging::make_lane(std::byte* base) const {
  Result<std::unique_ptr<gpu::CopyStream>> stream =
      gpu::CopyStream::create(driver_, context_->get(), options_.kernels, options_.stream);
  if (!stream.ok()) return stream.status();
  return Lane{base, Slots(nbytes_ / 2), std::move(stream).value()};
}

}  // namespace kvxfer
