// The plain limits that benchmark ratios are taken against: the same pages, moved by the shortest
// code that can move them. Shares nothing with the engine, on purpose.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "relay.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace {

using Offsets = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::byte* pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

[[noreturn]] void raise_value_error(const char* words) { throw nb::value_error(words); }

[[noreturn]] void raise_os_error(const char* call, int error) {
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, call);
  throw nb::python_error();
}

void check(std::size_t nbytes, std::size_t batch = 1) {
  if (nbytes == 0) raise_value_error("nbytes of a page must be positive");
  if (batch == 0 || batch > IOV_MAX) raise_value_error("batch must be between 1 and IOV_MAX (1024)");
}

void check_same_length(const Offsets& dst_offsets, const Offsets& src_offsets) {
  if (dst_offsets.size() != src_offsets.size())
    raise_value_error("dst_offsets and src_offsets differ in length");
}

// -- Copies ---------------------------------------------------------------------------------------

using CopyFunction = void (*)(std::byte* dst, const std::byte* src, std::size_t nbytes);

void copy_plain(std::byte* dst, const std::byte* src, std::size_t nbytes) { std::memcpy(dst, src, nbytes); }

#if defined(__x86_64__)

// Bytes from dst to the first boundary of `alignment`, at most nbytes.
std::size_t head_nbytes(const std::byte* dst, std::size_t alignment, std::size_t nbytes) {
  return std::min(nbytes, -reinterpret_cast<std::uintptr_t>(dst) & (alignment - 1));
}

__attribute__((target("avx512f"))) void copy_avx512_nt(std::byte* dst, const std::byte* src,
                                                       std::size_t nbytes) {
  const std::size_t head = head_nbytes(dst, 64, nbytes);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 256 <= nbytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
    const __m512i c = _mm512_loadu_si512(src + i + 128), d = _mm512_loadu_si512(src + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 192), d);
  }
  std::memcpy(dst + i, src + i, nbytes - i);
}

__attribute__((target("avx2"))) void copy_avx2_nt(std::byte* dst, const std::byte* src, std::size_t nbytes) {
  const std::size_t head = head_nbytes(dst, 32, nbytes);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 128 <= nbytes; i += 128) {
    const auto load = [&](std::size_t at) __attribute__((target("avx2"))) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + at));
    };
    const __m256i a = load(0), b = load(32), c = load(64), d = load(96);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i + 96), d);
  }
  std::memcpy(dst + i, src + i, nbytes - i);
}

#endif

struct Kernel {
  const char* name;
  CopyFunction copy;
};

Kernel choose_nt_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512-nt", copy_avx512_nt};
  if (__builtin_cpu_supports("avx2")) return {"avx2-nt", copy_avx2_nt};
#endif
  return {"memcpy", copy_plain};
}

const Kernel& nt_kernel() {
  static const Kernel kernel = choose_nt_kernel();
  return kernel;
}

// With so many threads, each copying a run of pages.
std::int64_t copy_with(CopyFunction copy, std::uint64_t dst_addr, std::uint64_t src_addr,
                       const Offsets& dst_offsets, const Offsets& src_offsets, std::size_t nbytes,
                       std::size_t num_threads = 1) {
  check(nbytes);
  if (num_threads == 0) raise_value_error("threads must be positive");
  check_same_length(dst_offsets, src_offsets);
  std::byte* const dst = pointer(dst_addr);
  const std::byte* const src = pointer(src_addr);
  const std::uint64_t* const to = dst_offsets.data();
  const std::uint64_t* const from = src_offsets.data();
  const std::size_t num_pages = dst_offsets.size();

  const nb::gil_scoped_release release;
  const std::int64_t start_ns = now_ns();
  const auto copy_share = [&](std::size_t thread) {
    const std::size_t end = num_pages * (thread + 1) / num_threads;
    for (std::size_t page = num_pages * thread / num_threads; page < end; ++page)
      copy(dst + to[page], src + from[page], nbytes);
#if defined(__x86_64__)
    _mm_sfence();  // a streamed page counts once other threads can see it
#endif
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t thread = 1; thread < num_threads; ++thread) others.emplace_back(copy_share, thread);
    copy_share(0);
  }
  return now_ns() - start_ns;
}

