// Two sessions that shake hands and talk, and each of them in any state that it can be in.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "core/control/session.h"
#include "wire_samples.h"

namespace session_pair {

using namespace wire_samples;
using State = SessionState;
using Event = SessionEvent;

inline constexpr Time kMs = 1'000'000;
inline constexpr Time kStart = 1'000'000 * kMs;

inline RandomSource random_source(std::uint64_t seed) {
  return [random = check::Random(seed)](std::span<std::byte> out) mutable {
    random.fill(out.data(), out.size());
  };
}

inline SessionConfig config_of(std::string name, std::string secret = "open sesame") {
  SessionConfig config;
  config.secret = std::move(secret);
  config.self.name = std::move(name);
  config.self.incarnation.fill(std::byte{static_cast<unsigned char>(config.self.name[0])});
  config.self.unix_name = "kvxfer-" + config.self.name;
  config.self.transports = {"shm", "tcp"};
  return config;
}

// The settings of an agent that accepts two secrets.
inline SessionConfig config_of(std::string name, std::string secret, std::string second) {
  SessionConfig config = config_of(std::move(name), std::move(secret));
  config.second_secret = std::move(second);
  return config;
}

struct Pair {
  explicit Pair(std::uint64_t seed = check::seed(), SessionConfig a = config_of("prefill-0"),
                SessionConfig b = config_of("decode-0"))
      : initiator(SessionRole::kInitiator, a, now, random_source(2 * seed)),
        acceptor(SessionRole::kAcceptor, b, now, random_source(2 * seed + 1)) {}

  Session& other(Session& one) { return &one == &initiator ? acceptor : initiator; }

  // Delivers the output of `from`; the first error ends it.
  Status carry(Session& from) {
    for (const Bytes& frame : from.take_output()) {
      Result<std::optional<Message>> result = other(from).receive(now, frame);
      if (!result.ok()) return result.status();
      if (result.value()) (&from == &initiator ? at_acceptor : at_initiator).push_back(*result.value());
    }
    return Status();
  }
  Status handshake() {
    if (Status status = carry(initiator); !status.ok()) return status;
    if (Status status = carry(acceptor); !status.ok()) return status;
    return carry(initiator);
  }

  Time now = kStart;
  Session initiator, acceptor;
  std::vector<Message> at_initiator, at_acceptor;
};

inline bool says(const Status& status, std::string_view words) {
  if (status.message().find(words) != std::string::npos) return true;
  std::printf("  it says: %s\n", status.message().c_str());
  return false;
}

// A session of either role in any state that it can be in, and the peer that brought it there.
struct Scene {
  SessionRole role;
  State state;
};
inline constexpr Scene kScenes[] = {
    {SessionRole::kAcceptor, State::kAwaitHello},
    {SessionRole::kAcceptor, State::kAwaitProof},
    {SessionRole::kAcceptor, State::kOpen},
    {SessionRole::kAcceptor, State::kClosed},
    {SessionRole::kInitiator, State::kAwaitChallenge},
    {SessionRole::kInitiator, State::kOpen},
    {SessionRole::kInitiator, State::kClosed},
};
inline Session& enter(Pair& pair, const Scene& scene) {
  Session& session = scene.role == SessionRole::kAcceptor ? pair.acceptor : pair.initiator;
  if (scene.state == State::kAwaitProof) REQUIRE_OK(pair.carry(pair.initiator));
  if (scene.state == State::kOpen) REQUIRE_OK(pair.handshake());
  if (scene.state == State::kClosed) session.connection_lost();
  REQUIRE_EQ(session.state(), scene.state);
  return session;
}

inline Message any_message(check::Random& random) {
  // One of the messages that the layer above sends: REGION and all after it.
  static const std::size_t first = Message(Region()).index();
  return Sampler(random, 6).message(random.between(first, kNumKinds - 1));
}

}  // namespace session_pair
