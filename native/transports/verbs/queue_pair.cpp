#include "transports/verbs/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/system/random.h"

namespace kvxfer::verbs {
namespace {

// For messages that find no receive posted; there are no such messages.
constexpr std::uint8_t kMinRnrTimer = 12, kRnrRetries = 6;

Status failed_to(const Device& device, const std::string& what, int error) {
  Status status = Status::from_errno(device.name() + ": " + what, error);
  return {Code::kRailFailed, status.message()};
}

}  // namespace

// ---- one ----

Status QueuePair::init() {
  abi::QueuePairAttributes attributes{};
  attributes.qp_state = abi::QueuePairState::kInit;
  attributes.pkey_index = device_->options().pkey_index;
  attributes.port_num = device_->port();
  const bool takes_writes = device_->options().writes;
  attributes.qp_access_flags = abi::kRemoteRead | (takes_writes ? abi::kRemoteWrite : 0u);
  if (const int error = device_->library().modify_qp(
          pair_, &attributes, abi::kMaskState | abi::kMaskPkeyIndex | abi::kMaskPort | abi::kMaskAccess);
      error != 0)
    return failed_to(
        *device_, "a queue pair cannot be set up (is verbs.pkey_index right?): ibv_modify_qp to INIT", error);
  for (std::uint32_t i = 0; takes_writes && i < kNumReceives; ++i)
    if (Status posted = receive(); !posted.ok()) return posted;
  return {};
}

Status QueuePair::receive() {
  abi::ReceiveRequest request{request_id(index_, 0) | kReceiveBit, nullptr, nullptr, 0};
  abi::ReceiveRequest* refused = nullptr;
  if (const int error = pair_->context->operations.post_recv(pair_, &request, &refused); error != 0)
    return failed_to(*device_, "ibv_post_recv", error);
  return {};
}

Status QueuePair::connect(const Message& theirs, const PortAddress& ours, const std::string& way) {
  const Options& options = device_->options();
  const PairAddress& other = theirs.pairs[index_];
  abi::QueuePairAttributes attributes{};
  attributes.qp_state = abi::QueuePairState::kReadyToReceive;
  attributes.path_mtu = std::min(ours.mtu, static_cast<abi::Mtu>(theirs.mtu));
  attributes.dest_qp_num = other.number;
  attributes.rq_psn = other.first_packet;
  attributes.max_dest_rd_atomic = device_->num_reads_served();
  attributes.min_rnr_timer = kMinRnrTimer;
  abi::AddressHandle& address = attributes.address;
  address.dlid = theirs.lid;
  address.service_level = path_.service_level;
  address.static_rate = static_cast<std::uint8_t>(path_.rate);
  address.port_num = device_->port();
  // InfiniBand routes by LIDs within a subnet, and by GIDs between subnets; RoCE has GIDs alone.
  const bool is_routed = theirs.gid.global.subnet_prefix != ours.gid.global.subnet_prefix;
  if (device_->link() == abi::LinkLayer::kEthernet || theirs.lid == 0 || is_routed) {
    address.is_global = 1;
    address.grh.dgid = theirs.gid;
    address.grh.sgid_index = ours.gid_index;
    address.grh.hop_limit = options.hop_limit;
    address.grh.traffic_class = path_.traffic_class;
  }
  if (const int error = device_->library().modify_qp(pair_, &attributes,
                                                     abi::kMaskState | abi::kMaskAddress | abi::kMaskPathMtu |
                                                         abi::kMaskDestQpn | abi::kMaskRqPsn |
                                                         abi::kMaskMaxDestReads | abi::kMaskMinRnrTimer);
      error != 0)
    return failed_to(
        *device_,
        "there is no path " + way +
            " (is there a route, and does verbs.gid_index at both ends name GIDs of one network?): "
            "ibv_modify_qp to RTR",
        error);
  attributes = {};
  attributes.qp_state = abi::QueuePairState::kReadyToSend;
  attributes.sq_psn = first_packet_;
  attributes.timeout = options.timeout;
  attributes.retry_cnt = options.num_retries;
  attributes.rnr_retry = kRnrRetries;
  attributes.max_rd_atomic =
      std::min(device_->num_reads_asked(), std::max<std::uint8_t>(theirs.num_reads, 1));
  if (const int error =
          device_->library().modify_qp(pair_, &attributes,
                                       abi::kMaskState | abi::kMaskSqPsn | abi::kMaskTimeout |
                                           abi::kMaskRetries | abi::kMaskRnrRetries | abi::kMaskMaxReads);
      error != 0)
    return failed_to(*device_, "ibv_modify_qp to RTS", error);
  return {};
}

void QueuePair::reset() noexcept {
  abi::QueuePairAttributes attributes{};
  attributes.qp_state = abi::QueuePairState::kError;
  // If the device is gone this may fail; then what is posted ends when the pair is destroyed.
  static_cast<void>(device_->library().modify_qp(pair_, &attributes, abi::kMaskState));
}

void QueuePair::destroy() noexcept {
  if (pair_ != nullptr) device_->library().destroy_qp(std::exchange(pair_, nullptr));
}

void QueuePair::begin(Chain& chain, std::uint32_t most) const noexcept {
  const auto room = static_cast<std::uint32_t>(most_requests_ - (posted_ - completed_));
  chain.begin(std::min({most, room, device_->options().num_chained}), request_id(index_, posted_ + 1));
}

Status QueuePair::post(Chain& chain) {
  marks_.push({posted_ + chain.size(), posted_nbytes_ + chain.nbytes()});
  abi::SendRequest* refused = nullptr;
  const int error = pair_->context->operations.post_send(pair_, chain.finish(), &refused);
  posted_nbytes_ += chain.nbytes();
  posted_ += error == 0 ? chain.size() : chain.index_of(refused);
  if (error != 0) return failed_to(*device_, "ibv_post_send", error);
  return {};
}

void QueuePair::complete(std::uint64_t position) noexcept {
  if (position <= completed_ || position > posted_) return;
  completed_ = position;
  for (; !marks_.empty() && marks_.front().end <= position; marks_.pop())
    completed_nbytes_ = marks_.front().nbytes;
}

// ---- all of a peer's ----

Result<std::unique_ptr<QueuePairs>> QueuePairs::create(std::shared_ptr<const Device> device,
                                                       std::span<const GidRow> tried) {
  std::unique_ptr<QueuePairs> made(new QueuePairs(std::move(device)));
  if (Status opened = made->open(tried); !opened.ok()) return opened;
  return made;
}

std::uint64_t QueuePairs::nbytes(const Device& device) noexcept {
  // A cache line for a request and one for a completion; 16 bytes for each entry of a scatter list.
  const std::uint64_t of_request = 64 + 16 * std::uint64_t{device.num_entries()} + 64;
  return std::uint64_t{device.num_pairs()} * device.num_requests() * of_request;
}

Status QueuePairs::open(std::span<const GidRow> tried) {
  const Library& library = device_->library();
  const std::size_t num_pairs = device_->num_pairs();
  Result<PortAddress> address = device_->address(tried);
  if (!address.ok()) return address.status();
  address_ = address.value();
  // When a pair fails, each of its requests gets a completion, signalled or not.
  const std::uint32_t num_receives = device_->options().writes ? QueuePair::kNumReceives : 0;
  cq_ = library.create_cq(device_->context(),
                          static_cast<int>(num_pairs * (device_->num_requests() + num_receives)), nullptr,
                          device_->channel(), 0);
  if (cq_ == nullptr) return failed_to(*device_, "ibv_create_cq", errno);
  pairs_.reserve(num_pairs);
  for (const PairClass& each : device_->classes())
    for (std::uint32_t i = 0; i < each.num_pairs; ++i) {
      std::uint32_t first_packet = 0;
      if (Status drawn = fill_random(std::as_writable_bytes(std::span(&first_packet, 1))); !drawn.ok())
        return drawn;
      abi::QueuePairInit init{};
      init.send_cq = init.recv_cq = cq_;
      init.capacity = {.max_send_wr = device_->num_requests(),
                       .max_recv_wr = num_receives,
                       .max_send_sge = device_->num_entries(),
                       .max_recv_sge = 0,
                       .max_inline_data = 0};
      init.qp_type = abi::kReliableConnection;
      abi::QueuePair* const pair = library.create_qp(device_->domain(), &init);
      if (pair == nullptr)
        return failed_to(*device_,
                         "it has no room for another queue pair (lower verbs.queue_pairs, or use fewer "
                         "verbs.classes): ibv_create_qp",
                         errno);
      pairs_.emplace_back(*device_, pair, pairs_.size(), first_packet & 0xff'ffff, each);
      if (Status ready = pairs_.back().init(); !ready.ok()) return ready;
    }
  serve_classes(priorities_of(device_->classes()));
  return {};
}

QueuePairs::~QueuePairs() { destroy(); }

void QueuePairs::destroy() noexcept {
  for (QueuePair& pair : pairs_) pair.destroy();
  if (cq_ != nullptr) device_->library().destroy_cq(std::exchange(cq_, nullptr));
}

void QueuePairs::introduce(Message& hello) const {
  const std::string& name = device_->name();
  std::copy_n(name.begin(), std::min(name.size(), hello.device.size() - 1), hello.device.begin());
  hello.gid = address_.gid;
  hello.lid = address_.lid;
  hello.link = device_->link();
  hello.mtu = static_cast<std::uint8_t>(address_.mtu);
  hello.num_reads = device_->num_reads_served();
  hello.takes_writes = device_->options().writes ? 1 : 0;
  hello.num_pairs = static_cast<std::uint8_t>(pairs_.size());
  for (std::size_t i = 0; i < pairs_.size(); ++i) hello.pairs[i] = pairs_[i].address();
}

Status QueuePairs::connect(const Message& theirs, const std::atomic<bool>& is_abandoned) {
  if (theirs.link != device_->link())
    return {Code::kRailFailed,
            device_->name() + " and its " + theirs.device_name() +
                " are on different networks (InfiniBand and Ethernet): name devices of one network in "
                "verbs.devices"};
  Gid gid{};
  std::copy(std::begin(theirs.gid.raw), std::end(theirs.gid.raw), gid.begin());
  way_ = "from " + address_.in_words() + ", to " +
         (theirs.lid != 0 ? "LID " + std::to_string(theirs.lid) : to_text(gid));
  agree_on_classes(theirs);
  path_nbytes_ = nbytes_of(std::min(address_.mtu, static_cast<abi::Mtu>(theirs.mtu)));
  for (QueuePair& pair : pairs_) {
    if (is_abandoned) break;
    if (Status connected = pair.connect(theirs, address_, way_); !connected.ok()) return connected;
  }
  return {};
}

void QueuePairs::serve_classes(const PriorityClasses& classes) noexcept {
  classes_ = classes;
  std::size_t at = 0;
  for (std::size_t i = 0; i < classes.size(); ++i) {
    begins_[i] = at;
    while (at < pairs_.size() && pairs_[at].first_priority() == classes.first(i)) ++at;
  }
  begins_[classes.size()] = at;
}

// Both ends of a pair use it for the same class, so that its works meet no pair of another class. If the
// ends' classes differ, all pairs serve all priorities: so a peer stays reachable while its options are being
// changed.
void QueuePairs::agree_on_classes(const Message& theirs) {
  bool are_alike = theirs.num_pairs == pairs_.size(), is_one = classes_.size() == 1;
  for (std::size_t i = 0; i < theirs.num_pairs; ++i) {
    is_one = is_one && theirs.pairs[i].first_priority == 0;
    are_alike = are_alike && theirs.pairs[i].first_priority == pairs_[i].first_priority();
  }
  if (are_alike) return;
  classes_differ_ = !is_one;
  for (; pairs_.size() > theirs.num_pairs; pairs_.pop_back()) pairs_.back().destroy();
  if (classes_.size() == 1) return serve_classes({});
  const PairClass only = device_->options().only_class();
  for (QueuePair& pair : pairs_) pair.serve_all(only);
  serve_classes({});
}

std::string QueuePairs::classes_in_words() const {
  if (classes_differ_)
    return "the two ends' verbs.classes differ in priorities or numbers of queue pairs, so there is one "
           "class";
  return classes_.size() == 1 ? std::string() : in_words(device_->classes());
}

void QueuePairs::reset() noexcept {
  for (QueuePair& pair : pairs_) pair.reset();
}

bool QueuePairs::is_drained() const noexcept {
  return std::all_of(pairs_.begin(), pairs_.end(), [](const QueuePair& pair) { return pair.is_drained(); });
}

bool QueuePairs::owns(const abi::AsyncEvent& event) const noexcept {
  if (event.kind == abi::EventKind::kCqError) return event.element.cq == cq_;
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [&](const QueuePair& pair) { return pair.raw() == event.element.qp; });
}

std::size_t QueuePairs::poll(std::span<abi::WorkCompletion> completions) noexcept {
  const int num =
      device_->context()->operations.poll_cq(cq_, static_cast<int>(completions.size()), completions.data());
  return num < 0 ? 0 : static_cast<std::size_t>(num);
}

void QueuePairs::arm() noexcept { device_->context()->operations.req_notify_cq(cq_, 0); }

}  // namespace kvxfer::verbs
