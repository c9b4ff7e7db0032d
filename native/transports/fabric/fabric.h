// A library that moves memory between processes (UCX, libfabric), as far as a rail needs it: memory that it knows, and for
// each peer an endpoint that reads that peer's.
//
// Threads: a Fabric's map() runs on any thread, beside all else. An Endpoint is one thread's at a time: that which holds
// the progress gate, or one that sets it up or ends it (transports/common/connector.h).
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/transport.h"
#include "transports/common/request_cursor.h"

namespace kvxfer::fabric {

// Keys are the library's own: numbers, or pointers to what it made of them.
using KeyedSpan = KeyedSpanOf<std::uint64_t>;
using KeyedSpans = KeyedSpansOf<std::uint64_t>;

// Some memory of ours that the library knows; forgotten when this ends.
class Memory {
 public:
  virtual ~Memory() = default;
  std::uint64_t local_key = 0;  // for reads that land here
  std::uint64_t address = 0;  // where peers find its first byte
  std::vector<std::byte> key;  // as it goes to peers
};

// The socket addresses of a rail's socket, by which its two hosts reach each other; without bytes where it has none.
struct Route { std::vector<std::byte> ours, theirs; };

// A run of bytes of the peer's memory, to ours.
struct Run { std::uint64_t remote, remote_key, local, local_key, nbytes; };

// One read, of some runs.
struct Read {
  static constexpr std::uint32_t kMostRuns = 4;

  void clear() noexcept {
    num_runs = 0;
    nbytes = 0;
  }
  // There is room for it.
  void add(const Run& run) noexcept {
    runs[num_runs++] = run;
    nbytes += run.nbytes;
  }

  std::array<Run, kMostRuns> runs;  // the first num_runs of them
  std::uint32_t num_runs = 0;
  std::uint64_t nbytes = 0;  // of all; 0: nothing
};

struct RemoteMemory;

// How a piece that is sent says which one it is.
struct PieceHeader {
  TransferId transfer = 0;
  std::uint32_t piece = 0;
  std::uint32_t is_proof = 0;  // of no piece: the first message of an endpoint
  std::uint64_t nbytes = 0;
};

// A work of which reads are under way or will be next, or a piece that is sent or awaited.
struct Flight {
  Work work;
  std::shared_ptr<const RemoteMemory> remote;  // held, since its region may be detached meanwhile
  RequestCursorOf<std::uint64_t> cursor;
  Read next;  // named by the cursor and not posted
  std::uint32_t num_under_way = 0;
  PieceHeader header;  // of one that is sent
  std::vector<iovec> segments;  // in the order of the stream, of one that is sent or awaited
  bool is_awaited = false;  // nothing of it has come
  std::optional<std::uint32_t> scratch;  // a question after a fence word: where the word lands
  bool is_used = false;
  bool is_proof = false;  // no work: the first read of an endpoint, whose end says whether it works
  bool is_named = false;  // the cursor is at its end, or nothing more is to be posted
  bool is_cancelled = false;
  std::chrono::steady_clock::time_point due_at{};  // where it is cancelled
  Code code = Code::kOk;  // what it ends with when its reads have
  std::string why;

  bool has_more() const noexcept { return !is_named || next.nbytes != 0; }
  bool has_landed() const noexcept { return is_used && num_under_way == 0 && !is_awaited && !has_more(); }
  // Nothing more of it is posted.
  void stop(Code its_code, std::string_view its_why) noexcept;
};

// Who knows which pieces are awaited.
class Receiver {
 public:
  // A piece's bytes are there, or about to come: where they go. Null: nobody awaits them.
  virtual Flight* begin_receive(const PieceHeader& header) noexcept = 0;

 protected:
  ~Receiver() = default;
};

class Endpoint {
 public:
  enum class Posted : std::uint8_t {
    kUnderWay,  // completed() is called for it
    kDone,  // it has landed
    kAgain,  // not now
    kFailed,
  };

  // After close(), and what unpack() held has gone.
  virtual ~Endpoint() = default;

