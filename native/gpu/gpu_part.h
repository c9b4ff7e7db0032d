// A GPU whose memory an agent registers, and what copies there. The caller that makes the agent loads it: the
// core knows how kernels are launched, not where they come from.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"

namespace kvxfer {

struct GpuPart {
  // Less is no arena to stage in: of half of it one peer may have a quarter, and a stream's piece has 512 KiB.
  static constexpr std::uint64_t kLeastStagingNbytes = 2 * 4 * 512 * 1024;

  const gpu::Driver* driver = nullptr;
  int device = 0;
  gpu::Kernels kernels;
  gpu::CopyStreamOptions stream;
  // In the place of stream.num_ctas where pages are staged: what was found to feed the bus (gpu/calibrate.h).
  std::uint32_t staging_ctas = gpu::kUnmeasuredCtas;
  // Pinned memory to stage pages in that go over streams; 0: they do not.
  std::uint64_t staging_nbytes = 64 * 1024 * 1024;
  std::shared_ptr<const void> keepalive;  // of the kernels, until the agent is gone
};

}  // namespace kvxfer
