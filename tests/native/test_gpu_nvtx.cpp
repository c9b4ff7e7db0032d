// The ranges of transfers that a tool sees: over sockets, over shared memory and on an emulated GPU.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "core/system/nvtx.h"
#include "gpu_ends.h"

namespace kvxfer {
namespace {

using namespace gpu_ends;

void listen() {
  ::setenv(nvtx::kPathVariable, KVXFER_NVTX_RECORDER, 1);
  nvtx::attach();
  REQUIRE(nvtx::tool() != nullptr);
}

std::string recorded() {
  static auto* read = reinterpret_cast<const char* (*)()>(
      ::dlsym(::dlopen(KVXFER_NVTX_RECORDER, RTLD_NOW | RTLD_NOLOAD), "kvxfer_recorded"));
  REQUIRE(read != nullptr);
  return read();
}

// The ranges that began since this was made: how often each name, and whether all have ended.
class Recording {
 public:
  Recording() : skipped_((listen(), recorded().size())) {}

  std::map<std::string, int> begun() { return read().first; }
  bool all_ended() { return read().second.empty(); }

 private:
  std::pair<std::map<std::string, int>, std::map<std::string, std::string>> read() {
    std::map<std::string, int> names;
    std::map<std::string, std::string> open;
    std::istringstream lines(recorded().substr(skipped_));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line.substr(1));
      std::string id, domain, number, name;
      words >> id >> domain;
      CHECK_EQ(domain, "kvxfer");
      if (line[0] == '-') {
        open.erase(id);
        continue;
      }
      words >> number;
      std::getline(words >> std::ws, name);
      ++names[name];
      open[id] = name;
    }
    return {names, open};
  }
  const std::size_t skipped_;
};

// It has to be the first, before anything has looked for a tool; from here on a tool listens.
TEST(without_a_tool_a_range_is_nothing_and_a_tool_is_let_in_once) {
  CHECK(nvtx::tool() == nullptr);
  { const nvtx::Range range("unheard", 1); }
  ::unsetenv(nvtx::kPathVariable);
  {
    // A range that began before the tool also ends without a report.
    const nvtx::Range early("early", 2);
    listen();
  }
  CHECK_EQ(recorded(), "");
  const nvtx::Tool* const listening = nvtx::tool();
  nvtx::attach();
  CHECK(nvtx::tool() == listening);
  {
    nvtx::Range moved;
    {
      nvtx::Range made("made", "here", 7);
      moved = std::move(made);
    }
    CHECK_EQ(recorded(), "+1 kvxfer 7 made here\n");
  }
  CHECK_EQ(recorded(), "+1 kvxfer 7 made here\n-1 kvxfer\n");
}

std::map<std::string, int> transfer_under(const Options& at_src, const Options& at_dst) {
  Recording recording;
  {
    Ends both(at_src, at_dst);
    const auto trigger = Trigger::create();
    const auto handle = both.read({trigger, 1, 1});
    trigger->fire(kLayers);
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
  CHECK(recording.all_ended());
  return recording.begun();
}

TEST(stages_of_a_transfer_between_hosts) {
  const Options tcp{.transports = {"tcp"}};
  auto seen = transfer_under(tcp, tcp);
  CHECK_EQ(seen["transfer"], 1);
  CHECK_EQ(seen["wait for trigger"], 1);
  CHECK_EQ(seen["receive tcp"], static_cast<int>(kLayers));
  CHECK_EQ(seen["send tcp"], static_cast<int>(kLayers));
  CHECK_EQ(seen["gather"], 0);

  const Options loopback{.transports = {"loopback"}};
  seen = transfer_under(loopback, loopback);
  CHECK_EQ(seen["fetch loopback"], static_cast<int>(kLayers));
  CHECK(seen["check fence loopback"] >= 1);
}

TEST(stages_of_a_transfer_between_gpus) {
  auto seen = transfer_under({}, {});
  CHECK_EQ(seen["transfer"], 1);
  CHECK_EQ(seen["wait for trigger"], 1);
  CHECK_EQ(seen["fetch cuda_ipc"], static_cast<int>(kLayers));
  CHECK(seen["check fence cuda_ipc"] >= 1);
  // Both close with memory that the other may have mapped.
  CHECK(seen["wait for unmapping"] >= 2);
}

TEST(stages_of_a_transfer_that_is_staged) {
  const Options host{.transports = {"tcp"}};
  const Options gpu{.transports = {"cuda_ipc", "tcp"}};
  auto in = transfer_under(host, gpu);
  CHECK_EQ(in["wire"], static_cast<int>(kLayers));
  CHECK_EQ(in["scatter"], static_cast<int>(kLayers));
  CHECK_EQ(in["gather"], 0);
  auto out = transfer_under(gpu, host);
  CHECK_EQ(out["gather"], static_cast<int>(kLayers));
  CHECK_EQ(out["wire"], static_cast<int>(kLayers));
  CHECK_EQ(out["send tcp"], static_cast<int>(kLayers));
  CHECK_EQ(out["scatter"], 0);
}

TEST(a_stream_that_waits_and_a_transfer_that_fails_end_their_ranges) {
  Recording recording;
  {
    ModelStream stream;
    Ends both;
    const auto handle = both.read({Trigger::create()});
    REQUIRE_OK(both.dst.runtime->wait_in(stream.get(), *handle));
    auto seen = recording.begun();
    CHECK_EQ(seen["wait in stream"], 1);
    CHECK(!recording.all_ended());
    both.dst.runtime->with_engine([&](Engine& engine, Time now) { engine.cancel(now, handle->id()); });
    REQUIRE(ends(handle));
    REQUIRE(await([&] { return stream.is_idle(); }));
    // Ends the transfer; the trigger was never fired.
    both.dst.runtime->close(kBound);
  }
  CHECK(recording.all_ended());
}

}  // namespace
}  // namespace kvxfer
