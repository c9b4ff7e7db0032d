// StreamTransport against a peer that is only a socket: what it puts on the wire, and what it does
// about bytes that no StreamTransport would send. conformance.h has the rest.
#include "conformance_ends.h"

#include <poll.h>
#include <unistd.h>

#include "transports/stream/piece_frame.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {
namespace {

using stream::PieceEnd;
using stream::PieceHeader;
using stream::PieceTrailer;

// One transport, one region and a raw socket in the place of the peer.
class RawPeer {
 public:
  static constexpr std::uint32_t kNumBlocks = 16;

  // `run_nbytes`: of the runs that pages are cut into, the second first; 0 for one.
  explicit RawPeer(std::uint64_t page_nbytes = 4096, bool unix_sockets = false, std::uint64_t run_nbytes = 0)
      : transport(reactor, StreamTransport::Options()),
        page_nbytes_(page_nbytes),
        memory(kNumBlocks * page_nbytes, false) {
    auto [ours, theirs] = unix_sockets ? conformance::unix_sockets() : conformance::tcp_sockets();
    socket = std::move(theirs);
    // A kernel that grows its buffers can hold a whole piece: what is cancelled then has gone out.
    const int nbytes = 256 * 1024;
    REQUIRE(::setsockopt(ours.get(), SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes) == 0);
    REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &nbytes, sizeof nbytes) == 0);
    peer = transport.connect(std::move(ours), {true, 3, "decode-0"}).value();
    auto program = std::make_shared<CopyProgram>();
    program->num_layers = 1;
    CopyLoop loop{};
    loop.num_layers = 1;
    loop.counts[0] = loop.counts[1] = 1;
    loop.nbytes = loop.src_block_stride = loop.dst_block_stride = page_nbytes;
    if (run_nbytes != 0) {
      loop.nbytes = run_nbytes;
      loop.counts[0] = 2;
      loop.counts[1] = static_cast<std::uint32_t>(page_nbytes / run_nbytes / 2);
      loop.src_strides[0] = loop.dst_strides[0] = run_nbytes;
      loop.src_strides[1] = loop.dst_strides[1] = 2 * run_nbytes;
    }
    program->loops = {loop};
    auto the_move = std::make_shared<Move>();
    the_move->transfer = 77;
    the_move->program = program;
    the_move->grid = {0, 1, kNumBlocks / 2, 4};  // two pieces of four pages, in every second block
    for (std::uint32_t i = 0; i < kNumBlocks / 2; ++i) the_move->src_ids.push_back(kNumBlocks - 1 - 2 * i);
    the_move->dst_ids = the_move->src_ids;
    the_move->local_base = memory.data();
    move = the_move;
  }

  std::uint64_t piece_nbytes() const { return 4 * page_nbytes_; }

  WorkId post(WorkKind kind, std::uint32_t piece) {
    Work work;
    work.id = conformance::next_work_id();
    work.kind = kind;
    work.piece = piece;
    work.move = move;
    REQUIRE_EQ(transport.post(peer, std::span(&work, 1)).accepted, 1);
    return work.id;
  }

  void step() {
    reactor.run_once(0);
    Completion completions[8];
    const std::size_t count = transport.poll(completions);
    for (std::size_t i = 0; i < count; ++i) {
      if (completions[i].kind == CompletionKind::kWork) outcomes[completions[i].work] = completions[i];
      if (completions[i].kind == CompletionKind::kRailDown) down = completions[i].detail;
    }
  }
  bool run_until(const std::function<bool()>& done) {
    return reactor.run_until([&] { step(); }, done);
  }
  bool run_until_done(WorkId id) {
    return run_until([&] { return outcomes.contains(id); });
  }

  void send(const void* bytes, std::size_t nbytes) {
    for (std::size_t sent = 0; sent < nbytes; step()) {
      const ssize_t count = ::send(socket.get(), static_cast<const char*>(bytes) + sent, nbytes - sent,
                                   MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count > 0) sent += static_cast<std::size_t>(count);
      if (count < 0 && errno != EAGAIN) return;
    }
  }
  void send_header(std::uint32_t piece, std::uint64_t nbytes) {
    PieceHeader header;
    header.transfer = move->transfer;
    header.piece = piece;
    header.nbytes = nbytes;
    send(&header, sizeof header);
  }
  void send_trailer(std::uint32_t piece, PieceEnd end) {
    const PieceTrailer trailer{end, piece};
    send(&trailer, sizeof trailer);
  }
  // What the transport sends, as it sends it.
  std::vector<std::byte> receive(std::size_t nbytes) {
    std::vector<std::byte> bytes(nbytes);
    std::size_t have = 0;
    REQUIRE(run_until([&] {
      const ssize_t count = ::recv(socket.get(), bytes.data() + have, nbytes - have, MSG_DONTWAIT);
      if (count > 0) have += static_cast<std::size_t>(count);
      return have == nbytes;
    }));
    return bytes;
  }
  template <class T>
  T receive_one() {
    T value;
    std::memcpy(static_cast<void*>(&value), receive(sizeof value).data(), sizeof value);
    return value;
  }

  Code outcome(WorkId id) const { return outcomes.at(id).code; }

  testing::TestReactor reactor;
  StreamTransport transport;

 private:
  std::uint64_t page_nbytes_;

 public:
  conformance::Memory memory;
  UniqueFd socket;
  PeerId peer = 0;
  std::shared_ptr<const Move> move;
  std::map<WorkId, Completion> outcomes;
  std::string down;
};

