// Ranges that name the stages of a transfer to Nsight and to whoever else listens to NVTX; gpu/PROFILING.md
// lists them. Where no tool listens a range costs the look at a pointer.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/system/nvtx_abi.h"

namespace kvxfer::nvtx {

// Looks for a tool (NVTX_INJECTION64_PATH) and lets it in. Once a process; later calls do nothing.
void attach();

struct Tool {
  Domain domain;
  StartRange start;
  EndRange end;
};

inline std::atomic<const Tool*> the_tool{nullptr};  // attach() sets it, and nobody takes it back
inline const Tool* tool() noexcept { return the_tool.load(std::memory_order_acquire); }

// From its making to end(), or to its own; any thread may end it.
class Range {
 public:
  Range() = default;
  // The number says of which transfer, or piece, it is.
  Range(const char* stage, std::uint64_t number) {
    if (tool() != nullptr) begin(stage, number);
  }
  // With what it is done; "fetch" and "shm".
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
  std::uint64_t id_ = 0;  // 0 is a range that nobody hears of
};

}  // namespace kvxfer::nvtx
