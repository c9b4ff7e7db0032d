// The suite of conformance.h over UCX by tcp, whichever release this machine has, and with injected faults.
#include "conformance.h"
#include "fabric_ends.h"

namespace kvxfer {
namespace {

using conformance::Subject;
using conformance::with_faults;

Subject ucx_over(std::string name, std::string transports, std::uint32_t num_requests = 64,
                 std::optional<fabric::Way> way = {}) {
  ucx::Options options;
  options.transports = std::move(transports);
  options.num_requests = num_requests;
  options.way = way;
  Subject subject{std::move(name),
                  [=](Reactor& reactor, const FenceTable& fences) {
                    const bool writes = options.way == fabric::Way::kWrite;
                    return fabric_ends::make_ucx(
                        reactor, fences, options,
                        writes ? fabric_ends::ucx_with_rdma() : fabric_ends::ucx_library());
                  },
                  conformance::tcp_sockets,
                  false,
                  {}};
  subject.num_loose_descriptors = 2;
  return subject;
}
Subject ucx_tcp() { return ucx_over("ucx over tcp", "tcp"); }
Subject ucx_one_at_a_time() { return ucx_over("ucx over tcp, one at a time", "tcp", 1); }
// As over RDMA. Over tcp no end may end while it reads or writes (ucx_fabric.cpp).
Subject ucx_reads() { return ucx_over("ucx by reads", "tcp", 64, fabric::Way::kRead); }
Subject ucx_reads_one() { return ucx_over("ucx by one read at a time", "tcp", 1, fabric::Way::kRead); }
Subject ucx_writes() { return ucx_over("ucx by writes", "tcp", 64, fabric::Way::kWrite); }
Subject ucx_one_write() { return ucx_over("ucx by one write at a time", "tcp", 1, fabric::Way::kWrite); }
Subject faulty_ucx() { return with_faults(ucx_tcp(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05"); }

CONFORMANCE(ucx_tcp)
CONFORMANCE(ucx_one_at_a_time)
CONFORMANCE(faulty_ucx)
#define WITHOUT_ENDS(subject)                       \
  FABRIC_WITHOUT_ENDS(CONFORMANCE_PROMISE, subject) \
  CONFORMANCE_PROMISE(subject, an_idle_rail_asks_for_nothing)
WITHOUT_ENDS(ucx_reads)
WITHOUT_ENDS(ucx_reads_one)
WITHOUT_ENDS(ucx_writes)
WITHOUT_ENDS(ucx_one_write)

}  // namespace
}  // namespace kvxfer

SKIP_FILE_FOR(fabric_ends::missing<kvxfer::ucx::Library>);
