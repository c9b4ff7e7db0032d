#include "transports/libfabric/libfabric_fabric.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "core/system/random.h"
#include "transports/common/found_library.h"

namespace kvxfer::libfabric {
namespace {

// The providers that are tried if none is named. 1.16 and 1.17 call "net" what later releases call "tcp".
constexpr const char* kProviders[] = {"efa", "cxi", "verbs;ofi_rxm", "net", "tcp"};
constexpr std::size_t kMostAddress = 256;  // bytes

template <class T>
void close_object(T*& object) noexcept {
  if (object != nullptr) object->object.ops->close(&object->object);
  object = nullptr;
}

// An IP address, in whatever structure it comes.
struct IpAddress {
  std::array<std::byte, 16> host{};  // IPv4 as IPv6 maps it
  bool is_v4 = false;
  std::uint32_t scope = 0;

  static std::optional<IpAddress> of(std::span<const std::byte> bytes) {
    sockaddr_storage storage{};
    if (bytes.size() < sizeof(sa_family_t) || bytes.size() > sizeof storage) return std::nullopt;
    std::memcpy(&storage, bytes.data(), bytes.size());
    IpAddress out;
    if (storage.ss_family == AF_INET && bytes.size() >= sizeof(sockaddr_in)) {
      out.host[10] = out.host[11] = std::byte{0xFF};
      std::memcpy(&out.host[12], &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, 4);
      out.is_v4 = true;
      return out;
    }
    if (storage.ss_family != AF_INET6 || bytes.size() < sizeof(sockaddr_in6)) return std::nullopt;
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    std::memcpy(out.host.data(), &v6.sin6_addr, out.host.size());
    out.is_v4 = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    out.scope = v6.sin6_scope_id;
    return out;
  }

  // Sets the address at which an endpoint is to listen; the system chooses the port.
  bool put_into(abi::Info& info) const noexcept {
    const std::size_t nbytes = is_v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    void* const made = std::calloc(1, nbytes);  // libfabric frees it
    if (made == nullptr) return false;
    if (is_v4) {
      auto& v4 = *static_cast<sockaddr_in*>(made);
      v4.sin_family = AF_INET;
      std::memcpy(&v4.sin_addr, &host[12], 4);
    } else {
      auto& v6 = *static_cast<sockaddr_in6*>(made);
      v6.sin6_family = AF_INET6;
      std::memcpy(&v6.sin6_addr, host.data(), host.size());
      v6.sin6_scope_id = scope;
    }
    std::free(info.source);
    info.source = made;
    info.source_nbytes = nbytes;
    info.address_format = is_v4 ? abi::kSocketAddressIpv4 : abi::kSocketAddressIpv6;
    return true;
  }
};

// Refuses sockets behind ofi_rxm. In 1.17 that crashes when an endpoint is closed with reads under way, and
// later releases do not need it.
bool is_refused(const abi::Info& info) {
  const std::string_view provider = info.fabric->provider == nullptr ? "" : info.fabric->provider;
  return provider == "tcp;ofi_rxm" || provider == "net;ofi_rxm";
}

bool is_named(const std::string& name, const std::string& names) {
  std::istringstream stream(names);
  for (std::string each; std::getline(stream, each, ',');)
    if (each == name) return true;
  return false;
}

}  // namespace

// Memory that is registered wherever the fabric serves it.
class LibfabricMemory final : public fabric::Memory {
 public:
  LibfabricMemory(std::shared_ptr<LibfabricFabric> fabric, std::byte* memory, std::uint64_t nbytes,
                  bool takes_writes)
      : fabric_(std::move(fabric)), span_{memory, nbytes} {
    params_.num_spans = 1;
    params_.access = abi::kRead | abi::kRemoteRead | (takes_writes ? abi::kWrite | abi::kRemoteWrite : 0);
  }
  ~LibfabricMemory() override {
    const std::lock_guard lock(fabric_->mutex_);
    fabric_->registered_.erase(this);
    for (auto& [domain, region] : regions_) close_object(region);
  }

