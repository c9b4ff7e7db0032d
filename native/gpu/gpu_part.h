// A GPU whose memory an agent registers, with the kernels that copy there. The caller that makes the agent
// loads the kernels: the core launches them, but does not know where they come from.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/copy_stream.h"
#include "gpu/driver.h"

namespace kvxfer {

struct GpuPart {
  // The smallest arena to stage in: a peer may have a quarter of one half of it, and a stream's piece has 512
  // KiB.
  static constexpr std::uint64_t kLeastStagingNbytes = 2 * 4 * 512 * 1024;

  const gpu::Driver* driver = nullptr;
  int device = 0;
  gpu::Kernels kernels;
  gpu::CopyStreamOptions stream;
  // Replaces stream.num_ctas where pages are staged: the number that was measured to feed the bus
  // (gpu/calibrate.h).
  std::uint32_t staging_ctas = gpu::kUnmeasuredCtas;
  // Pinned memory for staging pages that go over streams; 0: such pages do not go over streams.
  std::uint64_t staging_nbytes = 64 * 1024 * 1024;
  std::shared_ptr<const void> keepalive;  // keeps the kernels loaded until the agent is gone
};

}  // namespace kvxfer
