// Agents while an engine captures a graph, in the mode that forbids all threads of the process to allocate,
// free, map, query or wait for anything on the GPU.
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/memory_pool.h"
#include "gpu_ends.h"

namespace kvxfer::gpu_captures_test {
namespace {

using namespace gpu_ends;
using emulated::device;

// Another program's capture, from its beginning to its end.
class Capture {
 public:
  Capture() {
    device().num_broken_captures = 0;
    ++device().num_captures;
  }
  ~Capture() { --device().num_captures; }
  bool is_broken() const { return device().num_broken_captures != 0; }
};

TEST(whoever_asks_without_care_ends_the_capture) {
  ModelStream stream;
  stream.synchronize();
  {
    const Capture capture;
    CHECK_EQ(emulated::driver().stream_query(stream.get()), emulated::kCaptureUnsupported);
    CHECK(capture.is_broken());
  }
  CHECK_EQ(emulated::driver().stream_query(stream.get()), 0);
}

TEST(a_thread_minds_captures_again_behind_a_scope) {
  const gpu::ContextScope outer(emulated::driver(), emulated::own_context());
  CHECK_EQ(emulated::capture_mode(), gpu::kRelaxedCaptures);
  { const gpu::ContextScope inner(emulated::driver(), emulated::own_context()); }
  CHECK_EQ(emulated::capture_mode(), gpu::kRelaxedCaptures);
  std::thread([] { CHECK_EQ(emulated::capture_mode(), 0); }).join();
}

// The whole life of an agent: handles are opened, copies launched, streams and events waited for.
void moves_pages(const Options& at_src, const Options& at_dst) {
  ModelStream stream;
  gpu::EventHandle event;
  event.fired = true;
  {
    const Capture capture;
    Ends both(at_src, at_dst);
    both.produce(stream, 7);
    auto after = both.src.runtime->after_stream(stream.get());
    REQUIRE_OK(after);
    auto handle = both.write(std::move(after).value());
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_EQ(static_cast<int>(both.first_byte(3, kLayers - 1)), 7);
    after = both.src.runtime->after_event(&event);
    REQUIRE_OK(after);
    handle = both.write(std::move(after).value());
    REQUIRE(ends(handle));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
    CHECK_OK(both.src.runtime->deregister_region(both.src.region));
    both.src.runtime->close(kBound);
    both.dst.runtime->close(kBound);
    CHECK(!capture.is_broken());
  }
  CHECK_EQ(emulated::capture_mode(), 0);
}

TEST(agents_share_memory_and_copy_beside_a_capture) { moves_pages({}, {}); }

TEST(agents_stage_beside_a_capture) {
  moves_pages({.transports = {"cuda_ipc", "unix"}}, {.transports = {"unix"}});
}

TEST(a_pool_allocates_and_frees_beside_a_capture) {
  const Capture capture;
  auto pool = gpu::MemoryPool::create(emulated::driver(), 0);
  REQUIRE_OK(pool);
  const auto memory = pool.value()->allocate(1);
  REQUIRE_OK(memory);
  CHECK_OK(pool.value()->free(memory.value()));
  CHECK(!capture.is_broken());
}

}  // namespace
}  // namespace kvxfer::gpu_captures_test
