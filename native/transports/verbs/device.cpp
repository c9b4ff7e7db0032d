#include "transports/verbs/device.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string_view>

namespace kvxfer::verbs {
namespace {

// The most of one request. A queue pair's current request delays the other works by not much more than this.
constexpr std::uint64_t kMostReadNbytes = 1024 * 1024;

bool is_named(std::string_view names, std::string_view device) {
  if (names.empty()) return true;
  for (std::size_t at = 0; at <= names.size();) {
    const std::size_t end = std::min(names.find(',', at), names.size());
    if (names.substr(at, end - at) == device) return true;
    at = end + 1;
  }
  return false;
}

// The library's list of devices, freed when this object ends.
class DeviceList {
 public:
  explicit DeviceList(const Library& library) : library_(library), list_(library.get_device_list(&num_)) {}
  ~DeviceList() {
    if (list_ != nullptr) library_.free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  int size() const noexcept { return list_ == nullptr ? 0 : num_; }
  abi::Device* operator[](int index) const noexcept { return list_[index]; }

 private:
  const Library& library_;
  int num_ = 0;
  abi::Device** const list_;
};

std::uint8_t least(int device, std::uint32_t wished, std::uint32_t fallback) noexcept {
  const std::uint32_t can = device > 0 ? static_cast<std::uint32_t>(device) : fallback;
  return static_cast<std::uint8_t>(std::min<std::uint32_t>({can, wished == 0 ? 255 : wished, 255}));
}

}  // namespace

Result<std::vector<std::shared_ptr<Device>>> Device::open_all(const Library& library,
                                                              const Options& options) {
  std::vector<std::shared_ptr<Device>> devices;
  const DeviceList list(library);
  std::string passed_over;
  const auto pass_over = [&](const std::string& name, const std::string& why) {
    passed_over += (passed_over.empty() ? "" : "; ") + name + ": " + why;
  };
  for (int i = 0; i < list.size(); ++i) {
    const std::string name = library.get_device_name(list[i]);
    if (!is_named(options.devices, name)) {
      pass_over(name, "not among verbs.devices");
      continue;
    }
    // Opens the device once for each port, since the end of a rail closes its own.
    for (std::uint8_t port = 1, num_ports = 1; port <= num_ports; ++port) {
      abi::Context* const context = library.open_device(list[i]);
      if (context == nullptr) {
        pass_over(name, Status::from_errno("it cannot be opened", errno).message());
        break;
      }
      std::shared_ptr<Device> device(new Device(library, options, context, name, port));
      if (Status opened = device->open(); !opened.ok()) {
        pass_over(device->name(), opened.message());
        continue;
      }
      num_ports = std::max<std::uint8_t>(device->attributes_.phys_port_cnt, 1);
      if (device->attributes_of_port_.state != abi::PortState::kActive)
        pass_over(device->name(), "not active: is its cable in, and its interface up?");
      else
        devices.push_back(std::move(device));
    }
  }
  if (devices.empty())
    return Status(Code::kUnsupported, "no port of an RDMA device can be used (" +
                                          (passed_over.empty() ? "there is none" : passed_over) + ")");
  return devices;
}

Status Device::open() {
  const auto set_non_blocking = [](int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0;
  };
  if (const int error = library_.query_device(context_, &attributes_); error != 0)
    return Status::from_errno("ibv_query_device", error);
  if (const int error = library_.query_port(context_, port_, &attributes_of_port_); error != 0)
    return Status::from_errno("ibv_query_port", error);
  domain_ = library_.alloc_pd(context_);
  if (domain_ == nullptr) return Status::from_errno("ibv_alloc_pd", errno);
  channel_ = library_.create_comp_channel(context_);
  if (channel_ == nullptr) return Status::from_errno("ibv_create_comp_channel", errno);
  if (!set_non_blocking(channel_->fd) || !set_non_blocking(context_->async_fd))
    return Status::from_errno("fcntl(O_NONBLOCK) of a device's events", errno);
  return {};
}

Device::~Device() {
  if (channel_ != nullptr) library_.destroy_comp_channel(channel_);
  if (domain_ != nullptr) library_.dealloc_pd(domain_);
  library_.close_device(context_);
}

abi::Mtu Device::within_options(abi::Mtu mtu) const noexcept {
  while (options_.mtu != 0 && nbytes_of(mtu) > options_.mtu && mtu > abi::Mtu::k256)
    mtu = static_cast<abi::Mtu>(static_cast<int>(mtu) - 1);
  return mtu;
}

std::uint32_t Device::num_pairs() const noexcept {
  return std::accumulate(classes_.begin(), classes_.end(), 0u,
                         [](std::uint32_t sum, const PairClass& each) { return sum + each.num_pairs; });
}

std::uint32_t Device::num_requests() const noexcept {
  return std::min<std::uint32_t>(options_.num_requests,
                                 static_cast<std::uint32_t>(std::max(attributes_.max_qp_wr, 1)));
}

std::uint32_t Device::num_entries() const noexcept {
  // Some devices take fewer entries in a READ. Devices without that limit report 0.
  int most = std::max(attributes_.max_sge, 1);
  if (attributes_.max_sge_rd > 0) most = std::min(most, attributes_.max_sge_rd);
  return std::min(options_.num_entries, static_cast<std::uint32_t>(most));
}

std::uint8_t Device::num_reads_asked() const noexcept {
  return least(attributes_.max_qp_init_rd_atom, options_.num_reads, 1);
}

std::uint8_t Device::num_reads_served() const noexcept { return least(attributes_.max_qp_rd_atom, 0, 1); }

std::uint64_t Device::most_read_nbytes() const noexcept {
  const std::uint64_t of_port = attributes_of_port_.max_msg_sz;
  return of_port == 0 ? kMostReadNbytes : std::min(kMostReadNbytes, of_port);
}

std::string PortAddress::in_words() const { return row ? describe(*row) : "LID " + std::to_string(lid); }

Result<PortAddress> Device::address(std::span<const GidRow> tried) const {
  PortAddress address;
  abi::PortAttributes now{};
  if (const int error = library_.query_port(context_, port_, &now); error != 0)
    return Status::from_errno("ibv_query_port of " + name_, error);
  if (now.state != abi::PortState::kActive)
    return Status(Code::kRailFailed, name_ + " is not active: is its cable in, and its interface up?");
  address.lid = now.lid;
  address.mtu = within_options(now.active_mtu);
  std::vector<GidRow> rows;
  for (int i = 0; i < std::min(now.gid_tbl_len, 256); ++i) {
    abi::Gid gid{};
    if (library_.query_gid(context_, port_, i, &gid) != 0) continue;
    GidRow& row = rows.emplace_back();
    row.index = i;
    std::copy(std::begin(gid.raw), std::end(gid.raw), row.gid.begin());
    row.type = link() == abi::LinkLayer::kEthernet ? library_.gid_type(device_name_.c_str(), port_, i)
                                                   : GidType::kInfiniBand;
  }
  const GidRanking ranking =
      rank_gids(rows, options_.gid_index < 0 ? std::nullopt : std::optional<int>(options_.gid_index));
  if (!ranking.candidates.empty()) {
    const GidCandidate* const next = next_candidate(ranking, tried);
    const GidRow& row = (next != nullptr ? *next : ranking.candidates.front()).row;
    address.row = row;
    std::copy(row.gid.begin(), row.gid.end(), address.gid.raw);
    address.gid_index = static_cast<std::uint8_t>(row.index);
  } else if (link() == abi::LinkLayer::kEthernet || options_.gid_index >= 0) {
    return Status(Code::kRailFailed,
                  name_ + ": " + ranking.why_none + (options_.gid_index >= 0 ? " (verbs.gid_index)" : ""));
  }
  return address;
}

}  // namespace kvxfer::verbs
