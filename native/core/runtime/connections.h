// Sockets, from the first byte until each has become the control connection of an authenticated session or a
// rail of a transport; and the control connections from then on.
//
// Frames go to the engine, rails to the RailTable. A connection that has proved nothing is a stranger. All
// strangers share one budget, and the oldest gives way to the newest.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/control/dialling.h"
#include "core/control/frame_socket.h"
#include "core/engine.h"
#include "core/runtime/listeners.h"
#include "core/runtime/rail_table.h"
#include "core/runtime_options.h"
#include "core/system/epoll_reactor.h"

namespace kvxfer {

class Connections final : public Listeners::Host {
 public:
  using Log = std::function<void(std::string)>;
  Connections(const RuntimeOptions& options, EpollReactor& reactor, RailTable& rails, Log log);

  // Call it before everything else: sets the engine that gets the frames, and what we say of ourselves.
  void serve(Engine& engine, const wire::Identity& self) {
    engine_ = &engine;
    self_ = self;
  }

  // ---- incoming calls and our own calls
  void take_in(UniqueFd socket) override;
  // Connections that begin from now on prove themselves by these credentials, if the agent has any. From
  // any thread, with the gate or without.
  void renew(std::shared_ptr<const tls::Credentials> credentials);
  bool close_oldest_stranger() override;
  void log(std::string text) override { log_(std::move(text)); }
  const Budget& strangers() const noexcept { return *strangers_; }
  // Starts a connection. It asks a name server, so call it without the gate.
  struct Connection;
  Result<std::unique_ptr<Connection>> call(const std::string& address, Time timeout_ns);
  // Under the gate: makes the session of that connection. Ends the connection if there can be no session.
  Result<SessionKey> add(std::unique_ptr<Connection> called, Time now);

  // ---- as EngineHost's
  void send(SessionKey session, wire::Bytes&& frame);
  EngineHost::Unsent unsent(SessionKey session) const;
  void close_session(SessionKey session);
  // For a session that has opened; returns how many it started.
  std::uint32_t dial_rails(SessionKey session);
  void dial_rail(SessionKey session, const wire::RailName& rail);
  void has_come_up(SessionKey session);  // a wait for the session to come up is over
  bool never_opened(SessionKey session) const;  // it was a stranger, and never became a peer

  // ---- driving
  bool read_unread();  // from sockets that have had their turn; true if there are any
  bool read_rings();  // from watched rings, and wakes their readers; true if a frame was in one
  // Stops watching rings in which nothing was for a while: their peers then announce what they write.
  void leave_quiet_rings(Time now);
  // Before a thread sleeps on the reactor: peers are to announce over the socket that they have written to
  // a ring. False if something is in one already.
  bool arm_rings();
  // Sends what sockets have to send. True if some have closed, so that their descriptors are free again.
  bool flush();
  bool wants_flush() const noexcept { return !unsent_.empty() || !dead_.empty(); }
  Time next_due() const noexcept { return due_at_; }
  void expire(Time now);
  bool has_failed_rails() const noexcept { return !failed_rails_.empty(); }
  void tell_failed_rails(Time now);  // to the engine
  bool shares_any_memory() const noexcept { return num_sharing_ != 0; }
  bool shares_all_memory() const noexcept { return num_sharing_ == controls_.size(); }
  void close_all();  // sockets, at the agent's end

  using List = std::list<std::unique_ptr<Connection>>;
  struct Connection final : FrameSocket::Owner {
    enum class Kind : std::uint8_t { kFresh, kControl, kRail };
    explicit Connection(Connections& owner) : all(owner) {}
    std::uint32_t max_body() override;
    void on_frame(wire::ByteSpan frame) override;
    void on_more() override { all.unread_.push_back(this); }
    void on_announced() override { all.watch(*this); }
    void on_secure() override { all.on_secure(*this); }
    void on_closed(const std::string& why) override;
    std::vector<std::byte>& read_buffer() override { return all.read_buffer_; }
    Connections& all;
    Kind kind = Kind::kFresh;
    std::unique_ptr<FrameSocket> socket;
    SessionKey session = 0;
    List::iterator place;  // in waiting_, open_ or dead_
    bool accepted = false, was_open = false, is_kept_open = false, dead = false;
    // Its place among the strangers, until it proves something.
    std::optional<std::list<Connection*>::iterator> unproved;
    Charge stranger;  // the charge for its descriptor, until then
    bool tried_memory = false;  // share_memory was called
    bool shares_memory = false;  // frames may come through memory
    // Of its ring: the latter since the last leave_quiet_rings().
    bool is_watched = false, was_heard = false;
    Time deadline = kNever;
    std::string address;  // an initiator's; or that of the caller that was accepted
    Dialling dialling;  // an initiator's: rails go to its current address, too
    std::vector<std::size_t> rails;  // an initiator's: which transport each goes over, by index
    Time due_at = 0;  // the deadline for all its addresses together
    wire::RailName rail;  // kRail
    std::size_t transport = 0;  // kRail
    std::uint16_t peer_instance = 0;  // kRail
  };

