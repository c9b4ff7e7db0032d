// Two agents of this process, and blocks that one writes to the other over whatever transports they are given.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "runtime_calls.h"

namespace handovers {

using namespace kvxfer;
using namespace runtime_calls;

inline constexpr std::uint32_t kBlocks = 64;
inline constexpr std::uint64_t kBlockNbytes = 4096;

struct Agent {
  Agent(const std::string& name, std::vector<std::string> transports, NamedOptions options = {},
        Time silent_ns = 2 * kSecond)
      : memory(kBlocks * kBlockNbytes) {
    RuntimeOptions made;
    made.name = name;
    made.listen = "tcp://127.0.0.1:0";
    made.transports = std::move(transports);
    made.transport_options = std::move(options);
    made.silent_ns = silent_ns;
    made.heartbeat_ns = silent_ns / 4;
    runtime = create(std::move(made));
  }
  Result<RegionId> add(std::vector<std::byte>& bytes, const std::string& region_name = "kv") {
    return runtime->register_region(region_name, {{bytes.data(), bytes.size()}}, kBlocks,
                                    pages_of(kBlockNbytes), {});
  }
  std::vector<std::byte> memory;
  std::shared_ptr<Runtime> runtime;
  RegionId region = 0;
};

struct Pair {
  Pair(const std::vector<std::string>& transports, std::size_t rails, const NamedOptions& options = {},
       Time silent_ns = 2 * kSecond)
      : src("src", transports, options, silent_ns), dst("dst", transports, options, silent_ns) {
    for (Agent* agent : {&src, &dst}) {
      const Result<RegionId> id = agent->add(agent->memory);
      REQUIRE_OK(id);
      agent->region = id.value();
    }
    const Meeting both = meet(*src.runtime, *dst.runtime, rails);
    there = both.there;
    here = both.here;
    grant(*dst.runtime, here, dst.region, wire::LeaseMode::kWrite);
    program = install(*src.runtime, there, true, src.region, dst.region, pages_of(kBlockNbytes));
  }
  ~Pair() {
    src.runtime->close(kBound);
    dst.runtime->close(kBound);
  }
  // Every block, to its own place; whether it arrived, whole.
  bool hand_over(check::Random& random) {
    random.fill(src.memory.data(), src.memory.size());
    TransferRequest request;
    request.peer = there;
    request.program = program;
    for (std::uint32_t block = 0; block < kBlocks; ++block) request.src_ids.push_back(block);
    request.dst_ids = request.src_ids;
    request.num_layers = request.layers_ready = 1;
    request.timeout_ns = 2 * kBound;
    const auto handle = src.runtime->with_engine(
        [&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
    REQUIRE_OK(handle);
    return is_done(handle.value()) && src.memory == dst.memory;
  }
  Agent src, dst;
  SessionKey there = 0, here = 0;
  std::uint32_t program = 0;
};

}  // namespace handovers
