// What every transport promises, asked of this one; and pages between two agents that name it.
//
//   test_procmem [--seed N] [--list] [part of a test's name]
#include "agent_pair.h"
#include "conformance.h"
#include "kvxfer/transport_kind.h"

namespace kvxfer {
namespace {

using conformance::Subject;

std::unique_ptr<Transport> make_procmem(Reactor& reactor, const FenceTable& fences) {
  static const std::vector<GpuPart> gpus;
  static SharedParts shared;
  const TransportKind& kind = *find_transport_kind("procmem");
  auto rails = kind.make({reactor, fences, gpus, shared}, OptionValues(kind, {}));
  REQUIRE_OK(rails);
  return std::move(rails.value().front());
}

Subject procmem() { return {"procmem", make_procmem, conformance::unix_sockets, false, {}}; }
Subject faulty_procmem() {
  return conformance::with_faults(procmem(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}
CONFORMANCE(procmem)
CONFORMANCE(faulty_procmem)

TEST(two_agents_that_name_it_hand_pages_over) {
  check::Random random(check::seed());
  agent_pair::Pair both({.transports = {"procmem"}});
  const auto view =
      both.src.runtime->with_engine([&](Engine& engine, Time) { return engine.peer(both.there); });
  REQUIRE(view.has_value());
  CHECK_EQ(view->rails, (std::vector<std::string>{"procmem"}));
  CHECK(both.hand_over(random));
}

}  // namespace
}  // namespace kvxfer
