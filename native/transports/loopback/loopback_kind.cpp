#include "transports/loopback/loopback_transport.h"

#include "kvxfer/transport_kind.h"

namespace kvxfer {

extern const TransportKind loopback_transport;
constinit const TransportKind loopback_transport{
    .name = "loopback",
    .purpose = "moves pages between agents of one process",
    .remedy =
        "agents need memfd_create, eventfd, epoll and a listening socket: the message names the call that "
        "failed",
    .options = {},
    .memory = MemoryKind::kHost,
    .reach = Reach::kProcess,
    .socket = RailSocket::kUnix,
    .rank = 0,
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues&) -> Result<std::vector<std::unique_ptr<Transport>>> {
      std::vector<std::unique_ptr<Transport>> rails;
      rails.push_back(std::make_unique<LoopbackTransport>(parts.reactor, parts.fences));
      return rails;
    },
};

}  // namespace kvxfer
