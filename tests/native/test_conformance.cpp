// The suite of conformance.h over every transport of this build, plain and with injected faults.
#include "conformance.h"

#include "transports/loopback/loopback_transport.h"
#include "transports/shm/shm_transport.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {
namespace {

using conformance::Subject;
using conformance::with_faults;

template <class T>
std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable& fences) {
  return std::make_unique<T>(reactor, fences);
}

std::unique_ptr<Transport> make_stream(Reactor& reactor, std::string_view name) {
  StreamTransport::Options options;
  options.name = name;
  return std::make_unique<StreamTransport>(reactor, options);
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
Subject faulty_tcp() { return with_faults(tcp()); }
Subject faulty_unix_stream() {
  return with_faults(unix_stream(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}
Subject faulty_loopback() { return with_faults(loopback(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05"); }
Subject faulty_shm_pool() { return with_faults(shm_pool()); }
Subject faulty_shm_foreign() {
  return with_faults(shm_foreign(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}

// A socket that accepts a few KiB at a time: a piece takes many system calls, and may stop anywhere in a header, a
// run or a trailer. Not over TCP, whose windows of such a size wait for the kernel's timers.
Subject tiny_unix_stream() {
  Subject subject = unix_stream();
  subject.name = "unix with tiny buffers";
  subject.make = [](Reactor& reactor, const FenceTable&) -> std::unique_ptr<Transport> {
    StreamTransport::Options options;
    options.name = "unix";
    options.socket_buffer_nbytes = 4096;
    return std::make_unique<StreamTransport>(reactor, options);
  };
  return subject;
}

CONFORMANCE(tcp)
CONFORMANCE(unix_stream)
CONFORMANCE(loopback)
CONFORMANCE(shm_pool)
CONFORMANCE(shm_foreign)
CONFORMANCE_PROMISE(tiny_unix_stream, programs_of_every_kind_arrive)
CONFORMANCE_PROMISE(tiny_unix_stream, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(tiny_unix_stream, a_source_that_cancels_is_never_counted_as_done)
CONFORMANCE_PROMISE(tiny_unix_stream, a_disconnect_is_complete_with_its_completions)
CONFORMANCE(faulty_tcp)
CONFORMANCE(faulty_unix_stream)
CONFORMANCE(faulty_loopback)
CONFORMANCE(faulty_shm_pool)
CONFORMANCE(faulty_shm_foreign)

}  // namespace
}  // namespace kvxfer