std::vector<std::byte> filled(std::size_t nbytes, int value) {
  return std::vector<std::byte>(nbytes, static_cast<std::byte>(value));
}

TEST(a_piece_travels_as_header_pages_trailer) {
  RawPeer raw;
  const WorkId work = raw.post(WorkKind::kSend, 1);
  const auto header = raw.receive_one<PieceHeader>();
  CHECK_EQ(header.magic, PieceHeader::kMagic);
  CHECK_EQ(header.transfer, 77);
  CHECK_EQ(header.piece, 1);
  CHECK_EQ(header.nbytes, raw.piece_nbytes());
  const std::vector<std::byte> bytes = raw.receive(raw.piece_nbytes());
  for (std::uint32_t i = 0; i < 4; ++i)
    CHECK(std::memcmp(bytes.data() + i * 4096, raw.memory.data() + raw.move->src_ids[4 + i] * 4096, 4096) ==
          0);
  const auto trailer = raw.receive_one<PieceTrailer>();
  CHECK(trailer.end == PieceEnd::kHeld);
  CHECK_EQ(trailer.piece, 1);
  REQUIRE(raw.run_until_done(work));
  CHECK_EQ(raw.outcome(work), Code::kOk);
}

TEST(a_send_cancelled_before_its_first_byte_says_so_in_an_empty_piece) {
  RawPeer raw;
  const WorkId work = raw.post(WorkKind::kSend, 0);
  raw.transport.cancel(work);
  const auto header = raw.receive_one<PieceHeader>();
  CHECK_EQ(header.nbytes, 0);
  CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
  CHECK_EQ(raw.outcome(work), Code::kCancelled);
}

