// A stand-in for libibverbs in one process: NICs on one network, behind the library's table of functions.
// They check requests as hardware does (states, keys, bounds, queue lengths), count them, and move bytes when
// they are polled, as many as the seed says. So requests are under way for a while, and nothing depends on
// time.
//
// A device whose completion queue is armed goes on by itself until one completion has come, and announces it.
// If the caller does what the library forbids (destroys an object that others still use, or does not
// acknowledge an event), the test fails.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "transports/verbs/library.h"

namespace counting_device {

namespace abi = kvxfer::verbs::abi;
using kvxfer::verbs::GidType;
using kvxfer::verbs::Library;

struct Limits {
  int num_devices = 2, num_ports = 1;
  int max_sge = 16, max_sge_rd = 0, max_qp_wr = 4096, max_qp = 4096, max_reads = 16;
  std::uint64_t max_mr_nbytes = std::uint64_t{1} << 40;
  std::uint64_t most_registered_nbytes = UINT64_MAX;  // in all; more is ENOMEM
  abi::LinkLayer link = abi::LinkLayer::kEthernet;
  bool at_once = false;  // a poll moves all that is posted
  // Requests end at once and move only single words (fences), so that measurements do not contain the
  // device's time.
  bool does_nothing = false;
};

struct Counts {
  std::uint64_t requests = 0, doorbells = 0, signalled = 0, entries = 0, nbytes = 0, longest_chain = 0;
  std::uint64_t largest_chain_nbytes = 0, completions = 0, notifications = 0;
  std::array<std::uint64_t, 4> nbytes_of{};  // moved by each of the first devices
};

class Fabric {
  struct Context;
  struct Queue;
  struct Pair;
  template <class Body>
  auto locked(Body&& body) const {
    const std::lock_guard lock(mutex_);
    const Inside inside;
    return body();
  }
  struct Inside {
    Inside() { ++depth; }
    ~Inside() { --depth; }
    static inline thread_local int depth = 0;
  };

 public:
  // Whether this thread is in the device; its allocations are then not those of the code under test.
  static bool is_inside() { return Inside::depth != 0; }

  // Takes the place of libibverbs until this object ends. There may be one at a time.
  explicit Fabric(const Limits& limits = {}, std::uint64_t seed = check::seed());
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  static const Library& library();

  Counts counts() const {
    return locked([this] { return counts_; });
  }
  void forget_counts() {
    locked([this] { counts_ = {}; });
  }

  // ---- faults
  // Nothing moves on all devices, or on one, while it is held. Flushed requests are still reported.
  void hold(bool held, int device = -1);
  // The same for queue pairs whose packets have that traffic class.
  void hold_class(std::uint8_t traffic_class, bool held);
  // Flushed requests are not reported either.
  void hold_flushes(bool held);
  // After `after` more requests on any queue pair, one ends with that status.
  void fail(abi::WorkStatus status, std::uint64_t after = 0) {
    locked([&] { failure_ = {{status, after}}; });
  }
  // The next doorbell is refused from its request number `from` on.
  void refuse(std::uint64_t from, int error) {
    locked([&] { refusal_ = {{from, error}}; });
  }
  void announce(int device, abi::EventKind kind);  // of its ports
  void set_port(int device, bool active);
  // Packets from addresses at that index of ports' tables get lost; -1: none do.
  void lose(int gid_index) {
    locked([&] { lost_gid_ = gid_index; });
  }
  // No host answers for a device's addresses: connecting a queue pair to one of them blocks until let_go, and
  // then fails with its error (0: it succeeds after all).
  void stall(int device) {
    locked([&] { stalled_device_ = device; });
  }
  void let_go(int error = 0) {
    locked([&] {
      stall_error_ = error;
      stalled_device_ = -1;
      ++num_let_go_;
    });
    let_go_.notify_all();
  }
  std::size_t num_stalled() const {  // queue pairs that are blocked now
    return locked([this] { return num_stalled_; });
  }
  // There is no route to addresses at that index of ports' tables; -1: to all there is.
  void lose_way_to(int gid_index) {
    locked([&] { wayless_gid_ = gid_index; });
  }
  // The network between drops larger packets, although the ports agree on more.
  void narrow(std::uint64_t nbytes) {
    locked([&] { most_passed_nbytes_ = nbytes; });
  }
  void limit_registered(std::uint64_t nbytes) {
    locked([&] { limits_.most_registered_nbytes = nbytes; });
  }
  void refuse_writable(
      bool refused) {  // memory may only be read: registering it for writes fails with EFAULT
    locked([&] { refuses_writable_ = refused; });
  }
  // ---- memory of GPUs
  // Addresses for which `is_gpu` returns true cannot be registered directly, as without nvidia-peermem.
  void refuse_addresses(bool (*is_gpu)(std::uint64_t address)) {
    locked([&] { is_gpu_ = is_gpu; });
  }
  // From now on, writes to memory that came as a dmabuf are visible only after a flush.
  void hold_gpu_writes(bool held) {
    locked([&] { gpu_writes_held_ = held; });
  }
  static void flush_gpu() {
    self().locked([] {
      for (const auto& [to, bytes] : std::exchange(self().unseen_, {}))
        std::memcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size());
    });
  }
  std::size_t num_dmabufs() const {
    return locked([this] { return dmabufs_.size(); });
  }
  std::size_t num_pairs() const {
    return locked([this] { return pairs_.size(); });
  }
  std::size_t num_regions() const {
    return locked([this] { return regions_.size(); });
  }
  std::uint64_t num_under_way() const;
  // Of connected queue pairs, in the order in which they were made: the device, and the path of the packets.
  std::vector<std::pair<int, abi::AddressHandle>> addresses() const {
    return locked([this] {
      std::vector<std::pair<int, abi::AddressHandle>> all;
      for (const auto& [number, pair] : pairs_)
        if (pair->state == abi::QueuePairState::kReadyToSend)
          all.emplace_back(pair->nic->index, pair->attributes.address);
      return all;
    });
  }

