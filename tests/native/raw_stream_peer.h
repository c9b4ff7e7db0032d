// StreamTransport, with a plain socket as its peer.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block_programs.h"
#include "conformance_ends.h"
#include "transports/stream/piece_frame.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {

using stream::PieceEnd;
using stream::PieceHeader;
using stream::PieceTrailer;

// One transport, one region and a raw socket in the place of the peer.
class RawPeer {
 public:
  static constexpr std::uint32_t kNumBlocks = 16;

  // `run_nbytes`: pages are cut into runs of that size, with the second run first; 0: one run.
  explicit RawPeer(std::uint64_t page_nbytes = 4096, bool unix_sockets = false, std::uint64_t run_nbytes = 0)
      : transport(reactor, StreamTransport::Options()),
        page_nbytes_(page_nbytes),
        memory(kNumBlocks * page_nbytes, false) {
    auto [ours, theirs] = unix_sockets ? conformance::unix_sockets() : conformance::tcp_sockets();
    socket = std::move(theirs);
    // A small buffer: if the kernel could grow it, it would hold a whole piece, and what is cancelled would
    // have left.
    const int nbytes = 256 * 1024;
    REQUIRE(::setsockopt(ours.get(), SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes) == 0);
    REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVBUF, &nbytes, sizeof nbytes) == 0);
    peer = transport.connect(std::move(ours), {true, 3, "decode-0"}).value();
    auto program = std::make_shared<CopyProgram>(block_programs::pages_of(page_nbytes));
    CopyLoop& loop = program->loops[0];
    if (run_nbytes != 0) {
      loop.nbytes = run_nbytes;
      loop.counts[0] = 2;
      loop.counts[1] = static_cast<std::uint32_t>(page_nbytes / run_nbytes / 2);
      loop.src_strides[0] = loop.dst_strides[0] = run_nbytes;
      loop.src_strides[1] = loop.dst_strides[1] = 2 * run_nbytes;
    }
    auto the_move = std::make_shared<Move>();
    the_move->transfer = 77;
    the_move->program = program;
    the_move->grid = {0, 1, kNumBlocks / 2, 4};  // two pieces of four pages, in every second block
    for (std::uint32_t i = 0; i < kNumBlocks / 2; ++i) the_move->src_ids.push_back(kNumBlocks - 1 - 2 * i);
    the_move->dst_ids = the_move->src_ids;
    the_move->local = unregistered(memory.data());
    move = the_move;
  }

  std::uint64_t piece_nbytes() const { return 4 * page_nbytes_; }

  WorkId post(WorkKind kind, std::uint32_t piece) {
    Work work;
    work.id = conformance::next_work_id();
    work.kind = kind;
    work.piece = piece;
    work.move = move;
    REQUIRE_EQ(transport.post(peer, work), Code::kOk);
    return work.id;
  }

  void cancel(WorkId id) { transport.cancel(std::span(&id, 1)); }

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
  // Reads what the transport sends, while it sends.
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

inline std::vector<std::byte> filled(std::size_t nbytes, int value) {
  return std::vector<std::byte>(nbytes, static_cast<std::byte>(value));
}

}  // namespace kvxfer