 private:
  void prove(Connection& connection);  // from now on it is no stranger, or is gone
  void on_secure(Connection& connection);
  void certify(const Connection& connection);  // its session
  static std::string key_of(const Connection& connection);  // for a rail; "" if the connection is plain
  // For a socket that is about to be dialled or was accepted. `secured`: it goes over TCP, and there are
  // certificates.
  Status make_socket(Connection& connection, UniqueFd fd, bool connecting, bool exact, bool secured,
                     bool initiator);
  bool is_certified() const noexcept { return options_.credentials != nullptr; }
  std::shared_ptr<const tls::Credentials> credentials() const;
  void on_first_frame(Connection& connection, wire::ByteSpan frame);
  void on_rail_hello(Connection& connection, const wire::RailHello& hello);
  void on_rail_welcome(Connection& connection, wire::ByteSpan frame);
  void on_handshake(Connection& connection);  // proves the peer, or goes on
  void watch(Connection& connection);  // its ring
  // Goes on with the next address of the name, or ends the session if none is left.
  void dial_next(Connection& connection, const std::string& why);
  static Status unreachable(const Connection& connection);
  Status start_rail(SessionKey session, const wire::RailName& rail, const Connection& control);
  void hand_over(Connection& connection, bool initiator, Charge descriptor);
  Connection& add(std::unique_ptr<Connection> connection);  // to the waiting ones
  // Nothing is waited for any more: it belongs to a session.
  void keep_open(Connection& connection) noexcept;
  void drop(Connection& connection, const std::string& why);
  void end(Connection& connection) noexcept;  // the next flush destroys it
  void expire(Connection& connection, Time now);
  void expect_by(Connection& connection, Time at);
  bool is_open_to_others() const noexcept { return is_certified() || !options_.secret.empty(); }
  // May the process at the other end of this socket be a peer, and may it have memory of ours?
  Status check_user(int socket, bool shares_memory) const;

  const RuntimeOptions& options_;
  EpollReactor& reactor_;
  RailTable& rails_;
  const Log log_;
  mutable std::mutex renewing_;
  std::shared_ptr<const tls::Credentials> credentials_;  // null: peers prove themselves by a secret
  Engine* engine_ = nullptr;
  wire::Identity self_;
  const std::shared_ptr<Budget> strangers_;
  std::list<Connection*> unproved_;  // the oldest first
  // Strangers, dialled connections and future rails that have a deadline; the control connections of
  // sessions; closed connections. Walking the first and the last costs nothing for idle peers.
  List waiting_, open_, dead_;
  std::map<SessionKey, Connection*> controls_;
  Connection* pending_control_ = nullptr;  // of the session that is being added
  struct FailedRail {
    SessionKey session = 0;
    std::optional<wire::RailName> name;  // if it is worth dialling again
    std::string note;
  };
  std::vector<FailedRail> failed_rails_;  // told to the engine in the next round
  Time due_at_ = kNever;  // the earliest deadline in waiting_, or earlier
  std::vector<SessionKey> unsent_;  // sessions whose control socket has something to send
  std::size_t num_sharing_ = 0;  // sessions whose frames may come through memory
  // Connections whose rings are looked at in each round; all other peers announce what they write.
  std::vector<Connection*> watched_;
  Time looks_back_at_ = 0;  // when leave_quiet_rings() looks next
  bool rings_sleep_ = false;
  std::vector<std::byte> read_buffer_;  // shared by all sockets
  std::vector<Connection*> unread_;  // connections that have had a turn, and have more to say
};

}  // namespace kvxfer
