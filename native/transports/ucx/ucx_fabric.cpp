#include "transports/ucx/ucx_fabric.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <utility>

#include "transports/common/found_library.h"

namespace kvxfer::ucx {
namespace {

// About the size of a worker over tcp alone, and of a worker with an RDMA device's queues; most of it is the
// receive queue.
constexpr std::uint64_t kWorkerNbytes = 4 << 20, kRdmaWorkerNbytes = 48 << 20;
// Zeros behind a peer's key or address, which UCX takes without a length: more than a peer can make UCX read.
constexpr std::size_t kPadding = 32 * 1024;
// The time that an endpoint has to end; after it the worker is destroyed all the same.
constexpr std::chrono::milliseconds kCloseBound{200};
constexpr unsigned kMessageId = 0;

std::vector<std::byte> padded(std::span<const std::byte> bytes) {
  std::vector<std::byte> copy(bytes.size() + kPadding);
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

template <class Print>
std::string printed(Print&& print) {
  char* text = nullptr;
  std::size_t nbytes = 0;
  std::FILE* const stream = ::open_memstream(&text, &nbytes);
  if (stream == nullptr) return {};
  print(stream);
  std::fclose(stream);
  std::string out(text, nbytes);
  std::free(text);
  return out;
}

class UcxMemory final : public fabric::Memory {
 public:
  UcxMemory(std::shared_ptr<UcxFabric> fabric, const Library& library, abi::Context* context,
            abi::MemoryHandle* handle)
      : fabric_(std::move(fabric)), library_(library), context_(context), handle_(handle) {}
  ~UcxMemory() override { library_.mem_unmap(context_, handle_); }

 private:
  const std::shared_ptr<UcxFabric> fabric_;
  const Library& library_;
  abi::Context* const context_;
  abi::MemoryHandle* const handle_;
};

}  // namespace

class UcxEndpoint final : public fabric::Endpoint {
 public:
  UcxEndpoint(std::shared_ptr<UcxFabric> fabric, abi::Worker* worker)
      : fabric_(std::move(fabric)), library_(fabric_->library_), worker_(worker) {
    request_.field_mask =
        abi::RequestParams::kCallback | abi::RequestParams::kUserData | abi::RequestParams::kMemoryHandle;
    request_.callback.sent = [](void* request, abi::StatusCode status, void* flight) {
      current->on_end(request, status, *static_cast<fabric::Flight*>(flight));
    };
  }
  ~UcxEndpoint() override {
    close();
    const Current now(*this);  // requests that close() did not see end have their callbacks called now
    library_.worker_destroy(worker_);
  }

  Status listen() {
    if (const abi::StatusCode got = library_.worker_get_efd(worker_, &fd_); got != abi::kOk)
      return fabric_->refused("an event descriptor of a worker", got);
    abi::HandlerParams params;
    params.field_mask = abi::HandlerParams::kId | abi::HandlerParams::kFlags | abi::HandlerParams::kCallback |
                        abi::HandlerParams::kArgument;
    params.id = kMessageId;
    params.flags = abi::HandlerParams::kWholeMessage;
    params.callback = [](void* endpoint, const void* header, std::size_t header_nbytes, void* data,
                         std::size_t nbytes, const abi::MessageParams* message) {
      return static_cast<UcxEndpoint*>(endpoint)->on_message(header, header_nbytes, data, nbytes, *message);
    };
    params.argument = this;
    if (const abi::StatusCode set = library_.worker_set_am_recv_handler(worker_, &params); set != abi::kOk)
      return fabric_->refused("a handler of messages", set);
    return {};
  }

  std::vector<std::byte> address() const override {
    abi::Address* address = nullptr;
    std::size_t nbytes = 0;
    if (library_.worker_get_address(worker_, &address, &nbytes) != abi::kOk) return {};
    const auto* const first = reinterpret_cast<const std::byte*>(address);
    std::vector<std::byte> copy(first, first + nbytes);
    library_.worker_release_address(worker_, address);
    return copy;
  }

