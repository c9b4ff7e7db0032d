// Two agents of this process with a cache of a few layers each, on an emulated GPU, and a stream of the
// model's.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"
#include "runtime_calls.h"

namespace gpu_ends {

using namespace kvxfer;
using namespace runtime_calls;

inline constexpr std::uint32_t kBlocks = 4, kLayers = 3;
inline constexpr std::uint64_t kBlockNbytes = 4096;
inline constexpr std::uint64_t kLayerNbytes = kBlocks * kBlockNbytes, kNbytes = kLayers * kLayerNbytes;

inline CopyProgram layers_of_pages() { return pages_of(kBlockNbytes, kLayers, kLayerNbytes); }

// A stream of the model's.
class ModelStream {
 public:
  ModelStream() { REQUIRE_EQ(emulated::driver().stream_create(&stream_, 1, 0), 0); }
  ~ModelStream() { emulated::driver().stream_destroy(stream_); }
  gpu::Stream get() const { return stream_; }
  void hold(gpu::EventHandle& event) {
    REQUIRE_EQ(emulated::driver().stream_wait_event(stream_, &event, 0), 0);
  }
  // A kernel, as far as a stream is concerned.
  void run(std::function<void()> work) { REQUIRE_EQ(emulated::enqueue(stream_, std::move(work)), 0); }
  bool is_idle() const { return emulated::driver().stream_query(stream_) == 0; }
  void synchronize() { emulated::driver().stream_synchronize(stream_); }

 private:
  gpu::Stream stream_ = nullptr;
};

// What differs between tests.
struct Options {
  std::vector<std::string> transports = {"cuda_ipc"};
  std::size_t num_rails = 1;  // that the two have then
  MemoryKind kind = MemoryKind::kGpu;  // where the caches lie
  gpu::Kernels kernels = emulated::fast_kernels();
  std::string faults = {};
  std::uint64_t staging_nbytes = 4 * 1024 * 1024;
  Time heartbeat_ns = kNoHeartbeat;
};

struct End {
  End(const std::string& name, const Options& wished) : memory(kNbytes) {
    RuntimeOptions options;
    options.name = name;
    options.listen = "tcp://127.0.0.1:0";
    options.transports = wished.transports;
    options.transport_options = {{"tcp.rails", std::int64_t{1}}};
    options.faults = wished.faults;
    options.heartbeat_ns = wished.heartbeat_ns;
    options.silent_ns = 4 * kNoHeartbeat;
    for (const std::string& transport : wished.transports)
      if (transport == "cuda_ipc") options.gpus.emplace_back();
    if (!options.gpus.empty()) {
      options.gpus.front().driver = &emulated::driver();
      options.gpus.front().kernels = wished.kernels;
      options.gpus.front().staging_nbytes = wished.staging_nbytes;
    }
    runtime = create(std::move(options));
    std::memset(memory.data(), 0, kNbytes);
    const auto id = runtime->register_region("kv", {{memory.data(), kNbytes}}, kBlocks, layers_of_pages(), {},
                                             wished.kind);
    REQUIRE_OK(id);
    region = id.value();
  }
  LeaseId grant(SessionKey peer, wire::LeaseMode mode) {
    return runtime_calls::grant(*runtime, peer, region, mode);
  }
  std::uint32_t install(SessionKey peer, bool write, RegionId from, RegionId to) {
    return runtime_calls::install(*runtime, peer, write, from, to, layers_of_pages());
  }
  std::shared_ptr<Handle> post(SessionKey peer, std::uint32_t program, After after,
                               std::vector<std::uint32_t> blocks, Time timeout_ns = 2 * kBound,
                               LeaseId lease = 0) {
    TransferRequest request;
    request.peer = peer;
    request.program = program;
    request.src_ids = request.dst_ids = std::move(blocks);
    request.num_layers = kLayers;
    request.timeout_ns = timeout_ns;
    request.lease = lease;
    auto handle = runtime->post_after(std::move(request), std::move(after));
    REQUIRE_OK(handle);
    return handle.value();
  }
  gpu_memory::DeviceMemory memory;  // shared memory, which serves as the host's as well
  std::shared_ptr<Runtime> runtime;
  RegionId region = 0;
};

struct Ends {
  explicit Ends(const Options& options = {}) : Ends(options, options) {}
  Ends(const Options& at_src, const Options& at_dst) : src("src", at_src), dst("dst", at_dst) {
    const Meeting both = meet(*src.runtime, *dst.runtime, at_src.num_rails);
    there = both.there;
    here = both.here;
    write_lease = dst.grant(here, wire::LeaseMode::kWrite);
    read_lease = src.grant(there, wire::LeaseMode::kRead);
    writes = src.install(there, true, src.region, dst.region);
    reads = dst.install(here, false, src.region, dst.region);
  }
  ~Ends() {
    src.runtime->close(kBound);
    dst.runtime->close(kBound);
  }
  std::shared_ptr<Handle> write(After after, std::vector<std::uint32_t> blocks = {0, 1, 2, 3}) {
    return src.post(there, writes, std::move(after), std::move(blocks));
  }
  std::shared_ptr<Handle> read(After after, std::vector<std::uint32_t> blocks = {0, 1, 2, 3},
                               Time timeout_ns = 2 * kBound) {
    // By its lease: dst may not have been told of it yet.
    return dst.post(here, reads, std::move(after), std::move(blocks), timeout_ns, read_lease);
  }
  bool ends(const std::shared_ptr<Handle>& handle) { return runtime_calls::ends(handle); }
  std::byte first_byte(std::uint32_t block = 0, std::uint32_t layer = 0) {
    return dst.runtime->with_engine(
        [&](Engine&, Time) { return dst.memory.data()[layer * kLayerNbytes + block * kBlockNbytes]; });
  }
  bool is_told() {
    return await([&] { return num_transfers(*dst.runtime) == 1; });
  }
  // The model writes its whole cache, when its stream comes to that.
  void produce(ModelStream& stream, unsigned char value) {
    REQUIRE_EQ(emulated::driver().memory_set(reinterpret_cast<gpu::Address>(src.memory.data()), value,
                                             kNbytes, stream.get()),
               0);
  }

  End src, dst;
  SessionKey there = 0, here = 0;
  LeaseId write_lease = 0, read_lease = 0;
  std::uint32_t writes = 0, reads = 0;
};

template <class T>
void refused(const T& result, Code code, const std::string& words) {
  CHECK_EQ(result.code(), code);
  if (result.message().find(words) == std::string::npos) FAIL(result.message());
}

}  // namespace gpu_ends