 private:
  struct Nic {
    int index = 0;
    std::string name;
    bool active = true, held = false;
    std::set<Context*> contexts;
  };
  struct Context : abi::Context {
    Nic* nic = nullptr;
    std::deque<abi::AsyncEvent> events;
    std::size_t num_objects = 0;
  };
  struct Channel : abi::CompletionChannel { std::deque<Queue*> events; };
  struct Domain : abi::ProtectionDomain { std::size_t num_objects = 0; };
  struct Queue : abi::CompletionQueue {
    std::deque<abi::WorkCompletion> entries;
    std::vector<Pair*> pairs;
    bool armed = false;
    std::size_t num_unacknowledged = 0;
    std::vector<abi::WorkCompletion> ended;  // of a device that does nothing
    std::size_t num_taken = 0;  // of them
  };
  struct Request {
    std::uint64_t id, address;
    unsigned flags;
    std::uint32_t rkey, immediate;
    int opcode;
    std::vector<abi::ScatterEntry> entries;
    bool began = false;  // some of its bytes have landed
  };
  struct Pair : abi::QueuePair {
    abi::QueuePairCapacity capacity{};
    abi::QueuePairAttributes attributes{};
    std::deque<Request> requests;
    std::deque<std::uint64_t> receives;
    std::deque<std::uint64_t> slots;  // of requests whose end no poll has seen yet
    Nic* nic = nullptr;
  };

  static Fabric*& current() {
    static Fabric* the_fabric = nullptr;
    return the_fabric;
  }
  static Fabric& self() { return *current(); }
  static void misuse(const std::string& what) { check::fail(__FILE__, __LINE__, "counting device: " + what); }

  // ---- the library's functions
  static abi::Device** get_device_list(int* num);
  static void free_device_list(abi::Device** list) { delete[] list; }
  static const char* get_device_name(abi::Device* device) {
    return reinterpret_cast<Nic*>(device)->name.c_str();
  }
  static abi::Context* open_device(abi::Device* device);
  static int close_device(abi::Context* context);
  static int query_device(abi::Context* context, abi::DeviceAttributes* attributes);
  static int query_port(abi::Context* context, std::uint8_t port, abi::PortAttributes* attributes);
  static int query_gid(abi::Context* context, std::uint8_t port, int index, abi::Gid* gid);
  static GidType gid_type(const char*, std::uint8_t, int index) {
    return index == 0 ? GidType::kRoceV1 : GidType::kRoceV2;
  }
  static abi::ProtectionDomain* alloc_pd(abi::Context* context);
  static int dealloc_pd(abi::ProtectionDomain* domain);
  static abi::MemoryRegion* reg_mr(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                   int access);
  static abi::MemoryRegion* reg_mr_iova2(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                         std::uint64_t iova, unsigned access);
  static abi::MemoryRegion* reg_dmabuf_mr(abi::ProtectionDomain* domain, std::uint64_t offset,
                                          std::size_t nbytes, std::uint64_t iova, int fd, int access);
  static int dereg_mr(abi::MemoryRegion* region);
  static abi::CompletionChannel* create_comp_channel(abi::Context* context);
  static int destroy_comp_channel(abi::CompletionChannel* channel);
  static abi::CompletionQueue* create_cq(abi::Context* context, int num_entries, void* cq_context,
                                         abi::CompletionChannel* channel, int vector);
  static int destroy_cq(abi::CompletionQueue* queue);
  static int get_cq_event(abi::CompletionChannel* channel, abi::CompletionQueue** queue, void** cq_context);
  static void ack_cq_events(abi::CompletionQueue* queue, unsigned num);
  static abi::QueuePair* create_qp(abi::ProtectionDomain* domain, abi::QueuePairInit* init);
  static int modify_qp(abi::QueuePair* pair, abi::QueuePairAttributes* attributes, int mask);
  int find_way(const abi::Gid& to);  // an error, where none leads there
  static int destroy_qp(abi::QueuePair* pair);
  static int get_async_event(abi::Context* context, abi::AsyncEvent* event);
  static void ack_async_event(abi::AsyncEvent*) {}
  static const char* wc_status_str(abi::WorkStatus status);
  static const char* event_type_str(abi::EventKind kind);
  static int poll_cq(abi::CompletionQueue* queue, int num, abi::WorkCompletion* completions);
  static int req_notify_cq(abi::CompletionQueue* queue, int solicited_only);
  static int post_send(abi::QueuePair* pair, abi::SendRequest* requests, abi::SendRequest** refused);
  static int post_recv(abi::QueuePair* pair, abi::ReceiveRequest* requests, abi::ReceiveRequest** refused);
  static int post_nothing(abi::QueuePair* pair, abi::SendRequest* requests, abi::SendRequest** refused);
  static int poll_ended(abi::CompletionQueue* queue, int num, abi::WorkCompletion* completions);

