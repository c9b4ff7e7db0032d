// The suite of conformance.h over UCX by tcp, whichever release this machine has, and with injected faults.
#define KVXFER_CHECK_NO_MAIN  // without UCX it is skipped
#include "conformance.h"
#include "fabric_ends.h"

namespace kvxfer {
namespace {

using conformance::Subject;
using conformance::with_faults;

Subject ucx_over(std::string name, std::string transports, std::uint32_t num_reads = 64) {
  ucx::Options options;
  options.transports = std::move(transports);
  options.num_reads = num_reads;
  return {std::move(name),
          [=](Reactor& reactor, const FenceTable& fences) {
            return fabric_ends::make_ucx(reactor, fences, options);
          },
          conformance::tcp_sockets,
          false,
          {}};
}
Subject ucx_tcp() { return ucx_over("ucx over tcp", "tcp"); }
Subject ucx_tcp_one_read() { return ucx_over("ucx over tcp, a read at a time", "tcp", 1); }
Subject faulty_ucx() { return with_faults(ucx_tcp(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05"); }

CONFORMANCE(ucx_tcp)
CONFORMANCE(ucx_tcp_one_read)
CONFORMANCE(faulty_ucx)

}  // namespace
}  // namespace kvxfer

int main(int argc, char** argv) {
  return fabric_ends::run(argc, argv, [] { return kvxfer::ucx::Library::load(); });
}
