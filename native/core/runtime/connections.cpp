#include "core/runtime/connections.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/budgets.h"
#include "core/control/socket_address.h"
#include "core/runtime/clock.h"

namespace kvxfer {
namespace {

bool shares_memory(const TransportKind& kind) { return kind.shares_memory; }

// An announcement costs its peer a system call and this agent another. A look at a watched ring costs a few
// nanoseconds, in each round. A thousand idle peers, whose heartbeats come now and then, must cost a round
// no more than a few do. So a ring is watched for one to two of these times after its last frame ...
constexpr Time kWatchNs = 1'000'000;

// ... and always if there are no more rings than this.
constexpr std::size_t kAlwaysWatched = 8;

// Steps of TLS handshakes between two rounds of everything else: each takes up to half a millisecond of the
// gate, and strangers may ask for any number of them.
constexpr int kHandshakeSteps = 1;

// Labels of keys that only the two ends of a connection have, for its session or its rail.
constexpr std::string_view kSessionLabel = "EXPORTER-kvxfer-session", kRailLabel = "EXPORTER-kvxfer-rail";

std::string in_words(Time duration_ns) { return std::to_string(duration_ns / 1'000'000) + " ms"; }

}  // namespace

Connections::Connections(const RuntimeOptions& options, EpollReactor& reactor, RailTable& rails, Log log)
    : options_(options),
      reactor_(reactor),
      rails_(rails),
      log_(std::move(log)),
      credentials_(options.credentials),
      strangers_(budget_of_strangers()) {}

// ---- strangers ----------------------------------------------------------------------------------

void Connections::take_in(UniqueFd fd) {
  if (Status status = check_user(fd.get(), false); !status.ok())
    return log("refused a connection: " + status.message());
  auto connection = std::make_unique<Connection>(*this);
  while (!(connection->stranger = Charge::take(strangers_, Resource::kDescriptors, 1)))
    if (!close_oldest_stranger()) return;
  connection->accepted = true;
  connection->address = peer_in_words(fd.get());
  const bool secured = is_certified() && !peer_user(fd.get());
  if (Status status = make_socket(*connection, std::move(fd), false, false, secured, false); !status.ok())
    return log("refused a connection: " + status.message());
  connection->socket->charge(strangers_);
  if (!connection->socket->start().ok()) return;
  Connection& added = add(std::move(connection));
  expect_by(added, monotonic_now() + options_.handshake_ns);
  added.unproved = unproved_.insert(unproved_.end(), &added);
}

void Connections::renew(std::shared_ptr<const tls::Credentials> credentials) {
  const std::lock_guard lock(renewing_);
  credentials_.swap(credentials);
}

std::shared_ptr<const tls::Credentials> Connections::credentials() const {
  const std::lock_guard lock(renewing_);
  return credentials_;
}

Status Connections::make_socket(Connection& connection, UniqueFd fd, bool connecting, bool exact,
                                bool secured, bool initiator) {
  std::unique_ptr<tls::Channel> channel;
  if (secured && (channel = tls::Channel::create(credentials(), initiator)) == nullptr)
    return {Code::kExhausted, "there is not enough memory for its encryption"};
  connection.socket = std::make_unique<FrameSocket>(reactor_, std::move(fd), connection, connecting, exact,
                                                    std::move(channel));
  return {};
}

void Connections::prove(Connection& connection) {
  if (!connection.unproved) return;
  unproved_.erase(*connection.unproved);
  connection.unproved.reset();
  connection.stranger.release();
}

// No address is refused: many callers may share one.
bool Connections::close_oldest_stranger() {
  if (unproved_.empty()) return false;
  Connection& oldest = *unproved_.front();
  const std::string why = "too many handshakes are under way: the oldest one without a proven peer is closed";
  if (oldest.kind == Connection::Kind::kFresh)
    drop(oldest, why);
  else
    engine_->end_session(monotonic_now(), oldest.session, Code::kExhausted, why);
  prove(oldest);
  return true;
}

Status Connections::check_user(int socket, bool shares_memory) const {
  const std::optional<uid_t> user = peer_user(socket);
  if (user == ::geteuid()) return {};
  if (!user) {
    // Over TCP a peer proves itself only by a secret: without a given one, by the secret that no other
    // user can read.
    if (shares_memory) return {Code::kNotPermitted, "memory is shared over unix sockets only"};
    return {};
  }
  const std::string users =
      "the peer is user " + std::to_string(*user) + " and this agent user " + std::to_string(::geteuid());
  if (!is_open_to_others())
    return {
        Code::kNotPermitted,
        users + ": without a secret this agent serves only its own user; give both agents the same secret"};
  if (shares_memory && !options_.shares_with_all)
    return {Code::kNotPermitted, users +
                                     ": memory is shared only with its own user, unless option shm_peers is "
                                     "\"secret\" at both ends"};
  return {};
}

// ---- what comes of a connection -----------------------------------------------------------------

std::uint32_t Connections::Connection::max_body() {
  return kind == Kind::kControl ? all.engine_->max_body(session) : wire::kMaxHandshakeBody;
}

void Connections::Connection::on_frame(wire::ByteSpan frame) {
  if (dead) return;
  switch (kind) {
    case Kind::kFresh: all.on_first_frame(*this, frame); break;
    case Kind::kControl:
      all.engine_->on_frame(monotonic_now(), session, frame);
      if (!tried_memory) all.on_handshake(*this);
      break;
    case Kind::kRail: all.on_rail_welcome(*this, frame); break;
  }
}

// The engine ends a session, however little memory there is.
void Connections::Connection::on_closed(const std::string& why) {
  if (dead) return;
  try {
    switch (kind) {
      case Kind::kFresh: all.drop(*this, why); break;
      case Kind::kControl:
        if (socket->connecting())
          all.dial_next(*this, why);
        else if (socket->channel() != nullptr && socket->channel()->was_refused())
          all.engine_->end_session(monotonic_now(), session, Code::kAuthFailed, "at " + address + ": " + why);
        else
          all.engine_->on_disconnected(monotonic_now(), session, why);
        break;
      case Kind::kRail:
        all.failed_rails_.push_back({session, rail,
                                     std::string(all.rails_.kind(transport).name) + " rail " +
                                         std::to_string(rail.index) + ": " + why});
        all.drop(*this, "");
        break;
    }
  } catch (const std::bad_alloc&) {
    if (kind != Kind::kFresh) all.engine_->starve(monotonic_now(), session);
    if (!dead) all.drop(*this, "");
  }
}

Connections::Connection& Connections::add(std::unique_ptr<Connection> connection) {
  Connection& added = *connection;
  waiting_.push_back(std::move(connection));
  added.place = std::prev(waiting_.end());
  return added;
}

void Connections::keep_open(Connection& connection) noexcept {
  connection.deadline = kNever;
  if (!std::exchange(connection.is_kept_open, true)) open_.splice(open_.end(), waiting_, connection.place);
}

void Connections::end(Connection& connection) noexcept {
  connection.dead = true;
  dead_.splice(dead_.end(), connection.is_kept_open ? open_ : waiting_, connection.place);
  if (connection.shares_memory) --num_sharing_;
  prove(connection);
  connection.socket->close();
}

void Connections::drop(Connection& connection, const std::string& why) {
  if (connection.dead) return;
  end(connection);
  if (connection.kind == Connection::Kind::kFresh && !why.empty())
    log("closed a connection from " + connection.address + ": " + why);
}

void Connections::expect_by(Connection& connection, Time at) {
  connection.deadline = at;
  due_at_ = std::min(due_at_, at);
}

void Connections::expire(Time now) {
  if (now < due_at_) return;
  std::vector<Connection*> due;  // ending one may end others
  Time next = kNever;
  for (const auto& connection : waiting_) {
    if (connection->deadline <= now)
      due.push_back(connection.get());
    else
      next = std::min(next, connection->deadline);
  }
  due_at_ = next;
  for (Connection* connection : due) {
    if (connection->dead) continue;
    connection->deadline = kNever;
    try {
      expire(*connection, now);
    } catch (const std::bad_alloc&) {
      expect_by(*connection, now + 1'000'000);
    }
  }
}

void Connections::expire(Connection& connection, Time now) {
  if (connection.kind == Connection::Kind::kControl && now < connection.due_at) {
    // One address's turn is over: if none of its machines answered, the next address's turn begins.
    if (connection.socket->connecting())
      dial_next(connection, "no answer");
    else
      expect_by(connection, connection.due_at);
  } else if (connection.kind == Connection::Kind::kControl) {
    const std::string& tried = connection.dialling.tried();
    engine_->end_session(now, connection.session, Code::kNoAnswer,
                         (connection.was_open ? "no rail to " + connection.address + " came up"
                                              : "no answer from " + connection.address) +
                             " within the time to connect (connect_timeout_s)" +
                             (connection.was_open || connection.socket->connecting()
                                  ? ""
                                  : ", although it accepted the connection: it is stopped or starved, or is "
                                    "not a kvxfer agent") +
                             (tried.empty() ? "" : ", after " + tried));
  } else if (connection.kind == Connection::Kind::kRail) {
    connection.on_closed("no answer within " + in_words(options_.handshake_ns) + " (handshake_timeout_s)");
  } else {
    drop(connection,
         "it did not identify itself within " + in_words(options_.handshake_ns) + " (handshake_timeout_s)");
  }
}

void Connections::on_first_frame(Connection& connection, wire::ByteSpan frame) {
  Result<wire::Header> header = wire::decode_header(frame, wire::kMaxHandshakeBody);
  if (!header.ok()) return drop(connection, header.status().message());
  if (header.value().type == wire::FrameType::kHello) {
    // A caller on a unix name of this agent is a process of this host, and has not proved its identity.
    if (is_certified() && connection.socket->channel() == nullptr)
      return drop(connection,
                  "it has no certificate: an agent with certificates accepts sessions over TCP only");
    // An agent with another secret hangs up as well, but only after it was answered.
    if (connection.socket->hung_up())
      return drop(connection,
                  "it closed the connection before it was answered: it ended, or its connect_timeout_s was "
                  "over, perhaps because this agent or its host stood still");
    connection.session = engine_->add_session(monotonic_now(), SessionRole::kAcceptor);
    connection.kind = Connection::Kind::kControl;
    keep_open(connection);  // the session has its own limit
    controls_[connection.session] = &connection;
    if (is_certified()) certify(connection);
    engine_->on_frame(monotonic_now(), connection.session, frame);
    return;
  }
  Result<wire::Message> message =
      wire::decode(header.value(), frame.subspan(wire::kHeaderNbytes, header.value().body_nbytes));
  if (!message.ok()) return drop(connection, message.status().message());
  if (const auto* hello = std::get_if<wire::RailHello>(&message.value()))
    return on_rail_hello(connection, *hello);
  drop(connection, "it began with " + std::string(wire::name_of(header.value().type)) + " instead of HELLO");
}

void Connections::certify(const Connection& connection) {
  const tls::Channel& channel = *connection.socket->channel();
  engine_->session(connection.session)
      ->certify({channel.export_key(kSessionLabel),
                 [identities = channel.identities(), credentials = channel.credentials()](
                     std::string_view name) { return credentials->admit(identities, name); }});
}

void Connections::on_secure(Connection& connection) {
  if (connection.dead || connection.accepted) return;
  Session* const session = engine_->session(connection.session);
  if (session == nullptr) return drop(connection, "");
  if (connection.kind == Connection::Kind::kControl) return certify(connection);
  connection.socket->send(session->rail_hello(connection.rail, rails_.kind(connection.transport).name,
                                              rails_.instance_of(connection.transport), key_of(connection)));
}

std::string Connections::key_of(const Connection& connection) {
  const tls::Channel* const channel = connection.socket->channel();
  return channel != nullptr ? channel->export_key(kRailLabel) : std::string();
}

// ---- control connections ------------------------------------------------------------------------

// Control frames go through memory as soon as both ends have proved their identities.
void Connections::on_handshake(Connection& connection) {
  const Session* session = connection.dead ? nullptr : engine_->session(connection.session);
  if (session == nullptr || session->state() != SessionState::kOpen) return;
  prove(connection);
  connection.socket->charge(engine_->budget(connection.session));
  connection.tried_memory = true;
  if (!rails_.any(shares_memory) || !check_user(connection.socket->fd(), true).ok()) return;
  watched_.reserve(watched_.size() + 1);
  if (!connection.socket->share_memory()) return;
  connection.shares_memory = true;
  ++num_sharing_;
  watch(connection);
}

void Connections::send(SessionKey session, wire::Bytes&& frame) {
  unsent_.push_back(session);
  auto found = controls_.find(session);
  if (Connection* control = found != controls_.end() ? found->second : pending_control_)
    control->socket->send(std::move(frame));
}

EngineHost::Unsent Connections::unsent(SessionKey session) const {
  const auto found = controls_.find(session);
  if (found == controls_.end()) return {};
  return {found->second->socket->num_unsent(), found->second->socket->is_full()};
}

void Connections::close_session(SessionKey session) {
  // Its future rails, and itself if it is being dialled.
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    Connection& connection = **next++;
    if (connection.session == session && connection.kind != Connection::Kind::kFresh) end(connection);
  }
  const auto control = controls_.find(session);
  if (control == controls_.end()) return;
  if (!control->second->dead) end(*control->second);
  controls_.erase(control);
}