  // The caller of the functions below holds the fabric's mutex.

  // Registers it, bound to an endpoint unless that is null. Returns 0, or libfabric's error.
  int add_to(abi::Domain& domain, abi::Endpoint* endpoint) {
    abi::MemoryRegion*& region = regions_[&domain];
    params_.spans = &span_;
    int made = domain.regions->reg_params(&domain.object, &params_, 0, &region);
    if (made == 0 && endpoint != nullptr) {
      abi::Object& own = region->object;
      if (made = own.ops->bind(&own, &endpoint->object, 0); made == 0)
        made = own.ops->control(&own, abi::kEnable, nullptr);
      if (made != 0) close_object(region);
    }
    if (made != 0) regions_.erase(&domain);
    return made;
  }
  void remove_from(abi::Domain* domain) noexcept {
    if (const auto found = regions_.find(domain); found != regions_.end()) {
      close_object(found->second);
      regions_.erase(found);
    }
  }
  abi::RegionParams& params() noexcept { return params_; }
  std::uint64_t number() const noexcept { return params_.key; }
  const abi::MemoryRegion* in(abi::Domain* domain) const { return regions_.at(domain); }

 private:
  const std::shared_ptr<LibfabricFabric> fabric_;
  iovec span_;
  abi::RegionParams params_;
  std::map<abi::Domain*, abi::MemoryRegion*> regions_;
};

class LibfabricEndpoint final : public fabric::Endpoint {
 public:
  LibfabricEndpoint(std::shared_ptr<LibfabricFabric> fabric, std::vector<std::byte> theirs)
      : fabric_(std::move(fabric)), theirs_(std::move(theirs)), requests_(fabric_->num_requests()) {
    for (UnderWay& each : requests_) each.next_spare = std::exchange(spare_, &each);
  }
  ~LibfabricEndpoint() override {
    close();
    close_object(queue_);
    close_object(wait_);
    close_object(table_);
    if (domain_ != nullptr) fabric_->close_domain(domain_);
  }

  Status listen(abi::Info& info) {
    const Result<abi::Domain*> opened = fabric_->open_domain();
    if (!opened.ok()) return opened.status();
    domain_ = opened.value();
    abi::Domain& domain = *domain_;
    if (const int made = domain.ops->endpoint(&domain, &info, &endpoint_, nullptr); made != 0)
      return fabric_->refused("an endpoint", made);
    int made = make_queue();
    if (made != 0) return fabric_->refused("a completion queue", made);
    abi::AddressTableParams table;
    table.type = abi::kTable;
    table.count = 1;
    if (made = domain.ops->address_table(&domain, &table, &table_, nullptr); made != 0)
      return fabric_->refused("an address table", made);
    abi::Object& own = endpoint_->object;
    if (made = own.ops->bind(&own, &table_->object, 0); made == 0)
      made = own.ops->bind(&own, &queue_->object, abi::kTransmit | abi::kReceive);
    if (made == 0) made = own.ops->control(&own, abi::kEnable, nullptr);
    if (made != 0) return fabric_->refused("to enable an endpoint", made);
    return fabric_->serve(domain, *endpoint_);
  }

  std::vector<std::byte> address() const override {
    std::vector<std::byte> name(kMostAddress);
    std::size_t nbytes = name.size();
    if (endpoint_->names->get_name(&endpoint_->object, name.data(), &nbytes) != 0 || nbytes > name.size())
      return {};
    name.resize(nbytes);
    return name;
  }

