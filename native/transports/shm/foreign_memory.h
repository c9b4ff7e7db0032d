// A peer process's own memory, which the kernel reads for us (foreign_reader.h). It holds tensors that the
// engine allocated and that lie in no pool.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::shm {

// Bytes that a process names to its peers, so that they can try to read them.
struct Probe {
  std::uint64_t address = 0;
  std::array<std::byte, 16> bytes{};
};

// Any number of threads may read it at the same time.
class ForeignMemory {
 public:
  // Reads the peer's probe. Where that fails, refusal() says in words why and what to change.
  ForeignMemory(pid_t pid, uid_t uid, const Probe& probe);

  const std::string& refusal() const noexcept { return refusal_; }  // empty: the memory can be read
  pid_t pid() const noexcept { return pid_; }
  // Explains an error of process_vm_readv. kRailFailed: the process is gone. kSystem: the process, or this
  // one, unmapped part of the region.
  Status failed(int error) const;
  // kRailFailed: the process has ended.
  Status check_alive() const;
  bool is_gone() const noexcept;

 private:
  const pid_t pid_;
  // Readable once the process has ended. No other process can have its number before that.
  UniqueFd pidfd_;
  std::string refusal_;
};

}  // namespace kvxfer::shm
