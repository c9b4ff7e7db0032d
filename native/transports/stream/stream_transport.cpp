// Pages over connected stream sockets.
#include "transports/stream/stream_transport.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "core/copy/pack.h"
#include "core/in_room.h"
#include "transports/stream/receive_stream.h"
#include "transports/stream/send_stream.h"

namespace kvxfer {
namespace {

// The bytes that a poll moves in each direction before it gives the gate back, about. Short runs and single
// system calls count as more (step.h).
constexpr std::uint64_t kPollNbytes = 1024 * 1024;

// Works that may be posted for one peer, sends and receives each. The window asks for a handful; a caller
// that posts more than this has ignored post's answer.
constexpr std::size_t kMaxPosted = 1024;

// The bytes that one system call scatters: few enough to be in the L2 cache still when they are scattered.
constexpr std::size_t kScratchNbytes = 256 * 1024;

// The kernel grows a TCP socket's buffers as needed; fixed sizes from 512 KiB to 4 MiB were no
// faster. A unix socket keeps its first size, 208 KiB, which holds less than half a piece: 0.82 to
// 0.9 of a plain stream's rate, where 512 KiB reaches all of it, and 2 MiB (out of the cache) 0.9
// again. The kernel silently gives less where net.core.wmem_max is lower.
constexpr std::uint32_t kUnixBufferNbytes = 512 * 1024;

// In the middle of a piece a TCP socket counts as readable only from this many bytes on, or from what is left
// of the piece: about two wake-ups for a piece of half a MiB. With 64 KiB (one segment of loopback) there are
// eight wake-ups, and 0.8 to 0.95 of the rate that 256 KiB gives. It cannot hang: the kernel also wakes us
// when its buffer is full or the peer has closed.
constexpr std::uint64_t kWakeNbytes = 256 * 1024;

constexpr std::uint64_t kRecordNbytes = 32 * 1024;  // more than a cipher's largest

constexpr std::string_view kNoMemory = "this process could not allocate memory for the rail";

Status set_option(int fd, int level, int name, int value, const char* what) {
  if (::setsockopt(fd, level, name, &value, sizeof value) == 0) return {};
  return Status::from_errno(what, errno);
}

Result<int> domain_of(int fd) {
  int domain = 0;
  socklen_t length = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0) return domain;
  return Status::from_errno("getsockopt(SO_DOMAIN)", errno);
}

bool is_tcp(int domain) noexcept { return domain == AF_INET || domain == AF_INET6; }

Status prepare_socket(int fd, int domain, std::uint32_t buffer_nbytes) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
    return Status::from_errno("fcntl(O_NONBLOCK)", errno);
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return Status::from_errno("fcntl(FD_CLOEXEC)", errno);
  if (is_tcp(domain)) {
    // A trailer must not wait for the acknowledgement of the bytes before it.
    if (Status status = set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "setsockopt(TCP_NODELAY)"); !status.ok())
      return status;
  }
  if (buffer_nbytes == 0 && domain == AF_UNIX) buffer_nbytes = kUnixBufferNbytes;
  if (buffer_nbytes != 0) {
    const int nbytes = static_cast<int>(buffer_nbytes);
    if (Status status = set_option(fd, SOL_SOCKET, SO_SNDBUF, nbytes, "setsockopt(SO_SNDBUF)"); !status.ok())
      return status;
    if (Status status = set_option(fd, SOL_SOCKET, SO_RCVBUF, nbytes, "setsockopt(SO_RCVBUF)"); !status.ok())
      return status;
  }
  return {};
}

}  // namespace

// One connected socket: its two halves, and what epoll last said about it.
class StreamTransport::Peer final : public Reactor::Handler {
 public:
  explicit Peer(std::vector<Peer*>& active) : active_(active) {}

