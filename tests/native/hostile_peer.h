// A peer over real sockets that speaks the protocol correctly until its test makes it lie: it proves the
// secret, answers heartbeats, opens rails with valid proofs, and says, sends or withholds what the test
// wants. Beside it, a well-behaved agent (Bystander) reads pages of the victim, and must lose nothing.
//
// It has no thread: `hear...` and `serve` read what arrives, and answer heartbeats. Messages and macs are the
// core's (core/control/session, core/control/wire); the test decides what the peer *does* with them.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/control/session.h"
#include "core/control/socket_address.h"
#include "core/control/wire.h"

namespace hostile {

using namespace kvxfer;
using agent_pair::await, agent_pair::ends, agent_pair::is_done, agent_pair::num_rails, agent_pair::grant;
using agent_pair::kBound, agent_pair::kSecond, agent_pair::kNoHeartbeat, agent_pair::meet,
    agent_pair::pages_of;

inline void fill_from_urandom(std::span<std::byte> out) {
  std::ifstream("/dev/urandom", std::ios::binary)
      .read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
}

// A blocking end of a stream socket. Sending gives up when the other end has read nothing for kBound.
class Wire {
 public:
  explicit Wire(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const noexcept { return fd_.get(); }
  bool open() const noexcept { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }

  // False: the other end has hung up.
  bool send(wire::ByteSpan bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(sent));
      } else if (errno == EAGAIN) {
        if (!ready(POLLOUT, kBound)) return false;
      } else if (errno != EINTR) {
        return false;
      }
    }
    return true;
  }
  // Sends as much as the socket takes at once; 0 if it takes nothing.
  std::size_t send_some(wire::ByteSpan bytes) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent > 0 ? static_cast<std::size_t>(sent) : 0;
  }
  // Sends bytes with descriptors.
  bool pass(wire::ByteSpan bytes, std::span<const int> fds) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    std::vector<std::byte> control(CMSG_SPACE(fds.size_bytes()));
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
    return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // Appends what has come, and waits for it. False: the other end hung up (`hung_up`), or nothing came in
  // time. Descriptors that came with it are kept in `descriptors`.
  bool receive(wire::Bytes& into, Time timeout_ns) {
    if (!open() || !ready(POLLIN, timeout_ns)) return false;
    std::array<std::byte, 64 * 1024> bytes;
    iovec part{bytes.data(), bytes.size()};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(64 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t got = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got <= 0) {
      hung_up = got == 0 || (errno != EAGAIN && errno != EINTR);
      return false;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c))
      for (std::size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        descriptors.emplace_back(fd);
      }
    into.insert(into.end(), bytes.begin(), bytes.begin() + got);
    return true;
  }
  // Waits until the other end hangs up; drops what it still says.
  bool hears_the_end(Time timeout_ns = kBound) {
    wire::Bytes dropped;
    for (const Time until = Runtime::now() + timeout_ns; !hung_up && Runtime::now() < until; dropped.clear())
      receive(dropped, until - Runtime::now());
    return hung_up;
  }

  bool hung_up = false;
  std::vector<UniqueFd> descriptors;

 private:
  bool ready(short events, Time timeout_ns) {
    pollfd set{fd_.get(), events, 0};
    return ::poll(&set, 1, static_cast<int>(std::max<Time>(timeout_ns, 0) / 1'000'000)) > 0;
  }
  UniqueFd fd_;
};

enum class Over { kTcp, kUnix };

// A connected socket to an agent, on which nothing has been said.
inline Wire dial(const std::string& address, Over over = Over::kUnix) {
  if (over == Over::kUnix) {
    auto fd = dial_unix(name_beside(address));
    // On a busy machine more callers may wait than the listener queues.
    for (const Time until = Runtime::now() + kBound; !fd.ok() && Runtime::now() < until;) {
      ::poll(nullptr, 0, 1);
      fd = dial_unix(name_beside(address));
    }
    REQUIRE_OK(fd);
    return Wire(std::move(fd).value());
  }
  const auto resolved = TcpAddress::resolve(address);
  REQUIRE_OK(resolved);
  bool connecting = false;
  auto fd = dial_tcp(resolved.value().front(), connecting);
  REQUIRE_OK(fd);
  Wire wire(std::move(fd).value());
  pollfd set{wire.fd(), POLLOUT, 0};
  REQUIRE(!connecting || ::poll(&set, 1, static_cast<int>(kBound / 1'000'000)) == 1);
  return wire;
}

