// The CPU's copy executor: how one run of bytes is moved or summed. Kernels are compiled for
// their own instruction set, function by function, and one is chosen when the module loads.
#include "core/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

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

template <class Emit>
void runs_of(const Move& move, std::uint32_t piece, Emit&& emit) {
  for_each_run(move.program->loops.data(), move.program->loops.size(), move.grid.piece(piece),
               move.src_blocks.data(), move.dst_blocks.data(), emit);
}

// base + count * stride, or UINT64_MAX: sums of offsets that a peer chose.
std::uint64_t saturating_step(std::uint64_t base, std::uint64_t count, std::uint64_t stride) noexcept {
  std::uint64_t distance, sum;
  if (__builtin_mul_overflow(count, stride, &distance) || __builtin_add_overflow(base, distance, &sum))
    return UINT64_MAX;
  return sum;
}

// ---- crc32c ----

constexpr std::uint32_t kCrcPolynomial = 0x82f63b78;  // Castagnoli's, bits reversed

// tables[0] is the usual one; tables[k][b] is the crc of byte b followed by k zeros, so that
// eight bytes take eight independent look-ups (Intel's slicing-by-8).
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_slices() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCrcPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}
constexpr auto kSlices = make_slices();

// `state` is the register itself: inverted before the first byte and after the last.
using CrcKernel = std::uint32_t (*)(std::uint32_t state, const std::byte* bytes, std::size_t nbytes) noexcept;

std::uint32_t crc32c_table(std::uint32_t state, const std::byte* bytes, std::size_t nbytes) noexcept {
  const auto byte_at = [&bytes](std::size_t i) { return std::to_integer<std::uint32_t>(bytes[i]); };
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) {
    // Assembled byte by byte: the same on machines of either byte order.
    state ^= byte_at(0) | byte_at(1) << 8 | byte_at(2) << 16 | byte_at(3) << 24;
    state = kSlices[7][state & 0xff] ^ kSlices[6][state >> 8 & 0xff] ^ kSlices[5][state >> 16 & 0xff] ^
            kSlices[4][state >> 24] ^ kSlices[3][byte_at(4)] ^ kSlices[2][byte_at(5)] ^
            kSlices[1][byte_at(6)] ^ kSlices[0][byte_at(7)];
  }
  for (; nbytes > 0; --nbytes, ++bytes) state = state >> 8 ^ kSlices[0][(state ^ byte_at(0)) & 0xff];
  return state;
}

#if defined(__x86_64__)

// The instruction takes three cycles and can start every cycle, so three lanes run side by side
// and are joined: a lane's state, moved past the bytes of the lanes after it, is linear in its
// bits, hence a table a byte. 512 bytes a lane: joining costs 8 look-ups for 192 instructions.
constexpr std::size_t kLaneNbytes = 512;

constexpr std::array<std::array<std::uint32_t, 256>, 4> make_lane_shift() {
  std::array<std::uint32_t, 32> moved{};  // what each bit of a state becomes after kLaneNbytes zeros
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t state = 1u << bit;
    for (std::size_t i = 0; i < kLaneNbytes; ++i) state = state >> 8 ^ kSlices[0][state & 0xff];
    moved[bit] = state;
  }
  std::array<std::array<std::uint32_t, 256>, 4> tables{};
  for (std::size_t k = 0; k < 4; ++k)
    for (std::uint32_t byte = 0; byte < 256; ++byte)
      for (std::size_t bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) tables[k][byte] ^= moved[8 * k + bit];
  return tables;
}
constexpr auto kLaneShift = make_lane_shift();

std::uint32_t past_one_lane(std::uint64_t state) noexcept {
  return kLaneShift[0][state & 0xff] ^ kLaneShift[1][state >> 8 & 0xff] ^ kLaneShift[2][state >> 16 & 0xff] ^
         kLaneShift[3][state >> 24 & 0xff];
}

std::uint64_t word_at(const std::byte* bytes) noexcept {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t state, const std::byte* bytes,
                                                             std::size_t nbytes) noexcept {
  std::uint64_t first = state;
  for (; nbytes >= 3 * kLaneNbytes; nbytes -= 3 * kLaneNbytes, bytes += 3 * kLaneNbytes) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t at = 0; at < kLaneNbytes; at += 8) {
      first = _mm_crc32_u64(first, word_at(bytes + at));
      second = _mm_crc32_u64(second, word_at(bytes + kLaneNbytes + at));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * kLaneNbytes + at));
    }
    first = past_one_lane(past_one_lane(first) ^ second) ^ third;
  }
  for (; nbytes >= 8; nbytes -= 8, bytes += 8) first = _mm_crc32_u64(first, word_at(bytes));
  state = static_cast<std::uint32_t>(first);
  for (; nbytes > 0; --nbytes, ++bytes) state = _mm_crc32_u8(state, std::to_integer<std::uint8_t>(*bytes));
  return state;
}

CrcKernel choose_crc_kernel() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") ? crc32c_sse42 : crc32c_table;
}

#else

CrcKernel choose_crc_kernel() noexcept { return crc32c_table; }

#endif

const CrcKernel kCrcKernel = choose_crc_kernel();

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

void copy_piece(const Move& move, std::uint32_t piece, const std::byte* src_base,
                std::byte* dst_base) noexcept {
  Lookahead ahead;
  runs_of(move, piece, [&](std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
    ahead.push({dst_base + dst_offset, src_base + src_offset, nbytes});
  });
  ahead.drain();
  copy_fence();
}

std::uint64_t piece_end(const Move& move, std::uint32_t piece_index, Side side) noexcept {
  const Piece piece = move.grid.piece(piece_index);
  const bool src = side == Side::kSrc;
  const std::vector<std::uint32_t>& blocks = src ? move.src_blocks : move.dst_blocks;
  std::uint32_t last_block = 0;
  for (std::uint32_t pair = piece.first_pair; pair < piece.first_pair + piece.num_pairs; ++pair)
    last_block = std::max(last_block, blocks[pair]);

  std::uint64_t end = 0;
  for (const CopyLoop& loop : move.program->loops) {
    const std::uint32_t layer = piece.layer - loop.first_layer;  // wraps below first_layer
    if (layer >= loop.num_layers || loop.counts[0] == 0 || loop.counts[1] == 0) continue;
    const std::uint64_t* strides = src ? loop.src_strides : loop.dst_strides;
    // Strides are unsigned, so the largest indices have the largest offset.
    std::uint64_t at = src ? loop.src_offset : loop.dst_offset;
    at = saturating_step(at, layer, src ? loop.src_layer_stride : loop.dst_layer_stride);
    at = saturating_step(at, last_block, src ? loop.src_block_stride : loop.dst_block_stride);
    at = saturating_step(at, loop.counts[0] - 1, strides[0]);
    at = saturating_step(at, loop.counts[1] - 1, strides[1]);
    end = std::max(end, saturating_step(at, 1, loop.nbytes));
  }
  return end;
}

std::uint32_t crc32c(std::uint32_t crc, const std::byte* bytes, std::size_t nbytes) noexcept {
  return ~kCrcKernel(~crc, bytes, nbytes);
}

std::uint32_t checksum_piece(const Move& move, std::uint32_t piece, Side side,
                             const std::byte* base) noexcept {
  std::uint32_t state = ~0u;
  runs_of(move, piece, [&](std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
    state = kCrcKernel(state, base + (side == Side::kSrc ? src_offset : dst_offset), nbytes);
  });
  return ~state;
}

std::string_view copy_kernel_name() noexcept { return kKernel.name; }

}  // namespace kvxfer