TEST(a_send_cancelled_in_mid_piece_is_padded_and_ended) {
  for (const bool unix_sockets : {false, true}) {
    RawPeer raw(4 * 1024 * 1024, unix_sockets);  // 16 MiB a piece: no socket takes that at once
    std::memset(raw.memory.data(), 0x11, raw.memory.nbytes());
    const WorkId work = raw.post(WorkKind::kSend, 0);
    const WorkId next = raw.post(WorkKind::kSend, 1);
    const auto header = raw.receive_one<PieceHeader>();
    CHECK_EQ(header.nbytes, raw.piece_nbytes());
    for (int i = 0; i < 20; ++i) raw.step();
    raw.transport.cancel(work);
    std::memset(raw.memory.data(), 0x22, raw.memory.nbytes());  // somebody else's bytes from here on
    const std::vector<std::byte> bytes = raw.receive(raw.piece_nbytes());
    CHECK_EQ(raw.outcome(work), Code::kCancelled);
    CHECK(std::find(bytes.begin(), bytes.end(), std::byte{0x22}) == bytes.end());
    CHECK(bytes.front() == std::byte{0x11});
    CHECK(bytes.back() == std::byte{0});
    CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
    // What was queued behind it is whole.
    CHECK_EQ(raw.receive_one<PieceHeader>().piece, 1);
    CHECK(raw.receive(raw.piece_nbytes()) == filled(raw.piece_nbytes(), 0x22));
    CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kHeld);
    REQUIRE(raw.run_until_done(next));
    CHECK_EQ(raw.outcome(next), Code::kOk);
  }
}

// A piece as the program says it, of a memory that looks like this.
std::vector<std::byte> piece_of(const RawPeer& raw, std::uint32_t piece, const std::byte* memory) {
  return program_samples::packed(*raw.move, piece, memory);
}

TEST(what_is_cancelled_behind_a_gathered_piece_leaves_it_whole) {
  for (const bool unix_sockets : {false, true}) {
    RawPeer raw(2 * 1024 * 1024, unix_sockets, 256);  // 8 MiB a piece, in runs of 256 bytes
    check::Random random(check::seed());
    const std::vector<std::byte> first = piece_of(raw, 0, raw.memory.data()),
                                 second = piece_of(raw, 1, raw.memory.data());
    const WorkId work = raw.post(WorkKind::kSend, 0);
    CHECK_EQ(raw.receive_one<PieceHeader>().nbytes, first.size());
    // Again and again something behind it is cancelled, wherever the socket stands in it: what was
    // gathered and has not gone out is forgotten, and gathered again from there.
    std::uint64_t num_cancelled = 0;
    for (std::size_t at = 0; at < first.size();) {
      const std::size_t nbytes = std::min<std::size_t>(first.size() - at, random.between(1, 300'000));
      const std::vector<std::byte> part = raw.receive(nbytes);
      REQUIRE(std::equal(part.begin(), part.end(), first.begin() + static_cast<std::ptrdiff_t>(at)));
      at += nbytes;
      if (at + 4 * 1024 * 1024 > first.size()) continue;  // the piece may be out, and the next begun
      for (std::uint64_t steps = random.below(3); steps != 0; --steps) raw.step();
      const WorkId behind = raw.post(WorkKind::kSend, 1);
      if (random.chance(50)) raw.step();
      raw.transport.cancel(behind);
      ++num_cancelled;
    }
    CHECK(num_cancelled > 5);
    CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kHeld);
    for (; num_cancelled != 0; --num_cancelled) {
      CHECK_EQ(raw.receive_one<PieceHeader>().nbytes, 0);
      CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
    }
    REQUIRE(raw.run_until_done(work));
    CHECK_EQ(raw.outcome(work), Code::kOk);
    const WorkId next = raw.post(WorkKind::kSend, 1);
    CHECK_EQ(raw.receive_one<PieceHeader>().piece, 1);
    CHECK(raw.receive(second.size()) == second);
    CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kHeld);
    REQUIRE(raw.run_until_done(next));
  }
}