  // ---- with the lock
  static void ring(int fd) {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(fd, &one, sizeof one));
  }
  static bool hear(int fd) {
    std::uint64_t one;
    return ::read(fd, &one, sizeof one) == sizeof one;
  }
  bool is_held(const Pair& pair) const {
    return held_ || pair.nic->held || held_classes_.contains(pair.attributes.address.grh.traffic_class);
  }
  bool can_move(const Pair& pair) const {
    if (pair.requests.empty()) return false;
    if (pair.state == abi::QueuePairState::kError) return !flushes_held_;
    return pair.state == abi::QueuePairState::kReadyToSend && !is_held(pair);
  }
  void land(const Request& request, std::byte* remote, bool half);
  void land(std::uint64_t to, std::uint32_t key, const std::byte* from, std::uint32_t nbytes);
  void move_one(Pair& pair);
  void move_some(Queue& queue);
  void go_on_while_armed(Queue& queue);
  void go_on() {
    for (const auto& [number, pair] : pairs_) go_on_while_armed(*static_cast<Queue*>(pair->send_cq));
  }
  void complete(Pair& pair, const Request& request, abi::WorkStatus status);
  void tell(Queue& queue, const abi::WorkCompletion& entry);
  void fail_pair(Pair& pair);  // with what it was to receive
  void drop_receives(Pair& pair);
  std::optional<abi::WorkStatus> judge(const Pair& pair, const Request& request, std::byte** remote);
  void tell(Nic& nic, const abi::AsyncEvent& event);
  bool is_unreachable(const void* address) const {
    const bool is_so =
        locked([&] { return is_gpu_ != nullptr && is_gpu_(reinterpret_cast<std::uintptr_t>(address)); });
    if (is_so) errno = EFAULT;
    return is_so;
  }
  abi::MemoryRegion* add_region(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                unsigned access);
  Pair* find(std::uint32_t number) {
    const auto found = pairs_.find(number);
    return found == pairs_.end() ? nullptr : found->second;
  }

  mutable std::mutex mutex_;
  Limits limits_;
  check::Random random_;
  Counts counts_;
  std::vector<std::unique_ptr<Nic>> nics_;
  std::map<std::uint32_t, Pair*> pairs_;  // by number
  std::map<std::uint32_t, std::pair<abi::MemoryRegion*, unsigned>> regions_;  // by key, with their access
  std::uint32_t next_key_ = 0x100, next_pair_ = 17;
  std::set<std::uint32_t> dmabufs_;  // local keys
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> unseen_;  // bytes, and where they land
  bool (*is_gpu_)(std::uint64_t address) = nullptr;
  bool gpu_writes_held_ = false;
  std::uint64_t registered_nbytes_ = 0;
  std::set<std::uint8_t> held_classes_;
  bool held_ = false, flushes_held_ = false, refuses_writable_ = false;
  int lost_gid_ = -1, wayless_gid_ = -1;
  std::uint64_t most_passed_nbytes_ = UINT64_MAX;  // in a packet
  int stalled_device_ = -1, stall_error_ = 0;
  std::uint64_t num_let_go_ = 0;
  std::size_t num_stalled_ = 0;
  std::condition_variable let_go_;
  std::optional<std::pair<abi::WorkStatus, std::uint64_t>> failure_;
  std::optional<std::pair<std::uint64_t, int>> refusal_;
};

// ---- of the fabric ------------------------------------------------------------------------------

inline Fabric::Fabric(const Limits& limits, std::uint64_t seed) : limits_(limits), random_(seed) {
  for (int i = 0; i < limits.num_devices; ++i) {
    nics_.push_back(std::make_unique<Nic>());
    nics_.back()->index = i;
    nics_.back()->name = "nic" + std::to_string(i);
  }
  current() = this;
  Library::replace(&library());
}

inline Fabric::~Fabric() {
  Library::replace(nullptr);
  if (!pairs_.empty() || !regions_.empty()) misuse("queue pairs or registrations are left");
  for (const auto& nic : nics_)
    if (!nic->contexts.empty()) misuse("a device is left open");
  current() = nullptr;
}

inline const Library& Fabric::library() {
  static const Library table = {get_device_list,
                                free_device_list,
                                get_device_name,
                                open_device,
                                close_device,
                                query_device,
                                query_port,
                                query_gid,
                                alloc_pd,
                                dealloc_pd,
                                reg_mr,
                                reg_mr_iova2,
                                reg_dmabuf_mr,
                                dereg_mr,
                                create_comp_channel,
                                destroy_comp_channel,
                                create_cq,
                                destroy_cq,
                                get_cq_event,
                                ack_cq_events,
                                create_qp,
                                modify_qp,
                                destroy_qp,
                                get_async_event,
                                ack_async_event,
                                wc_status_str,
                                event_type_str,
                                gid_type};
  return table;
}

inline void Fabric::hold(bool held, int device) {
  locked([&] {
    (device < 0 ? held_ : nics_[static_cast<std::size_t>(device)]->held) = held;
    go_on();
  });
}

inline void Fabric::hold_class(std::uint8_t traffic_class, bool held) {
  locked([&] {
    if (held)
      held_classes_.insert(traffic_class);
    else
      held_classes_.erase(traffic_class);
    go_on();
  });
}

inline void Fabric::hold_flushes(bool held) {
  locked([&] {
    flushes_held_ = held;
    go_on();
  });
}

inline void Fabric::announce(int device, abi::EventKind kind) {
  locked([&] {
    abi::AsyncEvent event{};
    event.kind = kind;
    event.element.port_num = 1;
    tell(*nics_[static_cast<std::size_t>(device)], event);
  });
}

inline void Fabric::set_port(int device, bool active) {
  locked([&] { nics_[static_cast<std::size_t>(device)]->active = active; });
  announce(device, active ? abi::EventKind::kPortActive : abi::EventKind::kPortError);
}

inline std::uint64_t Fabric::num_under_way() const {
  return locked([this] {
    std::uint64_t num = 0;
    for (const auto& [number, pair] : pairs_) num += pair->requests.size();
    return num;
  });
}

inline void Fabric::tell(Nic& nic, const abi::AsyncEvent& event) {
  for (Context* context : nic.contexts) {
    context->events.push_back(event);
    ring(context->async_fd);
  }
}

// ---- devices ------------------------------------------------------------------------------------

inline abi::Device** Fabric::get_device_list(int* num) {
  auto** const list = new abi::Device*[self().nics_.size() + 1]();
  for (std::size_t i = 0; i < self().nics_.size(); ++i)
    list[i] = reinterpret_cast<abi::Device*>(self().nics_[i].get());
  *num = static_cast<int>(self().nics_.size());
  return list;
}

