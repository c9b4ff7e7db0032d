// Pages over TCP sockets, between hosts.
#include "transports/stream/stream_rails.h"

namespace kvxfer {
namespace {

constexpr TransportOption kOptions[] = {
    {"rails", "sockets of a session, over which every transfer is striped", std::int64_t{2}, 1, 64},
};

}  // namespace

extern const TransportKind tcp_transport;
constinit const TransportKind tcp_transport{
    .name = "tcp",
    .purpose = "moves pages between hosts, and within one host where no other transport can",
    .remedy = "bring the loopback interface up: ip link set lo up",
    .options = kOptions,
    .memory = MemoryKind::kHost,
    .reach = Reach::kNetwork,
    .socket = RailSocket::kTcp,
    .rank = 4,
    .why_off = [](const std::vector<GpuPart>&) { return std::string(); },
    .make =
        [](const RailParts& parts, const OptionValues& options) {
          return stream::make_rails(parts, tcp_transport, options.number("rails"));
        },
};

}  // namespace kvxfer