  Status connect(std::span<const std::byte> address) override {
    if (address.empty()) return {Code::kRailFailed, "its worker has no address"};
    const std::vector<std::byte> copy = padded(address);
    abi::EndpointParams params;
    params.field_mask = abi::EndpointParams::kRemoteAddress | abi::EndpointParams::kErrorMode |
                        abi::EndpointParams::kErrorHandler;
    params.address = reinterpret_cast<const abi::Address*>(copy.data());
    params.error_mode = abi::EndpointParams::kModePeer;
    params.error_handler.callback = [](void* endpoint, abi::EndpointHandle*, abi::StatusCode status) {
      auto& self = *static_cast<UcxEndpoint*>(endpoint);
      self.fail(self.library_.status_string(status));
    };
    params.error_handler.argument = this;
    const abi::StatusCode created = library_.ep_create(worker_, &params, &endpoint_);
    if (created == abi::kOk) return {};
    endpoint_ = nullptr;
    Status why = fabric_->refused("an endpoint to the peer's worker", created);
    if (created != abi::kUnreachable) return why;
    return {why.code(),
            why.message() +
                ". Both ends need a common transport that reports a peer's death: tcp or a network's, not "
                "shared memory (kvxfer's shm is for that)"};
  }

  Result<std::uint64_t> unpack(std::span<const std::byte> key, std::shared_ptr<const void>& holder) override {
    const std::vector<std::byte> copy = padded(key);
    abi::RemoteKey* unpacked = nullptr;
    if (const abi::StatusCode status = library_.ep_rkey_unpack(endpoint_, copy.data(), &unpacked);
        status != abi::kOk)
      return fabric_->refused("a peer's key", status);
    holder = std::shared_ptr<const void>(unpacked, [&library = library_](const void* its) {
      library.rkey_destroy(static_cast<abi::RemoteKey*>(const_cast<void*>(its)));
    });
    return reinterpret_cast<std::uintptr_t>(unpacked);
  }

  bool progress() noexcept override {
    const Current now(*this);
    const bool had_come = std::exchange(has_come_, false);
    return library_.worker_progress(worker_) != 0 || had_come;
  }
  int fd() const noexcept override { return fd_; }
  bool arm() noexcept override {
    const abi::StatusCode armed = library_.worker_arm(worker_);
    if (armed != abi::kOk && armed != abi::kBusy) fail(library_.status_string(armed));
    if (armed != abi::kOk || !library_.has_rdma) return armed == abi::kOk;
    // A device announces what completes from now on. What had completed before needs no announcement with
    // mlx5, and gets none with Soft-RoCE.
    const Current now(*this);
    has_come_ = library_.worker_progress(worker_) != 0;
    return !has_come_;
  }

  void close() noexcept override {
    if (std::exchange(is_closed_, true) || endpoint_ == nullptr) return;
    const Current now(*this);
    abi::RequestParams params;
    params.field_mask = abi::RequestParams::kFlags;
    params.flags = abi::RequestParams::kCloseByForce;
    void* const request = library_.ep_close_nbx(endpoint_, &params);
    const bool is_request = request != nullptr && !abi::is_error(request);
    const auto due = std::chrono::steady_clock::now() + kCloseBound;
    while ((num_under_way() != 0 ||
            (is_request && library_.request_check_status(request) == abi::kInProgress)) &&
           std::chrono::steady_clock::now() < due)
      library_.worker_progress(worker_);
    if (is_request) library_.request_free(request);
  }

  std::string path() const override {
    std::set<std::string> names;
    for (const Lane& lane : lanes()) names.insert(lane.name);
    std::string words;
    for (const std::string& name : names) words += (words.empty() ? "" : " ") + name;
    return words.empty() ? "lanes unknown" : words;
  }
  // Without a lane that reads and writes memory by itself, UCX has the peer's processor serve reads and
  // writes. It checks no key there. Of eight releases that were tried, five (1.13.1 to 1.22.0) crashed at
  // times when the reader ended meanwhile; 1.13.1 aborts if the writer did.
  fabric::Way preferred_way() const override {
    const std::optional<fabric::Way>& chosen = fabric_->options_.way;
    if (chosen == fabric::Way::kRead || chosen == fabric::Way::kSend) return *chosen;
    const std::vector<Lane> all = lanes();
    if (std::none_of(all.begin(), all.end(), [](const Lane& lane) { return lane.is_rdma; }))
      return fabric::Way::kSend;
    return chosen.value_or(fabric::Way::kRead);
  }

