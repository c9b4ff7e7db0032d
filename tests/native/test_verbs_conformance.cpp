// The suite of conformance.h over verbs rails between two counting devices, plain and with injected faults.
#include "conformance.h"
#include "verbs_ends.h"

namespace kvxfer {
namespace {

using conformance::Subject;
using conformance::with_faults;
using counting_device::Fabric;
using counting_device::Limits;

// Lasts until this program ends; each subject has other devices.
void use_fabric(const Limits& limits) {
  static std::unique_ptr<Fabric> fabric;
  fabric.reset();
  fabric = std::make_unique<Fabric>(limits);
}

// The two ends of a pair are made in turn; each has its own device.
template <int kNumPairs, int kNumRequests, bool kWrites = false, bool kHasClasses = false>
std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable& fences) {
  static unsigned num_made = 0;
  verbs::Options options;
  options.num_pairs = kNumPairs;
  options.num_requests = kNumRequests;
  options.writes = kWrites;
  // The suite's works are of priority 0.
  if (kHasClasses) {
    options.classes = {options.only_class(), options.only_class()};
    options.classes[1].first = 128;
  }
  return verbs_ends::make_rail(reactor, fences, "nic" + std::to_string(num_made++ % 2), options);
}

Subject verbs_rail() {
  use_fabric({});
  return {"verbs", make<4, 256>, conformance::tcp_sockets, false, {}};
}
// One queue pair that is nearly always full, no scatter lists, and registrations of 1 MiB: runs lie in two of them.
Subject small_verbs() {
  Limits limits;
  limits.max_sge = 1;
  limits.max_mr_nbytes = 1024 * 1024;
  use_fabric(limits);
  return {"verbs on a small device", make<1, 16>, conformance::tcp_sockets, false, {}};
}
Subject infiniband() {
  Limits limits;
  limits.link = counting_device::abi::LinkLayer::kInfiniBand;
  use_fabric(limits);
  return {"verbs on InfiniBand", make<2, 64>, conformance::tcp_sockets, true, {}};
}
Subject writing_verbs() {
  use_fabric({});
  return {"verbs by WRITE", make<4, 256, true>, conformance::tcp_sockets, false, {}};
}
Subject small_writing_verbs() {
  Limits limits;
  limits.max_sge = 1;
  limits.max_mr_nbytes = 1024 * 1024;
  use_fabric(limits);
  return {"verbs by WRITE on a small device", make<1, 16, true>, conformance::tcp_sockets, false, {}};
}
Subject verbs_with_classes() {
  use_fabric({});
  return {"verbs with classes", make<2, 64, true, true>, conformance::tcp_sockets, false, {}};
}
Subject faulty_verbs() { return with_faults(verbs_rail()); }
Subject failing_verbs() { return with_faults(verbs_rail(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05"); }

CONFORMANCE(verbs_rail)
CONFORMANCE(small_verbs)
CONFORMANCE(infiniband)
CONFORMANCE(writing_verbs)
CONFORMANCE(small_writing_verbs)
CONFORMANCE(verbs_with_classes)
CONFORMANCE(faulty_verbs)
CONFORMANCE(failing_verbs)

}  // namespace
}  // namespace kvxfer
