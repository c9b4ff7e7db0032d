// The suite of conformance.h over every transport of this build, plain and with injected faults.
#include "conformance.h"

#include "transports/loopback/loopback_transport.h"
#include "transports/shm/shm_transport.h"
#include "transports/tcp/tcp_transport.h"

namespace kvxfer {
namespace {

using conformance::Subject;

template <class T>
std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable& fences) {
  return std::make_unique<T>(reactor, fences);
}

std::unique_ptr<Transport> make_stream(Reactor& reactor, std::string_view name) {
  TcpTransport::Options options;
  options.name = name;
  return std::make_unique<TcpTransport>(reactor, options);
}

Subject tcp() {
  const auto make_tcp = [](Reactor& reactor, const FenceTable&) { return make_stream(reactor, "tcp"); };
  return {"tcp", make_tcp, conformance::tcp_sockets, false, {}};
}
Subject unix_stream() {
  const auto make_unix = [](Reactor& reactor, const FenceTable&) { return make_stream(reactor, "unix"); };
  return {"unix", make_unix, conformance::unix_sockets, false, {}};
}
Subject loopback() { return {"loopback", make<LoopbackTransport>, conformance::unix_sockets, false, {}}; }
Subject shm_pool() { return {"shm pool", make<ShmTransport>, conformance::unix_sockets, true, {}}; }
Subject shm_foreign() { return {"shm foreign", make<ShmTransport>, conformance::unix_sockets, false, {}}; }

// Back-pressure, late and shuffled completions, works that fail: all within the contract.
Subject with_faults(Subject subject, std::string_view text = "again=0.3,delay=0.3,reorder=0.5") {
  const auto faults = Faults::parse(text);
  REQUIRE_OK(faults);
  subject.name += " with faults";
  subject.faults = faults.value();
  return subject;
}
Subject faulty_tcp() { return with_faults(tcp()); }
Subject faulty_unix_stream() {
  return with_faults(unix_stream(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}
Subject faulty_loopback() { return with_faults(loopback(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05"); }
Subject faulty_shm_pool() { return with_faults(shm_pool()); }
Subject faulty_shm_foreign() {
  return with_faults(shm_foreign(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}

CONFORMANCE(tcp)
CONFORMANCE(unix_stream)
CONFORMANCE(loopback)
CONFORMANCE(shm_pool)
CONFORMANCE(shm_foreign)
CONFORMANCE(faulty_tcp)
CONFORMANCE(faulty_unix_stream)
CONFORMANCE(faulty_loopback)
CONFORMANCE(faulty_shm_pool)
CONFORMANCE(faulty_shm_foreign)

}  // namespace
}  // namespace kvxfer
