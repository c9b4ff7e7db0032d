#include "transports/shm/foreign_memory.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "core/copy/executor.h"

namespace kvxfer::shm {
namespace {

// What short runs are read into at a time: in the L2 cache still when they are spread from it.
constexpr std::size_t kBufferNbytes = SlicedCopy::kChunkNbytes;

// A run costs the kernel as much to find as reading 2 to 3 KiB does: where the next one begins this
// close behind, both are read together with what lies between.
constexpr std::uint64_t kTogetherNbytes = 2048;

// The bytes from the first run to the last, and whether they are read as one. What lies between runs
// is the block's own where a block spans them all.
bool is_together(std::uint64_t span, std::uint64_t num_runs, std::uint64_t block_stride) noexcept {
  return num_runs > 1 && span <= block_stride && span <= num_runs * kTogetherNbytes;
}

std::uint64_t row_nbytes(const CopyLoop& loop) noexcept {
  return (loop.counts[1] - 1) * loop.src_strides[1] + loop.nbytes;
}

// Whether reading through the buffer needs fewer look-ups than reading into place, or nothing else will do.
bool needs_buffer(const CopyProgram& program) noexcept {
  return !program.conversions.empty() ||
         std::any_of(program.loops.begin(), program.loops.end(), [](const CopyLoop& loop) {
           return loop.grain == kCoarse && loop.nbytes < kTogetherNbytes &&
                  is_together(row_nbytes(loop), loop.counts[1], loop.src_block_stride);
         });
}

// The kernel's value, or -1 where it is built without Yama.
int yama_ptrace_scope() {
  int scope = -1;
  if (std::FILE* file = std::fopen("/proc/sys/kernel/yama/ptrace_scope", "re")) {
    if (std::fscanf(file, "%d", &scope) != 1) scope = -1;
    std::fclose(file);
  }
  return scope;
}

std::string refusal_words(int error, pid_t pid, uid_t uid) {
  const std::string failed =
      Status::from_errno("process_vm_readv of process " + std::to_string(pid), error).message();
  if (error == ENOSYS) return failed + ": this kernel is built without CONFIG_CROSS_MEMORY_ATTACH";
  if (error == ESRCH)
    return failed +
           ": it lives in another pid namespace; start both containers with a common one (docker run "
           "--pid=container:<other>, Kubernetes shareProcessNamespace)";
  if (error == EFAULT)
    return failed + ": this number belongs to another process here; give both a common pid namespace";
  if (error != EPERM) return failed;

  std::string words = failed + ": ";
  const int scope = yama_ptrace_scope();
  if (uid != ::geteuid())
    words += "it runs as user " + std::to_string(uid) + " and this process as " +
             std::to_string(::geteuid()) + "; run both as one user, or this one with CAP_SYS_PTRACE";
  else if (scope > 0)
    words += "Yama's ptrace_scope is " + std::to_string(scope) +
             "; set it to 0 (sysctl kernel.yama.ptrace_scope=0), or give this process CAP_SYS_PTRACE";
  else
    words +=
        "this process lacks CAP_SYS_PTRACE, or a seccomp profile forbids the call (docker run --cap-add "
        "SYS_PTRACE), "
        "or the peer made itself undumpable";
  return words;
}

UniqueFd open_pidfd(pid_t pid) noexcept {
#if defined(SYS_pidfd_open)
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // closed on exec
#else
  static_cast<void>(pid);
  return {};
#endif
}

}  // namespace

ForeignMemory::ForeignMemory(pid_t pid, uid_t uid, const Probe& probe) : pid_(pid) {
  refusal_.clear();
  if (pid <= 0) {
    refusal_ =
        "the peer's process cannot be seen from this pid namespace; start both containers with a common one";
    return;
  }
  pidfd_ = open_pidfd(pid);  // before the probe: what the probe finds is then what the pidfd means
  Probe found;
  iovec local{found.bytes.data(), found.bytes.size()};
  iovec remote{reinterpret_cast<void*>(probe.address), found.bytes.size()};
  const ssize_t nbytes = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
  if (nbytes < 0)
    refusal_ = refusal_words(errno, pid, uid);
  else if (static_cast<std::size_t>(nbytes) != found.bytes.size() || found.bytes != probe.bytes)
    refusal_ = "process " + std::to_string(pid) + " is not the one at the other end of the socket";
}

Status ForeignMemory::fetch_pairs(const Move& move, const Piece& pairs, std::uint64_t remote_base) {
  return needs_buffer(*move.program) ? fetch_cells(move, pairs, remote_base)
                                     : fetch_runs(move, pairs, remote_base);
}

Result<const std::byte*> ForeignMemory::read(std::uint64_t address, std::size_t nbytes) {
  if (buffer_.size() < nbytes) buffer_.resize(2 * kBufferNbytes);
  named_.assign(1, {reinterpret_cast<void*>(address), nbytes});
  buffer_nbytes_ = nbytes;
  Status status = read_buffer();
  named_.clear();
  buffer_nbytes_ = 0;
  if (!status.ok()) return status;
  return buffer_.data();
}

Status ForeignMemory::fetch_runs(const Move& move, const Piece& piece, std::uint64_t remote_base) {
  std::size_t num_runs = 0;
  Status status;
  for_each_run(move.program->view(), piece, move.src_ids.data(), move.dst_ids.data(),
               [&](std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
                 if (!status.ok()) return;
                 local_[num_runs] = {move.local->base + dst_offset, nbytes};
                 remote_[num_runs] = {reinterpret_cast<void*>(remote_base + src_offset), nbytes};
                 if (++num_runs < kMaxRuns) return;
                 status = read_runs(num_runs);
                 num_runs = 0;
               });
  if (status.ok() && num_runs != 0) status = read_runs(num_runs);
  return status;
}

Status ForeignMemory::fetch_cells(const Move& move, const Piece& piece, std::uint64_t remote_base) {
  named_.clear();
  fetched_.clear();
  buffer_nbytes_ = 0;
  Status status;
  for_each_cell(move.program->view(), piece, move.src_ids.data(), move.dst_ids.data(), [&](const Cell& cell) {
    if (!status.ok()) return;
    Fetched& fetched =
        fetched_.emplace_back(Fetched{cell, *cell.loop, move.program->conversion_of(*cell.loop), 0, 0, {}});
    CopyLoop& loop = fetched.loop;
    fetched.src =
        name(remote_base + cell.src, loop.counts, loop.src_strides, loop.nbytes, loop.src_block_stride);
    if (const Conversion* conversion = fetched.conversion;
        conversion != nullptr && conversion->src_scales == ScalePlace::kRegion) {
      // An axis along which the scale stays has one.
      std::uint32_t counts[2];
      for (int axis = 0; axis < 2; ++axis) {
        fetched.scale_strides[axis] = conversion->src_strides[axis];
        counts[axis] = conversion->src_strides[axis] == 0 ? 1 : loop.counts[axis];
      }
      fetched.scales = name(remote_base + conversion->src_offset + cell.layer * conversion->src_layer_stride +
                                cell.src_block * conversion->src_block_stride,
                            counts, fetched.scale_strides, sizeof(float), conversion->src_block_stride);
    }
    if (buffer_nbytes_ >= kBufferNbytes || named_.size() >= kMaxRuns) status = land(move);
  });
  if (status.ok() && !fetched_.empty()) status = land(move);
  copy_fence();
  return status;
}

// Names an operand of a cell, [counts[0], counts[1]] runs from `at` on, to be read behind what is
// named already. Returns its place in the buffer and puts its strides there into `strides`.
std::size_t ForeignMemory::name(std::uint64_t at, const std::uint32_t* counts, std::uint64_t* strides,
                                std::uint64_t nbytes, std::uint64_t block_stride) {
  const std::size_t place = buffer_nbytes_;
  const auto take = [this](std::uint64_t from, std::uint64_t length) {
    named_.push_back({reinterpret_cast<void*>(from), length});
    buffer_nbytes_ += length;
  };
  const std::uint64_t row = (counts[1] - 1) * strides[1] + nbytes;
  const std::uint64_t all = (counts[0] - 1) * strides[0] + row;
  if (is_together(all, std::uint64_t{counts[0]} * counts[1], block_stride)) {
    take(at, all);
    return place;
  }
  const bool rows = is_together(row, counts[1], block_stride);
  for (std::uint32_t i = 0; i < counts[0]; ++i) {
    const std::uint64_t begin = at + i * strides[0];
    if (rows) {
      take(begin, row);
      continue;
    }
    for (std::uint32_t j = 0; j < counts[1]; ++j) take(begin + j * strides[1], nbytes);
  }
  if (!rows) strides[1] = nbytes;
  strides[0] = rows ? row : nbytes * counts[1];
  return place;
}

// Reads what is named, and spreads it.
Status ForeignMemory::land(const Move& move) {
  if (buffer_.size() < buffer_nbytes_) buffer_.resize(std::max(buffer_nbytes_, 2 * kBufferNbytes));
  Status status = read_buffer();
  for (const Fetched& fetched : fetched_) {
    if (!status.ok()) break;
    const std::byte* src = buffer_.data() + fetched.src;
    std::byte* dst = move.local->base + fetched.cell.dst;
    if (fetched.conversion == nullptr) {
      copy_cell(fetched.loop, nullptr, src, dst, {});
      continue;
    }
    CellScales scales =
        scales_of(move.program->view(), *fetched.conversion, fetched.cell, nullptr, move.local->base);
    Conversion conversion = *fetched.conversion;
    if (conversion.src_scales == ScalePlace::kRegion) {
      scales.src = buffer_.data() + fetched.scales;
      for (int axis = 0; axis < 2; ++axis)
        conversion.src_strides[axis] =
            fetched.conversion->src_strides[axis] == 0 ? 0 : fetched.scale_strides[axis];
    }
    copy_cell(fetched.loop, &conversion, src, dst, scales);
  }
  named_.clear();
  fetched_.clear();
  buffer_nbytes_ = 0;
  return status;
}

Status ForeignMemory::read_failed(int error) const {
  if (error == ESRCH) return {Code::kRailFailed, "process " + std::to_string(pid_) + " is gone"};
  if (error != EFAULT) return Status::from_errno("process_vm_readv", error);
  // A process that is ending has lost its pages a moment before its number.
  if (Status alive = check_alive(); !alive.ok()) return alive;
  return {Code::kSystem,
          "part of the region is not mapped any more, there or here (process_vm_readv: EFAULT); "
          "memory must stay mapped while it is registered"};
}

Status ForeignMemory::read_buffer() noexcept {
  std::byte* at = buffer_.data();
  for (std::size_t first = 0; first < named_.size();) {
    const std::size_t num = std::min(named_.size() - first, kMaxRuns);
    iovec local{at, static_cast<std::size_t>(buffer_.data() + buffer_nbytes_ - at)};
    const ssize_t result = ::process_vm_readv(pid_, &local, 1, &named_[first], num, 0);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return read_failed(errno);
    if (result == 0) return {Code::kSystem, "process_vm_readv moved nothing"};
    at += result;
    auto left = static_cast<std::size_t>(result);
    while (first < named_.size() && left >= named_[first].iov_len) left -= named_[first++].iov_len;
    if (left != 0) {
      named_[first].iov_base = static_cast<std::byte*>(named_[first].iov_base) + left;
      named_[first].iov_len -= left;
    }
  }
  return {};
}

Status ForeignMemory::read_runs(std::size_t num_runs) noexcept {
  std::size_t first = 0;
  while (first < num_runs) {
    const ssize_t result =
        ::process_vm_readv(pid_, &local_[first], num_runs - first, &remote_[first], num_runs - first, 0);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return read_failed(errno);
    if (result == 0) return {Code::kSystem, "process_vm_readv moved nothing"};
    // Runs have the same length on both sides, so both lists advance alike.
    auto left = static_cast<std::size_t>(result);
    while (first < num_runs && left >= local_[first].iov_len) left -= local_[first++].iov_len;
    if (left != 0) {
      local_[first] = {static_cast<std::byte*>(local_[first].iov_base) + left, local_[first].iov_len - left};
      remote_[first] = {static_cast<std::byte*>(remote_[first].iov_base) + left,
                        remote_[first].iov_len - left};
    }
  }
  return {};
}

Status ForeignMemory::check_alive() const {
  if (!pidfd_) return {};
  pollfd ended{pidfd_.get(), POLLIN, 0};
  if (::poll(&ended, 1, 0) > 0) return {Code::kRailFailed, "process " + std::to_string(pid_) + " is gone"};
  return {};
}

}  // namespace kvxfer::shm
