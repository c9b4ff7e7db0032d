// Frames through shared memory: in order, around the end, asleep and awake, and from a writer that lies.
#include "core/control/frame_ring.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/control/frame_socket.h"
#include "core/system/epoll_reactor.h"
#include "core/system/memfd.h"

namespace kvxfer::frame_ring_test {
namespace {

wire::Bytes frame_of(std::uint64_t sequence, std::size_t text_nbytes = 8) {
  return wire::encode(wire::Goodbye{Code::kClosed, std::string(text_nbytes, 'x')}, sequence);
}

struct Ring {
  std::unique_ptr<RingReader> reader;
  std::unique_ptr<RingWriter> writer;
  RingMemory* memory = nullptr;  // a third mapping, for a writer that lies

  Ring() {
    reader = std::move(RingReader::create()).value();
    const UniqueFd fd = reader->take_fd();
    writer = std::move(RingWriter::map(fd.get())).value();
    memory = static_cast<RingMemory*>(
        ::mmap(nullptr, sizeof(RingMemory), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  }
  ~Ring() { ::munmap(memory, sizeof(RingMemory)); }

  Result<bool> next(std::uint64_t sequence, wire::Bytes& frame) {
    return reader->next(sequence, wire::kMaxBody, frame);
  }
};

TEST(frames_come_out_as_they_went_in_around_the_end_many_times) {
  Ring ring;
  check::Random random(check::seed());
  std::uint64_t written = 0, read = 0;
  wire::Bytes frame;
  while (read < 20'000) {
    const wire::Bytes out = frame_of(written, written % 400);
    if (random.next() % 3 != 0 && ring.writer->push(out)) {
      ++written;
      continue;
    }
    if (read == written) continue;
    const Result<bool> next = ring.next(read, frame);
    REQUIRE(next.ok() && next.value());
    REQUIRE(frame == frame_of(read, read % 400));
    ++read;
  }
}

TEST(a_full_ring_takes_nothing_until_something_was_read) {
  Ring ring;
  std::uint64_t written = 0;
  while (ring.writer->push(frame_of(written))) ++written;
  CHECK_EQ(written, kRingNbytes / frame_of(0).size());
  wire::Bytes frame;
  CHECK(ring.next(0, frame).value());
  CHECK(ring.writer->push(frame_of(written)));
  CHECK(!ring.writer->push(frame_of(written + 1)));
}

TEST(a_frame_whose_turn_has_not_come_stays) {
  Ring ring;
  wire::Bytes frame;
  CHECK(ring.writer->push(frame_of(7)));
  CHECK(!ring.next(6, frame).value());
  CHECK(!ring.reader->has(6));
  CHECK(ring.reader->has(7));
  CHECK(ring.next(7, frame).value());
  CHECK(ring.reader->empty());
}

TEST(places_that_cannot_be_end_in_an_error_or_in_a_full_ring) {
  wire::Bytes frame;
  for (const std::uint64_t lie : {std::uint64_t{1}, std::uint64_t{kRingNbytes} + 1, UINT64_MAX}) {
    Ring ring;
    ring.memory->written = lie;
    CHECK(ring.reader->has(0));  // so that the reader does not sleep on it
    CHECK(!ring.next(0, frame).ok());
  }
  for (const std::uint64_t lie : {std::uint64_t{1}, std::uint64_t{1} << 40, UINT64_MAX - kRingNbytes}) {
    Ring ring;
    ring.memory->read = lie;
    CHECK(!ring.writer->push(frame_of(0)));
  }
}

TEST(lengths_that_cannot_be_end_in_an_error) {
  wire::Bytes frame;
  for (const std::uint32_t body_nbytes : {std::uint32_t{1000}, wire::kMaxBody + 1, UINT32_MAX}) {
    Ring ring;
    CHECK(ring.writer->push(frame_of(0)));
    std::memcpy(ring.memory->bytes, &body_nbytes, sizeof body_nbytes);
    CHECK(!ring.next(0, frame).ok());
  }
}

TEST(noise_in_the_memory_crashes_nobody) {
  check::Random random(check::seed());
  wire::Bytes frame;
  for (int round = 0; round < 2000; ++round) {
    Ring ring;
    for (std::uint64_t i = 0; i < 8; ++i) (void)ring.writer->push(frame_of(i));
    for (int i = 0; i < 4; ++i)
      ring.memory->bytes[random.next() % 512] = static_cast<std::byte>(random.next());
    if (round % 2 == 0) ring.memory->written = random.next() % (2 * kRingNbytes);
    if (round % 3 == 0) ring.memory->read = random.next() % (2 * kRingNbytes);
    for (std::uint64_t i = 0; i < 16; ++i) {
      const Result<bool> next = ring.next(i, frame);
      if (!next.ok()) break;
      (void)ring.writer->push(frame_of(i));
    }
  }
}

// The peer can write to the memory, so it can also punch it: its pages are then zeros, without a signal.
TEST(a_ring_that_is_punched_ends_as_one_that_is_scribbled_over) {
  Ring ring;
  wire::Bytes frame;
  CHECK(ring.writer->push(frame_of(0)));
  CHECK(::madvise(ring.memory, sizeof(RingMemory), MADV_REMOVE) == 0);
  const Result<bool> nothing = ring.next(0, frame);
  CHECK(nothing.ok() && !nothing.value());
  CHECK(ring.writer->push(frame_of(1)));
  CHECK(::madvise(ring.memory, sizeof(RingMemory), MADV_REMOVE) == 0);
  ring.memory->written = 100;
  CHECK(!ring.next(1, frame).ok());
}

TEST(a_writer_takes_no_memory_that_could_shrink_or_is_too_small) {
  const UniqueFd small = std::move(create_memfd("small", 4096)).value();
  CHECK(seal_memfd(small.get()).ok());
  CHECK(!RingWriter::map(small.get()).ok());
  const UniqueFd loose = std::move(create_memfd("loose", sizeof(RingMemory))).value();
  CHECK(!RingWriter::map(loose.get()).ok());
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK(!RingWriter::map(null.get()).ok());
}

TEST(a_sleeper_is_told_once_and_misses_nothing) {
  Ring ring;
  CHECK(ring.writer->push(frame_of(0)));
  CHECK(!ring.writer->reader_sleeps());
  ring.reader->fall_asleep();
  CHECK(ring.reader->has(0));  // it came before, so the reader must not sleep
  CHECK(ring.writer->push(frame_of(1)));
  CHECK(ring.writer->reader_sleeps());
  CHECK(!ring.writer->reader_sleeps());
}

TEST(no_wake_up_is_lost_between_two_threads) {
  constexpr std::uint64_t kFrames = 50'000;
  Ring ring;
  std::atomic<std::uint64_t> wakes{0};
  std::thread writing([&] {
    for (std::uint64_t i = 0; i < kFrames; ++i) {
      const wire::Bytes frame = frame_of(i, i % 64);
      while (!ring.writer->push(frame)) std::this_thread::yield();
      if (ring.writer->reader_sleeps()) {
        wakes.fetch_add(1);
        wakes.notify_one();
      }
    }
  });
  wire::Bytes frame;
  std::uint64_t heard = 0;
  for (std::uint64_t read = 0; read < kFrames;) {
    if (ring.next(read, frame).value()) {
      ++read;
      continue;
    }
    ring.reader->fall_asleep();
    if (ring.reader->has(read)) continue;  // a wake-up may come nevertheless
    wakes.wait(heard);  // without end, if one is lost
    heard = wakes.load();
  }
  writing.join();
}

// Two ends of a socket after the handshake.
struct End final : FrameSocket::Owner {
  explicit End(Reactor& reactor, UniqueFd fd)
      : socket(std::make_unique<FrameSocket>(reactor, std::move(fd), *this, false, false)) {
    static_cast<void>(socket->start());
  }
  std::uint32_t max_body() override { return wire::kMaxBody; }
  void on_frame(wire::ByteSpan frame) override { frames.emplace_back(frame.begin(), frame.end()); }
  void on_more() override { has_more = true; }
  void on_closed(const std::string& why) override { closed = why; }
  void on_announced() override { ++num_announced; }
  std::vector<std::byte>& read_buffer() override { return buffer; }
  void say(wire::Bytes frame) {
    socket->send(std::move(frame));
    socket->flush();
  }
  std::unique_ptr<FrameSocket> socket;
  std::vector<wire::Bytes> frames;
  std::string closed;
  std::vector<std::byte> buffer;
  bool has_more = false;
  int num_announced = 0;
};

struct Ends {
  explicit Ends(int kind = SOCK_STREAM) {
    std::array<int, 2> fds{};
    REQUIRE(::socketpair(AF_UNIX, kind, 0, fds.data()) == 0);
    a = std::make_unique<End>(reactor, UniqueFd(fds[0]));
    b = std::make_unique<End>(reactor, UniqueFd(fds[1]));
  }
  void share() {
    CHECK(a->socket->share_memory());
    CHECK(b->socket->share_memory());
    a->say(frame_of(0));  // the offers go with them
    b->say(frame_of(0));
    while (reactor.run()) {}
    REQUIRE(a->frames.size() == 1 && b->frames.size() == 1);
  }
  EpollReactor reactor;
  std::unique_ptr<End> a, b;
};

TEST(frames_keep_their_order_where_some_are_too_large_for_the_ring) {
  Ends ends;
  ends.share();
  check::Random random(check::seed());
  std::uint64_t written = 1;
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 20; ++i) {
      wire::Bytes frame = frame_of(written++);
      // Larger than what is free by then.
      if (random.next() % 4 == 0)
        frame = wire::encode(wire::Checksums{1, 0, std::vector<std::uint32_t>(4000)}, written - 1);
      ends.a->say(std::move(frame));
    }
    while (ends.b->socket->read_ring() || ends.reactor.run()) {}
  }
  REQUIRE(ends.b->closed.empty());
  REQUIRE(ends.b->frames.size() == written);
  for (std::uint64_t i = 0; i < written; ++i)
    CHECK_EQ(wire::decode_header(ends.b->frames[i], wire::kMaxBody).value().sequence, i);
}

TEST(the_socket_is_silent_while_the_reader_is_awake_and_wakes_it_once_asleep) {
  Ends ends;
  ends.share();
  ends.a->say(frame_of(1));
  CHECK(!ends.reactor.run());
  CHECK(ends.b->socket->read_ring());
  CHECK(ends.b->socket->fall_asleep());
  ends.a->say(frame_of(2));
  CHECK(ends.reactor.run());
  CHECK_EQ(ends.b->frames.size(), 3u);
  CHECK(!ends.reactor.run());
}

// The writer does not announce it again: a reader that does not look then would never hear of it.
TEST(whatever_comes_over_the_socket_announces_what_is_in_the_ring) {
  Ends ends;
  ends.share();
  REQUIRE(ends.b->socket->fall_asleep());
  ends.b->num_announced = 0;
  ends.a->socket->send(frame_of(1));
  ends.a->say(
      wire::encode(wire::Checksums{1, 0, std::vector<std::uint32_t>(10'000)}, 2));  // larger than the ring
  while (ends.reactor.run()) {}
  CHECK_EQ(ends.b->frames.size(), 3u);
  CHECK(ends.b->num_announced > 0);
  ends.a->say(frame_of(3));
  CHECK(!ends.reactor.run());
  CHECK(ends.b->socket->read_ring());
  CHECK_EQ(ends.b->frames.size(), 4u);
}

TEST(half_a_frame_alone_holds_memory_between_two_turns) {
  Ends ends;
  const wire::Bytes large = wire::encode(wire::Checksums{1, 0, std::vector<std::uint32_t>(10'000)}, 0);
  const wire::ByteSpan frame(large);
  ends.a->socket->send(wire::Bytes(frame.begin(), frame.begin() + 100));
  ends.a->socket->flush();
  while (ends.reactor.run()) {}
  const std::size_t lent = ends.b->buffer.capacity();
  CHECK(lent > 0);  // the read gave the buffer back
  CHECK(ends.b->frames.empty());
  ends.a->socket->send(wire::Bytes(frame.begin() + 100, frame.begin() + 30'000));
  ends.a->socket->flush();
  while (ends.reactor.run()) {}
  CHECK(ends.b->frames.empty());
  ends.a->socket->send(wire::Bytes(frame.begin() + 30'000, frame.end()));
  ends.a->say(frame_of(1));
  while (ends.reactor.run()) {}
  CHECK_EQ(ends.b->frames.size(), 2u);
  REQUIRE(!ends.b->frames.empty());
  CHECK(ends.b->frames[0] == large);
  CHECK(ends.b->buffer.capacity() >= lent);
}

// Whether reading comes to the end first, or sending.
TEST(what_was_written_before_the_end_is_delivered_before_it) {
  for (const bool shared : {false, true})
    for (const bool sends : {false, true}) {
      Ends ends;
      if (shared) ends.share();
      const std::size_t before = ends.b->frames.size();
      for (const std::uint64_t number : {before, before + 1}) ends.a->say(frame_of(number));
      ends.a->socket->close();
      // Larger than the ring, so it goes over the socket in either case.
      if (sends)
        ends.b->say(wire::encode(wire::Checksums{1, 0, std::vector<std::uint32_t>(100'000)}, before));
      CHECK(ends.b->closed.empty());
      while (ends.reactor.run()) {}
      CHECK_EQ(ends.b->frames.size(), before + 2);
      CHECK_EQ(ends.b->closed,
               std::string("it closed the connection without a goodbye: it was killed, or it crashed"));
    }
}

TEST(a_peer_that_offers_no_ring_gets_everything_over_the_socket) {
  Ends ends;
  CHECK(ends.a->socket->share_memory());  // b never shares its own, and does not know of a's
  for (std::uint64_t i = 0; i < 100; ++i) ends.a->say(frame_of(i));
  for (std::uint64_t i = 0; i < 100; ++i) ends.b->say(frame_of(i));
  for (bool any = true; any;) {
    any = ends.reactor.run();
    for (End* end : {ends.a.get(), ends.b.get()}) {
      const std::size_t had = end->frames.size();
      if (!std::exchange(end->has_more, false)) continue;
      end->socket->read_more();
      CHECK(end->frames.size() - had <= 64);  // others have their turn
      any = true;
    }
  }
  CHECK_EQ(ends.a->frames.size(), 100u);
  CHECK_EQ(ends.b->frames.size(), 100u);
}

// Allocated bytes, including blocks that the allocator maps one by one.
std::size_t allocated_nbytes() {
  const struct mallinfo2 found = ::mallinfo2();
  return found.uordblks + found.hblkhd;
}

TEST(a_reader_that_always_leaves_something_does_not_keep_what_it_has_read) {
  std::array<int, 2> fds{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
  EpollReactor reactor;
  End writer(reactor, UniqueFd(fds[0]));
  const UniqueFd reader(fds[1]);
  const auto budget = std::make_shared<Budget>(Budget::Amounts{std::uint64_t{64} << 20, 0, 0, 0, 0});
  writer.socket->charge(budget);
  wire::Bytes frame(64 * 1024), read(frame.size());
  for (int i = 0; i < 32; ++i) writer.say(frame);  // more than the kernel accepts
  const std::uint64_t unread = budget->used(Resource::kBytes);
  REQUIRE(unread > 0);
  const std::size_t before = allocated_nbytes();
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(::recv(reader.get(), read.data(), read.size(), MSG_WAITALL) == static_cast<ssize_t>(read.size()));
    writer.say(frame);
  }
  CHECK(writer.socket->open());
  CHECK(budget->used(Resource::kBytes) <= unread + 2 * frame.size());
  CHECK(allocated_nbytes() < before + (8u << 20));  // although 64 MiB went through
  // When everything is read, nothing is charged.
  while (::recv(reader.get(), read.data(), read.size(), MSG_DONTWAIT) > 0) writer.socket->flush();
  CHECK_EQ(budget->used(Resource::kBytes), 0u);
}

TEST(what_a_peer_does_not_read_is_bounded_by_its_budget) {
  std::array<int, 2> fds{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
  EpollReactor reactor;
  End writer(reactor, UniqueFd(fds[0]));
  const UniqueFd reader(fds[1]);
  writer.socket->charge(std::make_shared<Budget>(Budget::Amounts{std::uint64_t{1} << 20, 0, 0, 0, 0}));
  const wire::Bytes frame(64 * 1024);
  for (int i = 0; i < 64 && writer.socket->open(); ++i) writer.say(frame);
  CHECK_HAS(writer.closed, "does not read");
}

}  // namespace
}  // namespace kvxfer::frame_ring_test
