// Pages over unix stream sockets on one host: for memory that a rail that maps memory cannot reach.
#include "transports/stream/stream_rails.h"

namespace kvxfer {
extern const TransportKind unix_transport;
constinit const TransportKind unix_transport{
    .name = "unix",
    .purpose =
        "moves pages on one host that shm cannot reach: an engine's own memory where process_vm_readv is "
        "forbidden",
    .remedy = "it needs abstract unix sockets: the message names the call that failed",
    .options = {},
    .memory = MemoryKind::kHost,
    .reach = Reach::kHost,
    .socket = RailSocket::kUnix,
    .rank = 2,
    .is_default = false,  // added to a partial transport; named alone, it keeps that one out
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues&) { return stream::make_rails(parts, unix_transport, 1); },
};

}  // namespace kvxfer