std::int64_t copy_pages(std::uint64_t dst_addr, std::uint64_t src_addr, const Offsets& dst_offsets,
                        const Offsets& src_offsets, std::size_t nbytes) {
  return copy_with(copy_plain, dst_addr, src_addr, dst_offsets, src_offsets, nbytes);
}

std::int64_t copy_pages_nt(std::uint64_t dst_addr, std::uint64_t src_addr, const Offsets& dst_offsets,
                           const Offsets& src_offsets, std::size_t nbytes, std::size_t num_threads) {
  return copy_with(nt_kernel().copy, dst_addr, src_addr, dst_offsets, src_offsets, nbytes, num_threads);
}

// -- System calls over many pages -----------------------------------------------------------------

// The iovecs of up to `batch` pages, from byte `done` of the whole on. A call may have stopped at any byte.
void fill(std::vector<iovec>& out, std::byte* base, const Offsets& offsets, std::size_t nbytes,
          std::size_t batch, std::size_t done) {
  out.clear();
  const std::size_t first = done / nbytes;
  const std::size_t last = std::min(first + batch, offsets.size());
  const std::uint64_t* const at = offsets.data();
  for (std::size_t page = first; page < last; ++page) out.push_back({base + at[page], nbytes});
  const std::size_t skip = done % nbytes;
  out.front().iov_base = static_cast<std::byte*>(out.front().iov_base) + skip;
  out.front().iov_len -= skip;
}

// Calls step(done) until `total` bytes are moved; step returns the result of its system call. Releases the
// GIL. A signal in mid-call runs Python's handlers.
template <class Step>
std::int64_t move_all(const char* call, std::size_t total, Step&& step) {
  int error = 0;
  bool ended = false;
  std::int64_t elapsed_ns = 0;
  {
    const nb::gil_scoped_release release;
    const std::int64_t start_ns = now_ns();
    std::size_t done = 0;
    while (done < total) {
      const ssize_t moved = step(done);
      if (moved > 0) {
        done += static_cast<std::size_t>(moved);
      } else if (moved < 0 && errno == EINTR) {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
      } else {
        error = moved < 0 ? errno : 0;
        ended = moved == 0;
        break;
      }
    }
    elapsed_ns = now_ns() - start_ns;
  }
  if (error != 0) raise_os_error(call, error);
  if (ended) {
    PyErr_Format(PyExc_ConnectionError, "%s: the other end closed before all pages had moved", call);
    throw nb::python_error();
  }
  return elapsed_ns;
}

std::int64_t vm_readv_pages(int pid, std::uint64_t dst_addr, std::uint64_t src_addr,
                            const Offsets& dst_offsets, const Offsets& src_offsets, std::size_t nbytes,
                            std::size_t batch) {
  check(nbytes, batch);
  check_same_length(dst_offsets, src_offsets);
  std::vector<iovec> to, from;
  to.reserve(batch);
  from.reserve(batch);
  return move_all("process_vm_readv", dst_offsets.size() * nbytes, [&](std::size_t done) {
    fill(to, pointer(dst_addr), dst_offsets, nbytes, batch, done);
    fill(from, pointer(src_addr), src_offsets, nbytes, batch, done);
    return process_vm_readv(pid, to.data(), to.size(), from.data(), from.size(), 0);
  });
}

std::int64_t send_pages(int fd, std::uint64_t addr, const Offsets& offsets, std::size_t nbytes,
                        std::size_t batch) {
  check(nbytes, batch);
  std::vector<iovec> pages;
  pages.reserve(batch);
  return move_all("writev", offsets.size() * nbytes, [&](std::size_t done) {
    fill(pages, pointer(addr), offsets, nbytes, batch, done);
    return writev(fd, pages.data(), static_cast<int>(pages.size()));
  });
}

std::int64_t recv_pages(int fd, std::uint64_t addr, const Offsets& offsets, std::size_t nbytes,
                        std::size_t batch) {
  check(nbytes, batch);
  std::vector<iovec> pages;
  pages.reserve(batch);
  return move_all("readv", offsets.size() * nbytes, [&](std::size_t done) {
    fill(pages, pointer(addr), offsets, nbytes, batch, done);
    return readv(fd, pages.data(), static_cast<int>(pages.size()));
  });
}