  // libfabric takes an address as it is, and derives its length from the format. So the format must be our
  // own.
  Status connect(std::span<const std::byte> told) override {
    const std::vector<std::byte> own = address();
    const std::optional<IpAddress> ip = IpAddress::of(told);
    std::vector<std::byte> name(told.begin(), told.end());
    if (const std::optional<IpAddress> ours = IpAddress::of(own); ours && fabric_->follows_routes()) {
      if (!ip || ip->is_v4 != ours->is_v4 || told.size() != own.size())
        return {Code::kRailFailed, "its endpoint's address is of another kind than this end's"};
      // Else a peer could make this process connect to any port.
      if (const std::optional<IpAddress> theirs = IpAddress::of(theirs_); theirs && theirs->host != ip->host)
        return {Code::kRailFailed, "its endpoint is at another address than the peer itself"};
    } else if (told.empty() || told.size() > kMostAddress ||
               (fabric_->info_->address_format <= abi::kSocketAddressIpv6 && told.size() != own.size())) {
      return {Code::kRailFailed, "its endpoint's address is of another kind than this end's"};
    }
    name.resize(2 * kMostAddress);  // zeros follow the name, which may be too short
    if (const int inserted = table_->ops->insert(table_, name.data(), 1, &peer_, 0, nullptr); inserted != 1)
      return fabric_->refused("the peer's address", inserted < 0 ? inserted : -EINVAL);
    return {};
  }

  Result<std::uint64_t> unpack(std::span<const std::byte> key, std::shared_ptr<const void>&) override {
    std::uint64_t number;
    if (key.size() != sizeof number)
      return Status(Code::kUnsupported, "its keys are not in this version's format");
    std::memcpy(&number, key.data(), sizeof number);
    return number;
  }

  bool progress() noexcept override {
    abi::QueueEntry entries[32];
    const ssize_t num = queue_->ops->read(queue_, entries, std::size(entries));
    for (ssize_t i = 0; i < num; ++i)  // without a context: a write of the peer's that brought a number
      if (entries[i].context != nullptr) end(*static_cast<UnderWay*>(entries[i].context), {});
    if (num == -abi::kAvailableLater) return read_error();
    if (num < 0 && num != -EAGAIN) fail(fabric_->library_.error_string(static_cast<int>(-num)));
    return num > 0;
  }
  int fd() const noexcept override { return fd_; }
  bool arm() noexcept override {
    if (wait_ != nullptr) {
      const int waited = wait_->ops->wait(wait_, 0);
      if (waited != 0 && waited != -ETIMEDOUT) fail(fabric_->library_.error_string(-waited));
      return waited == -ETIMEDOUT;
    }
    abi::Object* objects[] = {&queue_->object};
    const int ready = fabric_->fabric_->ops->try_wait(fabric_->fabric_, objects, 1);
    if (ready != 0 && ready != -EAGAIN) fail(fabric_->library_.error_string(-ready));
    return ready == 0;
  }

  void close() noexcept override {
    // An endpoint does not close while memory is bound to it.
    if (fabric_->binds_memory() && domain_ != nullptr) fabric_->stop_serving(*domain_);
    close_object(endpoint_);
  }

  fabric::Way preferred_way() const override {
    return fabric_->options_.writes ? fabric::Way::kWrite : fabric::Way::kRead;
  }
  std::string path() const override {
    return fabric_->provider_ + " " + fabric_->device_ + (fd_ < 0 ? ", polled" : "");
  }

 private:
  // Makes a queue with a descriptor if the provider has such; else the queue is polled from time to time.
  int make_queue() {
    abi::Domain& domain = *domain_;
    abi::Fabric& fabric = *fabric_->fabric_;
    abi::QueueParams params;
    params.size = requests_.size() + 64;
    params.format = abi::kFormatContext;
    params.wait_object = abi::kWaitDescriptor;
    // net's own descriptor stays readable after something has come; only a wait set's descriptor is ever
    // cleared.
    if (fabric_->provider_ == "net") {
      abi::WaitParams wait;
      wait.wait_object = abi::kWaitDescriptor;
      if (const int made = fabric.ops->wait_set(&fabric, &wait, &wait_); made != 0) return made;
      params.wait_object = abi::kWaitSet;
      params.wait_set = wait_;
    }
    int made = domain.ops->queue(&domain, &params, &queue_, nullptr);
    if (made == 0) {
      abi::Object& waits = wait_ != nullptr ? wait_->object : queue_->object;
      made = waits.ops->control(&waits, abi::kGetWait, &fd_);
    }
    if (made == 0 || wait_ != nullptr) return made;
    close_object(queue_);
    fd_ = -1;
    params.wait_object = abi::kWaitNone;
    return domain.ops->queue(&domain, &params, &queue_, nullptr);
  }