inline abi::Context* Fabric::open_device(abi::Device* device) {
  auto* const context = new Context();
  context->device = device;
  context->nic = reinterpret_cast<Nic*>(device);
  context->operations.poll_cq = poll_cq;
  context->operations.req_notify_cq = req_notify_cq;
  context->operations.post_send = post_send;
  context->operations.post_recv = post_recv;
  if (self().limits_.does_nothing) {
    context->operations.post_send = post_nothing;
    context->operations.poll_cq = poll_ended;
  }
  context->async_fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  self().locked([&] { context->nic->contexts.insert(context); });
  return context;
}

inline int Fabric::close_device(abi::Context* of) {
  auto* const context = static_cast<Context*>(of);
  if (context->num_objects != 0) misuse("a device is closed that has something left");
  self().locked([&] { context->nic->contexts.erase(context); });
  ::close(context->async_fd);
  delete context;
  return 0;
}

inline int Fabric::query_device(abi::Context*, abi::DeviceAttributes* attributes) {
  const Limits& limits = self().limits_;
  *attributes = {};
  attributes->max_mr_size = limits.max_mr_nbytes;
  attributes->max_qp = limits.max_qp;
  attributes->max_qp_wr = limits.max_qp_wr;
  attributes->max_sge = limits.max_sge;
  attributes->max_sge_rd = limits.max_sge_rd;
  attributes->max_cqe = 1 << 22;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = limits.max_reads;
  attributes->phys_port_cnt = static_cast<std::uint8_t>(limits.num_ports);
  return 0;
}

inline int Fabric::query_port(abi::Context* of, std::uint8_t port, abi::PortAttributes* attributes) {
  if (port == 0 || port > self().limits_.num_ports) return EINVAL;
  return self().locked([&] {
    *attributes = {};
    attributes->state = static_cast<Context*>(of)->nic->active ? abi::PortState::kActive : abi::PortState(1);
    attributes->max_mtu = abi::Mtu::k4096;
    attributes->active_mtu = abi::Mtu::k1024;
    attributes->gid_tbl_len = 3;
    attributes->max_msg_sz = 1u << 31;
    attributes->link_layer = self().limits_.link;
    attributes->lid = static_cast<std::uint16_t>(static_cast<Context*>(of)->nic->index + 1);
    return 0;
  });
}

inline int Fabric::query_gid(abi::Context* of, std::uint8_t, int index, abi::Gid* gid) {
  *gid = {};
  const int number = static_cast<Context*>(of)->nic->index + 1;
  if (index < 2) {
    gid->raw[0] = 0xfe;
    gid->raw[1] = 0x80;
  } else {
    gid->raw[10] = gid->raw[11] = 0xff;
    gid->raw[12] = 10;
  }
  gid->raw[15] = static_cast<std::uint8_t>(number);
  return index < 3 ? 0 : EINVAL;
}

inline abi::ProtectionDomain* Fabric::alloc_pd(abi::Context* context) {
  auto* const domain = new Domain();
  domain->context = context;
  ++static_cast<Context*>(context)->num_objects;
  return domain;
}

inline int Fabric::dealloc_pd(abi::ProtectionDomain* of) {
  auto* const domain = static_cast<Domain*>(of);
  if (domain->num_objects != 0) misuse("a protection domain ends that has something left");
  --static_cast<Context*>(domain->context)->num_objects;
  delete domain;
  return 0;
}

// ---- memory -------------------------------------------------------------------------------------

inline abi::MemoryRegion* Fabric::add_region(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                             unsigned access) {
  return locked([&]() -> abi::MemoryRegion* {
    errno = 0;
    if (nbytes == 0 || nbytes > limits_.max_mr_nbytes) errno = EINVAL;
    if (registered_nbytes_ + nbytes > limits_.most_registered_nbytes) errno = ENOMEM;
    if (refuses_writable_ && (access & abi::kLocalWrite) != 0) errno = EFAULT;
    if (errno != 0) return nullptr;
    auto* const region =
        new abi::MemoryRegion{domain->context, domain, address, nbytes, 0, next_key_, next_key_ + 1};
    next_key_ += 1 + static_cast<std::uint32_t>(random_.between(1, 9));
    registered_nbytes_ += nbytes;
    regions_[region->lkey] = regions_[region->rkey] = {region, access};
    next_key_ += 1;
    ++static_cast<Domain*>(domain)->num_objects;
    return region;
  });
}

inline abi::MemoryRegion* Fabric::reg_mr(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                         int access) {
  if (self().is_unreachable(address)) return nullptr;
  return self().add_region(domain, address, nbytes, static_cast<unsigned>(access));
}

inline abi::MemoryRegion* Fabric::reg_mr_iova2(abi::ProtectionDomain* domain, void* address,
                                               std::size_t nbytes, std::uint64_t iova, unsigned access) {
  if (iova != reinterpret_cast<std::uintptr_t>(address))
    misuse("a registration at another address than its memory's");
  if (self().is_unreachable(address)) return nullptr;
  return self().add_region(domain, address, nbytes, access);
}

inline abi::MemoryRegion* Fabric::reg_dmabuf_mr(abi::ProtectionDomain* domain, std::uint64_t offset,
                                                std::size_t nbytes, std::uint64_t iova, int fd, int access) {
  struct { std::uint64_t address, nbytes; } stretch{};  // as the emulated driver wrote it
  if (::pread(fd, &stretch, sizeof stretch, 0) != sizeof stretch || nbytes > stretch.nbytes ||
      offset > stretch.nbytes - nbytes || stretch.address + offset != iova) {
    errno = EINVAL;
    return nullptr;
  }
  abi::MemoryRegion* const region =
      self().add_region(domain, reinterpret_cast<void*>(iova), nbytes, static_cast<unsigned>(access));
  if (region != nullptr) self().locked([&] { self().dmabufs_.insert(region->lkey); });
  return region;
}

