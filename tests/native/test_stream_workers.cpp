// Rails of streams that several threads move at the same time: the suite of every transport, its ends moved
// by two threads, and rights that end while a thread is in the middle of a piece.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "hand_over.h"
#include "transports/stream/stream_round.h"
#include "transports/stream/stream_transport.h"

namespace {

using namespace kvxfer;
using hand_over::HandOver;

// ---- what every transport promises --------------------------------------------------------------

// Moves both ends, whatever they have to do.
conformance::Subject in_one_round(std::string_view name, decltype(conformance::Subject::sockets) sockets) {
  const auto both = std::make_shared<std::weak_ptr<StreamRound>>();
  const auto make = [both, name](Reactor& reactor, const FenceTable&) {
    std::shared_ptr<StreamRound> round = both->lock();
    if (round == nullptr)
      *both = round = std::make_shared<StreamRound>(
          std::make_shared<CopyWorkers>(reactor, CopyWorkers::Options{.num_threads = 2}), 1);
    StreamTransport::Options options;
    options.name = name;
    return std::make_unique<StreamTransport>(reactor, options, round);
  };
  return {std::string(name) + " in rounds", make, std::move(sockets), false, {}};
}

conformance::Subject tcp() { return in_one_round("tcp", conformance::tcp_sockets); }
conformance::Subject unix_stream() { return in_one_round("unix", conformance::unix_sockets); }
conformance::Subject faulty_tcp() { return conformance::with_faults(tcp()); }

CONFORMANCE(tcp)
CONFORMANCE(unix_stream)
CONFORMANCE_PROMISE(faulty_tcp, post_accepts_a_prefix_and_the_rest_later)
CONFORMANCE_PROMISE(faulty_tcp, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(faulty_tcp, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(faulty_tcp, the_end_of_the_peer_ends_every_work)

// ---- agents -----------------------------------------------------------------------------------------

bool skips() {
  if (testing::HeldMemory::is_possible()) return false;
  std::printf("  %s: skipped, no userfaultfd for this process\n", check::state().current);
  return true;
}

TEST(a_thread_moves_one_rail_while_whoever_drives_moves_another) {
  if (skips()) return;
  const auto over = HandOver::in_a_piece("tcp");
  CHECK(over->handle->outcome() == Outcome::kPending);
  over->to.let_on();
  CHECK(agent_pair::is_done(over->handle));
  CHECK(std::memcmp(over->pool->data(), over->to.data(), over->to.nbytes()) == 0);
}

TEST(what_ends_a_right_waits_for_the_thread_in_a_piece) {
  if (skips()) return;
  const std::pair<const char*, std::function<void(HandOver&)>> ends[] = {
      {"revoke", [](HandOver& over) { CHECK(over.dst->revoke(over.lease, agent_pair::kBound)); }},
      {"deregister",
       [](HandOver& over) { CHECK(over.dst->deregister_region(over.dst_region, agent_pair::kBound).ok()); }},
      {"close", [](HandOver& over) { over.dst->close(agent_pair::kBound); }},
  };
  for (const auto& [name, end] : ends) {
    std::printf("  %s\n", name);
    const auto over = HandOver::in_a_piece("tcp");
    std::atomic<bool> ended{false};
    std::thread ending([&, &end = end] {
      end(*over);
      ended = true;
    });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    CHECK(!ended);
    CHECK_EQ(over->to.num_held(), 1u);
    over->to.let_on();
    ending.join();
    const std::vector<std::byte> at_fence(over->to.data(), over->to.data() + over->to.nbytes());
    CHECK(agent_pair::ends(over->handle));
    CHECK(over->handle->outcome() != Outcome::kDone);
    CHECK(std::memcmp(at_fence.data(), over->to.data(), at_fence.size()) == 0);
  }
}

}  // namespace
