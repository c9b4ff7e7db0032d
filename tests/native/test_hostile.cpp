// Peers that speak the wire truly and lie in what they say, beside an agent that must lose nothing.
#include <array>
#include <string>
#include <vector>

#include "hostile_peer.h"

namespace hostile {
namespace {

TEST(a_peer_that_speaks_truly_is_served_and_one_that_spoils_a_mac_loses_its_own_session) {
  Scene scene;
  Peer peer(scene.victim.runtime->address());
  REQUIRE(peer.shake_hands());
  CHECK(peer.num_heard<wire::Region>() == 1);
  const auto stream = peer.open_rail(0, "unix"), tcp = peer.open_rail(1, "tcp");
  CHECK(stream.has_value());
  CHECK(tcp.has_value());

  wire::Bytes spoiled = peer.sealed(wire::RegionsEnd{});
  spoiled.back() ^= std::byte{1};
  CHECK(peer.control.send(spoiled));
  CHECK(peer.hears_the_end());
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

TEST(the_meter_counts_what_a_caller_does_with_the_gate_and_not_how_long_it_waits) {
  Agent agent(options_of("alone"));
  agent.runtime->forget_longest_hold();
  volatile std::uint64_t sum = 0;
  const auto spin = [&](std::uint64_t rounds) {
    return agent.runtime->with_engine([&](Engine&, Time) {
      for (std::uint64_t i = 0; i < rounds; ++i) sum = sum + i;
      return 0;
    });
  };
  agent.runtime->with_engine([](Engine&, Time) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return 0;
  });
  const Time slept = agent.runtime->longest_hold_ns();
  CHECK(slept > 0);
  CHECK(slept < 20'000'000);
  for (std::uint64_t rounds = 1'000'000; agent.runtime->longest_hold_ns() < 50'000'000; rounds *= 2)
    spin(rounds);
  agent.runtime->forget_longest_hold();
  CHECK(agent.runtime->longest_hold_ns() < 50'000'000);
}

}  // namespace
}  // namespace hostile