inline int Fabric::dereg_mr(abi::MemoryRegion* region) {
  self().locked([&] {
    self().dmabufs_.erase(region->lkey);
    self().regions_.erase(region->lkey);
    self().regions_.erase(region->rkey);
    self().registered_nbytes_ -= region->length;
    --static_cast<Domain*>(region->domain)->num_objects;
  });
  delete region;
  return 0;
}

// ---- completions --------------------------------------------------------------------------------

inline abi::CompletionChannel* Fabric::create_comp_channel(abi::Context* context) {
  auto* const channel = new Channel();
  channel->context = context;
  channel->fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
  ++static_cast<Context*>(context)->num_objects;
  return channel;
}

inline int Fabric::destroy_comp_channel(abi::CompletionChannel* of) {
  auto* const channel = static_cast<Channel*>(of);
  if (channel->refcnt != 0) misuse("a channel ends that has completion queues");
  --static_cast<Context*>(channel->context)->num_objects;
  ::close(channel->fd);
  delete channel;
  return 0;
}

inline abi::CompletionQueue* Fabric::create_cq(abi::Context* context, int num_entries, void* cq_context,
                                               abi::CompletionChannel* channel, int) {
  auto* const queue = new Queue();
  queue->context = context;
  queue->channel = channel;
  queue->cq_context = cq_context;
  queue->cqe = num_entries;
  self().locked([&] {
    ++channel->refcnt;
    ++static_cast<Context*>(context)->num_objects;
  });
  return queue;
}

inline int Fabric::destroy_cq(abi::CompletionQueue* of) {
  auto* const queue = static_cast<Queue*>(of);
  self().locked([&] {
    if (!queue->pairs.empty()) misuse("a completion queue ends that has queue pairs");
    if (queue->num_unacknowledged != 0)
      misuse("a completion queue ends whose events were not acknowledged: it hangs");
    auto* const channel = static_cast<Channel*>(queue->channel);
    const auto gone = std::erase(channel->events, queue);
    for (std::size_t i = 0; i < gone; ++i) hear(channel->fd);
    --channel->refcnt;
    --static_cast<Context*>(queue->context)->num_objects;
  });
  delete queue;
  return 0;
}

inline int Fabric::get_cq_event(abi::CompletionChannel* of, abi::CompletionQueue** queue, void** cq_context) {
  auto* const channel = static_cast<Channel*>(of);
  return self().locked([&] {
    if (channel->events.empty() || !hear(channel->fd)) {
      errno = EAGAIN;
      return -1;
    }
    Queue* const told = channel->events.front();
    channel->events.pop_front();
    ++told->num_unacknowledged;
    *queue = told;
    *cq_context = told->cq_context;
    return 0;
  });
}

inline void Fabric::ack_cq_events(abi::CompletionQueue* queue, unsigned num) {
  self().locked([&] { static_cast<Queue*>(queue)->num_unacknowledged -= num; });
}

inline int Fabric::get_async_event(abi::Context* of, abi::AsyncEvent* event) {
  auto* const context = static_cast<Context*>(of);
  return self().locked([&] {
    if (context->events.empty() || !hear(context->async_fd)) {
      errno = EAGAIN;
      return -1;
    }
    *event = context->events.front();
    context->events.pop_front();
    return 0;
  });
}

inline const char* Fabric::wc_status_str(abi::WorkStatus status) {
  switch (status) {
    case abi::WorkStatus::kSuccess: return "success";
    case abi::WorkStatus::kLocalProtection: return "local protection error";
    case abi::WorkStatus::kFlushed: return "Work Request Flushed Error";
    case abi::WorkStatus::kRemoteAccess: return "remote access error";
    case abi::WorkStatus::kRetriesExceeded: return "transport retry counter exceeded";
    default: return "some other error";
  }
}

inline const char* Fabric::event_type_str(abi::EventKind kind) {
  switch (kind) {
    case abi::EventKind::kPortError: return "port error";
    case abi::EventKind::kDeviceFatal: return "local catastrophic error";
    case abi::EventKind::kQpAccessError: return "local access violation work queue error";
    default: return "some other event";
  }
}

// ---- queue pairs --------------------------------------------------------------------------------

inline abi::QueuePair* Fabric::create_qp(abi::ProtectionDomain* domain, abi::QueuePairInit* init) {
  Fabric& fabric = self();
  return fabric.locked([&]() -> abi::QueuePair* {
    const Limits& limits = fabric.limits_;
    const auto& wished = init->capacity;
    errno = 0;
    if (init->qp_type != abi::kReliableConnection ||
        wished.max_send_wr > static_cast<unsigned>(limits.max_qp_wr) ||
        wished.max_send_sge > static_cast<unsigned>(limits.max_sge))
      errno = EINVAL;
    if (fabric.pairs_.size() >= static_cast<std::size_t>(limits.max_qp)) errno = ENOMEM;
    if (errno != 0) return nullptr;
    auto* const pair = new Pair();
    pair->context = domain->context;
    pair->domain = domain;
    pair->send_cq = init->send_cq;
    pair->recv_cq = init->recv_cq;
    pair->capacity = wished;
    pair->qp_type = init->qp_type;
    pair->nic = static_cast<Context*>(domain->context)->nic;
    pair->qp_num = fabric.next_pair_;
    fabric.next_pair_ += static_cast<std::uint32_t>(fabric.random_.between(1, 5));
    fabric.pairs_[pair->qp_num] = pair;
    static_cast<Queue*>(pair->send_cq)->pairs.push_back(pair);
    ++static_cast<Domain*>(domain)->num_objects;
    return pair;
  });
}