// -- Pieces, each as a message of its own ------------------------------------------------------------

// Precedes a piece: the place where it belongs, and its length.
struct PieceHeader { std::uint64_t offset, nbytes; };

std::uint64_t total_nbytes(const Offsets& nbytes) {
  std::uint64_t total = 0;
  for (std::size_t piece = 0; piece < nbytes.size(); ++piece) {
    if (nbytes.data()[piece] == 0) raise_value_error("a piece has at least one byte");
    total += sizeof(PieceHeader) + nbytes.data()[piece];
  }
  return total;
}

std::int64_t send_pieces(int fd, const Offsets& addresses, const Offsets& dst_offsets,
                         const Offsets& nbytes) {
  check_same_length(dst_offsets, addresses);
  check_same_length(dst_offsets, nbytes);
  std::size_t piece = 0, sent = 0;  // sent: of this piece, its header first
  return move_all("writev", total_nbytes(nbytes), [&](std::size_t) {
    PieceHeader header{dst_offsets.data()[piece], nbytes.data()[piece]};
    const std::size_t header_sent = std::min(sent, sizeof(header)), payload_sent = sent - header_sent;
    iovec parts[] = {{reinterpret_cast<std::byte*>(&header) + header_sent, sizeof(header) - header_sent},
                     {pointer(addresses.data()[piece]) + payload_sent, header.nbytes - payload_sent}};
    const ssize_t moved = writev(fd, parts, 2);
    if (moved > 0) sent += static_cast<std::size_t>(moved);
    if (sent == sizeof(header) + header.nbytes) {
      ++piece;
      sent = 0;
    }
    return moved;
  });
}

// `total` counts headers and payloads. EBADMSG: a piece would reach beyond dst_nbytes.
std::int64_t recv_pieces(int fd, std::uint64_t dst_addr, std::uint64_t dst_nbytes, std::uint64_t total) {
  PieceHeader header{};
  std::size_t received = 0;
  return move_all("read", total, [&](std::size_t) {
    ssize_t moved = 0;
    if (received < sizeof(header)) {
      moved = read(fd, reinterpret_cast<std::byte*>(&header) + received, sizeof(header) - received);
    } else {
      if (header.nbytes == 0 || header.nbytes > dst_nbytes || header.offset > dst_nbytes - header.nbytes) {
        errno = EBADMSG;
        return static_cast<ssize_t>(-1);
      }
      const std::size_t done = received - sizeof(header);
      moved = read(fd, pointer(dst_addr) + header.offset + done, header.nbytes - done);
    }
    if (moved > 0) received += static_cast<std::size_t>(moved);
    if (received == sizeof(header) + header.nbytes && received > sizeof(header)) received = 0;
    return moved;
  });
}

// -- Wake-ups -------------------------------------------------------------------------------------

// Two processes take turns. One idles until the other sleeps in read(), and then writes the time to the
// eventfd that the other reads. A wake-up is the time after read() less the written time: the writing call,
// the kernel, and the way out of the reading call. It is one way, so nothing is halved.
std::vector<std::int64_t> wake_ups(int in, int out, bool first, std::size_t count, double timeout_s) {
  // With a timer's slack, and over both turns, a reader sleeps as long as a process that waits for the answer
  // to a write. If the turns followed at once, neither processor would have come to rest.
  constexpr std::chrono::microseconds kIdle{100};
  constexpr std::uint64_t kLate = std::uint64_t{1} << 63;  // added to a time, it is still recognizable
  // poll() with a timeout before read() would not do: leaving both calls takes a quarter more time than
  // leaving one. So this end wakes itself if the other end never does.
  const std::jthread watch([&](const std::stop_token& ended) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    never.wait_for(lock, ended, std::chrono::duration<double>(timeout_s), [] { return false; });
    if (ended.stop_requested()) return;
    [[maybe_unused]] const ssize_t written = write(in, &kLate, sizeof(kLate));
  });

  std::vector<std::int64_t> wakes_ns;
  wakes_ns.reserve(count);
  move_all("eventfd", 2 * count * sizeof(std::uint64_t), [&](std::size_t done) {
    std::uint64_t sent_ns = 0;
    if ((done / sizeof(sent_ns) % 2 == 0) == first) {
      std::this_thread::sleep_for(kIdle);
      sent_ns = static_cast<std::uint64_t>(now_ns());
      return write(out, &sent_ns, sizeof(sent_ns));
    }
    const ssize_t moved = read(in, &sent_ns, sizeof(sent_ns));
    const std::int64_t woken_ns = now_ns();
    if (moved > 0 && (sent_ns & kLate) != 0) {
      errno = ETIMEDOUT;
      return static_cast<ssize_t>(-1);
    }
    if (moved > 0) wakes_ns.push_back(woken_ns - static_cast<std::int64_t>(sent_ns));
    return moved;
  });
  return wakes_ns;
}