 private:
  // The endpoint whose worker makes progress on this thread. UCX passes a callback only one pointer, the
  // flight.
  struct Current {
    explicit Current(UcxEndpoint& endpoint) noexcept : before(std::exchange(current, &endpoint)) {}
    ~Current() { current = before; }
    UcxEndpoint* const before;
  };
  static thread_local UcxEndpoint* current;

  // A lane of the endpoint, as UCX prints it: "lane[0]:  0:rc_mlx5/mlx5_0:1 md[0] ... rma_bw#0 am".
  struct Lane {
    std::string name;
    bool is_rdma;
  };
  std::vector<Lane> lanes() const {
    std::istringstream stream(printed([this](std::FILE* file) { library_.ep_print_info(endpoint_, file); }));
    std::vector<Lane> found;
    for (std::string line; std::getline(stream, line);) {
      const std::size_t lane = line.find("lane["), slash = line.find('/');
      if (lane == std::string::npos || slash == std::string::npos) continue;
      const std::size_t name = line.rfind(':', slash), end = line.find(' ', slash);
      if (name != std::string::npos)
        found.push_back({line.substr(name + 1, end - name - 1), line.find(" rma") != std::string::npos});
    }
    return found;
  }

  Posted send(fabric::Flight& flight) noexcept override {
    const Current now(*this);
    abi::RequestParams params;
    params.field_mask = abi::RequestParams::kCallback | abi::RequestParams::kUserData;
    params.callback.sent = [](void* request, abi::StatusCode status, void* its) {
      current->on_end(request, status, *static_cast<fabric::Flight*>(its));
    };
    params.user_data = &flight;
    // The bytes go straight to where they are awaited, without a buffer.
    if (flight.header.nbytes != 0) {
      params.field_mask |= abi::RequestParams::kFlags;
      params.flags = abi::RequestParams::kRendezvous;
    }
    const Buffer buffer = name(flight, params);
    return posted(library_.am_send_nbx(endpoint_, kMessageId, &flight.header, sizeof flight.header,
                                       buffer.first, buffer.second, &params));
  }

  abi::StatusCode on_message(const void* header, std::size_t header_nbytes, void* data, std::size_t nbytes,
                             const abi::MessageParams& message) noexcept {
    fabric::PieceHeader piece;
    if (header_nbytes != sizeof piece || receiver() == nullptr) return abi::kOk;  // dropped
    std::memcpy(&piece, header, sizeof piece);
    if (piece.nbytes != nbytes) return abi::kOk;
    fabric::Flight* const flight = receiver()->begin_receive(piece);
    if (flight == nullptr || nbytes == 0) return abi::kOk;
    if ((message.attributes & abi::MessageParams::kIsRendezvous) == 0) {
      const auto* from = static_cast<const std::byte*>(data);
      for (const iovec& segment : flight->segments) {
        std::memcpy(segment.iov_base, from, segment.iov_len);
        from += segment.iov_len;
      }
      return abi::kOk;
    }
    abi::RequestParams params;
    params.field_mask = abi::RequestParams::kCallback | abi::RequestParams::kUserData;
    params.callback.received = [](void* request, abi::StatusCode status, std::size_t, void* its) {
      current->on_end(request, status, *static_cast<fabric::Flight*>(its));
    };
    params.user_data = flight;
    const Buffer buffer = name(*flight, params);
    began(*flight);
    void* const request = library_.am_recv_data_nbx(worker_, data, buffer.first, buffer.second, &params);
    if (request == nullptr)
      completed(*flight, {});
    else if (abi::is_error(request))
      completed(*flight, library_.status_string(abi::error_of(request)));
    return abi::kInProgress;
  }