inline int Fabric::find_way(const abi::Gid& to) {
  const Inside inside;
  std::unique_lock lock(mutex_);
  if (wayless_gid_ >= 0 && (to.raw[0] == 0) == (wayless_gid_ == 2)) return EHOSTUNREACH;
  if (stalled_device_ < 0 || int{to.raw[15]} != stalled_device_ + 1) return 0;
  ++num_stalled_;
  let_go_.wait(lock, [&, before = num_let_go_] { return num_let_go_ != before; });
  --num_stalled_;
  return stall_error_;
}

inline int Fabric::modify_qp(abi::QueuePair* of, abi::QueuePairAttributes* attributes, int mask) {
  using State = abi::QueuePairState;
  auto* const pair = static_cast<Pair*>(of);
  Fabric& fabric = self();
  if (attributes->qp_state == State::kReadyToReceive)
    if (const int error = fabric.find_way(attributes->address.grh.dgid); error != 0) return error;
  return fabric.locked([&] {
    const auto needs = [&](int all) { return (mask & all) == all; };
    if (!needs(abi::kMaskState)) return EINVAL;
    abi::QueuePairAttributes& has = pair->attributes;
    switch (attributes->qp_state) {
      case State::kInit:
        if (pair->state != State::kReset || !needs(abi::kMaskPkeyIndex | abi::kMaskPort | abi::kMaskAccess) ||
            attributes->pkey_index != 0)
          return EINVAL;
        has.qp_access_flags = attributes->qp_access_flags;
        break;
      case State::kReadyToReceive:
        if (pair->state != State::kInit ||
            !needs(abi::kMaskAddress | abi::kMaskPathMtu | abi::kMaskDestQpn | abi::kMaskRqPsn |
                   abi::kMaskMaxDestReads | abi::kMaskMinRnrTimer) ||
            attributes->path_mtu > abi::Mtu::k1024 ||
            attributes->max_dest_rd_atomic > static_cast<unsigned>(fabric.limits_.max_reads))
          return EINVAL;
        if (fabric.limits_.link == abi::LinkLayer::kEthernet &&
            (attributes->address.is_global == 0 || attributes->address.grh.sgid_index > 2))
          return EINVAL;
        has.address = attributes->address;
        has.path_mtu = attributes->path_mtu;
        has.dest_qp_num = attributes->dest_qp_num;
        has.rq_psn = attributes->rq_psn;
        break;
      case State::kReadyToSend:
        if (pair->state != State::kReadyToReceive ||
            !needs(abi::kMaskSqPsn | abi::kMaskTimeout | abi::kMaskRetries | abi::kMaskRnrRetries |
                   abi::kMaskMaxReads) ||
            attributes->max_rd_atomic > fabric.limits_.max_reads || attributes->max_rd_atomic == 0)
          return EINVAL;
        has.sq_psn = attributes->sq_psn;
        break;
      case State::kError: break;
      default: return EINVAL;
    }
    pair->state = attributes->qp_state;
    if (pair->state == State::kError) fabric.fail_pair(*pair);
    return 0;
  });
}

inline int Fabric::destroy_qp(abi::QueuePair* of) {
  auto* const pair = static_cast<Pair*>(of);
  self().locked([&] {
    auto* const queue = static_cast<Queue*>(pair->send_cq);
    std::erase(queue->pairs, pair);
    std::erase_if(queue->entries,
                  [&](const abi::WorkCompletion& entry) { return entry.qp_num == pair->qp_num; });
    self().pairs_.erase(pair->qp_num);
    --static_cast<Domain*>(pair->domain)->num_objects;
  });
  delete pair;
  return 0;
}

inline int Fabric::post_send(abi::QueuePair* of, abi::SendRequest* requests, abi::SendRequest** refused) {
  auto* const pair = static_cast<Pair*>(of);
  Fabric& fabric = self();
  return fabric.locked([&] {
    const auto refusal = std::exchange(fabric.refusal_, std::nullopt);
    ++fabric.counts_.doorbells;
    std::uint64_t num = 0, nbytes = 0;
    for (abi::SendRequest* request = requests; request != nullptr; request = request->next, ++num) {
      *refused = request;
      if (refusal && refusal->first == num) return refusal->second;
      if (pair->state != abi::QueuePairState::kReadyToSend && pair->state != abi::QueuePairState::kError)
        return EINVAL;
      if (pair->slots.size() >= pair->capacity.max_send_wr) return ENOMEM;
      const bool is_write =
          request->opcode == abi::kRdmaWrite || request->opcode == abi::kRdmaWriteWithImmediate;
      if ((request->opcode != abi::kRdmaRead && !is_write) || request->num_entries < (is_write ? 0 : 1) ||
          static_cast<unsigned>(request->num_entries) > pair->capacity.max_send_sge)
        return EINVAL;
      Request taken{request->id,
                    request->remote.rdma.address,
                    request->flags,
                    request->remote.rdma.rkey,
                    request->immediate,
                    request->opcode,
                    {}};
      taken.entries.assign(request->entries, request->entries + request->num_entries);
      for (const abi::ScatterEntry& entry : taken.entries) nbytes += entry.length;
      fabric.counts_.entries += taken.entries.size();
      ++fabric.counts_.requests;
      if ((request->flags & abi::kSignaled) != 0) ++fabric.counts_.signalled;
      pair->slots.push_back(request->id);
      pair->requests.push_back(std::move(taken));
    }
    fabric.counts_.nbytes += nbytes;
    if (const auto index = static_cast<std::size_t>(pair->nic->index);
        index < fabric.counts_.nbytes_of.size())
      fabric.counts_.nbytes_of[index] += nbytes;
    fabric.counts_.longest_chain = std::max(fabric.counts_.longest_chain, num);
    fabric.counts_.largest_chain_nbytes = std::max(fabric.counts_.largest_chain_nbytes, nbytes);
    fabric.go_on_while_armed(*static_cast<Queue*>(pair->send_cq));
    return 0;
  });
}

