// UCX as a fabric: one context for an agent, and for each peer a worker with one endpoint.
//
// Because each worker serves one peer, peers share neither requests under way nor anything that UCX
// remembers. To end a peer, its endpoint is closed by force, and then the worker is destroyed. UCX's
// shared-memory transports are left out: their endpoints cannot be closed by force (docs/fabrics.md).
//
// Over RDMA, pages are read or, where both ends are set so, written. Over tcp, UCX would have the peer's
// processor serve reads and writes, in software that checks no key and crashes at times when the other end
// ends. So over tcp pieces are sent, as active messages whose bytes go straight to where they are awaited.
//
// Where reads are allowed, UCX itself does not stop a peer from reading or writing any address. So memory
// stays until peers have said that they no longer read it, and every peer that may connect has to be trusted.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transports/fabric/fabric.h"
#include "transports/fabric/gpu_context.h"
#include "transports/ucx/library.h"

namespace kvxfer::ucx {

struct Options {
  // Nothing: read or send, as UCX's transports are made for. Without RDMA, kWrite is kSend.
  std::optional<fabric::Way> way;
  std::string library;  // file; "" for the one that is found
  std::string transports;  // UCX_TLS; "" for the environment's value, or UCX's own choice
  std::string devices;  // UCX_NET_DEVICES, likewise
  std::string config;  // more of UCX's settings, as "RMA_BW_LANES=2 RC_RX_QUEUE_LEN=1024"
  std::uint32_t num_requests = 64;
  std::shared_ptr<const fabric::GpuContext> gpu;  // the agent's; null: none
};

class UcxFabric final : public fabric::Fabric, public std::enable_shared_from_this<UcxFabric> {
 public:
  static Result<std::shared_ptr<UcxFabric>> create(const Library& library, const Options& options);
  ~UcxFabric() override;

  std::string_view transport() const noexcept override { return "ucx"; }
  std::string library() const override { return library_.name(); }
  Result<std::unique_ptr<fabric::Memory>> map(std::byte* memory, std::uint64_t nbytes, MemoryKind kind,
                                              bool takes_writes) override;
  Result<std::unique_ptr<fabric::Endpoint>> open(const fabric::Route& route) override;
  std::uint64_t endpoint_nbytes() const noexcept override;
  bool serves_peers() const noexcept override { return true; }
  bool can_send() const noexcept override { return true; }
  MemoryKinds memory() const noexcept override { return memory_; }
  bool takes_writes() const noexcept override { return options_.way == fabric::Way::kWrite; }
  std::uint32_t num_requests() const noexcept override { return options_.num_requests; }

 private:
  friend class UcxEndpoint;
  UcxFabric(const Library& library, Options options) : library_(library), options_(std::move(options)) {}
  Status refused(const std::string& what, abi::StatusCode status) const;

  const Library& library_;
  const Options options_;
  abi::Context* context_ = nullptr;
  MemoryKinds memory_ = MemoryKind::kHost;
};

}  // namespace kvxfer::ucx