  // A request that libfabric has, and the memory that it may use for it.
  struct UnderWay {
    abi::Context context{};
    fabric::Flight* flight = nullptr;
    UnderWay* next_spare = nullptr;
  };

  Posted read(const fabric::Request& next, fabric::Flight& flight, bool has_more) noexcept override {
    return begin(endpoint_->remote->read_message, next, flight, has_more ? abi::kMore : 0);
  }
  // It completes when the bytes are in the peer's memory.
  Posted write(const fabric::Request& next, fabric::Flight& flight, bool has_more) noexcept override {
    return begin(endpoint_->remote->write_message, next, flight,
                 abi::kDelivered | (has_more ? abi::kMore : 0));
  }
  Posted begin(decltype(abi::RemoteOps::read_message) message, const fabric::Request& next,
               fabric::Flight& flight, std::uint64_t flags) noexcept {
    if (spare_ == nullptr) return Posted::kAgain;
    UnderWay& under_way = *spare_;
    std::array<iovec, fabric::Request::kMostRuns> local;
    std::array<void*, fabric::Request::kMostRuns> descriptors;
    std::array<abi::RemoteSpan, fabric::Request::kMostRuns> remote;
    for (std::uint32_t i = 0; i < next.num_runs; ++i) {
      const fabric::Run& run = next.runs[i];
      local[i] = {reinterpret_cast<void*>(run.local), run.nbytes};
      descriptors[i] = reinterpret_cast<void*>(run.local_key);
      remote[i] = {run.remote, run.nbytes, run.remote_key};
    }
    abi::RemoteRequest request;
    request.spans = local.data();
    request.descriptors = descriptors.data();
    request.num_spans = request.num_remote = next.num_runs;
    request.peer = peer_;
    request.remote = remote.data();
    request.context = &under_way;
    const ssize_t posted = message(endpoint_, &request, flags);
    if (posted == -EAGAIN) return Posted::kAgain;
    if (posted != 0) {
      fail(fabric_->library_.error_string(static_cast<int>(-posted)));
      return Posted::kFailed;
    }
    spare_ = under_way.next_spare;
    under_way.flight = &flight;
    return Posted::kUnderWay;
  }
  void end(UnderWay& ended, std::string_view why) noexcept {
    fabric::Flight& flight = *std::exchange(ended.flight, nullptr);
    ended.next_spare = std::exchange(spare_, &ended);
    completed(flight, why);
  }
  bool read_error() noexcept {
    abi::QueueError error{};
    if (queue_->ops->read_error(queue_, &error, 0) <= 0) return false;
    const char* const why = fabric_->library_.error_string(error.error);
    if (error.context == nullptr)
      fail(why);
    else
      end(*static_cast<UnderWay*>(error.context), why);
    return true;
  }

