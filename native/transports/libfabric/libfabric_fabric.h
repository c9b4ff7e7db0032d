// libfabric as a fabric. Each peer has an endpoint with a completion queue and an address table of its own,
// in a domain of one provider on one device.
//
// Because each endpoint serves one peer, peers share nothing: neither requests under way nor wake-ups.
// Closing an endpoint fences that peer alone. The destination reads the source's pages or, where both ends
// are set so, the source writes them; nothing is sent. Requests end in any order (EFA keeps none), so each is
// counted.
//
// Over tcp each peer also has a domain of its own, and all memory is registered once more in each. There are
// two reasons. A domain polls its sockets for all endpoints at once, whichever endpoint asks. And when an
// endpoint is closed with reads under way, net of 1.17 returns their buffers twice, so the next read of the
// same domain could use one buffer for two purposes. (tcp of 1.17, behind ofi_rxm, crashes the process in
// that case.)
//
// cxi binds memory to an endpoint. So there, too, each peer has a domain of its own, all memory is registered
// for each peer, and is deregistered before the peer's endpoint closes.
//
// Providers that check keys in the source's process (tcp, net) get 64 random bits as a key, so a stranger who
// finds their port would have to guess the key. Other providers make keys themselves.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transports/fabric/fabric.h"
#include "transports/fabric/gpu_context.h"
#include "transports/libfabric/library.h"

namespace kvxfer::libfabric {

class LibfabricMemory;

struct Options {
  std::string library;  // file; "" for the one that is found
  std::string provider;  // as fi_info names it; "" for the best one available
  std::string devices;  // domains, separated by commas; "" for all of the provider's
  std::uint32_t num_requests = 64;
  bool writes = false;  // the source writes pages, where the peer is set so, too
  std::shared_ptr<const fabric::GpuContext> gpu;  // the agent's; null: none
};

class LibfabricFabric final : public fabric::Fabric, public std::enable_shared_from_this<LibfabricFabric> {
 public:
  // One for each device; a single one where the provider follows the host's own routes.
  static Result<std::vector<std::shared_ptr<LibfabricFabric>>> create(const Library& library,
                                                                      const Options& options);
  ~LibfabricFabric() override;

  std::string_view transport() const noexcept override { return "libfabric"; }
  std::string library() const override { return library_.name(); }
  std::string terms() const override { return "provider " + provider_; }
  Result<std::unique_ptr<fabric::Memory>> map(std::byte* memory, std::uint64_t nbytes, MemoryKind kind,
                                              bool takes_writes) override;
  Result<std::unique_ptr<fabric::Endpoint>> open(const fabric::Route& route) override;
  std::uint64_t endpoint_nbytes() const noexcept override;
  bool serves_peers() const noexcept override { return true; }
  MemoryKinds memory() const noexcept override { return memory_; }
  bool takes_writes() const noexcept override { return options_.writes; }
  std::uint64_t most_request_nbytes() const noexcept override;
  std::uint32_t most_runs() const noexcept override;
  std::uint32_t num_requests() const noexcept override { return num_requests_; }

 private:
  friend class LibfabricEndpoint;
  friend class LibfabricMemory;
  LibfabricFabric(const Library& library, const Options& options) : library_(library), options_(options) {}
  Status open(const abi::Info& info);
  // The domain for a peer: its own, or the one that all peers share.
  Result<abi::Domain*> open_domain();
  void close_domain(abi::Domain* domain) noexcept;
  // Registers all memory in a peer's own domain, now and as it comes. The endpoint is enabled.
  Status serve(abi::Domain& domain, abi::Endpoint& endpoint);
  void stop_serving(abi::Domain& domain) noexcept;
  Status draw_key(std::uint64_t& key) const;  // the caller holds the mutex
  Status refused(const std::string& what, int error) const;  // below 0, as libfabric returns it
  bool follows_routes() const noexcept;
  bool binds_memory() const noexcept;
  bool provides_keys() const noexcept;

  const Library& library_;
  const Options options_;
  std::string provider_, device_;
  abi::Info* info_ = nullptr;
  abi::Fabric* fabric_ = nullptr;
  abi::Domain* domain_ = nullptr;  // shared by all; null: each peer has its own
  std::mutex mutex_;  // of what follows
  std::map<abi::Domain*, abi::Endpoint*> served_;  // and what memory is bound to in it; null: to nothing
  std::set<LibfabricMemory*> registered_;
  MemoryKinds memory_ = MemoryKind::kHost;
  std::uint32_t num_requests_ = 1;
};

}  // namespace kvxfer::libfabric