  void on_ready(std::uint32_t events) override {
    // An error is read from the socket, by the next call on it.
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) readable = true;
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) writable = true;
    take_turns();
  }

  // Puts the peer into active_ if it has something to do.
  void take_turns() noexcept {
    if (takes_turns || !has_turn()) return;
    takes_turns = true;
    add_in_room(active_, this);
  }

  // While `nbytes` of a piece are missing, waking up for a few of them is not worth it.
  void wake_when_worth(std::uint64_t nbytes) noexcept {
    if (!tcp) return;  // other sockets' poll does not look at the mark
    // A cipher may already have taken some of them from the socket: a record at most.
    const std::uint64_t least = cipher != nullptr ? kWakeNbytes + kRecordNbytes : kWakeNbytes;
    const int mark = nbytes >= least ? static_cast<int>(kWakeNbytes) : 1;
    if (mark == wake_nbytes) return;
    wake_nbytes = mark;
    static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVLOWAT, &mark, sizeof mark));
  }

  // Marks the rail to this peer as broken; it goes down at the end of the turn.
  void break_with(Status why) noexcept {
    is_broken = true;
    failure = std::move(why);
  }

  bool up() const noexcept { return static_cast<bool>(socket); }
  bool moves() const noexcept { return up() && !is_broken; }
  // Bytes that the cipher has taken and the socket has not also need writing.
  bool wants_to_write() const noexcept {
    return !sending.empty() || (cipher != nullptr && cipher->has_unsent());
  }
  bool can_write() const noexcept { return writable && wants_to_write(); }
  stream::StreamSocket stream() const noexcept { return {socket.get(), cipher.get()}; }
  bool has_turn() const noexcept { return up() && (readable || can_write()); }

  PeerId id = 0;
  UniqueFd socket;  // closed once the rail is down
  std::shared_ptr<Cipher> cipher;  // null: the socket is plain
  std::string words;  // "tcp rail 0 to decode-0"
  bool tcp = false;
  int wake_nbytes = 1;  // what the socket's low-water mark is
  bool readable = false;
  bool writable = true;  // until a write says otherwise
  bool wants_writable = false;  // EPOLLOUT is asked for
  bool takes_turns = false;  // is in active_
  bool is_broken = false;
  Status failure;  // why it is broken; ok: because memory ran out
  stream::SendStream sending;
  stream::ReceiveStream receiving;

 private:
  std::vector<Peer*>& active_;
};

StreamTransport::StreamTransport(Reactor& reactor, const Options& options, std::shared_ptr<StreamRound> round)
    : reactor_(reactor), options_(options), round_(std::move(round)) {
  if (round_ != nullptr) round_->add(*this);
}

StreamTransport::~StreamTransport() {
  if (round_ != nullptr) round_->remove(*this);
  for (const auto& peer : peers_)
    if (peer->up()) reactor_.remove(peer->socket.get());
}

Capabilities StreamTransport::capabilities() const noexcept {
  Capabilities capabilities;
  capabilities.name = options_.name;
  capabilities.two_sided = true;
  // Compared with this piece size, 256 KiB moves 0.9 as much (more headers, credits and wake-ups); 1 MiB
  // moves no more and is coarser to schedule. Four pieces fill a loopback; eight leave room for credits on
  // their way.
  capabilities.window = 8;
  capabilities.piece_nbytes = 512 * 1024;
  capabilities.max_piece_nbytes = stream::kMaxPieceNbytes;
  return capabilities;
}

// A stream carries what the peer chooses to send, so there is nothing to register or to attach.
Result<RegionKeys> StreamTransport::register_memory(const LocalRegion&, const Pinned&) {
  return RegionKeys{};
}
void StreamTransport::deregister_memory(RegionId) noexcept {}
Status StreamTransport::attach(PeerId, const RemoteRegion&) { return {}; }
void StreamTransport::detach(PeerId, RegionId) noexcept {}

Result<PeerId> StreamTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  const Result<int> domain = domain_of(socket.get());
  if (!domain.ok()) return domain.status();
  if (Status status = prepare_socket(socket.get(), domain.value(), options_.socket_buffer_nbytes);
      !status.ok())
    return status;
  peers_.reserve(peers_.size() + 1);
  active_.reserve(peers_.capacity());
  make_room(0, 1);
  auto peer = std::make_unique<Peer>(active_);
  peer->tcp = is_tcp(domain.value());
  peer->id = next_id_++;
  peer->socket = std::move(socket);
  peer->cipher = info.cipher;
  peer->readable = info.cipher != nullptr;  // the cipher may have read ahead
  peer->words = std::string(options_.name) + " rail " + std::to_string(info.rail) + " to " + info.peer_name;
  if (Status status = reactor_.add(peer->socket.get(), EPOLLIN, *peer); !status.ok()) return status;
  completions_.rail_up(peer->id);
  peers_.push_back(std::move(peer));
  peers_.back()->take_turns();
  return peers_.back()->id;
}

