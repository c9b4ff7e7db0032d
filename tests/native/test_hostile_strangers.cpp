// Strangers, and peers that hold scarce resources: connections, descriptors, and the time of connecting
// agents.
#include <dlfcn.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "hostile_peer.h"

// How often this program's agents have asked the kernel what is ready.
static std::atomic<std::uint64_t> num_rounds{0};

// Replaces the C library's function in this program.
extern "C" int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  static const auto wait = reinterpret_cast<decltype(&::epoll_wait)>(::dlsym(RTLD_NEXT, "epoll_wait"));
  ++num_rounds;
  return wait(epoll, events, most, timeout_ms);
}

namespace hostile {
namespace {

std::uint64_t used(const Budget& budget) { return budget.used(Resource::kDescriptors); }
std::uint64_t limit(const Budget& budget) { return budget.limit(Resource::kDescriptors); }

TEST(strangers_share_a_budget_and_the_oldest_gives_way) {
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  const std::uint64_t most = limit(victim.strangers());
  REQUIRE(most >= 64);
  // Half of them say nothing, half say HELLO and no PROOF.
  std::vector<Wire> silent;
  std::vector<std::unique_ptr<Peer>> unproved;
  for (std::uint64_t i = 0; i < most; ++i) {
    silent.push_back(dial(victim.address(), i % 2 == 0 ? Over::kUnix : Over::kTcp));
    unproved.push_back(std::make_unique<Peer>(victim.address()));
    unproved.back()->flush();
    REQUIRE(await([&] { return used(victim.strangers()) > 0; }));
    CHECK(used(victim.strangers()) <= most);
  }
  // The newest are left, as many as there is room for.
  CHECK(silent.front().hears_the_end());
  CHECK(unproved.front()->control.hears_the_end());
  CHECK(await([&] { return used(victim.strangers()) == most; }));
  // A peer that proves itself is accepted, and no longer counts as a stranger.
  Peer newest(victim.address());
  CHECK(newest.shake_hands());
  CHECK(used(victim.strangers()) <= most);
  CHECK(unproved.back()->shake_hands());
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
  silent.clear();
  unproved.clear();
  CHECK(await([&] { return used(victim.strangers()) == 0; }));
}

TEST(what_strangers_say_by_halves_is_charged_to_them_until_they_go) {
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  const auto bytes = [&] { return victim.strangers().used(Resource::kBytes); };
  const std::uint64_t half = wire::kHeaderNbytes / 2;
  std::vector<Wire> strangers;
  for (std::uint64_t num = 1; num <= 20; ++num) {
    strangers.push_back(dial(victim.address(), num % 2 == 0 ? Over::kUnix : Over::kTcp));
    CHECK(strangers.back().send(wire::Bytes(half)));
    REQUIRE(await([&] { return bytes() >= num * half; }));
    CHECK(bytes() <= num * 2 * half);  // and not as much as a read could have brought
  }
  Peer peer(victim.address());
  CHECK(peer.shake_hands());
  strangers.clear();
  CHECK(await([&] { return bytes() == 0; }));  // a proven peer is charged to its own budget
  CHECK(scene.friend_is_served());
}

TEST(rails_beyond_those_of_a_transport_are_the_peers_own_and_end_with_it) {
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  auto peer = std::make_unique<Peer>(victim.address());
  REQUIRE(peer->shake_hands());
  std::shared_ptr<Budget> budget;
  REQUIRE(await([&] {
    victim.with_engine([&](Engine& engine, Time) {
      for (const SessionKey each : engine.open_peers())
        if (each != scene.here) budget = engine.budget(each);
    });
    return budget != nullptr;
  }));
  std::vector<Wire> rails;
  for (std::uint16_t index = 0; index < 12; ++index) {
    auto rail = peer->open_rail(index, index % 3 == 0 ? "shm" : index % 3 == 1 ? "unix" : "tcp");
    REQUIRE(rail.has_value());
    rails.push_back(std::move(*rail));
  }
  CHECK(await([&] { return budget->used(Resource::kDescriptors) >= 12; }));
  CHECK(scene.friend_is_served());
  CHECK(!peer->open_rail(3, "unix").has_value());  // a number that was used before
  peer.reset();
  for (Wire& rail : rails) CHECK(rail.hears_the_end());
  CHECK(await([&] { return budget->used(Resource::kDescriptors) == 0; }));
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

TEST(rails_of_one_session_are_bounded_and_visible) {
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  Peer peer(victim.address());
  REQUIRE(peer.shake_hands());
  std::vector<Wire> rails;
  std::uint16_t index = 0;
  while (index < 1004) {
    auto rail = peer.open_rail(index++, "unix");
    if (!rail) break;
    rails.push_back(std::move(*rail));
  }
  CHECK(rails.size() >= 64);
  CHECK(rails.size() <= 128);
  CHECK(logs(victim, "another rail of peer 'mallory': it may hold 128 descriptors here, and holds 128"));
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

// Takes every descriptor that this process can still open.
struct Shortage {
  Shortage() {
    ::getrlimit(RLIMIT_NOFILE, &before);
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(num_descriptors() + 64);
    ::setrlimit(RLIMIT_NOFILE, &few);
    for (;;) {
      UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!fd) return;
      taken.push_back(std::move(fd));
    }
  }
  ~Shortage() { ::setrlimit(RLIMIT_NOFILE, &before); }
  rlimit before{};
  std::vector<UniqueFd> taken;
};

TEST(without_descriptors_the_listener_rests_and_sessions_go_on) {
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  const auto where = TcpAddress::resolve(victim.address());
  REQUIRE_OK(where);
  // Sockets that exist before the shortage, since the callers live in this process.
  std::vector<UniqueFd> callers;
  for (int i = 0; i < 8; ++i) callers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::optional<Shortage> shortage(std::in_place);
  for (UniqueFd& caller : callers)
    REQUIRE(::connect(caller.get(), reinterpret_cast<const sockaddr*>(where.value().front().storage.data()),
                      static_cast<socklen_t>(where.value().front().storage.size())) == 0);
  std::size_t num_words = 0;
  REQUIRE(await([&] {
    for (const std::string& line : log_of(victim))
      num_words += line.find("no connection can be accepted") != std::string::npos ? 1 : 0;
    return num_words != 0;
  }));
  for (int i = 0; i < 20; ++i) CHECK(scene.friend_is_served());
  // Now no agent has anything to do but to listen again, after 10 ms of rest and ever later. A listener that spins asks
  // thousands of times. Rounds are counted because processor time also measures how slow the machine is.
  const Time began = Runtime::now();
  const std::uint64_t before = num_rounds;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const std::uint64_t rounds = num_rounds - before;
  const Time rests = (Runtime::now() - began) / 10'000'000 + 1;
  std::printf("  %llu rounds in the time of %lld rests\n", static_cast<unsigned long long>(rounds),
              static_cast<long long>(rests));
  for (const std::string& line : log_of(victim))
    num_words += line.find("no connection can be accepted") != std::string::npos ? 1 : 0;
  CHECK_EQ(num_words, 1u);
  CHECK(rounds < 100 * static_cast<std::uint64_t>(rests));
  callers.clear();
  shortage.reset();
  Peer late(victim.address());
  CHECK(late.shake_hands());
  CHECK(scene.friend_is_there());
}

// A peer that agents call, on its own TCP and unix listeners.
struct Called : Listening {
  Called() {
    auto unix_listening = listen_unix(name);
    REQUIRE_OK(unix_listening);
    local = std::move(unix_listening).value();
  }
  const std::string name = "kvxfer-called-" + address.substr(6);
  UniqueFd local;
};

std::string why_lost(Runtime& runtime, SessionKey key) {
  std::optional<PeerView> view;
  REQUIRE(await([&] {
    view = runtime.with_engine([&](Engine& engine, Time) { return engine.peer(key); });
    return view && view->state == "lost";
  }));
  return view->reason.message();
}

TEST(a_connect_ends_though_the_peer_withholds_something) {
  struct Case {
    const char* withheld;
    Time handshake_ns, connect_ns;
    const char* words;
  };
  const Case cases[] = {
      {"the end of its regions", kBound, kSecond / 2, "connect_timeout_s"},
      {"its welcome", kSecond / 2, kBound, "handshake_timeout_s"},
      {"its rail's hello", kSecond / 2, kBound, "handshake_timeout_s"},
      {"its rail's hello", kBound, kSecond / 2, "connect_timeout_s"},
  };
  for (const Case& c : cases) {
    Called called;
    RuntimeOptions options = options_of("caller");
    options.handshake_ns = c.handshake_ns;
    options.transports = {"shm"};
    Agent caller(options);
    const auto key = caller.runtime->begin_connect(called.address, c.connect_ns);
    REQUIRE_OK(key);
    PeerOptions own;
    own.transports = {"shm"};
    own.unix_name = called.name;
    own.host = caller.runtime->identity().host;
    Peer peer(accepted_by(called.tcp), own);
    REQUIRE(peer.hear_until([&] { return peer.num_heard<wire::RegionsEnd>() != 0; }));
    std::optional<Wire> rail;
    if (std::string_view(c.withheld) != "the end of its regions") {
      peer.say(wire::RegionsEnd{});
      rail.emplace(accepted_by(called.local));
      if (std::string_view(c.withheld) != "its welcome") CHECK(peer.welcome(*rail));
    }
    const std::string why = why_lost(*caller.runtime, key.value());
    CHECK_HAS(c.withheld + (": " + why), c.words);
  }
}

TEST(a_peer_that_reads_nothing_of_what_it_is_sent_ends_its_own_session) {
  Scene scene;
  Peer peer(scene.victim.runtime->address());
  REQUIRE(peer.shake_hands());
  // Each heartbeat is answered by a frame of the same length, which the peer does not read.
  wire::Bytes beats;
  std::uint64_t number = 0;
  bool taken = true;
  for (std::uint64_t nbytes = 0; taken && nbytes < 256u << 20; nbytes += beats.size()) {
    beats.clear();
    for (int i = 0; i < 4096; ++i) {
      const wire::Bytes beat = peer.sealed(wire::Heartbeat{++number});
      beats.insert(beats.end(), beat.begin(), beat.end());
    }
    taken = peer.control.send(beats);
  }
  CHECK(!taken);
  CHECK(logs(*scene.victim.runtime, "it does not read its socket"));
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

TEST(a_peer_that_floods_frames_has_turns_as_others_have) {  // of 64 frames, which test_frame_ring counts
  Scene scene;
  Peer peer(scene.victim.runtime->address());
  REQUIRE(peer.shake_hands());
  REQUIRE(scene.friend_is_served());
  wire::Bytes beats;
  std::uint64_t number = 0;
  for (int i = 0; i < 64 * 1024; ++i) {
    const wire::Bytes beat = peer.sealed(wire::Heartbeat{++number});
    beats.insert(beats.end(), beat.begin(), beat.end());
  }
  std::atomic<bool> over{false};
  std::thread flood([&] {
    peer.control.send(beats);
    over = true;
  });
  std::size_t num_served = 0;
  while (!over) {
    CHECK(scene.friend_is_served());
    ++num_served;
    wire::Bytes answers;
    while (peer.control.receive(answers, 0)) answers.clear();
  }
  flood.join();
  CHECK(peer.control.open());
  CHECK(num_served > 0);
  CHECK(scene.friend_is_there());
}

TEST(a_forked_child_keeps_no_socket_of_an_agent) {
  Scene scene;
  REQUIRE(scene.friend_is_served());
  const auto num_sockets = [] {
    int count = 0;
    for (int fd = 3; fd < 4096;
         ++fd) {  // by name: fstat of a descriptor that another thread may close is a race to TSan
      char target[8] = {};
      const std::string link = "/proc/self/fd/" + std::to_string(fd);
      count += ::readlink(link.c_str(), target, 7) > 0 && std::string(target) == "socket:" ? 1 : 0;
    }
    return count;
  };
  REQUIRE(num_sockets() >= 6);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) ::_exit(num_sockets());
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace hostile
