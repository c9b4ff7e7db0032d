#include "transports/shm/shm_transport.h"

#include "kvxfer/transport_kind.h"

namespace kvxfer {

extern const TransportKind shm_transport;
constinit const TransportKind shm_transport{
    .name = "shm",
    .purpose =
        "moves pages between processes of one host at memory speed: the destination copies out of the "
        "peer's pool, mapped read-only",
    .remedy =
        "it needs memfds and abstract unix sockets: a seccomp profile or a sandbox (gVisor) may forbid "
        "them; run without it, e.g. docker run --security-opt seccomp=unconfined",
    .options = {},
    .memory = MemoryKind::kHost,
    .reach = Reach::kHost,
    .socket = RailSocket::kUnix,
    .rank = 1,
    .is_partial = true,  // memory of no pool is read by process_vm_readv, which may be forbidden
    .shares_memory = true,
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make = [](const RailParts& parts,
               const OptionValues&) -> Result<std::vector<std::unique_ptr<Transport>>> {
      std::vector<std::unique_ptr<Transport>> rails;
      rails.push_back(std::make_unique<ShmTransport>(parts.reactor, parts.fences, parts.workers));
      return rails;
    },
};

}  // namespace kvxfer