void StreamTransport::disconnect(PeerId id) noexcept {
  const auto found = place_of(id);
  if (found == peers_.end()) return;
  Peer& peer = **found;
  if (peer.up()) reactor_.remove(peer.socket.get());
  peer.sending.fail(Code::kCancelled, "disconnected", completions_);
  peer.receiving.fail(Code::kCancelled, "disconnected", completions_);
  completions_.forget_rail(id);
  std::erase(active_, &peer);
  peers_.erase(found);
}

bool StreamTransport::is_up(PeerId id) const noexcept {
  const Peer* const peer = find(id);
  return peer != nullptr && peer->up();
}

Code StreamTransport::post_packed(PeerId id, const Work& work, std::byte* packed) noexcept {
  if (!is_up(id)) return Code::kRailFailed;
  Peer& peer = *find(id);
  Code code = Code::kAgain;
  try {
    make_room(1, 0);
    if (accept(peer, work, packed)) code = Code::kOk;
  } catch (const std::bad_alloc&) {  // counts as full
    places_.erase(work.id);
  }
  peer.take_turns();
  return code;
}

bool StreamTransport::accept(Peer& peer, const Work& work, std::byte* packed) {
  if (work.kind != WorkKind::kSend && work.kind != WorkKind::kReceive) {
    completions_.work(work.id, Code::kUnsupported, peer.words + ": a stream can only send and receive");
    return true;
  }
  if (work.piece >= work.move->grid.num_pieces() ||
      piece_nbytes(*work.move->program, work.move->grid.piece(work.piece)) > stream::kMaxPieceNbytes) {
    completions_.work(
        work.id, Code::kUnsupported,
        peer.words + ": piece " + std::to_string(work.piece) + " is not in the grid, or too large");
    return true;
  }
  const bool sends = work.kind == WorkKind::kSend;
  if ((sends ? peer.sending.size() : peer.receiving.size()) >= kMaxPosted) return false;
  Place& place = places_[work.id] = {peer.id, work.kind, 0, work.move->transfer, work.piece};
  if (sends)
    place.number = peer.sending.push(work, packed);
  else if (!peer.receiving.push(work, packed))
    completions_.work(work.id, Code::kUnsupported,
                      peer.words + ": piece " + std::to_string(work.piece) + " is already waited for");
  return true;
}

void StreamTransport::cancel(std::span<const WorkId> works) noexcept {
  for (const WorkId id : works) {
    const auto found = places_.find(id);
    Peer* const peer = found == places_.end() ? nullptr : find(found->second.peer);
    if (peer == nullptr) continue;  // it has ended
    const Place& place = found->second;
    try {
      if (place.kind == WorkKind::kSend)
        peer->sending.cancel(place.number, completions_);
      else
        peer->receiving.cancel(id, place.transfer, place.piece, completions_);
    } catch (const std::bad_alloc&) {  // the peer cannot be told that its piece will not come
      take_down(*peer, kNoMemory);
    }
  }
}

void StreamTransport::make_room(std::size_t num_works, std::size_t num_peers) {
  completions_.make_room(places_.size() + num_works + 2 * (peers_.size() + num_peers));
}

std::size_t StreamTransport::poll(std::span<Completion> completions) noexcept {
  if (round_ != nullptr) round_->move(*this);
  if (!std::exchange(had_turn_, false)) {
    run();
    end_turn();
  }
  const std::size_t count = completions_.take(completions);
  for (const Completion& told : completions.first(count))
    if (told.kind == CompletionKind::kWork) places_.erase(told.work);
  return count;
}

bool StreamTransport::busy() const noexcept { return !completions_.empty() || !active_.empty(); }

bool StreamTransport::is_worth_a_thread(std::uint64_t least_nbytes) const noexcept {
  if (had_turn_) return false;
  // No more peers are served in one turn, since each costs at least one system call.
  const std::size_t num_peers = std::min<std::size_t>(active_.size(), kPollNbytes / stream::kCallWork);
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < num_peers && nbytes < least_nbytes; ++i) {
    const Peer& peer = *active_[i];
    if (peer.can_write()) nbytes += peer.sending.left_nbytes();
    if (peer.readable) nbytes += peer.receiving.awaited_nbytes();
  }
  return nbytes >= least_nbytes;
}