// A caller that comes to a listener.
inline Wire accepted_by(const UniqueFd& listener) {
  pollfd set{listener.get(), POLLIN, 0};
  REQUIRE(::poll(&set, 1, static_cast<int>(kBound / 1'000'000)) == 1);
  int error = 0;
  return Wire(accept_from(listener.get(), error));
}

// A listener in the place of an agent's.
struct Listening {
  Listening() {
    const auto where = TcpAddress::resolve("tcp://127.0.0.1:0");
    REQUIRE_OK(where);
    auto listening = listen_tcp(where.value().front());
    REQUIRE_OK(listening);
    tcp = std::move(listening).value();
    address = listening_address(tcp.get()).value();
  }
  UniqueFd tcp;
  std::string address;
};

struct PeerOptions {
  std::string name = "mallory";
  std::string secret;
  std::vector<std::string> transports = {"shm", "unix", "tcp"};
  Over over = Over::kUnix;
  std::string unix_name;  // where it claims to listen
  std::optional<wire::Id128> host;  // the host on which it claims to run
};

class Peer {
 public:
  // Calls an agent.
  explicit Peer(const std::string& address, PeerOptions options = {})
      : Peer(dial(address, options.over), SessionRole::kInitiator, address, options) {}
  // Answers an agent that called: the test's listener accepted `wire`.
  Peer(Wire accepted, PeerOptions options) : Peer(std::move(accepted), SessionRole::kAcceptor, "", options) {}

  // Waits until the session is open at this end and the other end's regions are known; this end has none to
  // report. False: refused; see session.reason().
  bool shake_hands() {
    return hear_until([&] { return num_heard<wire::RegionsEnd>() != 0; }) && say(wire::RegionsEnd{});
  }
  // Sends a message, correctly sealed and numbered.
  bool say(const wire::Message& message) {
    session.send(Runtime::now(), message);
    return flush();
  }
  // A frame as say() would send it, for a test that spoils it.
  wire::Bytes sealed(const wire::Message& message) {
    session.send(Runtime::now(), message);
    std::vector<wire::Bytes> frames = session.take_output();
    REQUIRE_EQ(frames.size(), 1u);
    return std::move(frames.front());
  }

  // Reads until is_so(). False: it can no longer become so, or did not within kBound.
  bool hear_until(const std::function<bool()>& is_so, Time timeout_ns = kBound) {
    const Time until = Runtime::now() + timeout_ns;
    flush();
    while (!is_so()) {
      const Time left = until - Runtime::now();
      if (left <= 0 || control.hung_up || session.state() == SessionState::kClosed) return is_so();
      // Wakes early enough for its own heartbeats.
      if (control.receive(unread_, std::min<Time>(left, 20'000'000))) take_frames();
      static_cast<void>(session.on_time(Runtime::now()));
      flush();
    }
    return true;
  }
  // Answers heartbeats for that time, and does nothing else.
  void serve(Time duration_ns) {
    hear_until([] { return false; }, duration_ns);
  }
  template <class T>
  std::optional<T> hear() {
    std::optional<T> found;
    hear_until([&] {
      for (auto it = heard.begin(); it != heard.end(); ++it)
        if (T* body = std::get_if<T>(&*it)) {
          found = std::move(*body);
          heard.erase(it);
          return true;
        }
      return false;
    });
    return found;
  }
  template <class T>
  std::size_t num_heard() const {
    std::size_t count = 0;
    for (const wire::Message& message : heard) count += std::holds_alternative<T>(message) ? 1 : 0;
    return count;
  }
  // Waits until the other end has ended the session.
  bool hears_the_end() {
    hear_until([&] { return control.hung_up || session.state() == SessionState::kClosed; });
    return control.hung_up || session.state() == SessionState::kClosed;
  }

