// Who may connect, and who is handed memory: processes of another user of the host, with and without the
// secret.
#include <array>
#include <string>
#include <vector>

#include "hostile_peer.h"
#include "other_user.h"

namespace hostile {
namespace {

const std::string kUserSecret(32, 'u'), kSharedSecret(32, 's');

RuntimeOptions victim_options(std::string secret, bool shares_with_all = false) {
  RuntimeOptions options = options_of("victim");
  (secret == kSharedSecret ? options.secret : options.user_secret) = std::move(secret);
  options.shares_with_all = shares_with_all;
  return options;
}
RuntimeOptions friend_options(const std::string& secret) {
  RuntimeOptions options = victim_options(secret);
  options.name = "friend";
  return options;
}

// Whether descriptors of memory came over a rail that was welcomed. The rail stays open, because the end of
// the last rail ends the peer.
std::string memory_over(const std::optional<Wire>& opened, const char* transport) {
  return (opened ? ", " : ", no ") + std::string(transport) +
         (opened && !opened->descriptors.empty() ? " with descriptors" : "");
}

// What a process finds that calls the agent: whether it is accepted, and which memory it is handed.
std::string call(const std::string& address, const std::string& secret, Over over) {
  PeerOptions options;
  options.secret = secret;
  options.over = over;
  Peer peer(address, options);
  if (!peer.shake_hands()) {
    const bool spoken_to = !peer.session.peer().name.empty() ||
                           peer.session.reason().message().find("victim") != std::string::npos;
    return spoken_to ? "refused by its secret" : "refused unheard";
  }
  peer.serve(50'000'000);
  std::string found = peer.control.descriptors.empty() ? "in" : "in with a ring";
  if (over == Over::kTcp && secret == kUserSecret) return found;
  auto stream = peer.open_rail(0, "unix"), shm = peer.open_rail(1, "shm");
  wire::Bytes words;
  while (shm && shm->descriptors.empty() && shm->receive(words, 200'000'000)) {}
  return found + memory_over(shm, "shm") + memory_over(stream, "unix");
}

struct Case {
  const char* what;
  std::string agents_secret;
  bool shares_with_all;
  std::string callers_secret;
  Over over;
  std::string found_as_another, found_as_the_same;
};

TEST(who_comes_in_and_who_is_handed_memory) {
  if (!may_become_another_user()) return;
  const Case cases[] = {
      // A user's own secret admits only that user, even if another user has stolen it.
      {"no secret", kUserSecret, false, "", Over::kUnix, "refused unheard", "refused by its secret"},
      {"stolen", kUserSecret, false, kUserSecret, Over::kUnix, "refused unheard",
       "in with a ring, shm with descriptors, unix"},
      {"no secret, by tcp", kUserSecret, false, "", Over::kTcp, "refused by its secret",
       "refused by its secret"},
      // Pages for another user go over the stream.
      {"shared", kSharedSecret, false, kSharedSecret, Over::kUnix, "in, no shm, unix",
       "in with a ring, shm with descriptors, unix"},
      {"shared, memory too", kSharedSecret, true, kSharedSecret, Over::kUnix,
       "in with a ring, shm with descriptors, unix", "in with a ring, shm with descriptors, unix"},
      {"shared, guessed", kSharedSecret, true, std::string(32, 'g'), Over::kUnix, "refused by its secret",
       "refused by its secret"},
  };
  for (const Case& c : cases) {
    OtherUser another([&](const std::string& address) { return call(address, c.callers_secret, c.over); });
    Scene scene(victim_options(c.agents_secret, c.shares_with_all), friend_options(c.agents_secret));
    const std::string address = scene.victim.runtime->address();
    const std::string as_another = another.ask(address), as_same = call(address, c.callers_secret, c.over);
    if (as_another != c.found_as_another || as_same != c.found_as_the_same)
      std::printf("  %s: as another user '%s', as the same '%s'\n", c.what, as_another.c_str(),
                  as_same.c_str());
    CHECK(as_another == c.found_as_another);
    CHECK(as_same == c.found_as_the_same);
    CHECK(scene.friend_is_served());
    CHECK(scene.friend_is_there());
  }
}

// Listens under an abstract name. After "look" it reports what a caller said within a moment.
std::string squat(const std::string& name, UniqueFd& listener) {
  if (name == "look") {
    int error = 0;
    UniqueFd fd = accept_from(listener.get(), error);
    if (!fd) return "nobody came";
    Wire wire(std::move(fd));
    wire::Bytes words;
    return wire.receive(words, kSecond) ? "was told something" : "was told nothing";
  }
  auto listening = listen_unix(name);
  if (!listening.ok()) return listening.status().message();
  listener = std::move(listening).value();
  return "listens";
}

TEST(who_took_the_unix_name_beside_an_agent_hears_nothing_of_those_that_call_it) {
  if (!may_become_another_user()) return;
  UniqueFd listener;
  OtherUser squatter([&](const std::string& name) { return squat(name, listener); });
  Listening real;
  REQUIRE_EQ(squatter.ask(name_beside(real.address)), "listens");
  Agent caller(victim_options(kUserSecret));
  REQUIRE_OK(caller.runtime->begin_connect(real.address, kBound));
  CHECK(accepted_by(real.tcp).open());  // the caller came by TCP
  CHECK_EQ(squatter.ask("look"), "was told nothing");
}

TEST(who_took_the_unix_name_that_a_peer_tells_is_opened_no_rail) {
  if (!may_become_another_user()) return;
  for (const std::string& secret : {kUserSecret, kSharedSecret}) {
    UniqueFd listener;
    OtherUser squatter([&](const std::string& name) { return squat(name, listener); });
    const std::string name = "kvxfer-test-" + std::to_string(::getpid()) + secret.substr(0, 1);
    REQUIRE_EQ(squatter.ask(name), "listens");
    Listening real;
    Agent caller(victim_options(secret));
    REQUIRE_OK(caller.runtime->begin_connect(real.address, kBound));
    PeerOptions options;
    options.secret = secret;
    options.unix_name = name;
    options.host = caller.runtime->identity().host;
    options.transports = {"shm", "cuda_ipc"};
    Peer peer(accepted_by(real.tcp), options);
    peer.shake_hands();
    CHECK(peer.hears_the_end());
    CHECK(logs(*caller.runtime, secret == kUserSecret ? "without a secret this agent serves only its own user"
                                                      : "memory is shared only with its own user"));
    CHECK(squatter.ask("look") != "was told something");
  }
}

TEST(a_name_that_does_not_fit_a_unix_address_is_refused_in_words) {
  CHECK(dial_unix(std::string(107, 'x')).status().code() == Code::kUnreachable);
  for (const std::size_t nbytes : {108, 128, 1000}) {
    const auto dialled = dial_unix(std::string(nbytes, 'x'));
    REQUIRE(!dialled.ok());
    CHECK(dialled.status().code() == Code::kInvalidArgument);
    CHECK_HAS(dialled.status().message(), std::to_string(nbytes));
    CHECK(!listen_unix(std::string(nbytes, 'x')).ok());
  }
}

}  // namespace
}  // namespace hostile