// Serves active peers in turns. Each may use up the budget, and the next turn begins behind the last peer
// that was served. Whatever touches more than this rail (the reactor, and rails that go down) waits until the
// end of the turn.
void StreamTransport::run() noexcept {
  std::uint64_t read_left = kPollNbytes, write_left = kPollNbytes;
  while (num_served_ < active_.size() && read_left != 0 && write_left != 0) {
    Peer& peer = *active_[num_served_++];
    try {
      serve(peer, read_left, write_left);
    } catch (const std::bad_alloc&) {
      peer.break_with({});
    }
  }
}

void StreamTransport::end_turn_in_round() noexcept {
  end_turn();
  had_turn_ = busy();  // an idle rail is not polled, so its next poll must move something
}

void StreamTransport::end_turn() noexcept {
  const std::size_t num_served = std::exchange(num_served_, 0);
  if (num_served == 0) return;
  for (std::size_t i = 0; i < num_served; ++i) {
    Peer& peer = *active_[i];
    if (peer.is_broken)
      take_down(peer, peer.failure.ok() ? kNoMemory : std::string_view(peer.failure.message()));
    else
      watch(peer);
  }
  std::rotate(active_.begin(), active_.begin() + static_cast<std::ptrdiff_t>(num_served), active_.end());
  std::erase_if(active_, [](Peer* peer) { return !(peer->takes_turns = peer->has_turn()); });
}

void StreamTransport::serve(Peer& peer, std::uint64_t& read_left, std::uint64_t& write_left) {
  while (peer.moves() && peer.can_write() && write_left != 0) {
    if (peer.sending.empty()) {
      // On failure the reader meets the reason.
      peer.writable = peer.cipher->send({}) == 0;
      continue;
    }
    stream::Step step = peer.sending.write(peer.stream(), write_left, completions_);
    if (!step.status.ok()) peer.break_with(std::move(step.status));
    write_left -= std::min(write_left, step.work);
    peer.writable = !step.would_block;
  }
  while (peer.moves() && peer.readable && read_left != 0) {
    if (scratch_.empty()) scratch_.resize(kScratchNbytes);
    stream::Step step = peer.receiving.read(peer.stream(), read_left, scratch_, completions_);
    if (!step.status.ok()) peer.break_with(std::move(step.status));
    read_left -= std::min(read_left, step.work);
    peer.readable = !step.would_block;
    if (step.would_block && peer.moves()) peer.wake_when_worth(peer.receiving.missing_nbytes());
  }
}

// Asks the reactor for what the peer waits for.
void StreamTransport::watch(Peer& peer) {
  const bool wants_writable = peer.wants_to_write() && !peer.writable;
  if (!peer.up() || wants_writable == peer.wants_writable) return;
  peer.wants_writable = wants_writable;
  reactor_.modify(peer.socket.get(), wants_writable ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void StreamTransport::take_down(Peer& peer, std::string_view reason) noexcept {
  if (!peer.up()) return;
  std::string detail;
  try {
    detail = peer.words + ": " + std::string(reason);
  } catch (const std::bad_alloc&) {  // the completion is enough
  }
  reactor_.remove(peer.socket.get());
  peer.socket.reset();
  peer.sending.fail(Code::kRailFailed, detail, completions_);
  peer.receiving.fail(Code::kRailFailed, detail, completions_);
  completions_.rail_down(peer.id, detail);
}

StreamTransport::Peers::const_iterator StreamTransport::place_of(PeerId id) const noexcept {
  const auto found = std::lower_bound(peers_.begin(), peers_.end(), id,
                                      [](const auto& peer, PeerId wanted) { return peer->id < wanted; });
  return found == peers_.end() || (*found)->id != id ? peers_.end() : found;
}

StreamTransport::Peer* StreamTransport::find(PeerId id) const noexcept {
  const auto found = place_of(id);
  return found == peers_.end() ? nullptr : found->get();
}

}  // namespace kvxfer