  const std::shared_ptr<LibfabricFabric> fabric_;
  abi::Domain* domain_ = nullptr;
  const std::vector<std::byte> theirs_;  // address of the peer's end of the rail's socket
  std::vector<UnderWay> requests_;
  UnderWay* spare_ = nullptr;
  abi::Endpoint* endpoint_ = nullptr;
  abi::Queue* queue_ = nullptr;
  abi::WaitSet* wait_ = nullptr;  // of the queue, where it needs one
  abi::AddressTable* table_ = nullptr;
  abi::PeerAddress peer_ = 0;
  int fd_ = -1;
};

Status LibfabricFabric::refused(const std::string& what, int error) const {
  return {Code::kRailFailed, library_.name() + ", provider " + provider_ + ", refused " + what + ": " +
                                 library_.error_string(-error) + found_library::environment("FI_")};
}

bool LibfabricFabric::binds_memory() const noexcept {
  return (info_->domain->key_mode & abi::kKeysOfEndpoint) != 0;
}

bool LibfabricFabric::provides_keys() const noexcept {
  return (info_->domain->key_mode & abi::kKeysProvided) != 0;
}

bool LibfabricFabric::follows_routes() const noexcept {
  return provider_.starts_with("tcp") || provider_.starts_with("net");
}

Result<std::vector<std::shared_ptr<LibfabricFabric>>> LibfabricFabric::create(const Library& library,
                                                                              const Options& options) {
  using Info = std::unique_ptr<abi::Info, void (*)(abi::Info*)>;
  const auto ask = [&](const std::string& provider, bool with_gpu, bool is_bound) {
    const Info hints(library.copy_info(nullptr), library.free_info);
    if (hints == nullptr) return Info(nullptr, library.free_info);
    hints->caps = abi::kRma | abi::kRead | abi::kRemoteRead | (with_gpu ? abi::kGpuMemory : 0) |
                  (options.writes ? abi::kWrite | abi::kRemoteWrite : 0);
    hints->mode = abi::kContext | abi::kContext2;
    hints->endpoint->type = abi::kReliableDatagrams;
    // Memory that is bound to endpoints is registered once for each peer, always with the key that all peers
    // are told.
    hints->domain->key_mode = abi::kKeysVirtual | abi::kKeysAllocated |
                              (is_bound ? abi::kKeysOfEndpoint : abi::kKeysLocal | abi::kKeysProvided) |
                              (with_gpu ? abi::kKeysGpu : 0);
    hints->domain->threading = abi::kThreadSafe;
    // Without threads of the library.
    hints->domain->control_progress = hints->domain->data_progress = abi::kProgressManual;
    hints->fabric->provider = ::strdup(provider.c_str());
    abi::Info* found = nullptr;
    library.get_info(abi::kApi, nullptr, nullptr, 0, hints.get(), &found);
    return Info(found, library.free_info);
  };
  const auto look_for = [&](const std::string& provider, bool with_gpu) {
    Info found = ask(provider, with_gpu, false);
    return found != nullptr ? std::move(found) : ask(provider, with_gpu, true);
  };

  std::vector<std::string> providers(std::begin(kProviders), std::end(kProviders));
  if (!options.provider.empty()) providers = {options.provider};
  Info infos(nullptr, library.free_info);
  bool with_gpu = options.gpu != nullptr;
  for (const std::string& provider : providers) {
    if (with_gpu) infos = look_for(provider, true);
    if (infos == nullptr) {
      with_gpu = false;
      infos = look_for(provider, false);
    }
    if (infos != nullptr) break;
    with_gpu = options.gpu != nullptr;
  }
  if (infos == nullptr)
    return Status(Code::kUnsupported,
                  library.name() + " has no " +
                      (options.provider.empty() ? "provider" : "provider \"" + options.provider + "\"") +
                      " with remote reads on reliable datagram endpoints (FI_RMA on FI_EP_RDM)" +
                      found_library::environment("FI_") +
                      ". `fi_info` lists its providers; option libfabric.provider chooses one");

  std::vector<std::shared_ptr<LibfabricFabric>> made;
  std::string offered;
  bool any_refused = false;
  for (const abi::Info* info = infos.get(); info != nullptr; info = info->next) {
    if (is_refused(*info)) {
      any_refused = true;
      continue;
    }
    const std::string device = info->domain->name == nullptr ? "" : info->domain->name;
    if (is_named(device, offered)) continue;
    offered += (offered.empty() ? "" : ",") + device;
    if (!options.devices.empty() && !is_named(device, options.devices)) continue;
    const std::shared_ptr<LibfabricFabric> one(new LibfabricFabric(library, options));
    if (with_gpu) one->memory_ = MemoryKinds(MemoryKind::kHost) | MemoryKind::kGpu;
    if (Status opened = one->open(*info); !opened.ok()) return opened;
    made.push_back(one);
    if (one->follows_routes()) break;
  }
  if (made.empty() && offered.empty() && any_refused)
    return Status(Code::kUnsupported,
                  "tcp of " + library.name() +
                      " runs over ofi_rxm, which crashes if a peer ends while it reads: set option "
                      "libfabric.provider to net (in 1.16 and 1.17), or install 1.18 or newer");
  if (made.empty())
    return Status(Code::kInvalidArgument,
                  "libfabric.devices is \"" + options.devices + "\", and the provider has " + offered);
  return made;
}

Status LibfabricFabric::open(const abi::Info& info) {
  info_ = library_.copy_info(&info);
  if (info_ == nullptr) return {Code::kExhausted, "no memory"};
  provider_ = info_->fabric->provider == nullptr ? "?" : info_->fabric->provider;
  device_ = info_->domain->name == nullptr ? "" : info_->domain->name;
  num_requests_ = static_cast<std::uint32_t>(
      std::clamp<std::size_t>(options_.num_requests, 1, std::max<std::size_t>(info_->transmit->size, 1)));
  if (const int opened = library_.open_fabric(info_->fabric, &fabric_, nullptr); opened != 0)
    return refused("a fabric", opened);
  // One key can serve several domains only if it is ours.
  if (binds_memory() || (follows_routes() && !provides_keys())) return {};
  const Result<abi::Domain*> domain = open_domain();
  if (!domain.ok()) return domain.status();
  domain_ = domain.value();
  served_.emplace(domain_, nullptr);
  return {};
}

Result<abi::Domain*> LibfabricFabric::open_domain() {
  if (domain_ != nullptr) return domain_;
  abi::Domain* domain = nullptr;
  if (const int opened = fabric_->ops->domain(fabric_, info_, &domain, nullptr); opened != 0)
    return refused("a domain on " + device_, opened);
  return domain;
}

Status LibfabricFabric::serve(abi::Domain& domain, abi::Endpoint& endpoint) {
  if (&domain == domain_) return {};
  abi::Endpoint* const bound_to = binds_memory() ? &endpoint : nullptr;
  const fabric::GpuContext::Scope scope(options_.gpu.get());
  int added = 0;
  {
    const std::lock_guard lock(mutex_);
    served_.emplace(&domain, bound_to);
    for (LibfabricMemory* const memory : registered_)
      if (added == 0) added = memory->add_to(domain, bound_to);
  }
  if (added == 0) return {};
  stop_serving(domain);
  return refused("to register memory for another peer", added);
}

void LibfabricFabric::stop_serving(abi::Domain& domain) noexcept {
  const std::lock_guard lock(mutex_);
  for (LibfabricMemory* const memory : registered_) memory->remove_from(&domain);
  served_.erase(&domain);
}

void LibfabricFabric::close_domain(abi::Domain* domain) noexcept {
  if (domain == domain_) return;
  stop_serving(*domain);
  close_object(domain);
}

LibfabricFabric::~LibfabricFabric() {
  close_object(domain_);
  close_object(fabric_);
  if (info_ != nullptr) library_.free_info(info_);
}

// Where keys are short (cxi: 32 bits), two draws may be the same.
Status LibfabricFabric::draw_key(std::uint64_t& key) const {
  const auto is_taken = [&](const LibfabricMemory* each) { return each->number() == key; };
  do {
    if (Status filled = fill_random(std::as_writable_bytes(std::span(&key, 1))); !filled.ok()) return filled;
    if (const std::size_t num = info_->domain->key_nbytes; num < sizeof key)
      key &= (std::uint64_t{1} << (8 * num)) - 1;
  } while (std::ranges::any_of(registered_, is_taken));
  return {};
}

Result<std::unique_ptr<fabric::Memory>> LibfabricFabric::map(std::byte* memory, std::uint64_t nbytes,
                                                             MemoryKind kind, bool takes_writes) {
  auto made = std::make_unique<LibfabricMemory>(shared_from_this(), memory, nbytes, takes_writes);
  abi::RegionParams& params = made->params();
  if (kind == MemoryKind::kGpu) {
    params.memory = abi::kCudaMemory;
    params.device.cuda = options_.gpu->device();
  }
  const fabric::GpuContext::Scope scope(kind == MemoryKind::kGpu ? options_.gpu.get() : nullptr);
  std::uint64_t key;
  {
    const std::lock_guard lock(mutex_);
    if (!provides_keys())
      if (Status drawn = draw_key(params.key); !drawn.ok()) return drawn;
    key = params.key;
    for (const auto& [domain, endpoint] : served_)
      if (const int added = made->add_to(*domain, endpoint); added != 0) {
        for (const auto& [each, its_endpoint] : served_) made->remove_from(each);
        return refused("to register " + std::to_string(nbytes) + " bytes" +
                           (kind == MemoryKind::kGpu ? " of a GPU" : ""),
                       added);
      }
    if (domain_ != nullptr) {
      key = made->in(domain_)->key;
      made->local_key = reinterpret_cast<std::uintptr_t>(made->in(domain_)->descriptor);
    }
    registered_.insert(made.get());
  }
  const auto* const first = reinterpret_cast<const std::byte*>(&key);
  made->key.assign(first, first + sizeof key);
  if ((info_->domain->key_mode & abi::kKeysVirtual) != 0)
    made->address = reinterpret_cast<std::uintptr_t>(memory);
  return std::unique_ptr<fabric::Memory>(std::move(made));
}

Result<std::unique_ptr<fabric::Endpoint>> LibfabricFabric::open(const fabric::Route& route) {
  const std::unique_ptr<abi::Info, void (*)(abi::Info*)> info(library_.copy_info(info_), library_.free_info);
  if (info == nullptr) return Status(Code::kExhausted, "no memory");
  // Only over the addresses that the session uses.
  if (const std::optional<IpAddress> ours = IpAddress::of(route.ours); ours && follows_routes())
    if (!ours->put_into(*info)) return Status(Code::kExhausted, "no memory");
  auto endpoint = std::make_unique<LibfabricEndpoint>(shared_from_this(), route.theirs);
  if (Status listening = endpoint->listen(*info); !listening.ok()) return listening;
  return std::unique_ptr<fabric::Endpoint>(std::move(endpoint));
}

// Measured with 1.17, connected: net 92 KiB, shm 5 MiB, ofi_rxm 87 MiB of buffers for messages, which it
// allocates in advance.
std::uint64_t LibfabricFabric::endpoint_nbytes() const noexcept {
  if (provider_.find("ofi_rxm") != std::string::npos) return 96 << 20;
  return follows_routes() ? 256 << 10 : 16 << 20;
}

// With more than one run in a request, shm makes the source's processor do the work.
std::uint32_t LibfabricFabric::most_runs() const noexcept {
  if (!follows_routes()) return 1;
  return static_cast<std::uint32_t>(
      std::clamp<std::size_t>(std::min(info_->transmit->num_spans, info_->transmit->num_remote_spans), 1,
                              fabric::Request::kMostRuns));
}

std::uint64_t LibfabricFabric::most_request_nbytes() const noexcept {
  return std::min<std::uint64_t>(info_->endpoint->most_nbytes, std::uint64_t{1} << 30);
}

}  // namespace kvxfer::libfabric
