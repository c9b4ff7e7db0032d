// The CPU's copy executor: how one run of bytes is moved. Kernels are compiled for
// their own instruction set, function by function, and one is chosen when the module loads.
#include "core/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/cell.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer {
namespace {

constexpr std::size_t kLineNbytes = 64;
constexpr std::size_t kStepNbytes = 128;  // two lines an iteration: both halves of a prefetch pair

// Below this a run goes through memcpy, which also leaves it in the cache. Measured over scattered
// runs: from 1 KiB on the non-temporal copy wins, at 512 bytes the two are level.
constexpr std::size_t kStreamFromNbytes = 1024;

// While a run ends, the next one's first bytes are fetched: the hardware's prefetcher starts
// anew at every page. 512 bytes cover its start-up. Pages up to 4 KiB are over before it has
// started at all, so all of the next one is fetched.
constexpr std::size_t kShortRunNbytes = 4096;
constexpr std::size_t kPrefetchNbytes = 512;

struct Run {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t nbytes = 0;
};

// Moves `nbytes`, a multiple of kStepNbytes, to a `dst` on a cache line, and fetches the first
// `ahead_nbytes` from `ahead` into the cache beside the last steps.
using StreamKernel = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes,
                              const std::byte* ahead, std::size_t ahead_nbytes) noexcept;

struct Kernel {
  std::string_view name;
  StreamKernel stream;  // null: memcpy moves everything
};

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void stream_avx512(std::byte* dst, const std::byte* src,
                                                      std::size_t nbytes, const std::byte* ahead,
                                                      std::size_t ahead_nbytes) noexcept {
  const std::size_t ahead_from = nbytes - std::min(nbytes, ahead_nbytes);
  for (std::size_t at = 0; at < nbytes; at += kStepNbytes) {
    if (at >= ahead_from) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + (at - ahead_from)), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + (at - ahead_from) + kLineNbytes), _MM_HINT_T0);
    }
    const __m512i first = _mm512_loadu_si512(src + at);
    const __m512i second = _mm512_loadu_si512(src + at + 64);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), first);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at + 64), second);
  }
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* dst, const std::byte* src, std::size_t nbytes,
                                                 const std::byte* ahead, std::size_t ahead_nbytes) noexcept {
  const std::size_t ahead_from = nbytes - std::min(nbytes, ahead_nbytes);
  for (std::size_t at = 0; at < nbytes; at += kStepNbytes) {
    if (at >= ahead_from) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + (at - ahead_from)), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + (at - ahead_from) + kLineNbytes), _MM_HINT_T0);
    }
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i first = _mm256_loadu_si256(from);
    const __m256i second = _mm256_loadu_si256(from + 1);
    const __m256i third = _mm256_loadu_si256(from + 2);
    const __m256i fourth = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, first);
    _mm256_stream_si256(to + 1, second);
    _mm256_stream_si256(to + 2, third);
    _mm256_stream_si256(to + 3, fourth);
  }
}

Kernel choose_kernel() noexcept {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {"avx512-nt", stream_avx512};
  if (__builtin_cpu_supports("avx2")) return {"avx2-nt", stream_avx2};
  return {"memcpy", nullptr};
}

#else

Kernel choose_kernel() noexcept { return {"memcpy", nullptr}; }

#endif

const Kernel kKernel = choose_kernel();

void copy_run_ahead(const Run& run, const Run& next) noexcept {
  if (kKernel.stream == nullptr || run.nbytes < kStreamFromNbytes) {
    std::memcpy(run.dst, run.src, run.nbytes);
    return;
  }
  // A line that is stored only in part costs a read of it: start on a line, end on one.
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(run.dst) % kLineNbytes;
  const std::size_t body = (run.nbytes - head) / kStepNbytes * kStepNbytes;
  const std::size_t tail = run.nbytes - head - body;
  if (head != 0) std::memcpy(run.dst, run.src, head);
  kKernel.stream(run.dst + head, run.src + head, body, next.src,
                 std::min(next.nbytes, run.nbytes <= kShortRunNbytes ? kShortRunNbytes : kPrefetchNbytes));
  if (tail != 0) std::memcpy(run.dst + head + body, run.src + head + body, tail);
}

// The last few runs, not yet copied. A short run is a cache miss or two and hardly any work, and
// the processor sees only a few of them at a time: their lines are asked for when the run is
// pushed and are there when its turn comes. Long runs need no more than their successor's name.
class Lookahead {
 public:
  void push(const Run& run) noexcept {
    if (num_pushed_ - num_copied_ == kNumRuns) copy_oldest();
    if (run.nbytes < kStreamFromNbytes) {
      for (std::size_t at = 0; at < run.nbytes; at += kLineNbytes) {
        __builtin_prefetch(run.src + at, 0);
        __builtin_prefetch(run.dst + at, 1);
      }
    }
    runs_[num_pushed_++ % kNumRuns] = run;
  }
  void drain() noexcept {
    while (num_copied_ < num_pushed_) copy_oldest();
  }

 private:
  static constexpr std::size_t kNumRuns = 8;  // of 1 KiB at most: 16 KiB of both sides, half the L1 cache

  void copy_oldest() noexcept {
    const std::size_t oldest = num_copied_++;
    copy_run_ahead(runs_[oldest % kNumRuns],
                   num_copied_ < num_pushed_ ? runs_[num_copied_ % kNumRuns] : Run{});
  }

