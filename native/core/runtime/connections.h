// Sockets, from the first byte until each is the control connection of an authenticated session or a transport's rail,
// and the control connections from then on.
//
// Frames go to the engine, rails to the RailTable. Who has proved nothing is a stranger: all of them share one budget,
// and the oldest gives way to the newest.
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

  // Before the first of all other calls: whom frames go to, and what we say of ourselves.
  void serve(Engine& engine, const wire::Identity& self) {
    engine_ = &engine;
    self_ = self;
  }

  // ---- who calls, and whom we call
  void take_in(UniqueFd socket) override;
  // Connections that begin from now on prove themselves by these, where the agent has any.
  // Any thread, with the gate or without.
  void renew(std::shared_ptr<const tls::Credentials> credentials);
  bool close_oldest_stranger() override;
  void log(std::string text) override { log_(std::move(text)); }
  const Budget& strangers() const noexcept { return *strangers_; }
  // Asks a name server, so without the gate: a connection that is under way.
  struct Connection;
  Result<std::unique_ptr<Connection>> call(const std::string& address, Time timeout_ns);
  // And under it: its session. Ends the call where there can be none.
  Result<SessionKey> add(std::unique_ptr<Connection> called, Time now);

  // ---- as EngineHost's
  void send(SessionKey session, wire::Bytes frame);
  void close(SessionKey session);
  std::uint32_t dial_rails(SessionKey session);  // of one that has opened; how many it started
  void dial_rail(SessionKey session, const wire::RailName& rail);
  void has_come_up(SessionKey session);  // whoever waits for that need not any more
  bool never_opened(SessionKey session) const;  // of a stranger, who never became a peer

  // ---- driving
  bool read_unread();  // of those who have had their turn; true where there are any
  bool read_rings();  // of those that are watched, and wakes them; true when a frame was in one
  // Rings in which nothing was for a while are not watched any more: their peers announce what they write.
  void leave_quiet_rings(Time now);
  // Before somebody sleeps on the reactor: peers are to say over the socket when they have written to
  // a ring. False where something is in one already.
  bool rest_rings();
  // What sockets are to send; true where some have closed, whose descriptors are free again.
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
    bool accepted = false, was_open = false, settled = false, dead = false;
    std::optional<std::list<Connection*>::iterator>
        unproved;  // its place among those, until it proves something
    Charge stranger;  // its descriptor, until then
    bool tried_memory = false;  // share_memory has had its say
    bool shares_memory = false;  // and frames may come through it
    bool is_watched = false, was_heard = false;  // its ring; since leave_quiet_rings() looked last
    Time deadline = kNever;
    std::string address;  // an initiator's, or who was accepted
    Dialling dialling;  // an initiator's: rails go to its current address, too
    std::vector<std::size_t> rails;  // an initiator's: which transport each goes over, by index
    Time due_at = 0;  // of all its addresses together
    wire::RailName rail;  // kRail
    std::size_t transport = 0;  // kRail
    std::uint16_t peer_instance = 0;  // kRail
  };

 private:
  void prove(Connection& connection);  // it is no stranger any more, or gone
  void on_secure(Connection& connection);
  void certify(const Connection& connection);  // its session
  static std::string key_of(const Connection& connection);  // for a rail; "" where it is plain
  // Of a socket that is about to be dialled or was accepted; `secured`: it goes over TCP, and certificates are there.
  Status make_socket(Connection& connection, UniqueFd fd, bool connecting, bool exact, bool secured,
                     bool initiator);
  bool is_certified() const noexcept { return options_.credentials != nullptr; }
  std::shared_ptr<const tls::Credentials> credentials() const;
  void on_first_frame(Connection& connection, wire::ByteSpan frame);
  void on_rail_hello(Connection& connection, const wire::RailHello& hello);
  void on_rail_welcome(Connection& connection, wire::ByteSpan frame);
  void on_handshake(Connection& connection);  // proves the peer, or goes on
  void watch(Connection& connection);  // its ring
  // Goes on with the next address of the name, or ends the session where none is left.
  void dial_next(Connection& connection, const std::string& why);
  static Status unreachable(const Connection& connection);
  Status start_rail(SessionKey session, const wire::RailName& rail, const Connection& control);
  void hand_over(Connection& connection, bool initiator, Charge descriptor);
  Connection& add(std::unique_ptr<Connection> connection);  // to those that wait
  void settle(Connection& connection) noexcept;  // nothing is waited for any more: it is a session's
  void drop(Connection& connection, const std::string& why);
  void end(Connection& connection) noexcept;  // it is swept up with the next flush
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
  // Strangers, those that are dialled and rails to be, of which something is due; the control connections of sessions;
  // those that have closed. What is done with the first and the last costs nothing for each peer that is idle.
  List waiting_, open_, dead_;
  std::map<SessionKey, Connection*> controls_;
  Connection* pending_control_ = nullptr;  // of the session that is being added
  struct FailedRail {
    SessionKey session = 0;
    std::optional<wire::RailName> name;  // where it is worth dialling again
    std::string note;
  };
  std::vector<FailedRail> failed_rails_;  // told to the engine in the next round
  Time due_at_ = kNever;  // no deadline of those that wait is earlier
  std::vector<SessionKey> unsent_;  // sessions whose control socket has something to send
  std::size_t num_sharing_ = 0;  // sessions whose frames may come through memory
  // Those whose rings are looked at in each round; peers of all others announce what they write.
  std::vector<Connection*> watched_;
  Time looks_back_at_ = 0;  // leave_quiet_rings() does
  bool rings_sleep_ = false;
  std::vector<std::byte> read_buffer_;  // of all sockets
  std::vector<Connection*> unread_;  // they have had a turn, and have more to say
};

}  // namespace kvxfer