// Of the thread that has the agent's gate: nothing here is another's.
inline int Fabric::post_nothing(abi::QueuePair* of, abi::SendRequest* requests, abi::SendRequest**) {
  auto* const queue = static_cast<Queue*>(of->send_cq);
  for (abi::SendRequest* request = requests; request != nullptr; request = request->next) {
    if (request->num_entries == 1 && request->entries->length == sizeof(std::uint64_t))
      std::memcpy(reinterpret_cast<void*>(request->entries->address),
                  reinterpret_cast<const void*>(request->remote.rdma.address), sizeof(std::uint64_t));
    if ((request->flags & abi::kSignaled) == 0) continue;
    abi::WorkCompletion& ended = queue->ended.emplace_back();
    ended.id = request->id;
    ended.qp_num = of->qp_num;
  }
  return 0;
}

inline int Fabric::poll_ended(abi::CompletionQueue* of, int num, abi::WorkCompletion* completions) {
  auto* const queue = static_cast<Queue*>(of);
  int taken = 0;
  while (taken < num && queue->num_taken < queue->ended.size())
    completions[taken++] = queue->ended[queue->num_taken++];
  if (queue->num_taken == queue->ended.size()) queue->ended.clear(), queue->num_taken = 0;
  return taken == 0 ? poll_cq(of, num, completions) : taken;  // what was flushed
}

inline int Fabric::post_recv(abi::QueuePair* of, abi::ReceiveRequest* requests,
                             abi::ReceiveRequest** refused) {
  auto* const pair = static_cast<Pair*>(of);
  return self().locked([&] {
    for (abi::ReceiveRequest* request = requests; request != nullptr; request = request->next) {
      *refused = request;
      if (pair->state == abi::QueuePairState::kReset) return EINVAL;
      if (pair->receives.size() >= pair->capacity.max_recv_wr) return ENOMEM;
      pair->receives.push_back(request->id);
    }
    return 0;
  });
}

// ---- what moves ---------------------------------------------------------------------------------

inline int Fabric::poll_cq(abi::CompletionQueue* of, int num, abi::WorkCompletion* completions) {
  auto* const queue = static_cast<Queue*>(of);
  Fabric& fabric = self();
  return fabric.locked([&] {
    fabric.move_some(*queue);
    int taken = 0;
    for (; taken < num && !queue->entries.empty(); ++taken) {
      const abi::WorkCompletion entry = queue->entries.front();
      queue->entries.pop_front();
      Pair& pair = *fabric.find(entry.qp_num);
      while (entry.opcode != abi::kReceivedWithImmediate && !pair.slots.empty()) {
        const std::uint64_t id = pair.slots.front();
        pair.slots.pop_front();
        if (id == entry.id) break;
      }
      // Where it is an error the rest is not valid.
      completions[taken] = entry;
      if (entry.status != abi::WorkStatus::kSuccess)
        completions[taken].opcode = static_cast<int>(fabric.random_.next());
    }
    fabric.counts_.completions += static_cast<std::uint64_t>(taken);
    fabric.go_on_while_armed(*queue);
    return taken;
  });
}

inline int Fabric::req_notify_cq(abi::CompletionQueue* of, int) {
  self().locked([&] { static_cast<Queue*>(of)->armed = true; });
  return 0;
}

inline void Fabric::move_some(Queue& queue) {
  if (queue.pairs.empty()) return;
  const std::size_t first = random_.below(queue.pairs.size());
  for (std::size_t i = 0; i < queue.pairs.size(); ++i) {
    Pair& pair = *queue.pairs[(first + i) % queue.pairs.size()];
    std::uint64_t num = limits_.at_once ? UINT64_MAX : random_.chance(30) ? 0 : random_.below(80);
    for (; num > 0 && can_move(pair); --num) move_one(pair);
  }
}

inline void Fabric::go_on_while_armed(Queue& queue) {
  while (queue.armed) {
    const auto moves = [this](const Pair* pair) { return can_move(*pair); };
    const auto found = std::find_if(queue.pairs.begin(), queue.pairs.end(), moves);
    if (found == queue.pairs.end()) return;
    move_one(**found);
  }
}

inline void Fabric::complete(Pair& pair, const Request& request, abi::WorkStatus status) {
  if (status == abi::WorkStatus::kSuccess && (request.flags & abi::kSignaled) == 0) return;
  auto& queue = *static_cast<Queue*>(pair.send_cq);
  abi::WorkCompletion entry{};
  entry.id = request.id;
  entry.status = status;
  entry.vendor_error = status == abi::WorkStatus::kSuccess ? 0 : 0x81;
  entry.qp_num = pair.qp_num;
  tell(queue, entry);
}

inline void Fabric::fail_pair(Pair& pair) {
  drop_receives(pair);
  go_on_while_armed(*static_cast<Queue*>(pair.send_cq));
}

inline void Fabric::drop_receives(Pair& pair) {
  pair.state = abi::QueuePairState::kError;
  for (const std::uint64_t id : std::exchange(pair.receives, {})) {
    abi::WorkCompletion entry{};
    entry.id = id;
    entry.status = abi::WorkStatus::kFlushed;
    entry.opcode = abi::kReceivedWithImmediate;
    entry.qp_num = pair.qp_num;
    tell(*static_cast<Queue*>(pair.recv_cq), entry);
  }
}

inline void Fabric::tell(Queue& queue, const abi::WorkCompletion& entry) {
  queue.entries.push_back(entry);
  if (queue.entries.size() > static_cast<std::size_t>(queue.cqe)) misuse("a completion queue overflows");
  if (!std::exchange(queue.armed, false)) return;
  ++counts_.notifications;
  auto* const channel = static_cast<Channel*>(queue.channel);
  channel->events.push_back(&queue);
  ring(channel->fd);
}