  // Where peers find it.
  virtual std::vector<std::byte> address() const = 0;
  // To the peer's. `address` is what it said, and may be anything.
  virtual Status connect(std::span<const std::byte> address) = 0;
  // What a peer's key is here: what it said, which may be anything. `holder` keeps it for as long as it lives.
  virtual Result<std::uint64_t> unpack(std::span<const std::byte> key,
                                       std::shared_ptr<const void>& holder) = 0;

  // Begins a read of a flight. `has_more`: another one follows at once.
  Posted post(const Read& next, Flight& flight, bool has_more) noexcept {
    ++flight.num_under_way;
    ++num_under_way_;
    const Posted posted = read(next, flight, has_more);
    if (posted != Posted::kUnderWay) {
      --flight.num_under_way;
      --num_under_way_;
    }
    return posted;
  }
  // The same of a piece that is sent: segments under its header, both the flight's.
  Posted post_send(Flight& flight) noexcept {
    ++flight.num_under_way;
    ++num_under_way_;
    const Posted posted = send(flight);
    if (posted != Posted::kUnderWay) {
      --flight.num_under_way;
      --num_under_way_;
    }
    return posted;
  }
  // Whether pieces are to be sent to this peer and received from it, since reads would be the peer's processor's work.
  virtual bool prefers_sends() const { return false; }
  void receive_for(Receiver* receiver) noexcept { receiver_ = receiver; }
  std::uint32_t num_under_way() const noexcept { return num_under_way_; }  // of reads, sends and receives
  std::size_t num_flights = 0;  // that are used
  // Takes in what has come, a bounded amount; false: nothing had.
  virtual bool progress() noexcept = 0;
  // Becomes readable when something comes, once arm() has said true; -1: it has no descriptor, and is asked from time to
  // time.
  virtual int fd() const noexcept = 0;
  virtual bool arm() noexcept = 0;
  // Stops all that it has under way, the peer's reads as well: when it returns no byte of it lands, and none of ours is
  // read for it. Takes milliseconds, in bounded time. Idempotent.
  virtual void close() noexcept = 0;
  // By what it goes, for people.
  virtual std::string path() const = 0;

  // Why it carries nothing any more; "" while it does.
  const std::string& failure() const noexcept { return failure_; }

 protected:
  virtual Posted read(const Read& read, Flight& flight, bool has_more) noexcept = 0;
  virtual Posted send(Flight&) noexcept { return Posted::kFailed; }
  // What the library begins by itself, of a flight that it asked for.
  void began(Flight& flight) noexcept {
    ++flight.num_under_way;
    ++num_under_way_;
  }
  Receiver* receiver() const noexcept { return receiver_; }
  // A read of the flight has ended. `why`: not as it should.
  void completed(Flight& flight, std::string_view why) noexcept;
  void fail(std::string_view why) noexcept;

 private:
  std::string failure_;
  std::uint32_t num_under_way_ = 0;
  Receiver* receiver_ = nullptr;
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual std::string_view transport() const noexcept = 0;  // "ucx"
  virtual std::string library() const = 0;  // with its version, for people
  virtual std::string terms() const { return {}; }
  // Makes some memory known to the library; the span is in one piece.
  virtual Result<std::unique_ptr<Memory>> map(std::byte* memory, std::uint64_t nbytes, MemoryKind kind) = 0;
  // For one peer. Takes milliseconds.
  virtual Result<std::unique_ptr<Endpoint>> open(const Route& route) = 0;
  virtual std::uint64_t endpoint_nbytes() const noexcept = 0;  // of memory that it takes, about
  // Whether this process itself reads its memory when a peer asks it to: then that must be there until no peer can.
  virtual bool serves_peers() const noexcept = 0;
  virtual MemoryKinds memory() const noexcept { return MemoryKind::kHost; }
  // Whether endpoints can send pieces and receive them.
  virtual bool can_send() const noexcept { return false; }
  virtual std::uint64_t most_read_nbytes() const noexcept { return std::uint64_t{1} << 30; }
  virtual std::uint32_t most_runs() const noexcept { return 1; }  // of a read
  virtual std::uint32_t num_reads() const noexcept = 0;  // under way for each peer, at most
};

}  // namespace kvxfer::fabric
