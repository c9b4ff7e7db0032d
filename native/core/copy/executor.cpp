// The CPU's copy executor: runs of bytes, one by one and by the cell. Kernels are compiled for their own
// instruction set, function by function, and one is chosen when the module loads.
#include "core/copy/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/copy/convert_cell.h"
#include "core/copy/runs_ahead.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer {
namespace {

constexpr std::size_t kLineNbytes = 64;
constexpr std::size_t kStepNbytes = 128;  // two lines an iteration: both halves of a prefetch pair

// A run shorter than this is streamed only if it fills whole lines. Its lines are fetched when it is first
// seen, and not when its predecessor ends.
constexpr std::size_t kStreamFromNbytes = 1024;

// While a run ends, the first bytes of the next one are fetched: the hardware's prefetcher starts anew at
// every page. 512 bytes cover its start-up. A page of up to 4 KiB is over before the prefetcher has started,
// so all of the next one is fetched.
constexpr std::size_t kShortRunNbytes = 4096;
constexpr std::size_t kPrefetchNbytes = 512;

// Moves `nbytes`, a multiple of kStepNbytes, to a `dst` on a cache line, and fetches the first
// `ahead_nbytes` from `ahead` into the cache beside the last steps.
using StreamKernel = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes,
                              const std::byte* ahead, std::size_t ahead_nbytes) noexcept;

// The same for whole lines, without looking ahead: for short runs.
using LineKernel = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept;

// Copies all runs of a cell, which are short and of whole lines. The first ones are in the cache. Meanwhile
// the first runs of the next cell of the same loop, at `next` (null: there is none), are fetched.
using CellKernel = void (*)(const CopyLoop& loop, std::byte* dst, const std::byte* src,
                            const std::byte* next) noexcept;

struct Kernel {
  std::string_view name;
  StreamKernel stream;  // null: memcpy moves everything
  LineKernel stream_lines;
  CellKernel stream_cell;
};

// Short runs are fetched this far ahead of the copied one: twice as many lines as the processor can wait for
// at a time. 1 to 8 KiB are all alike.
constexpr std::size_t kAheadNbytes = 3072;

void fetch(const std::byte* at, std::size_t nbytes) noexcept {
  for (std::size_t line = 0; line < nbytes; line += kLineNbytes) __builtin_prefetch(at + line, 0);
}

// If a cell's source is read in one sweep, the processor prefetches it by itself, and only needs to be shown
// where the next sweep begins.
bool is_sweep(const CopyLoop& loop) noexcept {
  return loop.src_strides[1] == loop.nbytes &&
         (loop.counts[0] == 1 || loop.src_strides[0] == loop.counts[1] * loop.nbytes);
}

// Fetches the runs that were not fetched because no cell came before the first.
void fetch_first(const CopyLoop& loop, const std::byte* src) noexcept {
  if (is_sweep(loop)) return;
  const std::uint64_t num_runs = RunsAhead::num_ahead(loop, kAheadNbytes);
  for (std::uint64_t k = 0; k < num_runs; ++k)
    fetch(src + k / loop.counts[1] * loop.src_strides[0] + k % loop.counts[1] * loop.src_strides[1],
          loop.nbytes);
}

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

__attribute__((target("avx512f"))) void stream_lines_avx512(std::byte* dst, const std::byte* src,
                                                            std::size_t nbytes) noexcept {
  for (std::size_t at = 0; at < nbytes; at += kLineNbytes)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
}

__attribute__((target("avx2"))) void stream_lines_avx2(std::byte* dst, const std::byte* src,
                                                       std::size_t nbytes) noexcept {
  for (std::size_t at = 0; at < nbytes; at += kLineNbytes) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i first = _mm256_loadu_si256(from), second = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, first);
    _mm256_stream_si256(to + 1, second);
  }
}

// One body for both instruction sets: `lines` is inlined into a function for its own target.
template <class Lines>
__attribute__((always_inline)) inline void stream_cell(const CopyLoop& loop, std::byte* dst,
                                                       const std::byte* src, const std::byte* next,
                                                       Lines&& lines) noexcept {
  const bool sweep = is_sweep(loop);
  if (sweep && next != nullptr) fetch(next, kPrefetchNbytes);
  RunsAhead ahead(loop, sweep ? nullptr : src, sweep ? nullptr : next, kAheadNbytes);
  for (std::uint32_t i = 0; i < loop.counts[0]; ++i) {
    std::byte* to = dst + i * loop.dst_strides[0];
    const std::byte* from = src + i * loop.src_strides[0];
    for (std::uint32_t j = 0; j < loop.counts[1]; ++j) {
      if (const std::byte* run = ahead.pop()) fetch(run, loop.nbytes);
      lines(to, from, loop.nbytes);
      to += loop.dst_strides[1];
      from += loop.src_strides[1];
    }
  }
}

