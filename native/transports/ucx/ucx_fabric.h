// UCX as a fabric: a context for an agent, and for each peer a worker with one endpoint.
//
// A worker of its own for each peer, so that nothing of one peer's is another's: what it has under way, what it has made
// UCX remember, and the end, which is the endpoint's by force and then the worker's. UCX's transports of shared memory are
// left out: they take no endpoint that can be closed so (docs/fabrics.md).
//
// Over RDMA pages are read. Over tcp UCX would have the source's processor serve reads, by software that looks at no key and
// crashes at times where the reader ends: there pieces are sent, as active messages whose bytes go where they are awaited.
//
// With reads allowed nothing within UCX keeps a peer from reading or writing any address. So memory stays until peers have
// said that they read none of it, and whoever may connect has to be trusted.
#pragma once

#include <memory>
#include <string>

#include "transports/fabric/fabric.h"
#include "transports/ucx/library.h"

namespace kvxfer::ucx {

// How pages come: this end reads them, the source sends them, or whichever UCX's transports are made for.
enum class Way : std::uint8_t { kChosen, kRead, kSend };

struct Options {
  Way way = Way::kChosen;
  std::string library;  // file; "" for the one that is found
  std::string transports;  // UCX_TLS; "" for what the environment says, or UCX's own choice
  std::string devices;  // UCX_NET_DEVICES, likewise
  std::string config;  // more of UCX's settings, as "RMA_BW_LANES=2 RC_RX_QUEUE_LEN=1024"
  std::uint32_t num_reads = 64;
};

class UcxFabric final : public fabric::Fabric, public std::enable_shared_from_this<UcxFabric> {
 public:
  static Result<std::shared_ptr<UcxFabric>> create(const Library& library, const Options& options,
                                                   bool has_gpu);
  ~UcxFabric() override;

  std::string_view transport() const noexcept override { return "ucx"; }
  std::string library() const override { return library_.name(); }
  Result<std::unique_ptr<fabric::Memory>> map(std::byte* memory, std::uint64_t nbytes,
                                              MemoryKind kind) override;
  Result<std::unique_ptr<fabric::Endpoint>> open(const fabric::Route& route) override;
  std::uint64_t endpoint_nbytes() const noexcept override;
  bool serves_peers() const noexcept override { return true; }
  bool can_send() const noexcept override { return true; }
  MemoryKinds memory() const noexcept override { return memory_; }
  std::uint32_t num_reads() const noexcept override { return options_.num_reads; }

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