  std::array<Run, kNumRuns> runs_;
  std::size_t num_pushed_ = 0, num_copied_ = 0;
};

// base + count * stride, or UINT64_MAX: sums of offsets that a peer chose.
std::uint64_t saturating_step(std::uint64_t base, std::uint64_t count, std::uint64_t stride) noexcept {
  std::uint64_t distance, sum;
  if (__builtin_mul_overflow(count, stride, &distance) || __builtin_add_overflow(base, distance, &sum))
    return UINT64_MAX;
  return sum;
}

}  // namespace

void copy_run(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept {
  copy_run_ahead({dst, src, nbytes}, {});
}

void copy_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();  // non-temporal stores are weakly ordered: a release store would overtake them
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void copy_cell(const CopyLoop& loop, const Conversion* conversion, const std::byte* src, std::byte* dst,
               const CellScales& scales) noexcept {
  if (conversion != nullptr) return convert_cell(loop, *conversion, src, dst, scales);
  for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
    for (std::uint32_t j = 0; j < loop.counts[1]; ++j)
      copy_run(dst + i * loop.dst_strides[0] + j * loop.dst_strides[1],
               src + i * loop.src_strides[0] + j * loop.src_strides[1], loop.nbytes);
}

void execute(const CopyProgram& program, const Piece& piece, const std::uint32_t* src_ids,
             const std::uint32_t* dst_ids, const std::byte* src_base, std::byte* dst_base) noexcept {
  const ProgramView view = program.view();
  if (program.conversions.empty()) {
    Lookahead ahead;
    for_each_run(view, piece, src_ids, dst_ids,
                 [&](std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
                   ahead.push({dst_base + dst_offset, src_base + src_offset, nbytes});
                 });
    ahead.drain();
  } else {
    for_each_cell(view, piece, src_ids, dst_ids, [&](const Cell& cell) {
      const Conversion* conversion = program.conversion_of(*cell.loop);
      CellScales scales;
      if (conversion != nullptr) scales = scales_of(view, *conversion, cell, src_base, dst_base);
      copy_cell(*cell.loop, conversion, src_base + cell.src, dst_base + cell.dst, scales);
    });
  }
  copy_fence();
}

void copy_piece(const Move& move, std::uint32_t piece, const std::byte* src_base,
                std::byte* dst_base) noexcept {
  execute(*move.program, move.grid.piece(piece), move.src_ids.data(), move.dst_ids.data(), src_base,
          dst_base);
}

std::uint64_t piece_end(const Move& move, std::uint32_t piece_index, Side side) noexcept {
  const CopyProgram& program = *move.program;
  const Piece piece = move.grid.piece(piece_index);
  const bool src = side == Side::kSrc;
  const std::vector<std::uint32_t>& ids = src ? move.src_ids : move.dst_ids;
  std::uint32_t last_block[kNumGrains] = {0, 0};
  for (std::uint32_t grain = 0; grain < kNumGrains; ++grain) {
    std::uint32_t last = 0;
    for (std::uint32_t pair = piece.begin(grain); pair < piece.end(grain); ++pair)
      last = std::max(last, ids[pair]);
    const std::uint32_t units = src ? program.units[grain].src : program.units[grain].dst;
    last_block[grain] = units == 0 ? 0 : last / units;
  }

  std::uint64_t end = 0;
  for (const CopyLoop& loop : program.loops) {
    const std::uint32_t layer = piece.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers || loop.counts[0] == 0 || loop.counts[1] == 0) continue;
    if (piece.begin(loop.grain) == piece.end(loop.grain)) continue;
    const UnitsPerBlock units = program.units[loop.grain];
    const std::uint32_t block = last_block[loop.grain];
    const Conversion* conversion = program.conversion_of(loop);
    // Strides are unsigned, so the largest indices have the largest offset.
    const auto beyond = [&](std::uint64_t at, std::uint64_t layer_stride, std::uint64_t block_stride,
                            const std::uint64_t* strides, std::uint64_t nbytes) {
      at = saturating_step(at, layer, layer_stride);
      at = saturating_step(at, block, block_stride);
      at = saturating_step(at, loop.counts[0] - 1, strides[0]);
      at = saturating_step(at, loop.counts[1] - 1, strides[1]);
      end = std::max(end, saturating_step(at, 1, nbytes));
    };
    if (src) {
      beyond(saturating_step(loop.src_offset, units.src - 1, loop.src_unit_stride), loop.src_layer_stride,
             loop.src_block_stride, loop.src_strides, loop.nbytes);
      if (conversion != nullptr && conversion->src_scales == ScalePlace::kRegion)
        beyond(conversion->src_offset, conversion->src_layer_stride, conversion->src_block_stride,
               conversion->src_strides, sizeof(float));
    } else {
      beyond(saturating_step(loop.dst_offset, units.dst - 1, loop.dst_unit_stride), loop.dst_layer_stride,
             loop.dst_block_stride, loop.dst_strides, dst_run_nbytes(loop, conversion));
      if (conversion != nullptr && conversion->finds_scales())
        beyond(conversion->dst_offset, conversion->dst_layer_stride, conversion->dst_block_stride,
               conversion->dst_strides, sizeof(float));
    }
  }
  return end;
}

std::string_view copy_kernel_name() noexcept { return kKernel.name; }

}  // namespace kvxfer