void Connections::has_come_up(SessionKey session) {
  if (const auto control = controls_.find(session); control != controls_.end()) keep_open(*control->second);
}

bool Connections::never_opened(SessionKey session) const {
  return std::any_of(dead_.begin(), dead_.end(), [&](const auto& connection) {
    return connection->session == session && connection->kind == Connection::Kind::kControl &&
           connection->accepted && !connection->was_open;
  });
}

bool Connections::read_unread() {
  const std::vector<Connection*> turns = std::exchange(unread_, {});
  int handshakes = 0;
  for (Connection* connection : turns) {
    if (connection->dead) continue;
    if (connection->socket->is_securing() && ++handshakes > kHandshakeSteps)
      unread_.push_back(connection);
    else
      connection->socket->read_more();
  }
  return !turns.empty();
}

void Connections::watch(Connection& connection) {
  connection.was_heard = true;
  if (connection.is_watched) return;
  watched_.push_back(&connection);
  connection.is_watched = true;
  connection.socket->wake_up();
}

bool Connections::read_rings() {
  bool more = !unread_.empty() && read_unread();
  for (std::size_t i = 0; i < watched_.size(); ++i) {  // by index: a frame's effects may add some
    Connection& connection = *watched_[i];
    if (rings_sleep_) connection.socket->wake_up();
    if (!connection.socket->read_ring()) continue;
    connection.was_heard = more = true;
  }
  rings_sleep_ = false;
  return more;
}

