// Peers of a stream rail that cause much work by few bytes: a turn ends by our count of work, and memory is
// bounded.
#include <sys/resource.h>
#include <sys/socket.h>

#include "raw_stream_peer.h"

namespace kvxfer {
namespace {

// Polls until everything that has arrived is handled.
int num_polls_until_idle(RawPeer& peer) {
  int num = 0;
  peer.reactor.run_once(0);
  for (bool more = true; more; ++num) {
    Completion completions[8];
    peer.transport.poll(completions);
    more = peer.transport.busy();
  }
  return num;
}

TEST(pieces_without_bytes_have_no_more_of_a_turn_than_others) {
  RawPeer peer(4096, true);
  std::vector<std::byte> bytes;
  constexpr int kPieces = 1000;
  for (int k = 0; k < kPieces; ++k) {
    PieceHeader header;
    header.transfer = 1;  // no work waits for it
    const PieceTrailer trailer{PieceEnd::kEnded, 0};
    const auto* first = reinterpret_cast<const std::byte*>(&header);
    bytes.insert(bytes.end(), first, first + sizeof header);
    first = reinterpret_cast<const std::byte*>(&trailer);
    bytes.insert(bytes.end(), first, first + sizeof trailer);
  }
  REQUIRE_EQ(::send(peer.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL),
             static_cast<ssize_t>(bytes.size()));
  // One system call for each; a turn has 128.
  CHECK(num_polls_until_idle(peer) >= kPieces / 128);
  CHECK(peer.down.empty());
}

TEST(runs_of_one_byte_have_no_more_of_a_turn_than_others) {
  RawPeer peer(64 * 1024, true, 1);
  const WorkId id = peer.post(WorkKind::kReceive, 0);
  peer.send_header(0, peer.piece_nbytes());
  const std::vector<std::byte> bytes = filled(peer.piece_nbytes(), 0x3c);
  int num_polls = 0;
  for (std::size_t sent = 0; sent < bytes.size();) {
    const ssize_t count =
        ::send(peer.socket.get(), bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0) sent += static_cast<std::size_t>(count);
    num_polls += num_polls_until_idle(peer);
  }
  peer.send_trailer(0, PieceEnd::kHeld);
  REQUIRE(peer.run_until_done(id));
  CHECK_EQ(peer.outcome(id), Code::kOk);
  CHECK(num_polls >= 16);  // 256 KiB, of which a turn scatters 16
}

long most_memory_kib() {
  rusage usage{};
  REQUIRE(::getrusage(RUSAGE_SELF, &usage) == 0);
  return usage.ru_maxrss;
}

TEST(a_pair_of_gigabytes_is_gathered_in_slices_and_cancelled_in_one_step) {
  RawPeer peer(4096, true);
  constexpr std::uint32_t kRuns = 1 << 20;
  constexpr std::uint64_t kRunNbytes = 200;  // 200 MB from one place, which a program may name
  auto program = std::make_shared<CopyProgram>(*peer.move->program);
  CopyLoop& loop = program->loops[0];
  loop.counts[0] = loop.counts[1] = 1024;
  loop.nbytes = kRunNbytes;
  loop.src_strides[0] = loop.src_strides[1] = 0;
  auto move = std::make_shared<Move>(*peer.move);
  move->program = program;
  move->grid.pairs_per_piece = 1;
  peer.move = move;
  std::fill_n(peer.memory.data(), peer.memory.nbytes(), std::byte{0x3c});
  const long before = most_memory_kib();
  const WorkId id = peer.post(WorkKind::kSend, 0);
  CHECK_EQ(peer.receive_one<PieceHeader>().nbytes, std::uint64_t{kRuns} * kRunNbytes);
  CHECK(peer.receive(3 * 1024 * 1024) == filled(3 * 1024 * 1024, 0x3c));
  CHECK(most_memory_kib() - before < 64 * 1024);
  peer.cancel(id);
  REQUIRE(peer.run_until_done(id));
  CHECK_EQ(peer.outcome(id), Code::kCancelled);
}

}  // namespace
}  // namespace kvxfer