// What a request ends with before it moves anything, or where its bytes are.
inline std::optional<abi::WorkStatus> Fabric::judge(const Pair& pair, const Request& request,
                                                    std::byte** remote_at) {
  using Status = abi::WorkStatus;
  std::uint64_t nbytes = 0;
  const bool is_read = request.opcode == abi::kRdmaRead;
  for (const abi::ScatterEntry& entry : request.entries) {
    const auto local = regions_.find(entry.lkey);
    const auto* const memory = local == regions_.end() ? nullptr : local->second.first;
    const std::uint64_t base = memory == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(memory->address);
    if (memory == nullptr || memory->lkey != entry.lkey || memory->domain != pair.domain ||
        (is_read && (local->second.second & abi::kLocalWrite) == 0) || entry.address < base ||
        entry.address - base > memory->length || entry.length > memory->length - (entry.address - base))
      return Status::kLocalProtection;
    nbytes += entry.length;
  }
  Pair* const other = find(pair.attributes.dest_qp_num);
  // A packet that nobody takes is not answered.
  if (other == nullptr || !pair.nic->active || !other->nic->active ||
      int{pair.attributes.address.grh.sgid_index} == lost_gid_ ||
      (other->state != abi::QueuePairState::kReadyToReceive &&
       other->state != abi::QueuePairState::kReadyToSend) ||
      other->attributes.dest_qp_num != pair.qp_num || other->attributes.rq_psn != pair.attributes.sq_psn ||
      other->attributes.path_mtu != pair.attributes.path_mtu ||
      (limits_.link == abi::LinkLayer::kEthernet &&
       pair.attributes.address.grh.dgid.raw[15] != other->nic->index + 1))
    return Status::kRetriesExceeded;
  const std::uint64_t packet =
      std::min<std::uint64_t>(nbytes, 128u << static_cast<int>(pair.attributes.path_mtu));
  if (packet > most_passed_nbytes_) return Status::kRetriesExceeded;
  const auto remote = regions_.find(request.rkey);
  const auto* const memory = remote == regions_.end() ? nullptr : remote->second.first;
  const std::uint64_t base = memory == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(memory->address);
  const unsigned right = is_read ? abi::kRemoteRead : abi::kRemoteWrite;
  if ((other->attributes.qp_access_flags & right) == 0) return Status::kRemoteInvalidRequest;
  if (request.opcode == abi::kRdmaWriteWithImmediate && other->receives.empty())
    return Status::kRnrRetriesExceeded;
  if (nbytes == 0) return std::nullopt;
  if (memory == nullptr || memory->rkey != request.rkey || memory->domain != other->domain ||
      (remote->second.second & right) == 0 || request.address < base ||
      request.address - base > memory->length || nbytes > memory->length - (request.address - base)) {
    abi::AsyncEvent event{};
    event.kind = abi::EventKind::kQpAccessError;
    event.element.qp = other;
    auto* const context = static_cast<Context*>(other->context);
    context->events.push_back(event);
    ring(context->async_fd);
    fail_pair(*other);
    return Status::kRemoteAccess;
  }
  *remote_at = static_cast<std::byte*>(memory->address) + (request.address - base);
  return std::nullopt;
}

inline void Fabric::land(const Request& request, std::byte* remote, bool half) {
  const bool is_read = request.opcode == abi::kRdmaRead;
  for (const abi::ScatterEntry& entry : request.entries) {
    const std::uint32_t nbytes = half ? entry.length / 2 : entry.length;
    if (is_read)
      land(entry.address, entry.lkey, remote, nbytes);
    else
      land(reinterpret_cast<std::uintptr_t>(remote), regions_.at(request.rkey).first->lkey,
           reinterpret_cast<const std::byte*>(entry.address), nbytes);
    remote += entry.length;
  }
}

inline void Fabric::land(std::uint64_t to, std::uint32_t key, const std::byte* from, std::uint32_t nbytes) {
  if (gpu_writes_held_ && dmabufs_.contains(key))
    unseen_.emplace_back(to, std::vector(from, from + nbytes));
  else
    std::memcpy(reinterpret_cast<void*>(to), from, nbytes);
}

inline void Fabric::move_one(Pair& pair) {
  Request& request = pair.requests.front();
  std::optional<abi::WorkStatus> wrong;
  std::byte* from = nullptr;
  if (pair.state == abi::QueuePairState::kError) {
    wrong = abi::WorkStatus::kFlushed;
  } else {
    if (failure_ && !request.began && failure_->second-- == 0)
      wrong = std::exchange(failure_, std::nullopt)->first;
    if (!wrong) wrong = judge(pair, request, &from);
  }
  if (wrong) {
    // What was on its way when a queue pair was reset may land until its flush is told.
    if (*wrong == abi::WorkStatus::kFlushed && random_.chance(50) && !is_held(pair) &&
        !judge(pair, request, &from))
      land(request, from, false);
    drop_receives(pair);
    complete(pair, request, *wrong);
    pair.requests.pop_front();
    return;
  }
  // Some bytes of a request land before it completes.
  const bool half = !request.began && !limits_.at_once && random_.chance(10);
  land(request, from, half);
  request.began = true;
  if (half) return;
  if (request.opcode == abi::kRdmaWriteWithImmediate) {
    Pair& other = *find(pair.attributes.dest_qp_num);
    abi::WorkCompletion entry{};
    entry.id = other.receives.front();
    entry.opcode = abi::kReceivedWithImmediate;
    entry.immediate = request.immediate;
    entry.qp_num = other.qp_num;
    other.receives.pop_front();
    tell(*static_cast<Queue*>(other.recv_cq), entry);
  }
  complete(pair, request, abi::WorkStatus::kSuccess);
  pair.requests.pop_front();
}

}  // namespace counting_device