  // What UCX sends or fills: a buffer and its length, or segments and their number.
  using Buffer = std::pair<void*, std::size_t>;
  static Buffer name(fabric::Flight& flight, abi::RequestParams& params) noexcept {
    std::vector<iovec>& segments = flight.segments;
    if (segments.empty()) return {nullptr, 0};
    if (segments.size() == 1) return {segments.front().iov_base, segments.front().iov_len};
    params.field_mask |= abi::RequestParams::kDatatype;
    params.datatype = abi::RequestParams::kIov;
    return {segments.data(), segments.size()};
  }

  Posted read(const fabric::Request& next, fabric::Flight& flight, bool) noexcept override {
    return begin(library_.get_nbx, next.runs.front(), flight);
  }
  Posted write(const fabric::Request& next, fabric::Flight& flight, bool) noexcept override {
    return begin(library_.put_nbx, next.runs.front(), flight);
  }
  template <class Function>
  Posted begin(Function function, const fabric::Run& run, fabric::Flight& flight) noexcept {
    const Current now(*this);
    request_.user_data = &flight;
    request_.memory = reinterpret_cast<abi::MemoryHandle*>(run.local_key);
    return posted(function(endpoint_, reinterpret_cast<void*>(run.local), run.nbytes, run.remote,
                           reinterpret_cast<abi::RemoteKey*>(run.remote_key), &request_));
  }
  // A write has completed when UCX no longer needs its bytes; a flush, when the peer has them.
  Posted flush(fabric::Flight& flight) noexcept override {
    const Current now(*this);
    abi::RequestParams params;
    params.field_mask = abi::RequestParams::kCallback | abi::RequestParams::kUserData;
    params.callback = request_.callback;
    params.user_data = &flight;
    return posted(library_.ep_flush_nbx(endpoint_, &params));
  }
  Posted posted(abi::StatusPointer request) noexcept {
    if (request == nullptr) return Posted::kDone;
    if (!abi::is_error(request)) return Posted::kUnderWay;
    const abi::StatusCode status = abi::error_of(request);
    if (status == abi::kNoResource) return Posted::kAgain;
    fail(library_.status_string(status));
    return Posted::kFailed;
  }
  void on_end(void* request, abi::StatusCode status, fabric::Flight& flight) noexcept {
    library_.request_free(request);
    completed(flight, status == abi::kOk ? std::string_view() : library_.status_string(status));
  }

  const std::shared_ptr<UcxFabric> fabric_;
  const Library& library_;
  abi::Worker* const worker_;
  bool is_closed_ = false;
  bool has_come_ = false;  // something, while it was armed
  abi::EndpointHandle* endpoint_ = nullptr;
  int fd_ = -1;
  abi::RequestParams request_;  // of reads and writes
};

thread_local UcxEndpoint* UcxEndpoint::current = nullptr;

Status UcxFabric::refused(const std::string& what, abi::StatusCode status) const {
  return {status == abi::kUnreachable || status == abi::kNoDevice ? Code::kUnsupported : Code::kRailFailed,
          library_.name() + " refused " + what + ": " + library_.status_string(status) +
              found_library::environment("UCX_")};
}

Result<std::shared_ptr<UcxFabric>> UcxFabric::create(const Library& library, const Options& options) {
  const std::shared_ptr<UcxFabric> made(new UcxFabric(library, options));
  abi::Config* config = nullptr;
  if (const abi::StatusCode read = library.config_read(nullptr, nullptr, &config); read != abi::kOk)
    return made->refused("its configuration", read);
  const std::unique_ptr<abi::Config, void (*)(abi::Config*)> owned(config, library.config_release);
  std::vector<std::pair<std::string, std::string>> settings;
  if (!options.transports.empty()) settings.emplace_back("TLS", options.transports);
  if (!options.devices.empty()) settings.emplace_back("NET_DEVICES", options.devices);
  std::istringstream stream(options.config);
  for (std::string setting; stream >> setting;) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos)
      return Status(Code::kInvalidArgument,
                    "ucx.config has \"" + setting + "\": write NAME=value, separated by spaces");
    settings.emplace_back(setting.substr(0, equals), setting.substr(equals + 1));
  }
  for (const auto& [name, value] : settings)
    if (const abi::StatusCode set = library.config_modify(config, name.c_str(), value.c_str());
        set != abi::kOk)
      return Status(Code::kInvalidArgument, library.name() + " does not take " + name + "=" + value + ": " +
                                                library.status_string(set));

