// Ranges that name the stages of a transfer to Nsight and other tools that listen to NVTX; gpu/PROFILING.md
// lists them. Without a tool a range costs one look at a pointer.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/system/nvtx_abi.h"

namespace kvxfer::nvtx {

// Looks for a tool (NVTX_INJECTION64_PATH) and attaches it. Once a process; later calls do nothing.
void attach();

struct Tool {
  Domain domain;
  StartRange start;
  EndRange end;
};

inline std::atomic<const Tool*> the_tool{nullptr};  // attach() sets it, and it stays set
inline const Tool* tool() noexcept { return the_tool.load(std::memory_order_acquire); }

// Lasts until end() or its destructor; any thread may end it.
class Range {
 public:
  Range() = default;
  // The number names the transfer or the piece.
  Range(const char* stage, std::uint64_t number) {
    if (tool() != nullptr) begin(stage, number);
  }
  // Names also what does the work: "fetch" and "shm".
  Range(std::string_view stage, std::string_view by, std::uint64_t number) {
    if (tool() != nullptr) begin((std::string(stage) + " " + std::string(by)).c_str(), number);
  }
  Range(Range&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  Range& operator=(Range&& other) noexcept {
    if (this != &other) {
      end();
      id_ = std::exchange(other.id_, 0);
    }
    return *this;
  }
  ~Range() { end(); }

  void end() noexcept {
    if (id_ == 0) return;
    const Tool& listening = *tool();
    listening.end(listening.domain, std::exchange(id_, 0));
  }

 private:
  void begin(const char* name, std::uint64_t number) {
    const Tool& listening = *tool();
    Attributes attributes;
    attributes.payload = number;
    attributes.message = name;
    id_ = listening.start(listening.domain, &attributes);
  }
  std::uint64_t id_ = 0;  // 0: no tool hears of the range
};

}  // namespace kvxfer::nvtx
