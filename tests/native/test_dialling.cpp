// Names with several addresses: a host with an IPv6 address that the agent does not listen on, a cluster
// whose name server answers with every network. Agents and sockets are real; the test gives the resolver's
// answers.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/control/socket_address.h"

namespace {

// The addresses of "several.test".
std::vector<std::string>& several() {
  static std::vector<std::string> addresses;
  return addresses;
}

}  // namespace

// Replaces the C library's function in this program.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** found) {
  static const auto resolve = reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (std::strcmp(host, "several.test") != 0) return resolve(host, service, hints, found);
  addrinfo** last = found;
  for (const std::string& address : several()) {
    if (const int failure = resolve(address.c_str(), service, hints, last); failure != 0) return failure;
    last = &(*last)->ai_next;
  }
  return 0;
}

namespace kvxfer::dialling_test {
namespace {

using namespace agent_pair;

std::shared_ptr<Runtime> agent(const std::string& name, const std::string& transport,
                               Time handshake_ns = 2 * kSecond) {
  RuntimeOptions options = options_of(name, {.transports = {transport}});
  options.handshake_ns = handshake_ns;
  return create(std::move(options));
}

std::uint16_t port_of(const Runtime& runtime) {
  return static_cast<std::uint16_t>(std::stoi(runtime.address().substr(runtime.address().rfind(':') + 1)));
}

std::string several_at(std::uint16_t port) { return "tcp://several.test:" + std::to_string(port); }

struct Found {
  std::string state;
  Status error;
};

// Dials, and waits until the session is open or lost.
Found dial(Runtime& runtime, const std::string& address, Time timeout_ns) {
  Result<SessionKey> key = runtime.begin_connect(address, timeout_ns);
  if (!key.ok()) return {"refused", key.status()};
  Found found;
  const bool over = runtime.wait(
      [&] {
        const auto view = runtime.with_engine([&](Engine& engine, Time) { return engine.peer(key.value()); });
        REQUIRE(view.has_value());
        found = {view->state, view->reason};
        return view->state == "lost" || (view->state == "open" && !view->rails.empty());
      },
      timeout_ns + 5 * kSecond);
  REQUIRE(over);
  return found;
}

sockaddr_in at(const char* host, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  REQUIRE(::inet_pton(AF_INET, host, &address.sin_addr) == 1);
  return address;
}

// A port that does not answer: its queue is full, and the kernel drops further callers.
struct SilentPort {
  SilentPort(const char* host, std::uint16_t port)
      : listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_in address = at(host, port);
    REQUIRE(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(listener.get(), 0) == 0);
    for (int i = 0; i < 4; ++i) {
      UniqueFd& filler =
          waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const int result = ::connect(filler.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
      REQUIRE(result == 0 || errno == EINPROGRESS);
    }
  }
  UniqueFd listener;
  std::vector<UniqueFd> waiting;
};

TEST(the_next_address_is_dialled_where_one_refuses) {
  for (const char* transport : {"tcp", "shm"}) {
    const auto listening = agent("listening", transport), calling = agent("calling", transport);
    several() = {"127.0.0.9", "127.0.0.8", "127.0.0.1", "127.0.0.7"};
    const Found found = dial(*calling, several_at(port_of(*listening)), 5 * kSecond);
    CHECK_EQ(found.state, "open");
    CHECK_OK(found.error);
  }
}

TEST(an_address_that_says_nothing_leaves_the_others_their_time) {
  const auto listening = agent("listening", "tcp"), calling = agent("calling", "tcp", kSecond / 2);
  const SilentPort silent("127.0.0.9", port_of(*listening));
  several() = {"127.0.0.9", "127.0.0.1"};
  const Found found = dial(*calling, several_at(port_of(*listening)), 2 * kSecond);
  CHECK_EQ(found.state, "open");
}

TEST(a_name_of_which_no_address_answers_says_what_became_of_each) {
  std::uint16_t port = 0;
  { port = port_of(*agent("gone", "tcp")); }
  const auto calling = agent("calling", "tcp");
  several() = {"127.0.0.9", "127.0.0.8"};
  const std::string text = std::to_string(port);
  const Found refused = dial(*calling, several_at(port), 5 * kSecond);
  CHECK_EQ(refused.state, "lost");
  CHECK(refused.error.code() == Code::kUnreachable);
  CHECK_EQ(refused.error.message(),
           "cannot connect to tcp://several.test:" + text + ": 127.0.0.9:" + text +
               " (Connection refused), 127.0.0.8:" + text +
               " (Connection refused); is the agent running, and is this its address?");

  const SilentPort first("127.0.0.9", port), last("127.0.0.8", port);
  const Found silent = dial(*calling, several_at(port), kSecond / 2);
  CHECK_EQ(silent.state, "lost");
  CHECK(silent.error.code() == Code::kNoAnswer);
  CHECK_EQ(silent.error.message(),
           "no answer from tcp://several.test:" + text +
               " within the time to connect (connect_timeout_s), after 127.0.0.9:" + text + " (no answer)");
}

TEST(who_connects_bears_with_a_handshake_for_as_long_as_with_connecting) {
  // A listener that accepts and says nothing is not a kvxfer agent.
  auto mute = listen_tcp(TcpAddress::resolve("tcp://127.0.0.1:0").value().front());
  REQUIRE_OK(mute);
  const auto calling = agent("calling", "tcp", 1);
  const std::string there = listening_address(mute.value().get()).value();
  const Found found = dial(*calling, there, kSecond / 4);
  CHECK_EQ(found.state, "lost");
  CHECK(found.error.code() == Code::kNoAnswer);
  CHECK_EQ(found.error.message(), "no answer from " + there +
                                      " within the time to connect (connect_timeout_s), although it accepted "
                                      "the connection: it is stopped or starved, or is not a kvxfer agent");
}

TEST(a_name_that_leads_beyond_loopback_needs_a_secret) {
  const auto calling = agent("calling", "tcp");
  several() = {"127.0.0.1", "192.0.2.1"};
  const Found found = dial(*calling, several_at(1), kSecond);
  CHECK_EQ(found.state, "refused");
  CHECK(found.error.code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvxfer::dialling_test
