// Rails of streams that several threads move at the same time: the suite of every transport, its ends moved
// by two threads, and rights that end while a thread is in the middle of a piece.
#include <memory>
#include <string>
#include <utility>

#include "check.h"
#include "conformance.h"
#include "hand_over.h"
#include "transports/stream/stream_round.h"
#include "transports/stream/stream_transport.h"

namespace {

using namespace kvxfer;

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

TEST(a_thread_moves_one_rail_while_whoever_drives_moves_another) { hand_over::what_was_held_arrives("tcp"); }

TEST(what_ends_a_right_waits_for_the_thread_in_a_piece) {
  hand_over::what_ends_a_right_waits_for_the_thread_in_a_piece("tcp", false);
}

}  // namespace
