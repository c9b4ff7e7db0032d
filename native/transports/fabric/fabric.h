// What a rail needs of a library that moves memory between processes (UCX, libfabric): memory that the
// library knows, and for each peer an endpoint that reads the peer's memory, or writes it.
//
// Threads: Fabric::map() runs on any thread, at the same time as anything else. One thread at a time uses an
// Endpoint: the thread that holds the progress gate, or a thread that sets the endpoint up or ends it
// (transports/common/connector.h).
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

// Keys are the library's own: numbers, or pointers to objects that the library made from them.
using KeyedSpan = KeyedSpanOf<std::uint64_t>;
using KeyedSpans = KeyedSpansOf<std::uint64_t>;

// How pages come from a peer.
enum class Way : std::uint32_t {
  kRead = 0,  // the destination reads the source's memory
  kSend = 1,  // the source sends, into memory that the destination has named
  kWrite = 2,  // the source writes the destination's memory, once the destination awaits the piece
};
// What two ends take that prefer these: they send if one of them wants that, and write if both do.
constexpr Way agreed(Way ours, Way theirs) noexcept {
  if (ours == Way::kSend || theirs == Way::kSend) return Way::kSend;
  return ours == theirs ? ours : Way::kRead;
}

// Memory of ours that the library knows; the library forgets it when this object ends.
class Memory {
 public:
  virtual ~Memory() = default;
  std::uint64_t local_key = 0;  // for reads that land here, and writes that come from here
  std::uint64_t address = 0;  // where peers find its first byte
  std::vector<std::byte> key;  // as sent to peers
};

// Both socket addresses of a rail's socket, by which the two hosts reach each other; empty where the socket
// has none.
struct Route { std::vector<std::byte> ours, theirs; };

// A run of bytes in the peer's memory and in ours.
struct Run { std::uint64_t remote, remote_key, local, local_key, nbytes; };

// One read or write, of one or more runs.
struct Request {
  static constexpr std::uint32_t kMostRuns = 4;

  void clear() noexcept {
    num_runs = 0;
    nbytes = 0;
  }
  // The caller has checked that there is room.
  void add(const Run& run) noexcept {
    runs[num_runs++] = run;
    nbytes += run.nbytes;
  }

  std::array<Run, kMostRuns> runs;  // the first num_runs of them
  std::uint32_t num_runs = 0;
  std::uint64_t nbytes = 0;  // of all runs; 0: no run
};

struct RemoteMemory;

// Identifies a piece that is sent.
struct PieceHeader {
  TransferId transfer = 0;
  std::uint32_t piece = 0;
  std::uint32_t is_proof = 0;  // no piece: the first message of an endpoint
  std::uint64_t nbytes = 0;
};

// A work with reads or writes that are under way or will be next; or a piece that is sent or awaited.
struct Flight {
  Work work;
  std::shared_ptr<const RemoteMemory> remote;  // held, because its region may be detached meanwhile
  RequestCursorOf<std::uint64_t> cursor;
  Request next;  // runs that the cursor has named and that are not posted
  std::uint32_t num_under_way = 0;
  PieceHeader header;  // of a piece that is sent
  std::vector<iovec> segments;  // of a piece that is sent or awaited, in the order of the stream
  bool is_awaited = false;  // nothing of the piece has come yet
  bool is_write = false;  // the source writes the piece, which the destination knows by this number
  std::uint32_t number = 0;
  bool is_flushed = true;  // nothing is left to post after the last write
  std::optional<std::uint32_t> scratch;  // of a fetch: where the fence word lands
  bool is_confirming = false;  // of a fetch: its bytes are in, and `next` reads the fence word
  bool is_used = false;
  bool is_proof = false;  // no work: an endpoint's first read, which proves that it works
  bool is_named = false;  // the cursor is at its end, or nothing more will be posted
  bool is_cancelled = false;
  std::chrono::steady_clock::time_point due_at{};  // set when it is cancelled
  Code code = Code::kOk;  // result, once its reads have ended
  std::string why;

  bool has_more() const noexcept { return !is_named || next.nbytes != 0 || !is_flushed; }
  bool has_landed() const noexcept { return is_used && num_under_way == 0 && !is_awaited && !has_more(); }
  // Reads, writes and sends nothing more of this flight.
  void stop(Code its_code, std::string_view its_why) noexcept;
};

// Knows which pieces are awaited.
class Receiver {
 public:
  // A piece's bytes are there, or about to come. Returns the flight that they go to; null: no flight awaits
  // them.
  virtual Flight* begin_receive(const PieceHeader& header) noexcept = 0;

 protected:
  ~Receiver() = default;
};

class Endpoint {
 public:
  enum class Posted : std::uint8_t {
    kUnderWay,  // completed() will be called for it
    kDone,  // it has landed
    kAgain,  // not now
    kFailed,
  };