TEST(a_gathered_send_cancelled_in_mid_piece_reads_no_page_from_there_on) {
  for (const bool unix_sockets : {false, true})
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      RawPeer raw(2 * 1024 * 1024, unix_sockets, 256);
      check::Random random(check::seed() + seed);
      std::memset(raw.memory.data(), 0x11, raw.memory.nbytes());
      const WorkId work = raw.post(WorkKind::kSend, 0);
      const WorkId next = raw.post(WorkKind::kSend, 1);
      CHECK_EQ(raw.receive_one<PieceHeader>().nbytes, raw.piece_nbytes());
      const std::size_t before = random.between(1, 2 * 1024 * 1024);
      CHECK(raw.receive(before) == filled(before, 0x11));
      for (int i = 0; i < 20; ++i) raw.step();
      raw.transport.cancel(work);
      std::memset(raw.memory.data(), 0x22, raw.memory.nbytes());  // somebody else's bytes from here on
      const std::vector<std::byte> rest = raw.receive(raw.piece_nbytes() - before);
      CHECK(std::find(rest.begin(), rest.end(), std::byte{0x22}) == rest.end());
      CHECK(rest.back() == std::byte{0});
      CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
      CHECK_EQ(raw.receive_one<PieceHeader>().piece, 1);
      CHECK(raw.receive(raw.piece_nbytes()) == filled(raw.piece_nbytes(), 0x22));
      CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kHeld);
      REQUIRE(raw.run_until_done(next));
      CHECK_EQ(raw.outcome(work), Code::kCancelled);
      CHECK_EQ(raw.outcome(next), Code::kOk);
    }
}