  // For an initiator: opens a rail's socket, with proof and welcome; the test speaks as the transport.
  std::optional<Wire> open_rail(std::uint16_t index, std::string_view transport) {
    Wire rail = transport == "tcp" ? dial(address_, Over::kTcp) : dial(address_);
    if (!rail.send(session.rail_hello(index, transport))) return std::nullopt;
    wire::Bytes answer;
    constexpr std::size_t kWelcome = wire::kHeaderNbytes + sizeof(wire::Digest) + wire::kMacNbytes;
    while (answer.size() < kWelcome)
      if (!rail.receive(answer, kBound)) return std::nullopt;
    return rail;
  }
  // For an acceptor: answers a RAIL_HELLO that came over `rail`, and leaves the rest to the test.
  bool welcome(Wire& rail) {
    wire::Bytes frame;
    for (;;) {
      const auto header = wire::decode_header(frame, wire::kMaxHandshakeBody);
      if (header.ok() && frame.size() >= header.value().frame_nbytes()) {
        const auto message = wire::decode(
            header.value(), wire::ByteSpan(frame).subspan(wire::kHeaderNbytes, header.value().body_nbytes));
        const auto* const hello = message.ok() ? std::get_if<wire::RailHello>(&message.value()) : nullptr;
        return hello != nullptr && session.verify_rail_hello(*hello) &&
               rail.send(session.rail_welcome(hello->rail));
      }
      if (!rail.receive(frame, kBound)) return false;
    }
  }

  bool flush() {
    bool sent = control.open();
    for (const wire::Bytes& frame : session.take_output()) sent = sent && control.send(frame);
    return sent;
  }

  const std::string name;
  Wire control;
  Session session;
  std::deque<wire::Message> heard;  // except heartbeats and the handshake

 private:
  Peer(Wire wire, SessionRole role, std::string address, const PeerOptions& options)
      : name(options.name),
        control(std::move(wire)),
        session(role, config_of(options), Runtime::now(), fill_from_urandom),
        address_(std::move(address)) {}

  static SessionConfig config_of(const PeerOptions& options) {
    SessionConfig config;
    config.secret = options.secret;
    config.self.name = options.name;
    fill_from_urandom(config.self.incarnation);
    fill_from_urandom(config.self.host);
    fill_from_urandom(config.self.process);
    config.self.transports = options.transports;
    config.self.unix_name = options.unix_name;
    if (options.host) config.self.host = *options.host;
    config.silent_ns = kNoHeartbeat;
    config.heartbeat_ns = kNoHeartbeat;
    return config;
  }

  void take_frames() {
    for (;;) {
      const auto header = wire::decode_header(unread_, session.max_body());
      if (!header.ok() || unread_.size() < header.value().frame_nbytes()) return;
      const std::size_t nbytes = header.value().frame_nbytes();
      auto message = session.receive(Runtime::now(), wire::ByteSpan(unread_).first(nbytes));
      unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(nbytes));
      if (message.ok() && message.value()) heard.push_back(std::move(*message.value()));
    }
  }

  std::string address_;
  wire::Bytes unread_;
};

// ---- the victim and its friend ------------------------------------------------------------------

inline constexpr std::uint32_t kBlocks = 16;
inline constexpr std::uint64_t kBlockNbytes = 4096;

// An agent with a region of host memory; the time that its gate is held is measured.
struct Agent : agent_pair::Agent<> {
  explicit Agent(RuntimeOptions options) : agent_pair::Agent<>(std::move(options), {kBlocks, kBlockNbytes}) {
    add();
  }
  ~Agent() { runtime->close(kSecond); }
};

inline RuntimeOptions options_of(const std::string& name) {
  RuntimeOptions options = agent_pair::options_of(name, {.transports = {"shm", "unix", "tcp"}});
  // The peer has no thread, so it must not be lost for silence; nor must any peer when the machine stands
  // still.
  options.silent_ns = kNoHeartbeat;
  options.heartbeat_ns = kSecond;
  options.meter_gate = true;
  return options;
}

// A victim, and a well-behaved third agent, which may write all of its blocks.
struct Scene {
  explicit Scene(RuntimeOptions of_victim = options_of("victim"),
                 RuntimeOptions of_friend = options_of("friend"))
      : victim(of_victim), bystander(of_friend) {
    std::tie(there, here) = meet(*bystander.runtime, *victim.runtime, 0);
    victim.grant(here, wire::LeaseMode::kWrite);
    program = bystander.install(there, true, bystander.region, victim.region);
  }

