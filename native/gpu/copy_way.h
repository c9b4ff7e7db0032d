// Decides how runs are copied between a GPU and the host's memory: by a kernel or by the copy engines. Pure
// functions.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace kvxfer::gpu {

// Between which memories a copy goes. Copies within a device never use copy engines (gpu/DESIGN.md).
enum class Direction : std::uint8_t { kToHost = 0, kToDevice = 1, kOnDevice = 2 };
inline constexpr std::size_t kNumHostDirections = 2;

enum class Way : std::uint8_t { kKernel, kCopyEngine };

// How runs are passed to copy engines: each as one copy of a batch, or rows at regular distances as one 2-D
// copy.
enum class Form : std::uint8_t { kRuns = 0, kRows = 1 };
inline constexpr std::size_t kNumForms = 2;

// If every address and length is a multiple of this, each lane of a kernel moves 16 bytes. Engines are
// equally fast at any alignment.
inline constexpr std::uint32_t kKernelAlignment = 16;
// Looser alignments were measured at this one. At still looser ones kernels are slower, so the choice favours
// kernels there.
inline constexpr std::uint32_t kLooseAlignment = 8;

struct Runs {
  std::uint64_t run_nbytes = 0;  // on average
  std::uint64_t num = 0;
  std::uint32_t alignment = kKernelAlignment;  // at least this, of every address and length
  Form form = Form::kRuns;
};

// From which length of runs on a device's copy engines are faster than kernels. Default: never.
struct Calibration {
  // By direction, form and alignment (0: kKernelAlignment, 1: looser).
  using Table = std::array<std::array<std::array<std::uint64_t, 2>, kNumForms>, kNumHostDirections>;

  static constexpr std::uint64_t kNever = UINT64_MAX;
  // Kernels copy fewer bytes than this, since the time that such copies take to begin was not measured. A
  // stream's pieces are larger: up to half a MiB, and more than half of that.
  static constexpr std::uint64_t kLeastCopyNbytes = 256 * 1024;

  Table least_run_nbytes = filled(kNever);
  std::uint64_t least_copy_nbytes = kLeastCopyNbytes;

  // Everything between device and host goes by copy engines. For calibration and tests.
  static Calibration always() noexcept { return {filled(0), 0}; }

  bool uses_engines() const noexcept;

  static constexpr Table filled(std::uint64_t nbytes) noexcept {
    Table all{};
    for (auto& forms : all)
      for (auto& alignments : forms) alignments.fill(nbytes);
    return all;
  }
};

Way way_of(Direction direction, const Runs& runs, const Calibration& calibration) noexcept;

// How long the same bytes took by kernels and by engines, in runs of one length.
struct WaySample {
  Direction direction;
  Form form;
  std::uint32_t alignment;
  std::uint64_t run_nbytes;
  std::uint64_t kernel_ns, engine_ns;
};

// Engines are used from the smallest measured length on from which they are as fast at every measured length.
// Samples may come in any order. A direction, form and alignment without samples never uses engines.
Calibration calibration_of(std::span<const WaySample> samples) noexcept;

}  // namespace kvxfer::gpu
