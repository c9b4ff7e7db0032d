// Pages over unix stream sockets: what a rail that maps memory cannot reach, on one host.
#include "transports/stream/stream_rails.h"

namespace kvxfer {
extern const TransportKind unix_transport;
constinit const TransportKind unix_transport{
    .name = "unix",
    .purpose =
        "carries on one host what shm cannot reach: an engine's own memory where process_vm_readv is "
        "forbidden",
    .remedy = "it needs abstract unix sockets: see what the message names",
    .options = {},
    .memory = MemoryKind::kHost,
    .reach = Reach::kHost,
    .socket = RailSocket::kUnix,
    .rank = 2,
    .is_default = false,  // it comes with a partial one; alone it keeps that out
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues&) { return stream::make_rails(parts, unix_transport, 1); },
};

}  // namespace kvxfer
