// Connections, from the first byte to an authenticated session or a transport's rail.
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>

#include "core/runtime.h"

namespace kvxfer {
namespace {

// Callers that are taken in before others have their turn: each costs 20 us or so.
constexpr int kAcceptsInTurn = 16;

// While no descriptor is left: a listener looks again after so long, and each time after twice as long. Descriptors
// that sessions give back end it at once.
constexpr Time kFirstRest = 10'000'000, kLongestRest = 1'000'000'000;

bool is_shortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// A unix name beside the peer's port is worth trying for rails between processes of one host.
bool is_of_one_host(const TransportKind& kind) { return kind.reach == Reach::kHost; }
bool shares_memory(const TransportKind& kind) { return kind.shares_memory; }

std::string in_words(Time duration_ns) { return std::to_string(duration_ns / 1'000'000) + " ms"; }

bool has(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

// ---- accepting ----------------------------------------------------------------------------------

void Runtime::Listener::on_ready(std::uint32_t) { runtime->accept_all(*this); }

void Runtime::accept_all(Listener& listener) {
  for (int i = 0; i < kAcceptsInTurn; ++i) {
    int error = 0;
    UniqueFd fd = accept_from(listener.fd.get(), error);
    if (fd) {
      listener.pause_ns = 0;
      short_of_descriptors_ = false;
      if (Status status = check_user(fd.get(), false); !status.ok())
        log("refused a connection: " + status.message());
      else
        take_in(std::move(fd));
    } else if (error == 0) {
      return;
    } else if (is_shortage(error) && !close_oldest_stranger()) {
      return rest(listener, error);
    }
  }
}

void Runtime::take_in(UniqueFd fd) {
  while (!strangers_->take(Resource::kDescriptors, 1))
    if (!close_oldest_stranger()) return;
  auto connection = std::make_unique<Connection>(*this);
  connection->accepted = true;
  connection->address = peer_in_words(fd.get());
  connection->unproved = unproved_.insert(unproved_.end(), connection.get());
  expect_by(*connection, now() + options_.handshake_ns);
  connection->socket = std::make_unique<FrameSocket>(reactor_, std::move(fd), *connection, false, false);
  connection->socket->charge(strangers_);
  if (connection->socket->start().ok())
    connections_.push_back(std::move(connection));
  else
    prove(*connection);
}

void Runtime::prove(Connection& connection) {
  if (!connection.unproved) return;
  unproved_.erase(*connection.unproved);
  connection.unproved.reset();
  strangers_->give_back(Resource::kDescriptors, 1);
}

// Nobody is refused for where he calls from: behind one address there may be many.
bool Runtime::close_oldest_stranger() {
  if (unproved_.empty()) return false;
  Connection& oldest = *unproved_.front();
  const std::string why = "too many others are shaking hands: of strangers the oldest gives way";
  if (oldest.kind == ConnectionKind::kFresh)
    drop(oldest, why);
  else
    engine_->end_session(now(), oldest.session, Code::kExhausted, why);
  prove(oldest);
  return true;
}

void Runtime::rest(Listener& listener, int error) {
  // Who has waited longest is turned away at once, and not when its time is over.
  reserve_.reset();
  int ignored = 0;
  accept_from(listener.fd.get(), ignored).reset();
  reserve_.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  reactor_.remove(listener.fd.get());
  listener.pause_ns = std::clamp(2 * listener.pause_ns, kFirstRest, kLongestRest);
  listener.rests_until = now() + listener.pause_ns;
  listeners_due_at_ = std::min(listeners_due_at_, listener.rests_until);
  if (!std::exchange(short_of_descriptors_, true))
    log(std::string("nobody can be accepted (") + std::strerror(error) +
        "): no descriptor is left; raise ulimit -n. Sessions that are open go on, and listening does when "
        "one is free");
}

void Runtime::wake_listeners(Time at) {
  if (at < listeners_due_at_) return;
  listeners_due_at_ = kNever;
  for (Listener* listener : {&tcp_listener_, &unix_listener_}) {
    if (at >= listener->rests_until && reactor_.add(listener->fd.get(), EPOLLIN, *listener).ok())
      listener->rests_until = kNever;
    else if (listener->rests_until != kNever)
      listener->rests_until = std::max(listener->rests_until, at + listener->pause_ns);
    listeners_due_at_ = std::min(listeners_due_at_, listener->rests_until);
  }
}

Budget Runtime::strangers() {
  const std::lock_guard lock(gate_);
  return *strangers_;
}

std::uint32_t Runtime::Connection::max_body() {
  return kind == ConnectionKind::kControl ? runtime.engine_->max_body(session) : wire::kMaxHandshakeBody;
}

void Runtime::Connection::on_frame(wire::ByteSpan frame) {
  if (dead) return;
  switch (kind) {
    case ConnectionKind::kFresh: runtime.on_first_frame(*this, frame); break;
    case ConnectionKind::kControl:
      runtime.engine_->on_frame(Runtime::now(), session, frame);
      if (!tried_memory) runtime.on_handshake(*this);
      break;
    case ConnectionKind::kRail: runtime.on_rail_welcome(*this, frame); break;
  }
}

void Runtime::Connection::on_closed(const std::string& why) {
  if (dead) return;
  switch (kind) {
    case ConnectionKind::kFresh: runtime.drop(*this, why); break;
    case ConnectionKind::kControl:
      if (socket->connecting())
        runtime.dial_next(*this, why);
      else
        runtime.engine_->on_disconnected(Runtime::now(), session, why);
      break;
    case ConnectionKind::kRail:
      runtime.failed_rails_.push_back({session, rail,
                                       std::string(runtime.transports_[transport]->capabilities().name) +
                                           " rail " + std::to_string(rail.index) + ": " + why});
      runtime.drop(*this, "");
      break;
  }
}

// A peer of this host that fetches by itself can fetch anything.
bool Runtime::hands_out_memory(std::size_t transport) const {
  return kind_of_[transport]->reach == Reach::kHost && transports_[transport]->capabilities().one_sided;
}

Status Runtime::check_user(int socket, bool shares_memory) const {
  const std::optional<uid_t> user = peer_user(socket);
  if (user == ::geteuid()) return {};
  if (!user) {
    // Over TCP a peer proves itself by a secret alone: without one given to both, by what no other user can read.
    if (shares_memory) return {Code::kNotPermitted, "memory goes over unix sockets alone"};
    return {};
  }
  const std::string users =
      "the peer is user " + std::to_string(*user) + " and this agent user " + std::to_string(::geteuid());
  if (!is_open_to_others())
    return {Code::kNotPermitted,
            users + ": without a secret it serves its own user alone; give both agents one secret"};
  if (shares_memory && !options_.shares_with_all)
    return {Code::kNotPermitted, users +
                                     ": memory goes to its own user alone, unless option shm_peers is "
                                     "\"secret\" at both ends"};
  return {};
}

// Control frames go through memory as soon as both ends have proved who they are.
void Runtime::on_handshake(Connection& connection) {
  const Session* session = connection.dead ? nullptr : engine_->session(connection.session);
  if (session == nullptr || session->state() != SessionState::kOpen) return;
  prove(connection);
  connection.socket->charge(engine_->budget(connection.session));
  connection.tried_memory = true;
  if (uses(shares_memory) && check_user(connection.socket->fd(), true).ok() &&
      connection.socket->share_memory())
    sharing_.push_back(connection.session);
}

bool Runtime::read_unread() {
  const std::vector<Connection*> turns = std::exchange(unread_, {});
  for (Connection* connection : turns)
    if (!connection->dead) connection->socket->read_more();
  return !turns.empty();
}

bool Runtime::read_rings() {
  bool more = !unread_.empty() && read_unread();
  for (std::size_t i = 0; i < sharing_.size();) {  // by index: a frame may end sessions
    const auto control = controls_.find(sharing_[i]);
    if (control == controls_.end()) {
      sharing_[i] = sharing_.back();
      sharing_.pop_back();
      continue;
    }
    FrameSocket& socket = *control->second->socket;
    if (rings_sleep_) socket.wake_up();
    more = socket.read_ring() || more;
    ++i;
  }
  rings_sleep_ = false;
  return more;
}

bool Runtime::rest_rings() {
  if (!unread_.empty()) return false;
  if (rings_sleep_) return true;
  rings_sleep_ = true;
  bool quiet = true;
  for (const SessionKey key : sharing_)
    if (const auto control = controls_.find(key); control != controls_.end())
      quiet = control->second->socket->fall_asleep() && quiet;
  return quiet;
}

void Runtime::drop(Connection& connection, const std::string& why) {
  if (connection.dead) return;
  connection.dead = true;
  sweep_ = true;
  prove(connection);
  if (connection.kind == ConnectionKind::kFresh && !why.empty())
    log("closed a connection from " + connection.address + ": " + why);
  connection.socket->close();
}

void Runtime::expect_by(Connection& connection, Time at) {
  connection.deadline = at;
  connections_due_at_ = std::min(connections_due_at_, at);
}

void Runtime::expire_connections(Time at) {
  if (at < connections_due_at_) return;
  connections_due_at_ = kNever;
  for (auto& connection : connections_) {
    if (connection->dead) continue;
    if (connection->deadline > at) {
      connections_due_at_ = std::min(connections_due_at_, connection->deadline);
      continue;
    }
    connection->deadline = kNever;
    if (connection->kind == ConnectionKind::kControl && at < connection->due_at) {
      // One address's turn is over: where nobody answered, the next one's begins.
      if (connection->socket->connecting())
        dial_next(*connection, "no answer");
      else
        expect_by(*connection, connection->due_at);
    } else if (connection->kind == ConnectionKind::kControl) {
      const std::string& tried = connection->dialling.tried();
      engine_->end_session(at, connection->session, Code::kUnreachable,
                           (connection->was_open ? "no rail to " + connection->address + " came up"
                                                 : "no answer from " + connection->address) +
                               " within the time to connect (connect_timeout_s)" +
                               (connection->was_open || connection->socket->connecting()
                                    ? ""
                                    : ", though it took the connection; is it a kvxfer agent?") +
                               (tried.empty() ? "" : ", after " + tried));
    } else if (connection->kind == ConnectionKind::kRail) {
      connection->on_closed("no answer within " + in_words(options_.handshake_ns) + " (handshake_timeout_s)");
    } else {
      drop(*connection,
           "it did not say who it is within " + in_words(options_.handshake_ns) + " (handshake_timeout_s)");
    }
  }
}

void Runtime::on_first_frame(Connection& connection, wire::ByteSpan frame) {
  Result<wire::Header> header = wire::decode_header(frame, wire::kMaxHandshakeBody);
  if (!header.ok()) return drop(connection, header.status().message());
  if (header.value().type == wire::FrameType::kHello) {
    connection.kind = ConnectionKind::kControl;
    connection.deadline = kNever;  // the session has its own
    connection.session = engine_->add_session(now(), SessionRole::kAcceptor);
    controls_[connection.session] = &connection;
    engine_->on_frame(now(), connection.session, frame);
    return;
  }
  Result<wire::Message> message =
      wire::decode(header.value(), frame.subspan(wire::kHeaderNbytes, header.value().body_nbytes));
  if (!message.ok()) return drop(connection, message.status().message());
  if (const auto* hello = std::get_if<wire::RailHello>(&message.value()))
    return on_rail_hello(connection, *hello);
  drop(connection, "it began with " + std::string(wire::name_of(header.value().type)) + " instead of HELLO");
}

void Runtime::on_rail_hello(Connection& connection, const wire::RailHello& hello) {
  SessionKey key = 0;
  Session* session = engine_->find_session(hello.session, key);
  if (session == nullptr) return drop(connection, "RAIL_HELLO for a session that does not exist");
  // Several rails of one kind are several instances: the one that serves fewest rails of the
  // session takes it, so that both ends pair them alike.
  std::size_t best = SIZE_MAX, fewest = SIZE_MAX;
  for (std::size_t i = 0; i < transports_.size(); ++i) {
    if (transports_[i]->capabilities().name != hello.transport) continue;
    const auto bound =
        static_cast<std::size_t>(std::count_if(bound_.begin(), bound_.end(), [&](const auto& entry) {
          return entry.first.first == i && entry.second.session == key &&
                 entry.second.name.index != hello.rail.index;
        }));
    if (bound < fewest) {
      fewest = bound;
      best = i;
    }
  }
  if (best == SIZE_MAX)
    return drop(connection, "RAIL_HELLO for transport '" + hello.transport + "', which is not in use here");
  if (Status status = check_user(connection.socket->fd(), hands_out_memory(best)); !status.ok())
    return drop(connection, "RAIL_HELLO for " + hello.transport + ": " + status.message());
  if (!session->verify_rail_hello(hello))
    return drop(connection, "RAIL_HELLO whose proof is wrong or was used before");
  drop_unready(key, hello.rail.index);
  const std::shared_ptr<Budget> budget = engine_->budget(key);
  Charge descriptor = Charge::take(budget, Resource::kDescriptors, 1);
  if (!descriptor)
    return drop(connection, "a rail more of peer '" + session->peer().name +
                                "': " + budget->in_words(Resource::kDescriptors));
  connection.socket->send(session->rail_welcome(hello.rail, instance_of(best)));
  connection.socket->flush();
  if (!connection.socket->open()) return;
  connection.session = key;
  connection.transport = best;
  connection.peer_instance = hello.instance;
  connection.rail = hello.rail;
  hand_over(connection, false, std::move(descriptor));
}

// Whoever dials a rail anew has given up what was coming of it. Where one is up the engine keeps it until the other is.
void Runtime::drop_unready(SessionKey session, std::uint16_t index) {
  std::vector<std::pair<std::size_t, PeerId>> unready;
  for (const auto& [place, rail] : bound_)
    if (rail.session == session && rail.name.index == index && rail.id == 0) unready.push_back(place);
  for (const auto& [transport, peer] : unready) unbind(transport, peer);
}

// The socket goes to its transport; what is left of the connection is swept up.
void Runtime::hand_over(Connection& connection, bool initiator, Charge descriptor) {
  const std::string name = engine_->session(connection.session)->peer().name;
  Result<PeerId> peer = transports_[connection.transport]->connect(
      connection.socket->release(), {initiator, connection.rail.index, name,
                                     engine_->budget(connection.session), connection.peer_instance});
  if (peer.ok()) {
    const Time due_at = now() + options_.handshake_ns;
    bound_[{connection.transport, peer.value()}] = {connection.session,    connection.rail,         0, due_at,
                                                    std::move(descriptor), connection.peer_instance};
    rails_due_.push_back({due_at, {connection.transport, peer.value()}});
  } else
    failed_rails_.push_back({connection.session, connection.rail, peer.status().message()});
  drop(connection, "");
}

// A peer may withhold what its end of a rail has to say first; whoever connects waits for the rails.
void Runtime::expire_rails(Time at) {
  while (!rails_due_.empty() && rails_due_.front().first <= at) {
    const auto [due_at, place] = rails_due_.front();
    rails_due_.pop_front();
    const auto found = bound_.find(place);
    // It is up, or gone and its number is another rail's.
    if (found == bound_.end() || found->second.id != 0 || found->second.due_at != due_at) continue;
    const SessionKey session = found->second.session;
    const std::string name(transports_[place.first]->capabilities().name);
    const wire::RailName rail = found->second.name;
    unbind(place.first, place.second);
    engine_->rail_failed(at, session, rail,
                         name + " rail " + std::to_string(rail.index) +
                             ": the peer's end was not ready within " + in_words(options_.handshake_ns) +
                             " (handshake_timeout_s)");
  }
}

// ---- dialling -----------------------------------------------------------------------------------

Result<SessionKey> Runtime::begin_connect(const std::string& address, Time timeout_ns) {
  Result<Dialling> found = Dialling::to(address);  // may ask a name server: before the gate
  if (!found.ok()) return found.status();
  if (!found.value().all_loopback() && options_.secret.empty())
    return Status(Code::kInvalidArgument,
                  "connecting to " + address +
                      " needs a secret, without which nobody proves who they are: set secret= or "
                      "KVXFER_SECRET_FILE, alike at both ends");
  auto connection = std::make_unique<Connection>(*this);
  connection->kind = ConnectionKind::kControl;
  connection->address = address;
  connection->dialling = std::move(found).value();
  connection->due_at = now() + timeout_ns;
  bool connecting = false;
  UniqueFd fd = uses(is_of_one_host) ? connection->dialling.dial_beside() : UniqueFd();
  if (!fd) fd = connection->dialling.dial(connecting);
  if (!fd) return unreachable(*connection);
  connection->socket = std::make_unique<FrameSocket>(reactor_, std::move(fd), *connection, connecting, false);
  const CallerTurn turn(*this);
  if (closed()) return check_alive();
  expect_by(*connection, connection->dialling.turn_ends(turn.now, connection->due_at));
  // Frames that the session has to say find the connection through controls_: HELLO is queued by
  // add_session, under the number that it is about to return.
  pending_control_ = connection.get();
  const SessionKey key = engine_->add_session(turn.now, SessionRole::kInitiator);
  pending_control_ = nullptr;
  connection->session = key;
  controls_[key] = connection.get();
  engine_->on_dialling(turn.now, key);
  if (Status status = connection->socket->start(); !status.ok()) {
    engine_->on_disconnected(turn.now, key, status.message());
    return status;
  }
  connections_.push_back(std::move(connection));
  return key;
}

Status Runtime::unreachable(const Connection& connection) {
  return {Code::kUnreachable, "cannot connect to " + connection.address + ": " + connection.dialling.tried() +
                                  "; is the agent started, and is that its address?"};
}

void Runtime::dial_next(Connection& connection, const std::string& why) {
  bool connecting = false;
  UniqueFd fd = connection.dialling.dial_next(why, connecting);
  Status status = fd ? connection.socket->redial(std::move(fd), connecting) : unreachable(connection);
  if (!status.ok()) return engine_->on_unreachable(now(), connection.session, status.message());
  expect_by(connection, connection.dialling.turn_ends(now(), connection.due_at));
}

std::uint32_t Runtime::session_open(SessionKey key) {
  Connection& control = *controls_.at(key);
  control.was_open = true;
  if (control.accepted) return 0;
  const wire::Identity& peer = engine_->session(key)->peer();
  std::uint32_t started = 0;
  const auto failed = [&](std::optional<wire::RailName> rail, std::string note) {
    failed_rails_.push_back({key, rail, std::move(note)});
    ++started;
  };
  const auto dial = [&](std::size_t transport) {
    const wire::RailName rail(static_cast<std::uint16_t>(control.rails.size()));
    control.rails.push_back(transport);
    const Status status = start_rail(key, rail, control);
    if (status.ok())
      ++started;
    else
      failed(rail, status.message());
    return status.ok();
  };
  // Nearest first. A kind is dialled where no rail reaches all of its memory yet; one that may not reach all
  // leaves that to another beside it.
  const bool same_host = peer.host == self_.host && !peer.unix_name.empty();
  MemoryKinds carried = MemoryKinds::none();
  for (const TransportKind* kind : kinds_) {
    if (!has(peer.transports, kind->name) || carried.has(kind->memory)) continue;
    if (kind->reach == Reach::kProcess && !(same_host && peer.process == self_.process)) continue;
    if (kind->reach == Reach::kHost && !same_host) {
      if (has(options_.transports, kind->name))
        failed({}, std::string(kind->name) + " is not used: the peer runs on another host");
      continue;
    }
    bool dialled = false;
    for (std::size_t i = 0; i < transports_.size(); ++i)
      if (kind_of_[i] == kind) dialled = dial(i) || dialled;
    if (dialled && !kind->is_partial) carried = carried | kind->memory;
  }
  if (started == 0) {
    std::string ours, theirs;
    for (const std::string& name : self_.transports) ours += " " + name;
    for (const std::string& name : peer.transports) theirs += " " + name;
    failed({}, "no transport in common: here" + ours + ", there" + theirs);
  }
  return started;
}

bool Runtime::uses(bool (*is_so)(const TransportKind&)) const {
  return std::any_of(kinds_.begin(), kinds_.end(), [&](const auto* kind) { return is_so(*kind); });
}

void Runtime::dial_rail(SessionKey key, const wire::RailName& rail) {
  if (Status status = start_rail(key, rail, *controls_.at(key)); !status.ok())
    failed_rails_.push_back({key, rail, status.message()});
}

Status Runtime::start_rail(SessionKey key, const wire::RailName& rail, const Connection& control) {
  const std::size_t transport = control.rails[rail.index];
  const std::string_view name = kind_of_[transport]->name;
  const Session& session = *engine_->session(key);
  bool connecting = false;
  const bool is_tcp = kind_of_[transport]->socket == RailSocket::kTcp;
  const TcpAddress& tcp = control.dialling.current();
  Result<UniqueFd> fd = is_tcp ? dial_tcp(tcp, connecting) : dial_unix(session.peer().unix_name);
  if (fd.ok() && !is_tcp)  // anybody may have taken the name
    if (Status status = check_user(fd.value().get(), hands_out_memory(transport)); !status.ok()) fd = status;
  if (!fd.ok())
    return {fd.status().code(),
            std::string(name) + " is not used: " + (is_tcp ? "cannot connect to " + tcp.text + ": " : "") +
                fd.status().message()};
  auto connection = std::make_unique<Connection>(*this);
  connection->kind = ConnectionKind::kRail;
  connection->session = key;
  connection->rail = rail;
  connection->transport = transport;
  connection->address = control.address;
  expect_by(*connection, now() + options_.handshake_ns);
  connection->socket =
      std::make_unique<FrameSocket>(reactor_, std::move(fd).value(), *connection, connecting, true);
  connection->socket->send(session.rail_hello(rail, name, instance_of(transport)));
  if (Status status = connection->socket->start(); !status.ok()) return status;
  connections_.push_back(std::move(connection));
  return {};
}

void Runtime::on_rail_welcome(Connection& connection, wire::ByteSpan frame) {
  Session* session = engine_->session(connection.session);
  if (session == nullptr) return drop(connection, "");
  Result<wire::Header> header = wire::decode_header(frame, wire::kMaxHandshakeBody);
  if (header.ok()) {
    Result<wire::Message> message =
        wire::decode(header.value(), frame.subspan(wire::kHeaderNbytes, header.value().body_nbytes));
    if (message.ok())
      if (const auto* welcome = std::get_if<wire::RailWelcome>(&message.value()))
        if (session->verify_rail_welcome(connection.rail, *welcome)) {
          connection.peer_instance = welcome->instance;
          const std::shared_ptr<Budget> budget = engine_->budget(connection.session);
          Charge descriptor = Charge::take(budget, Resource::kDescriptors, 1);
          if (!descriptor) return connection.on_closed(budget->in_words(Resource::kDescriptors));
          return hand_over(connection, true, std::move(descriptor));
        }
  }
  connection.on_closed("the peer did not prove that the rail is its own");
}

}  // namespace kvxfer
