// Two agents in this process with caches on an emulated GPU: each with a cache of a few layers and a stream
// of the model; or one with a cache on the GPU and one with a cache in host memory.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"

namespace gpu_ends {

using namespace kvxfer;
using namespace agent_pair;
using gpu_memory::DeviceMemory;

inline GpuPart emulated_gpu(gpu::Kernels kernels = emulated::fast_kernels(),
                            std::uint64_t staging_nbytes = 4 * 1024 * 1024) {
  return {.driver = &emulated::driver(),
          .kernels = kernels,
          .stream = {},
          .staging_nbytes = staging_nbytes,
          .keepalive = {}};
}

// A GPU if a transport needs one, and a rail of tcp.
inline Options with_gpu(Options options) {
  if (!options.gpu) options.gpu = emulated_gpu();
  if (options.transport_options.empty()) options.transport_options = {{"tcp.rails", std::int64_t{1}}};
  return options;
}

// A stream of the model's.
class ModelStream {
 public:
  ModelStream() { REQUIRE_EQ(emulated::driver().stream_create(&stream_, 1, 0), 0); }
  ~ModelStream() { emulated::driver().stream_destroy(stream_); }
  gpu::Stream get() const { return stream_; }
  void hold(gpu::EventHandle& event) {
    REQUIRE_EQ(emulated::driver().stream_wait_event(stream_, &event, 0), 0);
  }
  // A kernel, as a stream sees it.
  void run(std::function<void()> work) { REQUIRE_EQ(emulated::enqueue(stream_, std::move(work)), 0); }
  bool is_idle() const { return emulated::driver().stream_query(stream_) == 0; }
  void synchronize() { emulated::driver().stream_synchronize(stream_); }

 private:
  gpu::Stream stream_ = nullptr;
};

// ---- a cache of a few layers --------------------------------------------------------------------

inline constexpr std::uint32_t kBlocks = 4, kLayers = 3;
inline constexpr std::uint64_t kBlockNbytes = 4096;
inline constexpr std::uint64_t kLayerNbytes = kBlocks * kBlockNbytes, kNbytes = kLayers * kLayerNbytes;

// Its memory is shared memory, which the host can read as well.
struct End : Agent<DeviceMemory> {
  End(const std::string& name, Options options) : Agent(name, of_layers(std::move(options))) {
    std::memset(memory.data(), 0, kNbytes);
  }
  static Options of_layers(Options options) {
    options.layout = {kBlocks, kBlockNbytes, kLayers};
    if (options.transports.empty()) options.transports = {"cuda_ipc"};
    return with_gpu(std::move(options));
  }
};

struct Ends : Pair<End> {
  explicit Ends(const Options& at_both = {}) : Pair(at_both) {}
  using Pair::Pair;
  std::shared_ptr<Handle> write(After after, std::vector<std::uint32_t> blocks = {}) {
    return post(true, std::move(after), std::move(blocks));
  }
  std::shared_ptr<Handle> read(After after, std::vector<std::uint32_t> blocks = {},
                               Time timeout_ns = 2 * kBound) {
    return post(false, std::move(after), std::move(blocks), timeout_ns);
  }
  std::byte first_byte(std::uint32_t block = 0, std::uint32_t layer = 0) {
    return dst.runtime->with_engine(
        [&](Engine&, Time) { return dst.memory.data()[dst.layout.at(block, layer)]; });
  }
  // The model writes its whole cache when its stream reaches this.
  void produce(ModelStream& stream, unsigned char value) {
    REQUIRE_EQ(emulated::driver().memory_set(src.memory.address(), value, kNbytes, stream.get()), 0);
  }
};

// ---- a cache on the GPU, and one of the same layout in host memory ------------------------------

struct Caches {
  explicit Caches(std::uint64_t nbytes) : gpu(std::in_place, nbytes), host(nbytes) {}
  std::optional<DeviceMemory> gpu;
  std::vector<std::byte> host;
};

// For an agent that has a GPU, one that reaches host memory, or one that does both.
struct CachesEnd : Agent<Caches> {
  CachesEnd(const std::string& name, const Options& options)
      : Agent(name, with_gpu(options)),
        has_gpu(options.has("cuda_ipc") || options.has("verbs")),
        has_host(options.transports.size() > (options.has("cuda_ipc") ? 1u : 0u)) {
    check::Random random(check::seed() + static_cast<unsigned char>(name.front()));
    std::array<std::uint64_t, 512>
        page;  // equal except for their first words: random numbers are slow under a sanitizer
    for (std::byte* const cache : {memory.gpu->data(), memory.host.data()}) {
      random.fill(page.data(), page.size());
      for (std::uint64_t at = 0; at < layout.nbytes(); at += sizeof page) {
        page[0] = random.next();
        std::memcpy(cache + at, page.data(), sizeof page);
      }
    }
  }
  using Agent::add;
  void add() {
    if (has_gpu) region = on_gpu = add(memory.gpu->data(), "gpu", MemoryKind::kGpu);
    if (has_host) on_host = add(memory.host.data(), "host");
  }
  using Agent::grant;
  LeaseId grant(SessionKey peer, RegionId id, wire::LeaseMode mode) {
    return agent_pair::grant(*runtime, peer, id, mode);
  }
  // Everything that there is.
  std::vector<LeaseId> grant_all(SessionKey peer) {
    std::vector<LeaseId> leases;
    for (const wire::LeaseMode mode : {wire::LeaseMode::kRead, wire::LeaseMode::kWrite})
      for (const RegionId id : {on_gpu, on_host})
        if (id != 0) leases.push_back(grant(peer, id, mode));
    return leases;
  }
  const std::byte* bytes(RegionId id) const { return id == on_gpu ? memory.gpu->data() : memory.host.data(); }
  std::vector<std::byte> copy(RegionId id) const { return {bytes(id), bytes(id) + layout.nbytes()}; }
  // Copies the first blocks (all, by default) to the last ones, in reverse.
  Result<std::shared_ptr<Handle>> try_post(SessionKey peer, bool write, RegionId from, RegionId to,
                                           std::uint32_t num_blocks = 0, bool integrity = false) {
    if (num_blocks == 0) num_blocks = layout.num_blocks;
    TransferRequest made = request(peer, install(peer, write, from, to));
    made.src_ids.resize(num_blocks);
    made.dst_ids = {made.dst_ids.rbegin(), made.dst_ids.rbegin() + num_blocks};
    made.integrity = integrity;
    return Agent::try_post(std::move(made));
  }
  // Whether the bytes are where another's transfer put them. It asks the receiver first, because a sanitizer
  // does not follow bytes that come through memory.
  bool has(RegionId id, const std::byte* from, std::uint32_t num_blocks = 0) {
    if (num_blocks == 0) num_blocks = layout.num_blocks;
    num_transfers();
    for (std::uint32_t block = 0; block < num_blocks; ++block)
      if (std::memcmp(from + layout.at(block, 0), bytes(id) + layout.at(layout.num_blocks - 1 - block, 0),
                      layout.block_nbytes) != 0)
        return false;
    return true;
  }