  abi::ContextParams params;
  params.field_mask = abi::ContextParams::kFeatures | abi::ContextParams::kMtWorkersShared;
  params.features = abi::ContextParams::kActiveMessages | abi::ContextParams::kWakeup;
  // Without kRma, UCX serves no reads and writes of a peer.
  if (options.way != fabric::Way::kSend) params.features |= abi::ContextParams::kRma;
  params.mt_workers_shared = 1;
  if (const abi::StatusCode begun =
          library.init_version(abi::kApiMajor, abi::kApiMinor, &params, config, &made->context_);
      begun != abi::kOk) {
    made->context_ = nullptr;
    return Status(Code::kUnsupported,
                  library.name() + " has no usable transport" +
                      (options.transports.empty() ? "" : " of \"" + options.transports + "\"") + ": " +
                      library.status_string(begun) + found_library::environment("UCX_") +
                      ". `ucx_info -d` lists its transports; option ucx.transports chooses among them");
  }
  if (options.gpu != nullptr) made->memory_ = MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu;
  return made;
}

UcxFabric::~UcxFabric() {
  if (context_ != nullptr) library_.cleanup(context_);
}

Result<std::unique_ptr<fabric::Memory>> UcxFabric::map(std::byte* memory, std::uint64_t nbytes,
                                                       MemoryKind kind, bool) {
  abi::MemoryMapParams params;
  params.field_mask =
      abi::MemoryMapParams::kAddress | abi::MemoryMapParams::kLength | abi::MemoryMapParams::kMemoryType;
  params.address = memory;
  params.length = nbytes;
  params.memory_type = kind == MemoryKind::kGpu ? abi::MemoryMapParams::kCuda : abi::MemoryMapParams::kHost;
  const fabric::GpuContext::Scope scope(kind == MemoryKind::kGpu ? options_.gpu.get() : nullptr);
  abi::MemoryHandle* handle = nullptr;
  if (const abi::StatusCode mapped = library_.mem_map(context_, &params, &handle); mapped != abi::kOk)
    return refused("to register " + std::to_string(nbytes) + " bytes" +
                       (kind == MemoryKind::kGpu ? " of a GPU (a build without CUDA cannot)" : ""),
                   mapped);
  auto made = std::make_unique<UcxMemory>(shared_from_this(), library_, context_, handle);
  void* key = nullptr;
  std::size_t key_nbytes = 0;
  if (const abi::StatusCode packed = library_.rkey_pack(context_, handle, &key, &key_nbytes);
      packed != abi::kOk)
    return refused("a key of registered memory", packed);
  const auto* const first = static_cast<const std::byte*>(key);
  made->key.assign(first, first + key_nbytes);
  library_.rkey_buffer_release(key);
  made->local_key = reinterpret_cast<std::uintptr_t>(handle);
  made->address = reinterpret_cast<std::uintptr_t>(memory);
  return std::unique_ptr<fabric::Memory>(std::move(made));
}

Result<std::unique_ptr<fabric::Endpoint>> UcxFabric::open(const fabric::Route&) {
  abi::WorkerParams params;
  params.field_mask = abi::WorkerParams::kThreadMode;
  params.thread_mode = abi::WorkerParams::kSerialized;
  abi::Worker* worker = nullptr;
  if (const abi::StatusCode created = library_.worker_create(context_, &params, &worker); created != abi::kOk)
    return refused("a worker", created);
  auto endpoint = std::make_unique<UcxEndpoint>(shared_from_this(), worker);
  if (Status listening = endpoint->listen(); !listening.ok()) return listening;
  return std::unique_ptr<fabric::Endpoint>(std::move(endpoint));
}

std::uint64_t UcxFabric::endpoint_nbytes() const noexcept {
  return library_.has_rdma ? kRdmaWorkerNbytes : kWorkerNbytes;
}

}  // namespace kvxfer::ucx