// -- A litmus test ------------------------------------------------------------------------------------

std::uint64_t relay(std::uint64_t done, std::uint64_t word, std::uint64_t said, std::uint64_t reply,
                    std::uint32_t num_words, std::uint32_t num_rounds, double timeout_s) {
  const kvxfer::bench::Relay ends{
      reinterpret_cast<std::uint64_t*>(done), reinterpret_cast<std::uint32_t*>(word),
      reinterpret_cast<const std::uint32_t*>(said), reinterpret_cast<std::uint32_t*>(reply), num_words};
  std::optional<std::uint64_t> wrong;
  {
    const nb::gil_scoped_release release;
    wrong = kvxfer::bench::relay(ends, num_rounds, timeout_s);
  }
  if (wrong) return *wrong;
  PyErr_SetString(PyExc_TimeoutError, "the device did not come to the end of the litmus test in time");
  throw nb::python_error();
}

}  // namespace

NB_MODULE(_limits, module) {
  module.attr("NT_KERNEL") = nt_kernel().name;
  module.def("copy_pages", &copy_pages, nb::arg("dst_addr"), nb::arg("src_addr"),
             nb::arg("dst_offsets").noconvert(), nb::arg("src_offsets").noconvert(), nb::arg("nbytes"));
  module.def("copy_pages_nt", &copy_pages_nt, nb::arg("dst_addr"), nb::arg("src_addr"),
             nb::arg("dst_offsets").noconvert(), nb::arg("src_offsets").noconvert(), nb::arg("nbytes"),
             nb::arg("threads") = 1);
  module.def("vm_readv_pages", &vm_readv_pages, nb::arg("pid"), nb::arg("dst_addr"), nb::arg("src_addr"),
             nb::arg("dst_offsets").noconvert(), nb::arg("src_offsets").noconvert(), nb::arg("nbytes"),
             nb::arg("batch") = 1024);
  module.def("send_pages", &send_pages, nb::arg("fd"), nb::arg("addr"), nb::arg("offsets").noconvert(),
             nb::arg("nbytes"), nb::arg("batch") = 1024);
  module.def("recv_pages", &recv_pages, nb::arg("fd"), nb::arg("addr"), nb::arg("offsets").noconvert(),
             nb::arg("nbytes"), nb::arg("batch") = 1024);
  module.attr("PIECE_HEADER_NBYTES") = sizeof(PieceHeader);
  module.def("send_pieces", &send_pieces, nb::arg("fd"), nb::arg("addresses").noconvert(),
             nb::arg("dst_offsets").noconvert(), nb::arg("nbytes").noconvert());
  module.def("recv_pieces", &recv_pieces, nb::arg("fd"), nb::arg("dst_addr"), nb::arg("dst_nbytes"),
             nb::arg("total"));
  module.def("relay", &relay, nb::arg("done"), nb::arg("word"), nb::arg("said"), nb::arg("reply"),
             nb::arg("num_words"), nb::arg("num_rounds"), nb::arg("timeout_s"));
  module.def("wake_ups", &wake_ups, nb::arg("in_fd"), nb::arg("out_fd"), nb::arg("first"), nb::arg("count"),
             nb::arg("timeout_s"));
}
