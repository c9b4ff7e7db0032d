// One opened port of one NIC: what rails and registrations of memory share, and what the device can do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/status.h"
#include "transports/verbs/gids.h"
#include "transports/verbs/library.h"
#include "transports/verbs/options.h"

namespace kvxfer::verbs {

inline std::uint32_t nbytes_of(abi::Mtu mtu) noexcept { return 128u << static_cast<int>(mtu); }

// How a peer's packets reach this port.
struct PortAddress {
  abi::Gid gid{};
  std::uint8_t gid_index = 0;
  std::uint16_t lid = 0;
  abi::Mtu mtu = abi::Mtu::k256;  // of its packets, within what the options allow
  std::optional<GidRow> row;      // of the GID, where there is one

  std::string in_words() const;
};

class Device {
 public:
  // One for each active port of the devices that the options name. kUnsupported: there is none.
  static Result<std::vector<std::shared_ptr<Device>>> open_all(const Library& library,
                                                               const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Library& library() const noexcept { return library_; }
  const Options& options() const noexcept { return options_; }
  // Classes of transfer priorities, with queue pairs of their own to each peer; at least one.
  const std::vector<PairClass>& classes() const noexcept { return classes_; }
  std::uint32_t num_pairs() const noexcept;  // of all classes
  const std::string& name() const noexcept { return name_; }  // "mlx5_0 port 1"
  const std::string& device_name() const noexcept { return device_name_; }  // "mlx5_0"
  std::uint8_t port() const noexcept { return port_; }
  abi::Context* context() const noexcept { return context_; }
  abi::ProtectionDomain* domain() const noexcept { return domain_; }
  abi::CompletionChannel* channel() const noexcept { return channel_; }
  abi::LinkLayer link() const noexcept { return attributes_of_port_.link_layer; }

  // ---- what it can do, within what the options allow
  std::uint32_t num_requests() const noexcept;   // of one queue pair
  std::uint32_t num_entries() const noexcept;    // of one READ's scatter list
  std::uint8_t num_reads_asked() const noexcept;  // of ours under way on a queue pair
  std::uint8_t num_reads_served() const noexcept;  // of the peer's under way on a queue pair
  std::uint64_t most_read_nbytes() const noexcept;  // in one request
  std::uint64_t most_registered_nbytes() const noexcept { return attributes_.max_mr_size; }

  // Reads the port's addresses anew, since GIDs and the MTU change while the port is up. Returns the
  // likeliest GID that was not tried in vain; if all were, the likeliest of all. Not ok: no GID fits.
  Result<PortAddress> address(std::span<const GidRow> tried) const;

 private:
  Device(const Library& library, const Options& options, abi::Context* context, std::string name,
         std::uint8_t port)
      : library_(library),
        options_(options),
        classes_(options.classes.empty() ? std::vector{options.only_class()} : options.classes),
        context_(context),
        device_name_(name),
        name_(std::move(name)),
        port_(port) {
    name_ += " port " + std::to_string(port);
  }
  Status open();
  abi::Mtu within_options(abi::Mtu mtu) const noexcept;

  const Library& library_;
  const Options options_;
  const std::vector<PairClass> classes_;
  abi::Context* const context_;
  const std::string device_name_;
  std::string name_;
  const std::uint8_t port_;
  abi::ProtectionDomain* domain_ = nullptr;
  abi::CompletionChannel* channel_ = nullptr;
  abi::DeviceAttributes attributes_{};
  abi::PortAttributes attributes_of_port_{};
};

}  // namespace kvxfer::verbs
