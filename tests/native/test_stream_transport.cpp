// StreamTransport against a plain socket: what it sends, and how it handles bytes that no StreamTransport
// would send. conformance.h has the rest.
#include "count_steps.h"
#include "raw_stream_peer.h"

#include <poll.h>
#include <unistd.h>

namespace kvxfer {
namespace {

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
  raw.cancel(work);
  const auto header = raw.receive_one<PieceHeader>();
  CHECK_EQ(header.nbytes, 0);
  CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
  CHECK_EQ(raw.outcome(work), Code::kCancelled);
}

// The bytes of a piece, by its program, if memory has this content.
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
    // Works behind it are cancelled again and again, at any position of the socket within the piece: bytes
    // that were gathered and not sent are dropped, and gathered again from there.
    std::uint64_t num_cancelled = 0;
    for (std::size_t at = 0; at < first.size();) {
      const std::size_t nbytes = std::min<std::size_t>(first.size() - at, random.between(1, 300'000));
      const std::vector<std::byte> part = raw.receive(nbytes);
      REQUIRE(std::equal(part.begin(), part.end(), first.begin() + static_cast<std::ptrdiff_t>(at)));
      at += nbytes;
      if (at + 4 * 1024 * 1024 > first.size())
        continue;  // the piece may have left, and the next may have begun
      for (std::uint64_t steps = random.below(3); steps != 0; --steps) raw.step();
      const WorkId behind = raw.post(WorkKind::kSend, 1);
      if (random.chance(50)) raw.step();
      raw.cancel(behind);
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

TEST(a_send_cancelled_in_mid_piece_reads_no_page_from_there_on) {
  for (const bool unix_sockets : {false, true})
    for (const std::uint64_t run_nbytes : {0, 256})  // as they lie, and gathered
      for (const bool has_left : {false, true, true, true}) {
        // 16 MiB a piece, or 8: no socket takes that at once.
        RawPeer raw((run_nbytes == 0 ? 4 : 2) * 1024 * 1024, unix_sockets, run_nbytes);
        std::memset(raw.memory.data(), 0x11, raw.memory.nbytes());
        const WorkId work = raw.post(WorkKind::kSend, 0);
        const WorkId next = raw.post(WorkKind::kSend, 1);
        CHECK_EQ(raw.receive_one<PieceHeader>().nbytes, raw.piece_nbytes());
        const std::size_t before =
            has_left ? check::Random(check::seed() + next).between(1, 2 * 1024 * 1024) : 0;
        CHECK(raw.receive(before) == filled(before, 0x11));
        for (int i = 0; i < 20; ++i) raw.step();
        raw.cancel(work);
        std::memset(raw.memory.data(), 0x22, raw.memory.nbytes());  // from here on the pages serve others
        const std::vector<std::byte> rest = raw.receive(raw.piece_nbytes() - before);
        CHECK_EQ(raw.outcome(work), Code::kCancelled);
        CHECK(std::find(rest.begin(), rest.end(), std::byte{0x22}) == rest.end());
        if (!has_left) CHECK(rest.front() == std::byte{0x11});
        CHECK(rest.back() == std::byte{0});
        CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kEnded);
        // The piece that was queued behind it is whole.
        CHECK_EQ(raw.receive_one<PieceHeader>().piece, 1);
        CHECK(raw.receive(raw.piece_nbytes()) == filled(raw.piece_nbytes(), 0x22));
        CHECK(raw.receive_one<PieceTrailer>().end == PieceEnd::kHeld);
        REQUIRE(raw.run_until_done(next));
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
  raw.cancel(cancelled);
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

TEST(what_nobody_waits_for_is_drained) {
  RawPeer raw;
  const std::vector<std::byte> before(raw.memory.data(), raw.memory.data() + raw.memory.nbytes());
  const std::vector<std::byte> stray = filled(300'000, 0x55);
  raw.send_header(0, stray.size());  // of a length that no program has; no work asked for it
  raw.send(stray.data(), stray.size());
  raw.send_trailer(0, PieceEnd::kHeld);
  const WorkId cancelled = raw.post(WorkKind::kReceive, 0);
  raw.send_header(0, raw.piece_nbytes());
  for (int i = 0; i < 20; ++i) raw.step();
  raw.cancel(cancelled);  // after the header, before the bytes
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

TEST(the_end_of_the_stream_in_mid_piece_fails_the_rail_in_words) {
  for (const bool is_reset : {false, true}) {
    RawPeer raw;
    const WorkId landing = raw.post(WorkKind::kReceive, 0);
    const WorkId waiting = raw.post(WorkKind::kReceive, 1);
    raw.send_header(0, raw.piece_nbytes());
    raw.send(filled(5000, 0x66).data(), 5000);
    const linger on_close{is_reset ? 1 : 0, 0};
    REQUIRE(::setsockopt(raw.socket.get(), SOL_SOCKET, SO_LINGER, &on_close, sizeof on_close) == 0);
    raw.socket.reset();
    REQUIRE(raw.run_until([&] { return !raw.down.empty(); }));
    CHECK_EQ(raw.down, is_reset ? "tcp rail 3 to decode-0: readv: Connection reset by peer (errno 104)"
                                : "tcp rail 3 to decode-0: the peer closed its end in the middle of a piece");
    for (const WorkId work : {landing, waiting}) {
      CHECK_EQ(raw.outcome(work), Code::kRailFailed);
      CHECK_EQ(raw.outcomes.at(work).detail, raw.down);
    }
    CHECK_EQ(raw.reactor.num_handlers(), 0);
  }
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
  check_refused([](RawPeer& raw) { raw.send(filled(64, 0x77).data(), 64); }, "not a piece's header");
  check_refused([](RawPeer& raw) { raw.send_header(0, stream::kMaxPieceNbytes + 1); }, "the limit is");
  check_refused([](RawPeer& raw) { raw.send_header(5, UINT64_MAX); }, "the limit is");
  check_refused([](RawPeer& raw) { raw.send_header(0, raw.piece_nbytes() + 1); }, "its program has 16384");
  check_refused([](RawPeer& raw) { raw.send_header(0, raw.piece_nbytes() - 1); }, "its program has 16384");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(0, 0);
        raw.send_trailer(0, PieceEnd::kHeld);
      },
      "sent none of its bytes");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(1, 0);  // no work waits for it; its trailer is checked nevertheless
        raw.send_trailer(1, static_cast<PieceEnd>(0));
      },
      "not a piece's trailer");
  check_refused(
      [](RawPeer& raw) {
        raw.send_header(1, 0);
        raw.send_trailer(2, PieceEnd::kEnded);
      },
      "not a piece's trailer");
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

// Instructions for cancelling the first `num_works` of 64 sends, with so many other peers connected.
std::optional<std::uint64_t> steps_of_a_cancel(std::size_t num_works, std::size_t num_others) {
  RawPeer raw;
  std::vector<std::pair<UniqueFd, UniqueFd>> others;
  for (std::size_t i = 0; i < num_others; ++i) {
    auto [ours, theirs] = conformance::unix_sockets();
    REQUIRE_OK(raw.transport.connect(std::move(ours), {true, 3, "another"}));
    others.emplace_back(UniqueFd(), std::move(theirs));
  }
  std::vector<WorkId> works;
  for (int i = 0; i < 64; ++i) works.push_back(raw.post(WorkKind::kSend, static_cast<std::uint32_t>(i % 2)));
  works.resize(num_works);
  return check::count_steps([&] { raw.transport.cancel(works); });
}

TEST(a_cancel_costs_what_its_works_cost_and_not_what_peers_there_are) {
  const auto few = steps_of_a_cancel(8, 1), beside_many = steps_of_a_cancel(8, 200),
             more = steps_of_a_cancel(64, 1);
  if (!few || !beside_many || !more) {
    std::printf("  skipped: this process may not trace its children\n");
    return;
  }
  CHECK(*beside_many < 2 * *few);
  CHECK(*more < 16 * *few);
}

}  // namespace
}  // namespace kvxfer
