// Two ends of a transport, with memory between guards, and transfers between them whose every byte is known.
// The conformance suite (conformance.h) is made of these.
// Both ends live on one thread, and are driven as the core drives them: a transport is polled when
// wants_poll() says so. It rests when it is not busy and arm() has agreed, until a descriptor is ready. So a
// wake-up that it forgets to announce shows as a hang.
#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance_wishes.h"
#include "core/copy/executor.h"
#include "core/faulty_transport.h"
#include "core/system/pool_memory.h"
#include "kvxfer/transport.h"
#include "program_samples.h"
#include "test_reactor.h"
#include "transport_calls.h"

namespace kvxfer::conformance {

using program_samples::for_each_read;
using program_samples::for_each_written;

struct Subject {
  std::string name;
  std::function<std::unique_ptr<Transport>(Reactor&, const FenceTable&)> make;
  std::function<std::pair<UniqueFd, UniqueFd>()> sockets;
  bool pool_memory = false;  // the regions lie in PoolMemory
  std::optional<Faults> faults;  // wrapped in a FaultyTransport
  // Allocates memory for the regions on a GPU; this process must be able to read it as well.
  std::byte* (*allocate)(std::size_t nbytes) = nullptr;
  void (*release)(std::byte* memory) = nullptr;
  bool src_on_host = false, dst_on_host = false;  // in host memory although `allocate` is set
  // Descriptors that a library opens and closes by itself: UCX's two ends connect to each other at the same
  // time, and later close one of the two connections.
  std::size_t num_loose_descriptors = 0;
};

// Back-pressure, late and shuffled completions, works that fail: the contract permits all of them.
inline Subject with_faults(Subject subject, std::string_view text = "again=0.3,delay=0.3,reorder=0.5") {
  const auto faults = Faults::parse(text);
  REQUIRE_OK(faults);
  subject.name += " with faults";
  subject.faults = faults.value();
  return subject;
}

inline std::pair<UniqueFd, UniqueFd> unix_sockets() {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

inline std::pair<UniqueFd, UniqueFd> tcp_sockets() {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  UniqueFd initiator(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::connect(initiator.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  UniqueFd acceptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(static_cast<bool>(acceptor));
  return {std::move(initiator), std::move(acceptor)};
}

inline std::size_t num_descriptors() {
  DIR* const directory = ::opendir("/proc/self/fd");
  std::size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// What memory holds before a test, so that a stray store shows at any place: `nbytes` without a repetition at
// the distance of a page. Made once, because the tests fill gigabytes with it.
inline const std::byte* canary(std::size_t nbytes) {
  static std::vector<std::byte> pattern;
  while (pattern.size() < nbytes)
    pattern.push_back(static_cast<std::byte>((pattern.size() * 0x9e37'79b1u) >> 13 | 1));
  return pattern.data();
}

// ---- one end ----

// Bytes between guards of the same allocation.
class Memory {
 public:
  static constexpr std::size_t kGuardNbytes = 64 * 1024;

  Memory(std::size_t nbytes, bool pool) : Memory(nbytes, of_pool(pool)) {}
  Memory(std::size_t nbytes, const Subject& subject, bool on_host = false)
      : nbytes_(nbytes), release_(on_host ? nullptr : subject.release) {
    if (subject.allocate != nullptr && !on_host) {
      all_ = subject.allocate(nbytes + 2 * kGuardNbytes);
    } else if (subject.pool_memory) {
      PoolMemory::Options options;
      options.nbytes = nbytes + 2 * kGuardNbytes;
      options.name = "conformance";
      options.huge_pages = false;
      auto created = PoolMemory::create(options);
      REQUIRE_OK(created);
      pool_ = std::move(created).value();
      all_ = pool_->data();
    } else {
      plain_.resize(nbytes + 2 * kGuardNbytes);
      all_ = plain_.data();
    }
    fill_canary();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (release_ != nullptr) release_(all_);
  }

  void fill_canary() {
    const std::size_t all_nbytes = nbytes_ + 2 * kGuardNbytes;
    std::memcpy(all_, canary(all_nbytes), all_nbytes);
  }
  void fill_random(check::Random& random) {
    for (std::size_t i = 0; i + 8 <= nbytes_; i += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(data() + i, &word, 8);
    }
  }
  bool is_as_filled() const {
    const std::size_t all_nbytes = nbytes_ + 2 * kGuardNbytes;
    return std::memcmp(all_, canary(all_nbytes), all_nbytes) == 0;
  }
  bool guards_hold() const {
    const std::size_t behind = kGuardNbytes + nbytes_;
    const std::byte* const expected = canary(behind + kGuardNbytes);
    return std::memcmp(all_, expected, kGuardNbytes) == 0 &&
           std::memcmp(all_ + behind, expected + behind, kGuardNbytes) == 0;
  }
  std::byte* data() { return all_ + kGuardNbytes; }
  std::size_t nbytes() const { return nbytes_; }

  LocalRegion region(RegionId id) {
    LocalRegion region;
    region.id = id;
    region.kind = release_ != nullptr ? MemoryKind::kGpu : MemoryKind::kHost;
    region.base = data();
    region.spans = {{0, nbytes_}};
    if (pool_ != nullptr) {
      const auto slice = PoolMemory::find(data(), nbytes_);
      REQUIRE(slice.has_value());
    }
    return region;
  }

 private:
  std::size_t nbytes_;
  std::vector<std::byte> plain_;
  std::shared_ptr<PoolMemory> pool_;
  static Subject of_pool(bool pool) {
    Subject subject;
    subject.pool_memory = pool;
    return subject;
  }

  std::byte* all_ = nullptr;
  void (*release_)(std::byte* memory);
};

inline RegionId next_region_id() {
  static RegionId last = 0;
  return ++last;
}
inline WorkId next_work_id() {
  static WorkId last = 0;
  return ++last;
}
inline TransferId next_transfer_id() {
  static TransferId last = 0;
  return ++last;
}

class End {
 public:
  End(const Subject& subject, std::size_t nbytes, bool is_src, check::Random& random)
      : memory(nbytes, subject, is_src ? subject.src_on_host : subject.dst_on_host) {
    if (is_src) memory.fill_random(random);
    auto created = FenceTable::create();
    REQUIRE_OK(created);
    fences = std::move(created).value();
    transport = subject.make(reactor, *fences);
    if (subject.faults) {
      Faults faults = *subject.faults;
      faults.seed += random.next();
      transport = std::make_unique<FaultyTransport>(std::move(transport), faults);
    }
    num_handlers_at_first = reactor.num_handlers();
    region = memory.region(next_region_id());
    auto registered = testing::register_memory(*transport, region);
    REQUIRE_OK(registered);
    keys = std::move(registered).value();
    CHECK(keys.size() <= kMaxKeyBytes);
  }

  // Polls if there is a reason to, as the core does. False if the transport rests: nothing happened, and it
  // is armed.
  bool step() {
    if (transport == nullptr) return false;
    bool stirred = reactor.run_once(0) != 0;
    if (transport->wants_poll()) {
      Completion completions[16];
      const std::size_t count = transport->poll(completions);
      REQUIRE(count <= std::size(completions));
      for (std::size_t i = 0; i < count; ++i) take(completions[i]);
      stirred = stirred || count != 0;
    }
    if (stirred || transport->busy()) return true;
    const bool rests = transport->arm();
    CHECK(rests || transport->wants_poll());
    return !rests;
  }

  void cancel(WorkId id) { transport->cancel(std::span(&id, 1)); }
  Code post(const Work& work) {
    const Code code = transport->post(peer, work);
    CHECK(code == Code::kOk || code == Code::kAgain || code == Code::kRailFailed);
    if (code == Code::kOk) accepted[work.id] = true;
    return code;
  }

  bool completed(WorkId id) const { return outcomes.contains(id); }
  Code outcome(WorkId id) const { return outcomes.at(id).code; }
  bool all_completed() const { return outcomes.size() == accepted.size(); }
  // For all its rails: it watches no more descriptors than when it was made.
  bool has_let_go() const { return reactor.num_handlers() == num_handlers_at_first; }

  RemoteRegion remote_region() const {
    return {region.id, reinterpret_cast<std::uintptr_t>(region.base), region.spans, keys};
  }

  testing::TestReactor reactor;
  Memory memory;
  std::unique_ptr<FenceTable> fences;
  LocalRegion region;
  RegionKeys keys;
  std::unique_ptr<Transport> transport;
  std::size_t num_handlers_at_first = 0;
  PeerId peer = 0;
  bool up = false;
  bool down = false;
  std::string down_detail;
  std::unordered_map<WorkId, bool> accepted;
  std::unordered_map<WorkId, Completion> outcomes;
  std::function<void(WorkId)> on_completed;  // at once: a fence is complete

 private:
  // Contract 1, checked for every completion of every test.
  void take(Completion& completion) {
    if (completion.kind == CompletionKind::kWork) {
      if (!accepted.contains(completion.work)) return FAIL("a work completed that was never accepted");
      if (outcomes.contains(completion.work)) return FAIL("a work completed twice");
      if (completion.code == Code::kOk) CHECK(completion.detail.empty());
      CHECK(completion.code != Code::kAgain);
      const WorkId id = completion.work;
      outcomes[id] = std::move(completion);
      if (on_completed) on_completed(id);
      return;
    }
    CHECK_EQ(completion.peer, peer);
    bool& flag = completion.kind == CompletionKind::kRailUp ? up : down;
    CHECK(!flag);
    flag = true;
    if (completion.kind == CompletionKind::kRailDown) {
      CHECK(completion.code != Code::kOk);
      CHECK(!completion.detail.empty());
      down_detail = completion.detail;
    }
  }
};

// ---- two of them ----

struct Shape {
  std::uint32_t num_layers = 3;
  std::uint32_t num_pairs = 12;
  std::uint32_t pairs_per_piece = 5;  // the last piece of a layer is shorter
  std::uint32_t counts[2] = {1, 1};
  std::uint64_t nbytes = 4096;
};

inline constexpr std::size_t kRegionNbytes = 8 * 1024 * 1024;

class Pair {
 public:
  explicit Pair(const Subject& subject, std::size_t nbytes = kRegionNbytes)
      : random(check::seed()),
        src(subject, nbytes, true, random),
        dst(subject, nbytes, false, random),
        subject_(subject) {
    connect();
  }

  bool one_sided() const { return dst.transport->capabilities().one_sided; }
  bool two_sided() const { return dst.transport->capabilities().two_sided; }
  bool can_run(const Move& move) const {
    return !move.program->converts() || dst.transport->capabilities().converts;
  }
  // How the core moves a piece.
  WorkKind kind_to_bring(const Move& at_dst, std::uint32_t piece) const {
    if (one_sided() && two_sided()) return dst.transport->choose(dst.peer, at_dst, piece);
    return one_sided() ? WorkKind::kFetch : WorkKind::kReceive;
  }

  void connect() {
    auto [a, b] = subject_.sockets();
    src.up = src.down = dst.up = dst.down = false;
    auto src_peer = src.transport->connect(std::move(a), {true, 0, "dst"});
    REQUIRE_OK(src_peer);
    src.peer = src_peer.value();
    auto dst_peer = dst.transport->connect(std::move(b), {false, 0, "src"});
    REQUIRE_OK(dst_peer);
    dst.peer = dst_peer.value();
    REQUIRE(run_until([&] { return src.up && dst.up; }));
    REQUIRE_OK(dst.transport->attach(dst.peer, src.remote_region()));
    REQUIRE_OK(src.transport->attach(src.peer, dst.remote_region()));
  }

  bool step() {
    const bool src_did = src.step();
    return dst.step() || src_did;
  }

  // Long enough for a machine that runs sanitizers and other programs. A test that passes never waits so
  // long.
  template <class Done>
  bool run_until(Done&& done, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (step()) continue;
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  // Waits until neither end has had anything to do for a while: a TCP segment may still be under way.
  void run_until_quiet() {
    for (int idle = 0; idle < 200;) idle = step() ? 0 : idle + 1;
  }

  check::Random random;
  End src;
  End dst;

 private:
  const Subject& subject_;
};

// A random program that copies pages of one end's region to the other's, and the bytes that have to arrive
// (program_samples.h).
class TestTransfer {
 public:
  TestTransfer(Pair& pair, const Shape& shape) : TestTransfer(pair, pair.src, pair.dst, shape) {}
  TestTransfer(Pair& pair, End& from, End& to, const Shape& shape, std::uint64_t first_byte = 0)
      : TestTransfer(pair, from, to, move_of(pair.random, shape, first_byte)) {}
  TestTransfer(Pair& pair, const Wish& wish)
      : TestTransfer(pair, pair.src, pair.dst, sample_of(pair, wish)) {}

  std::uint32_t num_pieces() const { return at_dst->grid.num_pieces(); }

  // Posts pieces as the core does. For a piece that is received, it posts the destination's work first, and
  // the source's once that was accepted. Returns when all are posted, or when a rail is down.
  void start(const std::vector<std::uint32_t>& pieces) {
    std::vector<Work> at_dst_works, at_src_works;
    std::vector<std::size_t> receives;  // at_dst_works of at_src_works
    for (const std::uint32_t piece : pieces) {
      Work work;
      work.piece = piece;
      work.kind = pair_.kind_to_bring(*at_dst, piece);
      work.move = at_dst;
      work.id = next_work_id();
      at_dst_works.push_back(work);
      if (work.kind == WorkKind::kFetch) continue;
      receives.push_back(at_dst_works.size() - 1);
      work.kind = WorkKind::kSend;
      work.move = at_src;
      work.id = next_work_id();
      at_src_works.push_back(work);
    }
    std::size_t at_dst_posted = 0, at_src_posted = 0;
    while (at_dst_posted < at_dst_works.size() || at_src_posted < at_src_works.size()) {
      if (!post_some(dst, at_dst_works, at_dst_posted, at_dst_works.size(), dst_works)) return;
      const auto num_asked =
          std::lower_bound(receives.begin(), receives.end(), at_dst_posted) - receives.begin();
      if (!post_some(src, at_src_works, at_src_posted, static_cast<std::size_t>(num_asked), src_works))
        return;
    }
  }

  std::vector<std::uint32_t> all_pieces() const {
    std::vector<std::uint32_t> pieces(num_pieces());
    for (std::uint32_t i = 0; i < num_pieces(); ++i) pieces[i] = i;
    return pieces;
  }
  std::vector<std::uint32_t> missing_pieces() const {
    std::vector<std::uint32_t> pieces;
    for (std::uint32_t i = 0; i < num_pieces(); ++i)
      if (!done(i)) pieces.push_back(i);
    return pieces;
  }
  bool done(std::uint32_t piece) const {
    const auto found = dst.outcomes.find(dst_works[piece]);
    return found != dst.outcomes.end() && found->second.code == Code::kOk;
  }

  // Moves every piece that has not arrived; works that fail are posted again if `may_fail`.
  void finish(bool may_fail) {
    REQUIRE(pair_.run_until([&] { return src.all_completed() && dst.all_completed(); }));
    for (int round = 0; round < 1000; ++round) {
      const std::vector<std::uint32_t> missing = missing_pieces();
      if (missing.empty()) return;
      start(missing);
      REQUIRE(pair_.run_until([&] { return src.all_completed() && dst.all_completed(); }));
      if (may_fail) continue;
      for (const std::uint32_t piece : missing) REQUIRE_EQ(dst.outcome(dst_works[piece]), Code::kOk);
    }
    FAIL("works kept failing");
  }

  // Checks that pieces that are done hold the source's original bytes, that of all others only the bytes that
  // they name differ, and that nothing else has changed.
  void check_bytes() const {
    std::vector<std::byte> expected = before_;
    for (std::uint32_t piece = 0; piece < num_pieces(); ++piece) {
      const std::byte* const from = done(piece) ? after_.data() : dst.memory.data();
      for_each_written(*at_dst, piece, [&](std::uint64_t at, std::uint64_t nbytes) {
        std::memcpy(expected.data() + at, from + at, nbytes);
      });
    }
    if (std::memcmp(expected.data(), dst.memory.data(), expected.size()) != 0) {
      const auto differs = std::mismatch(expected.begin(), expected.end(), dst.memory.data()).first;
      FAIL("byte " + std::to_string(differs - expected.begin()) +
           " of the destination is not what it should be");
    }
    CHECK(dst.memory.guards_hold());
    CHECK(src.memory.guards_hold());
  }

  // Checks the pieces alone, for tests in which other transfers write the same region.
  void check_pieces() const {
    for (std::uint32_t piece = 0; piece < num_pieces(); ++piece) {
      bool same = done(piece);
      for_each_written(*at_dst, piece, [&](std::uint64_t at, std::uint64_t nbytes) {
        same = same && std::memcmp(dst.memory.data() + at, after_.data() + at, nbytes) == 0;
      });
      CHECK(same);
    }
  }

  std::vector<std::byte> piece_bytes(std::uint32_t piece) const {
    std::vector<std::byte> bytes;
    for_each_written(*at_dst, piece, [&](std::uint64_t at, std::uint64_t nbytes) {
      bytes.insert(bytes.end(), dst.memory.data() + at, dst.memory.data() + at + nbytes);
    });
    return bytes;
  }
  void scribble_source(std::uint32_t piece) {
    for_each_read(*at_dst, piece, [&](std::uint64_t at, std::uint64_t nbytes) {
      std::memset(src.memory.data() + at, 0xee, nbytes);
    });
  }
  void restore_source() { std::copy(original_.begin(), original_.end(), src.memory.data()); }

 private:
  Pair& pair_;

 public:
  End& src;
  End& dst;
  std::shared_ptr<const Move> at_src, at_dst;
  std::vector<WorkId> dst_works,
      src_works;  // by piece, the newest; 0 if there is none: fetched, or not posted

 private:
  TestTransfer(Pair& pair, End& from, End& to, Move move) : pair_(pair), src(from), dst(to) {
    REQUIRE(move.grid.num_pieces() == 0 || piece_ends(move, Side::kSrc) <= src.memory.nbytes());
    REQUIRE(move.grid.num_pieces() == 0 || piece_ends(move, Side::kDst) <= dst.memory.nbytes());
    move.transfer = next_transfer_id();
    move.local = std::make_shared<const LocalRegion>(src.region);
    move.remote_region = dst.region.id;
    at_src = std::make_shared<Move>(move);
    move.local = std::make_shared<const LocalRegion>(dst.region);
    move.remote_region = src.region.id;
    at_dst = std::make_shared<Move>(move);

    original_.assign(src.memory.data(), src.memory.data() + src.memory.nbytes());
    before_.assign(dst.memory.data(), dst.memory.data() + dst.memory.nbytes());
    after_ = before_;
    for (std::uint32_t piece = 0; piece < num_pieces(); ++piece)
      program_samples::apply(move, piece, original_.data(), after_.data());
    dst_works.resize(num_pieces());
    src_works.resize(num_pieces());
  }
  static std::uint64_t piece_ends(const Move& move, Side side) {
    std::uint64_t end = 0;
    for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece)
      end = std::max(end, piece_end(move, piece, side));
    return end;
  }
  static Move sample_of(Pair& pair, const Wish& wish) {
    program_samples::Sample sample(pair.random, wish);
    REQUIRE(sample.src.end <= pair.src.memory.nbytes());
    sample.fill_source(pair.src.memory.data());
    return sample.move;
  }
  static Move move_of(check::Random& random, const Shape& shape, std::uint64_t first_byte) {
    auto program = std::make_shared<CopyProgram>();
    program->num_layers = shape.num_layers;
    const std::uint32_t num_blocks = shape.num_pairs + (shape.num_pairs < 12 ? 1 : 3);  // some stay untouched
    std::uint64_t src_end = first_byte + random.below(64), dst_end = first_byte + random.below(64);
    for (int kv = 0; kv < 2; ++kv) {  // keys, then values
      CopyLoop loop{};
      loop.num_layers = shape.num_layers;
      loop.nbytes = shape.nbytes;
      loop.counts[0] = shape.counts[0];
      loop.counts[1] = shape.counts[1];
      src_end = lay_out(random, shape, num_blocks, src_end, loop.src_offset, loop.src_strides,
                        loop.src_block_stride, loop.src_layer_stride);
      dst_end = lay_out(random, shape, num_blocks, dst_end, loop.dst_offset, loop.dst_strides,
                        loop.dst_block_stride, loop.dst_layer_stride);
      program->loops.push_back(loop);
    }
    Move move;
    move.program = program;
    move.grid = {0, shape.num_layers, shape.num_pairs, shape.pairs_per_piece};
    for (auto* blocks : {&move.src_ids, &move.dst_ids}) {
      for (std::uint32_t i = 0; i < num_blocks; ++i) blocks->push_back(i);
      random.shuffle(*blocks);
      blocks->resize(shape.num_pairs);
    }
    return move;
  }
  static std::uint64_t lay_out(check::Random& random, const Shape& shape, std::uint32_t num_blocks,
                               std::uint64_t offset, std::uint64_t& first, std::uint64_t (&strides)[2],
                               std::uint64_t& block_stride, std::uint64_t& layer_stride) {
    const auto gap = [&] { return random.chance(50) ? 0 : random.below(48); };
    first = offset;
    strides[1] = shape.nbytes + gap();
    strides[0] = strides[1] * shape.counts[1] + gap();
    block_stride = strides[0] * shape.counts[0] + gap();
    layer_stride = block_stride * num_blocks + gap();
    return offset + layer_stride * shape.num_layers;
  }

  // Posts some of works[num_posted, end), and steps if there is back-pressure. False: the rail is down.
  bool post_some(End& end, const std::vector<Work>& works, std::size_t& num_posted, std::size_t last,
                 std::vector<WorkId>& by_piece) {
    if (num_posted >= last) return true;
    const std::size_t count = pair_.random.between(1, last - num_posted);
    Code code = Code::kOk;
    for (const std::size_t until = num_posted + count; num_posted < until; ++num_posted) {
      if (code = end.post(works[num_posted]); code != Code::kOk) break;
      by_piece[works[num_posted].piece] = works[num_posted].id;
    }
    if (code == Code::kAgain) pair_.step();
    return code != Code::kRailFailed;
  }

  std::vector<std::byte> original_, before_, after_;  // the source; the destination, and its expected content
};

}  // namespace kvxfer::conformance
