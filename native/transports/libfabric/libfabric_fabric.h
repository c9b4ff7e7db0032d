// libfabric as a fabric: for each peer an endpoint with a completion queue and an address table of its own, in a domain of one
// provider's on one device.
//
// An endpoint of its own for each peer, so that nothing of one peer's is another's: what it has under way, what wakes it up,
// and its end, which fences that peer alone. The destination reads the source's pages; nothing is sent and nothing written.
// Reads end in any order (EFA keeps none): each is counted.
//
// Over tcp each peer has a domain of its own as well, in which all memory is registered once more. There a domain is what
// asks its sockets, all of them for any endpoint; and where an endpoint is closed with reads under way, net of 1.17 gives their
// buffers back twice, of which the next read of the same domain would take one for two uses. (Where tcp of 1.17 is asked the
// same, behind ofi_rxm, the process crashes.)
//
// Providers that look at keys in the source's process (tcp, net) are given 64 random bits as a key, which a stranger who
// finds their port would have to guess. Others make keys themselves.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transports/fabric/fabric.h"
#include "transports/libfabric/library.h"

namespace kvxfer::libfabric {

class LibfabricMemory;

struct Options {
  std::string library;  // file; "" for the one that is found
  std::string provider;  // as fi_info names it; "" for the best of those that are there
  std::string devices;  // domains with commas between them; "" for all of the provider's
  std::uint32_t num_reads = 64;
  int gpu = -1;  // index of the agent's; -1: none
};

class LibfabricFabric final : public fabric::Fabric, public std::enable_shared_from_this<LibfabricFabric> {
 public:
  // One for each device; one alone where the provider goes by the host's own routes.
  static Result<std::vector<std::shared_ptr<LibfabricFabric>>> create(const Library& library,
                                                                      const Options& options);
  ~LibfabricFabric() override;

  std::string_view transport() const noexcept override { return "libfabric"; }
  std::string library() const override { return library_.name(); }
  std::string terms() const override { return "provider " + provider_; }
  Result<std::unique_ptr<fabric::Memory>> map(std::byte* memory, std::uint64_t nbytes,
                                              MemoryKind kind) override;
  Result<std::unique_ptr<fabric::Endpoint>> open(const fabric::Route& route) override;
  std::uint64_t endpoint_nbytes() const noexcept override;
  bool serves_peers() const noexcept override { return true; }
  MemoryKinds memory() const noexcept override { return memory_; }
  std::uint64_t most_read_nbytes() const noexcept override;
  std::uint32_t most_runs() const noexcept override;
  std::uint32_t num_reads() const noexcept override { return num_reads_; }

 private:
  friend class LibfabricEndpoint;
  friend class LibfabricMemory;
  LibfabricFabric(const Library& library, const Options& options) : library_(library), options_(options) {}
  Status open(const abi::Info& info);
  // For a peer: one of its own, with all memory registered in it, or that which all have.
  Result<abi::Domain*> open_domain();
  void close_domain(abi::Domain* domain) noexcept;
  Status refused(const std::string& what, int error) const;  // below 0, as libfabric returns it
  bool follows_routes() const noexcept;

  const Library& library_;
  const Options options_;
  std::string provider_, device_;
  abi::Info* info_ = nullptr;
  abi::Fabric* fabric_ = nullptr;
  abi::Domain* domain_ = nullptr;  // of all; null: each peer has its own
  std::mutex mutex_;  // of what follows
  std::set<abi::Domain*> domains_;
  std::set<LibfabricMemory*> registered_;
  MemoryKinds memory_ = MemoryKind::kHost;
  std::uint32_t num_reads_ = 1;
};

}  // namespace kvxfer::libfabric
