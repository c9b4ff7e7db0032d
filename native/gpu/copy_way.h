// Which way runs go between a GPU and the host's memory: by a kernel, or by the copy engines. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace kvxfer::gpu {

// What a copy goes between. A device's own memory is never for copy engines (gpu/DESIGN.md).
enum class Direction : std::uint8_t { kToHost = 0, kToDevice = 1, kOnDevice = 2 };
inline constexpr std::size_t kNumHostDirections = 2;

enum class Way : std::uint8_t { kKernel, kCopyEngine };

// How copy engines are told of runs: one copy each of a batch, or rows at regular distances as one 2-D copy.
enum class Form : std::uint8_t { kRuns = 0, kRows = 1 };
inline constexpr std::size_t kNumForms = 2;

// Where every address and length is a multiple of this, kernels move 16 bytes a lane; engines do not care.
inline constexpr std::uint32_t kKernelAlignment = 16;
// What is less aligned was measured at this. At still less kernels are slower, and so the choice errs on
// their side.
inline constexpr std::uint32_t kLooseAlignment = 8;

struct Runs {
  std::uint64_t run_nbytes = 0;  // on average
  std::uint64_t num = 0;
  std::uint32_t alignment = kKernelAlignment;  // of every address and length, or more
  Form form = Form::kRuns;
};

// From which runs on a device's copy engines are the faster way. The default is that they never are.
struct Calibration {
  // By direction, form and alignment (0: that of kernels, 1: looser).
  using Table = std::array<std::array<std::array<std::uint64_t, 2>, kNumForms>, kNumHostDirections>;

  static constexpr std::uint64_t kNever = UINT64_MAX;
  // Copies of fewer bytes go by kernels: what they take to begin was not measured. The pieces of a stream
  // are larger than half of half a MiB.
  static constexpr std::uint64_t kLeastCopyNbytes = 256 * 1024;

  Table least_run_nbytes = filled(kNever);
  std::uint64_t least_copy_nbytes = kLeastCopyNbytes;

  // Everything between device and host goes by copy engines: what a calibration measures, and tests.
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

// What the same bytes took both ways; runs of one length.
struct WaySample {
  Direction direction;
  Form form;
  std::uint32_t alignment;
  std::uint64_t run_nbytes;
  std::uint64_t kernel_ns, engine_ns;
};

// From the smallest measured run on from which engines are as fast at every measured length. Samples of one
// direction, form and alignment may come in any order; where there is none, engines never are.
Calibration calibration_of(std::span<const WaySample> samples) noexcept;

}  // namespace kvxfer::gpu