  const bool has_gpu, has_host;
  RegionId on_gpu = 0, on_host = 0;
};

struct CachesEnds : Meeting<CachesEnd> {
  using Meeting::Meeting;
  std::shared_ptr<Handle> post(bool write, RegionId from, RegionId to, std::uint32_t num_blocks = 0) {
    auto handle = end(write).try_post(peer(write), write, from, to, num_blocks);
    REQUIRE_OK(handle);
    return std::move(handle).value();
  }
  std::shared_ptr<Handle> write(RegionId from, RegionId to, std::uint32_t num_blocks = 0) {
    return post(true, from, to, num_blocks);
  }
  std::shared_ptr<Handle> read(RegionId from, RegionId to, std::uint32_t num_blocks = 0) {
    return post(false, from, to, num_blocks);
  }
};

// A source in another process, which accepts any peer, and dies when it is told to. Make it while this
// process has one thread, because it forks.
template <class End>
class Child {
 public:
  explicit Child(const Options& options) {
    int sockets[2];
    REQUIRE_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
    ours_.reset(sockets[0]);
    UniqueFd theirs(sockets[1]);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ours_.reset();
      End source("child", options);
      source.add();
      const std::string address = source.runtime->address();
      if (::send(theirs.get(), address.data(), address.size(), MSG_NOSIGNAL) < 0) ::_exit(1);
      if (!await([&] { return first_peer(*source.runtime) != 0; })) ::_exit(1);
      const LeaseId lease = source.grant(first_peer(*source.runtime), wire::LeaseMode::kRead);
      if (::send(theirs.get(), &lease, sizeof lease, MSG_NOSIGNAL) < 0) ::_exit(1);
      char end;
      (void)!::recv(theirs.get(), &end, 1, 0);
      ::_exit(0);
    }
    char text[64] = {};
    REQUIRE(::recv(ours_.get(), text, sizeof text - 1, 0) > 0);
    address_ = text;
  }
  ~Child() { kill(); }
  const std::string& address() const { return address_; }
  // Returns once a peer has connected.
  LeaseId lease() {
    LeaseId lease = 0;
    REQUIRE_EQ(::recv(ours_.get(), &lease, sizeof lease, MSG_WAITALL), sizeof lease);
    return lease;
  }
  void kill() {
    if (pid_ <= 0) return;
    CHECK_EQ(::kill(pid_, SIGKILL), 0);
    CHECK_EQ(::waitpid(pid_, nullptr, 0), pid_);
    pid_ = 0;
  }

 private:
  UniqueFd ours_;
  pid_t pid_ = 0;
  std::string address_;
};

}  // namespace gpu_ends