  // Called after close(), and after all that unpack() held is released.
  virtual ~Endpoint() = default;

  // The address by which peers find this endpoint.
  virtual std::vector<std::byte> address() const = 0;
  // Connects to the peer's endpoint. `address` came from the peer, and may be anything.
  virtual Status connect(std::span<const std::byte> address) = 0;
  // Turns a peer's key, which may be anything, into a key of this process. `holder` keeps that key alive.
  virtual Result<std::uint64_t> unpack(std::span<const std::byte> key,
                                       std::shared_ptr<const void>& holder) = 0;

  // Begins a read or write for a flight. `has_more`: the caller posts another one at once.
  Posted post(const Request& next, Flight& flight, bool has_more) noexcept {
    began(flight);
    return counted(flight.is_write ? write(next, flight, has_more) : read(next, flight, has_more), flight);
  }
  // After a flight's last write. When this and all its writes have completed, the bytes are in the peer's
  // memory.
  Posted post_flush(Flight& flight) noexcept {
    began(flight);
    return counted(flush(flight), flight);
  }
  // Begins to send a piece. The header and the segments are the flight's.
  Posted post_send(Flight& flight) noexcept {
    began(flight);
    return counted(send(flight), flight);
  }
  // How pieces should go to this peer and come from it.
  virtual Way preferred_way() const { return Way::kRead; }
  void receive_for(Receiver* receiver) noexcept { receiver_ = receiver; }
  std::uint32_t num_under_way() const noexcept { return num_under_way_; }  // of requests of any kind
  std::size_t num_flights = 0;  // that are in use
  // Takes in a bounded amount of what has come; false: nothing had come.
  virtual bool progress() noexcept = 0;
  // Becomes readable when something comes, once arm() has returned true. -1: there is no descriptor, and the
  // caller polls it from time to time.
  virtual int fd() const noexcept = 0;
  virtual bool arm() noexcept = 0;
  // Stops all that is under way, the peer's reads included. After it returns, no byte lands here and none of
  // our bytes is read for this endpoint. Takes milliseconds; the time is bounded. Idempotent.
  virtual void close() noexcept = 0;
  // The path that it uses, for people.
  virtual std::string path() const = 0;

  // Why the endpoint carries nothing any more; "" while it works.
  const std::string& failure() const noexcept { return failure_; }

 protected:
  virtual Posted read(const Request& next, Flight& flight, bool has_more) noexcept = 0;
  virtual Posted write(const Request&, Flight&, bool) noexcept { return Posted::kFailed; }
  virtual Posted flush(Flight&) noexcept { return Posted::kDone; }
  virtual Posted send(Flight&) noexcept { return Posted::kFailed; }
  // For what is about to begin, or what the library begins by itself for a flight that it asked for.
  void began(Flight& flight) noexcept {
    ++flight.num_under_way;
    ++num_under_way_;
  }
  Receiver* receiver() const noexcept { return receiver_; }
  // A request of the flight has ended. `why`: "" or why it failed.
  void completed(Flight& flight, std::string_view why) noexcept;
  void fail(std::string_view why) noexcept;

 private:
  Posted counted(Posted posted, Flight& flight) noexcept {
    if (posted != Posted::kUnderWay) {
      --flight.num_under_way;
      --num_under_way_;
    }
    return posted;
  }

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
  // Makes memory known to the library; the span is contiguous. Peers read it and, if `takes_writes`, write
  // it.
  virtual Result<std::unique_ptr<Memory>> map(std::byte* memory, std::uint64_t nbytes, MemoryKind kind,
                                              bool takes_writes) = 0;
  // Opens an endpoint for one peer. Takes milliseconds.
  virtual Result<std::unique_ptr<Endpoint>> open(const Route& route) = 0;
  virtual std::uint64_t endpoint_nbytes() const noexcept = 0;  // of memory that an endpoint takes, about
  // Whether this process itself reads its memory when a peer asks for it. Then the memory must stay until no
  // peer can ask.
  virtual bool serves_peers() const noexcept = 0;
  virtual MemoryKinds memory() const noexcept { return MemoryKind::kHost; }
  // Whether endpoints can send and receive pieces.
  virtual bool can_send() const noexcept { return false; }
  // Whether peers that want to may write into the memory of regions.
  virtual bool takes_writes() const noexcept { return false; }
  virtual std::uint64_t most_request_nbytes() const noexcept { return std::uint64_t{1} << 30; }
  virtual std::uint32_t most_runs() const noexcept { return 1; }  // runs of one read or write, at most
  virtual std::uint32_t num_requests() const noexcept = 0;  // under way for each peer, at most
};

}  // namespace kvxfer::fabric