TEST(short_runs_are_scattered_as_their_bytes_come_and_not_after_a_cancel) {
  RawPeer raw(16 * 1024, false, 128);
  check::Random random(check::seed());
  std::vector<std::byte> image(raw.memory.nbytes());
  random.fill(image.data(), image.size());
  std::vector<std::byte> expected(raw.memory.data(), raw.memory.data() + raw.memory.nbytes());
  const WorkId work = raw.post(WorkKind::kReceive, 0);
  const WorkId cancelled = raw.post(WorkKind::kReceive, 1);
  const auto send_in_parts = [&](const std::vector<std::byte>& bytes, std::size_t first, std::size_t last) {
    while (first < last) {
      const std::size_t nbytes = std::min<std::size_t>(last - first, random.between(1, 900));
      raw.send(bytes.data() + first, nbytes);
      raw.step();
      first += nbytes;
    }
  };
  const std::vector<std::byte> pieces[] = {piece_of(raw, 0, image.data()), piece_of(raw, 1, image.data())};
  raw.send_header(0, raw.piece_nbytes());
  send_in_parts(pieces[0], 0, pieces[0].size());
  raw.send_trailer(0, PieceEnd::kHeld);
  REQUIRE(raw.run_until_done(work));
  program_samples::for_each_written(*raw.move, 0, [&](std::uint64_t at, std::uint64_t nbytes) {
    std::memcpy(expected.data() + at, image.data() + at, nbytes);
  });
  CHECK(std::memcmp(expected.data(), raw.memory.data(), expected.size()) == 0);

  raw.send_header(1, raw.piece_nbytes());
  send_in_parts(pieces[1], 0, 20'000);
  for (int i = 0; i < 20; ++i) raw.step();
  raw.transport.cancel(cancelled);
  std::memcpy(expected.data(), raw.memory.data(), expected.size());
  send_in_parts(pieces[1], 20'000, pieces[1].size());
  raw.send_trailer(1, PieceEnd::kHeld);
  const WorkId again = raw.post(WorkKind::kReceive, 1);
  for (int i = 0; i < 20; ++i) raw.step();
  CHECK(std::memcmp(expected.data(), raw.memory.data(), expected.size()) == 0);
  raw.send_header(1, raw.piece_nbytes());
  send_in_parts(pieces[1], 0, pieces[1].size());
  raw.send_trailer(1, PieceEnd::kHeld);
  REQUIRE(raw.run_until_done(again));
  CHECK_EQ(raw.outcome(again), Code::kOk);
  CHECK_EQ(raw.outcome(cancelled), Code::kCancelled);
  CHECK(piece_of(raw, 1, raw.memory.data()) == pieces[1]);
  CHECK(raw.memory.guards_hold());
}

TEST(a_receive_is_done_only_when_the_trailer_says_held) {
  RawPeer raw;
  const std::vector<std::byte> page = filled(raw.piece_nbytes(), 0x33);
  const WorkId held = raw.post(WorkKind::kReceive, 0);
  const WorkId ended = raw.post(WorkKind::kReceive, 1);
  raw.send_header(0, page.size());
  raw.send(page.data(), page.size());
  for (int i = 0; i < 20; ++i) raw.step();
  CHECK(!raw.outcomes.contains(held));
  raw.send_trailer(0, PieceEnd::kHeld);
  REQUIRE(raw.run_until_done(held));
  CHECK_EQ(raw.outcome(held), Code::kOk);
  raw.send_header(1, page.size());
  raw.send(page.data(), page.size());
  raw.send_trailer(1, PieceEnd::kEnded);
  REQUIRE(raw.run_until_done(ended));
  CHECK_EQ(raw.outcome(ended), Code::kLeaseEnded);
  CHECK(raw.memory.guards_hold());
}

TEST(a_piece_may_arrive_byte_by_byte) {
  RawPeer raw(64);
  const WorkId work = raw.post(WorkKind::kReceive, 0);
  std::vector<std::byte> stream(sizeof(PieceHeader) + raw.piece_nbytes() + sizeof(PieceTrailer),
                                std::byte{0x44});
  PieceHeader header;
  header.transfer = 77;
  header.nbytes = raw.piece_nbytes();
  std::memcpy(stream.data(), &header, sizeof header);
  const PieceTrailer trailer;
  std::memcpy(stream.data() + stream.size() - sizeof trailer, &trailer, sizeof trailer);
  for (const std::byte& byte : stream) {
    CHECK(!raw.outcomes.contains(work));
    raw.send(&byte, 1);
    raw.reactor.run_once(1);
    raw.step();
  }
  REQUIRE(raw.run_until_done(work));
  CHECK_EQ(raw.outcome(work), Code::kOk);
  for (std::uint32_t i = 0; i < 4; ++i)
    CHECK(std::memcmp(raw.memory.data() + raw.move->dst_ids[i] * 64, filled(64, 0x44).data(), 64) == 0);
}

TEST(what_nobody_waits_for_is_drained) {
  RawPeer raw;
  const std::vector<std::byte> before(raw.memory.data(), raw.memory.data() + raw.memory.nbytes());
  const std::vector<std::byte> stray = filled(300'000, 0x55);
  raw.send_header(0, stray.size());  // of no length that any program says: nobody asked
  raw.send(stray.data(), stray.size());
  raw.send_trailer(0, PieceEnd::kHeld);
  const WorkId cancelled = raw.post(WorkKind::kReceive, 0);
  raw.send_header(0, raw.piece_nbytes());
  for (int i = 0; i < 20; ++i) raw.step();
  raw.transport.cancel(cancelled);  // after the header, before the bytes
  raw.send(stray.data(), raw.piece_nbytes());
  raw.send_trailer(0, PieceEnd::kHeld);
  const WorkId work = raw.post(WorkKind::kReceive, 1);
  CHECK(std::memcmp(raw.memory.data(), before.data(), before.size()) == 0);
  raw.send_header(1, raw.piece_nbytes());
  raw.send(stray.data(), raw.piece_nbytes());
  raw.send_trailer(1, PieceEnd::kHeld);
  REQUIRE(raw.run_until_done(work));
  CHECK_EQ(raw.outcome(cancelled), Code::kCancelled);
  CHECK_EQ(raw.outcome(work), Code::kOk);
}

TEST(the_end_of_the_stream_in_mid_piece_fails_the_rail) {
  RawPeer raw;
  const WorkId landing = raw.post(WorkKind::kReceive, 0);
  const WorkId waiting = raw.post(WorkKind::kReceive, 1);
  raw.send_header(0, raw.piece_nbytes());
  raw.send(filled(5000, 0x66).data(), 5000);
  raw.socket.reset();
  REQUIRE(raw.run_until([&] { return !raw.down.empty(); }));
  CHECK_EQ(raw.down, "tcp rail 3 to decode-0: the peer closed its end in the middle of a piece");
  CHECK_EQ(raw.outcome(landing), Code::kRailFailed);
  CHECK_EQ(raw.outcome(waiting), Code::kRailFailed);
  CHECK_EQ(raw.reactor.num_handlers(), 0);
}

TEST(a_reset_connection_is_told_in_words) {
  RawPeer raw;
  const WorkId work = raw.post(WorkKind::kReceive, 0);
  const linger reset_on_close{1, 0};
  REQUIRE(::setsockopt(raw.socket.get(), SOL_SOCKET, SO_LINGER, &reset_on_close, sizeof reset_on_close) == 0);
  raw.socket.reset();
  REQUIRE(raw.run_until([&] { return !raw.down.empty(); }));
  CHECK_EQ(raw.down, "tcp rail 3 to decode-0: readv: Connection reset by peer (errno 104)");
  CHECK_EQ(raw.outcome(work), Code::kRailFailed);
  CHECK_EQ(raw.outcomes.at(work).detail, raw.down);
}

// Garbage ends the rail with words; no byte of it lands.
void check_refused(const std::function<void(RawPeer&)>& send, std::string_view words) {
  RawPeer raw;
  const std::vector<std::byte> before(raw.memory.data(), raw.memory.data() + raw.memory.nbytes());
  const WorkId work = raw.post(WorkKind::kReceive, 0);
  send(raw);
  REQUIRE(raw.run_until([&] { return !raw.down.empty(); }));
  CHECK_EQ(raw.outcome(work), Code::kRailFailed);
  if (raw.down.find(words) == std::string::npos)
    FAIL("\"" + raw.down + "\" does not say: " + std::string(words));
  CHECK(std::memcmp(raw.memory.data(), before.data(), before.size()) == 0);
}

TEST(garbage_is_refused) {
  check_refused([](RawPeer& raw) { raw.send(filled(64, 0x77).data(), 64); }, "no piece's header");
  check_refused([](RawPeer& raw) { raw.send_header(0, stream::kMaxPieceNbytes + 1); }, "the bound is");
  check_refused([](RawPeer& raw) { raw.send_header(5, UINT64_MAX); }, "the bound is");
  check_refused([](RawPeer& raw) { raw.send_header(0, raw.piece_nbytes() + 1); }, "whose program says 16384");
  check_refused([](RawPeer& raw) { raw.send_header(0, raw.piece_nbytes() - 1); }, "whose program says 16384");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(0, 0);
        raw.send_trailer(0, PieceEnd::kHeld);
      },
      "no bytes for a piece that has some");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(1, 0);  // nobody waits for it; its trailer is checked all the same
        raw.send_trailer(1, static_cast<PieceEnd>(0));
      },
      "no piece's trailer");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(1, 0);
        raw.send_trailer(2, PieceEnd::kEnded);
      },
      "no piece's trailer");
}

TEST(works_that_no_grid_holds_complete_as_unsupported) {
  RawPeer raw;
  const WorkId outside = raw.post(WorkKind::kSend, 2);
  const WorkId first = raw.post(WorkKind::kReceive, 0);
  const WorkId twice = raw.post(WorkKind::kReceive, 0);
  REQUIRE(raw.run_until_done(outside) && raw.run_until_done(twice));
  CHECK_EQ(raw.outcome(outside), Code::kUnsupported);
  CHECK_EQ(raw.outcome(twice), Code::kUnsupported);
  CHECK(!raw.outcomes.contains(first));
}

}  // namespace
}  // namespace kvxfer
