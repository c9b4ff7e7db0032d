// The context of the agent's GPU, for threads that register its memory with a library. The library asks the
// CUDA driver about the memory, and the driver refuses a thread that has no current context. Any thread
// may register memory.
#pragma once

#include <memory>
#include <utility>

#include "gpu/driver.h"
#include "gpu/gpu_part.h"

namespace kvxfer::fabric {

class GpuContext {
 public:
  static Result<std::shared_ptr<const GpuContext>> create(const GpuPart& part) {
    Result<gpu::PrimaryContext> context = gpu::PrimaryContext::retain(*part.driver, part.device);
    if (!context.ok()) return context.status();
    return std::shared_ptr<const GpuContext>(
        new GpuContext(*part.driver, std::move(context).value(), part.device));
  }
  int device() const noexcept { return device_; }

  // Makes the context current for the calling thread while it lives. Of null: does nothing.
  class Scope {
   public:
    explicit Scope(const GpuContext* gpu) {
      if (gpu != nullptr) scope_ = std::make_unique<gpu::ContextScope>(gpu->driver_, gpu->context_.get());
    }

   private:
    std::unique_ptr<gpu::ContextScope> scope_;
  };

 private:
  GpuContext(const gpu::Driver& driver, gpu::PrimaryContext context, int device)
      : driver_(driver), context_(std::move(context)), device_(device) {}

  const gpu::Driver& driver_;
  const gpu::PrimaryContext context_;
  const int device_;
};

}  // namespace kvxfer::fabric
