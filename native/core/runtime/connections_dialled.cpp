// Connections that this agent dials, and the rails of sessions, dialled or taken in.
#include <algorithm>
#include <utility>

#include "core/control/socket_address.h"
#include "core/runtime/clock.h"
#include "core/runtime/connections.h"

namespace kvxfer {
namespace {

// For rails between processes of one host, the unix name beside the peer's port is worth trying.
bool is_of_one_host(const TransportKind& kind) { return kind.reach == Reach::kHost; }

bool has(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

// ---- dialling -----------------------------------------------------------------------------------

Result<std::unique_ptr<Connections::Connection>> Connections::call(const std::string& address,
                                                                   Time timeout_ns) {
  Result<Dialling> found = Dialling::to(address);
  if (!found.ok()) return found.status();
  if (!found.value().all_loopback() && !is_open_to_others())
    return Status(Code::kInvalidArgument, "connecting to " + address +
                                              " needs a secret, with which the agents prove their identity: "
                                              "set the same secret= or KVXFER_SECRET_FILE at both ends");
  auto connection = std::make_unique<Connection>(*this);
  connection->kind = Connection::Kind::kControl;
  connection->address = address;
  connection->dialling = std::move(found).value();
  connection->due_at = monotonic_now() + timeout_ns;
  bool connecting = false;
  // The kernel knows users, and no identities.
  const bool beside = rails_.any(is_of_one_host) && !is_certified();
  UniqueFd fd = beside ? connection->dialling.dial_beside() : UniqueFd();
  if (!fd) fd = connection->dialling.dial(connecting);
  if (!fd) return unreachable(*connection);
  if (Status status = make_socket(*connection, std::move(fd), connecting, false, is_certified(), true);
      !status.ok())
    return status;
  return connection;
}

Result<SessionKey> Connections::add(std::unique_ptr<Connection> called, Time now) {
  Connection& connection = add(std::move(called));
  expect_by(connection, connection.dialling.turn_ends(now, connection.due_at));
  // Frames of the session find the connection through controls_: add_session queues HELLO under the number
  // that it is about to return.
  pending_control_ = &connection;
  try {
    connection.session = engine_->add_session(now, SessionRole::kInitiator);
    pending_control_ = nullptr;
    controls_[connection.session] = &connection;
    engine_->on_dialling(now, connection.session);
  } catch (...) {
    pending_control_ = nullptr;
    if (connection.session != 0) engine_->starve(now, connection.session);
    drop(connection, "");
    throw;
  }
  const SessionKey key = connection.session;
  if (Status status = connection.socket->start(); !status.ok()) {
    engine_->on_disconnected(now, key, status.message());
    drop(connection, "");
    return status;
  }
  return key;
}

Status Connections::unreachable(const Connection& connection) {
  return {Code::kUnreachable, "cannot connect to " + connection.address + ": " + connection.dialling.tried() +
                                  "; is the agent running, and is this its address?"};
}

void Connections::dial_next(Connection& connection, const std::string& why) {
  bool connecting = false;
  UniqueFd fd = connection.dialling.dial_next(why, connecting);
  Status status = fd ? connection.socket->redial(std::move(fd), connecting) : unreachable(connection);
  if (!status.ok()) return engine_->on_unreachable(monotonic_now(), connection.session, status.message());
  expect_by(connection, connection.dialling.turn_ends(monotonic_now(), connection.due_at));
}

// ---- rails --------------------------------------------------------------------------------------

std::uint32_t Connections::dial_rails(SessionKey key) {
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
  // Nearest first. A kind is dialled if no rail reaches all of its memory yet; a kind that may not reach
  // all leaves the rest to another beside it.
  const bool same_host = peer.host == self_.host && !peer.unix_name.empty();
  MemoryKinds carried = MemoryKinds::none();
  for (const TransportKind* kind : rails_.kinds()) {
    const bool is_required = has(options_.require, kind->name);
    if (!has(peer.transports, kind->name)) {
      // A caller named a kind that is partial and no default, and would wonder.
      if (is_required || (kind->is_partial && !kind->is_default))
        failed({}, std::string(kind->name) +
                       " is not used: the peer does not offer it (is it among the peer's transports?)");
      continue;
    }
    if (carried.has(kind->memory) && !is_required) continue;
    if (kind->reach == Reach::kProcess && !(same_host && peer.process == self_.process)) continue;
    if (kind->reach == Reach::kHost && !same_host) {
      if (has(options_.transports, kind->name))
        failed({}, std::string(kind->name) + " is not used: the peer runs on another host");
      continue;
    }
    bool dialled = false;
    for (std::size_t i = 0; i < rails_.size(); ++i)
      if (&rails_.kind(i) == kind) dialled = dial(i) || dialled;
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

void Connections::dial_rail(SessionKey key, const wire::RailName& rail) {
  if (Status status = start_rail(key, rail, *controls_.at(key)); !status.ok())
    failed_rails_.push_back({key, rail, status.message()});
}

Status Connections::start_rail(SessionKey key, const wire::RailName& rail, const Connection& control) {
  const std::size_t transport = control.rails[rail.index];
  const std::string_view name = rails_.kind(transport).name;
  if (engine_->is_off(name))
    return {Code::kRailFailed,
            std::string(name) + " rail " + std::to_string(rail.index) + " is switched off here"};
  const Session& session = *engine_->session(key);
  bool connecting = false;
  const bool is_tcp = rails_.kind(transport).socket == RailSocket::kTcp;
  const TcpAddress& tcp = control.dialling.current();
  Result<UniqueFd> fd = is_tcp ? dial_tcp(tcp, connecting) : dial_unix(session.peer().unix_name);
  if (fd.ok() && !is_tcp)  // any process may have taken the name
    if (Status status = check_user(fd.value().get(), rails_.hands_out_memory(transport)); !status.ok())
      fd = status;
  if (!fd.ok())
    return {fd.status().code(),
            std::string(name) + " is not used: " + (is_tcp ? "cannot connect to " + tcp.text + ": " : "") +
                fd.status().message()};
  auto connection = std::make_unique<Connection>(*this);
  connection->kind = Connection::Kind::kRail;
  connection->session = key;
  connection->rail = rail;
  connection->transport = transport;
  connection->address = control.address;
  const bool secured = is_tcp && is_certified();
  if (Status status = make_socket(*connection, std::move(fd).value(), connecting, true, secured, true);
      !status.ok())
    return status;
  if (!secured) connection->socket->send(session.rail_hello(rail, name, rails_.instance_of(transport)));
  if (Status status = connection->socket->start(); !status.ok()) return status;
  expect_by(add(std::move(connection)), monotonic_now() + options_.handshake_ns);
  return {};
}

void Connections::on_rail_welcome(Connection& connection, wire::ByteSpan frame) {
  Session* session = engine_->session(connection.session);
  if (session == nullptr) return drop(connection, "");
  Result<wire::Header> header = wire::decode_header(frame, wire::kMaxHandshakeBody);
  if (header.ok()) {
    Result<wire::Message> message =
        wire::decode(header.value(), frame.subspan(wire::kHeaderNbytes, header.value().body_nbytes));
    if (message.ok())
      if (const auto* welcome = std::get_if<wire::RailWelcome>(&message.value()))
        if (session->verify_rail_welcome(connection.rail, *welcome, key_of(connection))) {
          connection.peer_instance = welcome->instance;
          const std::shared_ptr<Budget> budget = engine_->budget(connection.session);
          Charge descriptor = Charge::take(budget, Resource::kDescriptors, 1);
          if (!descriptor) return connection.on_closed(budget->in_words(Resource::kDescriptors));
          return hand_over(connection, true, std::move(descriptor));
        }
  }
  connection.on_closed("the peer did not prove that the rail is its own");
}

void Connections::on_rail_hello(Connection& connection, const wire::RailHello& hello) {
  SessionKey key = 0;
  Session* session = engine_->find_session(hello.session, key);
  if (session == nullptr) return drop(connection, "RAIL_HELLO for a session that does not exist");
  const std::size_t transport = rails_.instance_for(hello.transport, key, hello.rail);
  if (transport == SIZE_MAX)
    return drop(connection, "RAIL_HELLO for transport '" + hello.transport + "', which is not in use here");
  if (Status status = check_user(connection.socket->fd(), rails_.hands_out_memory(transport)); !status.ok())
    return drop(connection, "RAIL_HELLO for " + hello.transport + ": " + status.message());
  if (!session->verify_rail_hello(hello, key_of(connection)))
    return drop(connection, "RAIL_HELLO whose proof is wrong or was used before");
  if (engine_->is_off(hello.transport)) {
    engine_->refused_rail(monotonic_now(), key, hello.rail, hello.transport);
    return drop(connection, "");
  }
  rails_.drop_unready(key, hello.rail.index);
  const std::shared_ptr<Budget> budget = engine_->budget(key);
  Charge descriptor = Charge::take(budget, Resource::kDescriptors, 1);
  if (!descriptor)
    return drop(connection, "another rail of peer '" + session->peer().name +
                                "': " + budget->in_words(Resource::kDescriptors));
  connection.socket->send(
      session->rail_welcome(hello.rail, rails_.instance_of(transport), key_of(connection)));
  connection.socket->flush();
  if (!connection.socket->open()) return;
  connection.session = key;
  connection.transport = transport;
  connection.peer_instance = hello.instance;
  connection.rail = hello.rail;
  hand_over(connection, false, std::move(descriptor));
}

// The socket goes to its transport; the next flush destroys the rest of the connection.
void Connections::hand_over(Connection& connection, bool initiator, Charge descriptor) {
  const Session& session = *engine_->session(connection.session);
  std::shared_ptr<Cipher> cipher;
  if (connection.socket->channel() != nullptr) {
    cipher = tls::Channel::for_pages(connection.socket->release_channel());
    if (cipher == nullptr) {
      failed_rails_.push_back(
          {connection.session, connection.rail,
           "it sent more than the first frame of a rail, or there is not enough memory for its encryption"});
      return drop(connection, "");
    }
  }
  const ConnectInfo info{initiator,
                         connection.rail.index,
                         session.peer().name,
                         engine_->budget(connection.session),
                         connection.peer_instance,
                         std::move(cipher)};
  const Status bound =
      rails_.bind({connection.session, connection.rail, connection.transport, connection.peer_instance,
                   std::move(descriptor)},
                  connection.socket->release(), info, monotonic_now() + options_.handshake_ns);
  if (!bound.ok()) failed_rails_.push_back({connection.session, connection.rail, bound.message()});
  drop(connection, "");
}

void Connections::tell_failed_rails(Time now) {
  for (FailedRail& failed : std::exchange(failed_rails_, {})) {
    // For a rail that this end dialled, the session is known.
    const auto control = controls_.find(failed.session);
    const bool is_ours =
        failed.name && control != controls_.end() && failed.name->index < control->second->rails.size();
    engine_->rail_failed(
        now, failed.session, failed.name, std::move(failed.note),
        is_ours ? rails_.kind(control->second->rails[failed.name->index]).name : std::string_view());
  }
}

}  // namespace kvxfer
