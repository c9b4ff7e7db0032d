// The kernels that an emulated driver launches. Emulated threads are expensive, and other tests use more of
// them: here a launch is one CTA of one warp, and copies can run without threads.
#pragma once

#include <cstdlib>

#include "cuda_threads.h"
#include "emulated_driver.h"
#include "gpu/copy_job.h"
#include "gpu/copy_stream.h"

extern "C" void kvxfer_copy_vectors(kvxfer::gpu::CopyJob job);
extern "C" void kvxfer_convert(kvxfer::gpu::CopyJob job, kvxfer::gpu::ConvertJob conversions);

namespace emulated {

using kvxfer::gpu::ConvertJob;
using kvxfer::gpu::CopyJob;
using kvxfer::gpu::FunctionHandle;
using kvxfer::gpu::kWarp;

inline FunctionHandle copy_vectors{[](unsigned, unsigned, unsigned shared_nbytes, void** arguments) {
                                     cuda_threads::launch(1, kWarp, shared_nbytes, kvxfer_copy_vectors,
                                                          *static_cast<CopyJob*>(arguments[0]));
                                   },
                                   {sizeof(CopyJob)}};

inline FunctionHandle convert{[](unsigned, unsigned, unsigned shared_nbytes, void** arguments) {
                                cuda_threads::launch(1, kWarp, shared_nbytes, kvxfer_convert,
                                                     *static_cast<CopyJob*>(arguments[0]),
                                                     *static_cast<ConvertJob*>(arguments[1]));
                              },
                              {sizeof(CopyJob), sizeof(ConvertJob)}};

// Copies atom by atom, with the header that the kernels compile.
inline void copy_on_host(const CopyJob& job) {
  for (std::uint32_t index = 0; index < job.num_slices; ++index) {
    const kvxfer::gpu::Slice slice = slice_at(job, index);
    const kvxfer::gpu::JobLoop& loop = job.loops[slice.loop];
    for (std::uint32_t k = 0; k < slice.num_atoms; ++k) {
      const kvxfer::gpu::AtomPlace place = place_of(loop, slice.first_atom + k);
      std::memcpy(reinterpret_cast<void*>(address_of(loop.dst, place, job.dst_ids[place.pair], slice.layer)),
                  reinterpret_cast<void*>(address_of(loop.src, place, job.src_ids[place.pair], slice.layer)),
                  src_nbytes_of(loop, place));
    }
  }
  if (job.done != nullptr) std::atomic_ref(*job.done).store(job.done_value, std::memory_order_release);
}

// Launches of fast_copy and copies by engines that never end, as on a device that has failed.
inline std::atomic<bool>& hang_launches() { return device().hangs; }

inline FunctionHandle fast_copy{[](unsigned, unsigned, unsigned, void** arguments) {
                                  if (!hang_launches()) copy_on_host(*static_cast<CopyJob*>(arguments[0]));
                                },
                                {sizeof(CopyJob)}};

inline kvxfer::gpu::Kernels kernels() { return {{&copy_vectors, nullptr, &convert}}; }

// How tests that support both ways copy between device and host memory: by kernels or, if
// KVXFER_TEST_COPY_ENGINES is set (CMakeLists.txt), by copy engines wherever possible.
inline bool by_engines() { return std::getenv("KVXFER_TEST_COPY_ENGINES") != nullptr; }
inline kvxfer::gpu::Calibration calibration() {
  return by_engines() ? kvxfer::gpu::Calibration::always() : kvxfer::gpu::Calibration();
}

inline kvxfer::gpu::Kernels fast_kernels() { return {{&fast_copy, nullptr, &convert}}; }

}  // namespace emulated
