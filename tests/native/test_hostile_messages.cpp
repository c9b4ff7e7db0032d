// Peers that break the rules of messages, over real sockets: each loses its own session, and a third agent's messages
// and pages go on.
#include <array>
#include <span>
#include <string>

#include "hostile_peer.h"

namespace hostile {
namespace {

// The friend's message comes to the victim's caller, after whatever others had said.
bool friend_is_heard(Scene& scene, const std::string& words) {
  const auto bytes = std::as_bytes(std::span(words));
  const Status sent = scene.bystander.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.send_message(now, scene.there, {bytes.begin(), bytes.end()});
  });
  if (!sent.ok()) return false;
  bool heard = false;
  return await([&] {
    while (const std::optional<Mail> mail = scene.victim.runtime->ring().take(MailKind::kMessage))
      heard = heard || (mail->peer == scene.here && wire::text_of(mail->payload) == words);
    return heard;
  });
}

struct Breach {
  const char* what;
  void (*say)(Peer&);
};

bool send(Peer& peer, std::uint64_t nbytes) { return peer.say(wire::AgentMessage{wire::Bytes(nbytes)}); }

void fill(Peer& peer, std::uint64_t nbytes) {
  const std::uint64_t num_that_fit = wire::kMessageWindow / message_charge(nbytes);
  for (std::uint64_t i = 0; i <= num_that_fit; ++i)
    if (!send(peer, nbytes)) return;
}

TEST(who_breaks_the_rules_of_messages_loses_its_session_and_nobody_elses) {
  const std::array<Breach, 5> breaches = {{
      {"large messages that nobody has room for", [](Peer& peer) { fill(peer, wire::kMaxMessage); }},
      {"empty messages without end", [](Peer& peer) { fill(peer, 0); }},
      {"a message beyond the largest", [](Peer& peer) { send(peer, wire::kMaxMessage + 1); }},
      {"a caller that took what was never sent", [](Peer& peer) { peer.say(wire::MessagesTaken{1}); }},
      {"a caller that took nothing anew", [](Peer& peer) { peer.say(wire::MessagesTaken{0}); }},
  }};
  Scene scene;
  for (const Breach& breach : breaches) {
    Peer peer(scene.victim.runtime->address());
    REQUIRE(peer.shake_hands());
    breach.say(peer);
    const bool ended = peer.hears_the_end();
    CHECK(ended);
    const bool lost = await([&] {
      return scene.victim.runtime->with_engine(
          [](Engine& engine, Time) { return engine.open_peers().size() == 1; });
    });
    CHECK(lost);
    const bool heard = friend_is_heard(scene, breach.what);
    CHECK(heard);
    CHECK(scene.friend_is_served());
    if (!ended || !lost || !heard) std::printf("  %s\n", breach.what);
  }
  CHECK(scene.friend_is_there());
}

TEST(who_comes_under_a_name_that_is_open_says_nothing_to_callers) {
  Scene scene;
  PeerOptions namesake;
  namesake.name = "friend";
  Peer peer(scene.victim.runtime->address(), namesake);
  REQUIRE(peer.hear_until([&] { return peer.session.state() == SessionState::kOpen; }));
  CHECK(send(peer, 5));
  CHECK(peer.hears_the_end());
  CHECK(peer.session.reason().message().find("MESSAGE before") != std::string::npos);
  CHECK(friend_is_heard(scene, "the friend's"));
  CHECK(!scene.victim.runtime->ring().take(MailKind::kMessage));
  CHECK(scene.friend_is_there());
}

}  // namespace
}  // namespace hostile