__attribute__((target("avx512f"))) void stream_cell_avx512(const CopyLoop& loop, std::byte* dst,
                                                           const std::byte* src,
                                                           const std::byte* next) noexcept {
  stream_cell(loop, dst, src, next, stream_lines_avx512);
}

__attribute__((target("avx2"))) void stream_cell_avx2(const CopyLoop& loop, std::byte* dst,
                                                      const std::byte* src, const std::byte* next) noexcept {
  stream_cell(loop, dst, src, next, stream_lines_avx2);
}

Kernel choose_kernel() noexcept {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f"))
    return {"avx512-nt", stream_avx512, stream_lines_avx512, stream_cell_avx512};
  if (__builtin_cpu_supports("avx2")) return {"avx2-nt", stream_avx2, stream_lines_avx2, stream_cell_avx2};
  return {"memcpy", nullptr, nullptr, nullptr};
}

#else

Kernel choose_kernel() noexcept { return {"memcpy", nullptr, nullptr, nullptr}; }

#endif

const Kernel kKernel = choose_kernel();

bool is_whole_lines(const std::byte* dst, std::size_t nbytes) noexcept {
  return (reinterpret_cast<std::uintptr_t>(dst) | nbytes) % kLineNbytes == 0;
}

// `next`: the run that follows it; null if there is none.
void copy_run_ahead(std::byte* dst, const std::byte* src, std::size_t nbytes, const std::byte* next,
                    std::size_t next_nbytes) noexcept {
  if (kKernel.stream == nullptr) {
    std::memcpy(dst, src, nbytes);
    return;
  }
  if (nbytes < kStreamFromNbytes) {
    if (is_whole_lines(dst, nbytes))
      kKernel.stream_lines(dst, src, nbytes);
    else
      std::memcpy(dst, src, nbytes);
    return;
  }
  // A line that is stored only in part costs a read of it: start on a line, end on one.
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLineNbytes;
  const std::size_t body = (nbytes - head) / kStepNbytes * kStepNbytes;
  const std::size_t tail = nbytes - head - body;
  if (head != 0) std::memcpy(dst, src, head);
  kKernel.stream(dst + head, src + head, body, next,
                 std::min(next_nbytes, nbytes <= kShortRunNbytes ? kShortRunNbytes : kPrefetchNbytes));
  if (tail != 0) std::memcpy(dst + head + body, src + head + body, tail);
}

// The last few runs, not yet copied. A short run is a cache miss or two and hardly any work, and the
// processor sees only a few of them ahead. So their lines are fetched when the run is pushed, and have
// arrived when its turn comes. For a long run it is enough to know its successor.
class Lookahead {
 public:
  void push(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept {
    if (nbytes < kStreamFromNbytes) {
      const bool reads_dst = kKernel.stream == nullptr || !is_whole_lines(dst, nbytes);
      fetch(src, nbytes);
      for (std::size_t at = 0; reads_dst && at < nbytes; at += kLineNbytes) __builtin_prefetch(dst + at, 1);
    }
    const std::size_t place = num_pushed_++ % kNumRuns;
    dst_[place] = dst;
    src_[place] = src;
    nbytes_[place] = nbytes;
    nbytes_ahead_ += nbytes;
    while (num_pushed_ - num_copied_ > 1 &&
           (nbytes_ahead_ > kAheadNbytes || num_pushed_ - num_copied_ == kNumRuns))
      copy_oldest();
  }
  void drain() noexcept {
    while (num_copied_ < num_pushed_) copy_oldest();
  }

 private:
  static constexpr std::size_t kNumRuns = 64;

  void copy_oldest() noexcept {
    const std::size_t place = num_copied_++ % kNumRuns, next = num_copied_ % kNumRuns;
    const bool has_next = num_copied_ < num_pushed_;
    nbytes_ahead_ -= nbytes_[place];
    copy_run_ahead(dst_[place], src_[place], nbytes_[place], has_next ? src_[next] : nullptr,
                   has_next ? nbytes_[next] : 0);
  }

  // One array for each field. With an array of structs, compilers use one load for two fields that were
  // stored one by one. The processor cannot answer such a load from its store queue: it waits until all
  // earlier streamed stores are out.
  std::array<std::byte*, kNumRuns> dst_;
  std::array<const std::byte*, kNumRuns> src_;
  std::array<std::size_t, kNumRuns> nbytes_;
  std::size_t num_pushed_ = 0, num_copied_ = 0;
  std::size_t nbytes_ahead_ = 0;  // of the runs that are not copied yet
};

// Runs as they come, joined where they touch on both sides.
class RunMerger {
 public:
  void push(std::byte* dst, const std::byte* src, std::size_t nbytes) noexcept {
    if (src == src_ + nbytes_ && dst == dst_ + nbytes_ && nbytes_ != 0) {
      nbytes_ += nbytes;
      return;
    }
    if (nbytes_ != 0) ahead_.push(dst_, src_, nbytes_);
    dst_ = dst;
    src_ = src;
    nbytes_ = nbytes;
  }
  void drain() noexcept {
    if (nbytes_ != 0) ahead_.push(dst_, src_, nbytes_);
    nbytes_ = 0;
    ahead_.drain();
  }