void Connections::leave_quiet_rings(Time now) {
  if (watched_.size() <= kAlwaysWatched || now < looks_back_at_) return;
  looks_back_at_ = now + kWatchNs;
  for (std::size_t i = 0; i < watched_.size() && watched_.size() > kAlwaysWatched;) {
    Connection& connection = *watched_[i];
    // Falls asleep first: the peer announces frames that it writes after this look.
    if (std::exchange(connection.was_heard, false) || !connection.socket->fall_asleep()) {
      connection.socket->wake_up();
      ++i;
      continue;
    }
    connection.is_watched = false;
    watched_[i] = watched_.back();
    watched_.pop_back();
  }
}

bool Connections::arm_rings() {
  if (!unread_.empty()) return false;
  if (rings_sleep_) return true;
  rings_sleep_ = true;
  bool quiet = true;
  for (Connection* connection : watched_) quiet = connection->socket->fall_asleep() && quiet;
  return quiet;
}

bool Connections::flush() {
  // By index: a failed flush ends its session, and that may send frames to others.
  for (std::size_t i = 0; i < unsent_.size(); ++i)
    if (auto control = controls_.find(unsent_[i]); control != controls_.end())
      control->second->socket->flush();
  unsent_.clear();
  if (dead_.empty()) return false;
  for (auto* list : {&unread_, &watched_})
    std::erase_if(*list, [](const Connection* connection) { return connection->dead; });
  dead_.clear();
  return true;
}

void Connections::close_all() {
  for (List* const list : {&waiting_, &open_})
    for (std::unique_ptr<Connection>& connection : *list)
      if (connection->socket) connection->socket->close();
}

}  // namespace kvxfer