  // Whether a write of the friend's arrives, with its bytes.
  bool friend_is_served() {
    const std::uint32_t block = next_block++ % kBlocks;
    std::byte* const page = bystander.memory.data() + block * kBlockNbytes;
    std::memset(page, static_cast<int>(next_block), kBlockNbytes);
    const auto handle = bystander.try_post(bystander.request(there, program, {block}));
    if (!handle.ok() || !is_done(handle.value())) return false;
    // The victim's gate was held while the bytes moved; after taking it once, this thread may read them.
    victim.runtime->with_engine([](Engine&, Time) {});
    return std::memcmp(page, victim.memory.data() + block * kBlockNbytes, kBlockNbytes) == 0;
  }
  // Whether the friend still has its first session.
  bool friend_is_there() {
    return victim.runtime->with_engine([&](Engine& engine, Time) {
      return engine.session(here) != nullptr;
    }) && bystander.runtime->with_engine([&](Engine& engine, Time) {
      return engine.session(there) != nullptr;
    });
  }

  Agent victim, bystander;
  SessionKey there = 0, here = 0;  // the friend's number for the victim, and the victim's for the friend
  std::uint32_t program = 0, next_block = 0;
};

// A hostile peer with a region, which may read the victim's pages.
struct Reader {
  Reader(Scene& scene, Peer& its) : peer(its) {
    Runtime& victim = *scene.victim.runtime;
    rail = peer.open_rail(0, "unix");
    REQUIRE(rail.has_value());
    peer.say(hers());
    SessionKey key = 0;
    REQUIRE(await([&] {
      return victim.with_engine([&](Engine& engine, Time) {
        for (const SessionKey each : engine.open_peers())
          if (engine.peer(each)->name == peer.name) key = each;
        return key != 0;
      });
    }));
    grant(victim, key, scene.victim.region, wire::LeaseMode::kRead);
    src = scene.victim.region;
  }
  static wire::Region hers() {
    wire::Region region;
    region.id = kRegion;
    region.name = "hers";
    region.spans = {{0, kBlocks * kBlockNbytes}};
    region.num_blocks = kBlocks;
    region.keys = {{"unix", {}}};
    return region;
  }
  bool tell(const CopyProgram& program) {
    return peer.say(wire::Program{++num_programs, src, kRegion, program});
  }
  // Requests a read of all blocks by the newest program; returns the transfer's id.
  TransferId ask(std::uint8_t flags = 0) {
    wire::Request request;
    request.spec.transfer = next += 2;
    request.spec.program = num_programs;
    request.spec.grid = {0, 1, kBlocks, 1};
    request.spec.flags = flags;
    request.spec.timeout_ns = static_cast<std::uint64_t>(kBound);
    for (std::uint32_t block = 0; block < kBlocks; ++block) {
      request.spec.src_ids.push_back(block);
      request.spec.dst_ids.push_back(block);
    }
    peer.say(request);
    return next;
  }

  static constexpr RegionId kRegion = 77;
  Peer& peer;
  std::optional<Wire> rail;
  RegionId src = 0;
  std::uint32_t num_programs = 0;
  TransferId next = 0;
};

// What an agent has logged since the last call, line by line.
inline std::vector<std::string> log_of(Runtime& runtime) {
  std::vector<std::string> lines;
  for (;;) {
    const std::vector<Event> events = runtime.ring().drain(256, false);
    if (events.empty()) return lines;
    for (const Event& event : events)
      if (event.kind == EventKind::kLog || event.kind == EventKind::kPeerLost) lines.push_back(event.message);
  }
}
inline bool logs(Runtime& runtime, std::string_view words) {
  bool found = false;
  return await([&] {
    for (const std::string& line : log_of(runtime)) found = found || line.find(words) != std::string::npos;
    return found;
  });
}

inline std::size_t num_descriptors() {
  std::size_t count = 0;
  for (int fd = 0; fd < 65536; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

}  // namespace hostile