 private:
  std::byte* dst_ = nullptr;
  const std::byte* src_ = nullptr;
  std::size_t nbytes_ = 0;
  Lookahead ahead_;
};

// Cells of many short runs of whole lines, which arise when heads and tokens change places: naming them one
// by one costs as much as copying them.
class CellStream {
 public:
  static bool takes(const CopyLoop& loop, const std::byte* dst) noexcept {
    const std::uint64_t all =
        loop.nbytes | loop.dst_strides[0] | loop.dst_strides[1] | reinterpret_cast<std::uintptr_t>(dst);
    return kKernel.stream_cell != nullptr && loop.nbytes < kStreamFromNbytes && all % kLineNbytes == 0 &&
           loop.counts[0] * loop.counts[1] >= kLeastRuns;
  }

  void push(const CopyLoop& loop, std::byte* dst, const std::byte* src) noexcept {
    if (loop_ != &loop) {
      drain();
      fetch_first(loop, src);
      loop_ = &loop;
    } else {
      kKernel.stream_cell(loop, dst_, src_, src);
    }
    dst_ = dst;
    src_ = src;
  }
  void drain() noexcept {
    if (loop_ != nullptr) kKernel.stream_cell(*loop_, dst_, src_, nullptr);
    loop_ = nullptr;
  }

 private:
  static constexpr std::uint32_t kLeastRuns = 4;

  const CopyLoop* loop_ = nullptr;  // of the last pushed cell, which is not copied yet
  std::byte* dst_ = nullptr;
  const std::byte* src_ = nullptr;
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
  copy_run_ahead(dst, src, nbytes, nullptr, 0);
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
  const ProgramView view = program.view_of(piece.layer);
  RunMerger runs;
  CellStream cells;
  ConvertStream converted;
  for_each_cell(view, piece, src_ids, dst_ids, [&](const Cell& cell) {
    const CopyLoop& loop = *cell.loop;
    const std::byte* src = src_base + cell.src;
    std::byte* dst = dst_base + cell.dst;
    if (const Conversion* conversion = program.conversion_of(loop)) {
      converted.push(loop, *conversion, src, dst, scales_of(view, *conversion, cell, src_base, dst_base));
    } else if (CellStream::takes(loop, dst)) {
      cells.push(loop, dst, src);
    } else {
      for (std::uint32_t i = 0; i < loop.counts[0]; ++i)
        for (std::uint32_t j = 0; j < loop.counts[1]; ++j)
          runs.push(dst + i * loop.dst_strides[0] + j * loop.dst_strides[1],
                    src + i * loop.src_strides[0] + j * loop.src_strides[1], loop.nbytes);
    }
  });
  cells.drain();
  converted.drain();
  runs.drain();
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
  const auto [first_loop, end_loop] = program.loops_of(piece.layer);
  for (std::size_t k = first_loop; k < end_loop; ++k) {
    const CopyLoop& loop = program.loops[k];
    const std::uint32_t layer = piece.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers || loop.counts[0] == 0 || loop.counts[1] == 0) continue;
    if (piece.begin(loop.grain) == piece.end(loop.grain)) continue;
    const Conversion* conversion = program.conversion_of(loop);
    // Strides are unsigned, so the largest indices have the largest offset.
    const auto beyond = [&](const HalfLoop& half) {
      std::uint64_t at = saturating_step(half.offset, half.units - 1, half.unit_stride);
      at = saturating_step(at, layer, half.layer_stride);
      at = saturating_step(at, last_block[loop.grain], half.block_stride);
      at = saturating_step(at, loop.counts[0] - 1, half.strides[0]);
      at = saturating_step(at, loop.counts[1] - 1, half.strides[1]);
      end = std::max(end, saturating_step(at, 1, half.nbytes));
    };
    beyond(half_of(loop, conversion, program.units[loop.grain], side));
    if (const auto scales = region_scales_of(conversion, program.units[loop.grain], side)) beyond(*scales);
  }
  return end;
}

std::string_view copy_kernel_name() noexcept { return kKernel.name; }

}  // namespace kvxfer
