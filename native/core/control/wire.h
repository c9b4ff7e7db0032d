// The control frames: what two agents send each other beside the pages, and how it is laid out.
//
//   | body_nbytes u32 | type u16 | flags u16 | sequence u64 | body | mac 16 bytes |
//
// All numbers little-endian. `mac` is SipHash-2-4-128 of header and body under the sender's
// session key (core/control/session.h); a handshake frame carries zeros there and proves itself in its
// body. A decoder accepts exactly what the encoder writes: no short, no trailing bytes, every
// count within the bounds below, before anything is allocated for it.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer::wire {

using Bytes = std::vector<std::byte>;
using ByteSpan = std::span<const std::byte>;
using Id128 = std::array<std::byte, 16>;
using Digest = std::array<std::byte, 32>;

// The newest protocol that this release speaks, and the oldest that it still does. Two agents talk in the
// newest that both know (Session::protocol), so a cluster may be upgraded node by node. The layout of HELLO
// never changes.
inline constexpr std::uint16_t kProtocolVersion = 6;
inline constexpr std::uint16_t kOldestProtocolVersion = 6;
inline constexpr std::size_t kHeaderNbytes = 16;
inline constexpr std::size_t kMacNbytes = 16;
// The most that a peer may make us hold before it is authenticated.
inline constexpr std::uint32_t kMaxHandshakeBody = 1024;
inline constexpr std::uint32_t kMaxBody = 4 * 1024 * 1024;  // two tables of kMaxBlocks, and room
inline constexpr std::uint32_t kMaxBlocks = 256 * 1024;     // block pairs in one transfer
inline constexpr std::uint32_t kMaxPieces = 1024 * 1024;    // its bitmap is then 128 KiB
inline constexpr std::uint32_t kMaxLoops = 8192;
inline constexpr std::uint32_t kMaxScales = 64 * 1024;      // in a program's table
inline constexpr std::uint32_t kMaxUnits = 1024 * 1024;     // of one block, or its tokens
inline constexpr std::uint32_t kMaxHeads = 64 * 1024;
inline constexpr std::uint32_t kMaxExtensions = 512;
inline constexpr std::uint32_t kMaxSpans = 8192;
// Of one agent: an agent that tells more ends its sessions.
inline constexpr std::uint32_t kMaxRegions = 4096;
inline constexpr std::uint32_t kMaxLayers = 4096;
inline constexpr std::uint32_t kMaxNotify = 4096;
inline constexpr std::uint32_t kMaxContext = 256;
inline constexpr std::uint32_t kMaxName = 128;
inline constexpr std::uint32_t kMaxText = 512;              // an error's words
inline constexpr std::uint32_t kMaxLayout = 64 * 1024;
inline constexpr std::uint32_t kMaxTransports = 16;
// Rails of one agent that may have registered a region.
inline constexpr std::uint32_t kMaxRegionKeys = 64;
inline constexpr std::uint32_t kMaxCreditPieces = 65536;
inline constexpr std::uint32_t kMaxMessage = 64 * 1024;  // of one message
inline constexpr std::uint32_t kMaxEagerNbytes = 64 * 1024;  // of pages in an OFFER

// In each direction of a session, messages of so many bytes may be on their way to the receiver's caller,
// unread. Each counts at least kLeastMessageCharge, so at most 256 messages wait: this bounds what messages
// cost besides their bytes.
inline constexpr std::uint64_t kMessageWindow = 1024 * 1024;
inline constexpr std::uint64_t kLeastMessageCharge = 4096;

enum class FrameType : std::uint16_t {
  // Handshake: initiator HELLO -> CHALLENGE from the acceptor -> PROOF from the initiator.
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  // First frame of a rail's socket, initiator to acceptor, and its answer.
  kRailHello = 8,
  kRailWelcome = 9,
  kRailDown = 10,
  kHeartbeat = 16,
  kHeartbeatAck = 17,
  kGoodbye = 18,
  kRegion = 24,
  kRegionGone = 25,
  kRegionsEnd = 26,
  kProgram = 27,
  kLease = 32,
  kLeaseEnded = 33,
  kOffer = 40,
  kRequest = 41,
  kAccept = 42,
  kCredit = 43,
  kLayersReady = 44,
  kChecksums = 45,
  kDone = 46,
  kFail = 47,
  kMessage = 56,
  kMessagesTaken = 57,
};

struct Identity {                     // who an agent is and where it runs
  std::string name;
  Id128 incarnation{};                // random at creation: a restarted process is a new peer
  Id128 host{};                       // boot id; equal on one machine
  Id128 process{};                    // random per process: equal for two agents in one process
  std::string unix_name;              // abstract unix socket it accepts on, "" for none
  std::vector<std::string> transports;  // that it is willing to use
};

// Features that one release has and another may lack. Each end names its own in HELLO and CHALLENGE, and
// both use those that both have.
struct Features {
  std::uint32_t eager_nbytes = 0;     // pages' bytes that it accepts in an OFFER; 0: none
  // In CHALLENGE: the proof of the acceptor's second secret (Session); zeros if it accepts one. Stands
  // last.
  Digest second_proof{};
};
// The form of `extensions`: kind u16, nbytes u16, value, and so on. A reader skips a kind that it does not
// know, and everything from the point where the bytes are no list of kinds.
Bytes encode(const Features& features);
Features decode_features(ByteSpan extensions);

struct Hello {
  std::uint16_t version = kProtocolVersion, oldest = kOldestProtocolVersion;
  Digest nonce{};
  Identity identity;
  Bytes extensions;                   // Features, and what newer releases add
};
struct Challenge {
  std::uint16_t version = kProtocolVersion, oldest = kOldestProtocolVersion;
  Digest nonce{};
  Identity identity;
  Bytes extensions;
  Id128 session{};
  Digest proof{};
};
struct Proof { Digest proof{}; };
inline constexpr std::uint16_t kNoRail = 0xffff;
// One attempt at one rail of a session. A rail that was lost is dialled again under its index, in the next
// attempt, so a statement about an earlier one is never applied to it.
struct RailName {
  RailName(std::uint16_t its_index = 0, std::uint32_t its_attempt = 0)
      : index(its_index), attempt(its_attempt) {}
  std::uint16_t index;
  std::uint32_t attempt;
  auto operator<=>(const RailName&) const = default;
};
// A rail joins one instance of a transport at each end: HELLO names the initiator's instance, WELCOME the
// acceptor's.
struct RailHello {
  Id128 session{};
  RailName rail;
  std::string transport;
  std::uint16_t instance = 0;
  Digest proof{};
};
struct RailWelcome {
  std::uint16_t instance = 0;
  Digest proof{};
};

// The sender's end of the rail is gone. If a rail fell silent, no socket may tell the peer.
struct RailDown { RailName rail; };

struct Heartbeat { std::uint64_t number = 0; };     // also renews every renewable lease held
struct HeartbeatAck { std::uint64_t number = 0; };
struct Goodbye {
  Code code = Code::kClosed;
  std::string text;
};

struct TransportKeys {
  std::string transport;
  RegionKeys keys;
  std::uint16_t instance = 0;         // of the owner's rails of that transport
};
struct Region {
  RegionId id = 0;
  std::string name;
  std::uint64_t base = 0;
  std::vector<MemorySpan> spans;
  std::uint32_t num_blocks = 0;
  Bytes layout;                       // kvxfer/layout/kv_layout.py's schema; the core does not look inside
  // Of the rails that reach the region's kind of memory; so they also tell which kind that is.
  std::vector<TransportKeys> keys;
};
struct RegionGone { RegionId id = 0; };
struct RegionsEnd {};                 // the regions that existed when the session opened are told
struct Program {                      // compiled by the initiator of transfers, checked natively
  std::uint32_t id = 0;               // the sender's number for it in this session
  RegionId src_region = 0, dst_region = 0;
  CopyProgram program;
};

enum class LeaseMode : std::uint8_t { kRead = 1, kWrite = 2 };
struct Lease {                        // grantor -> holder
  std::uint64_t id = 0;
  RegionId region = 0;
  LeaseMode mode = LeaseMode::kRead;
  bool renewable = true;
  std::uint64_t ttl_ns = 0;
  bool all_blocks = false;
  std::vector<std::uint32_t> blocks;
};
struct LeaseEnded {
  std::uint64_t id = 0;
  Code code = Code::kLeaseEnded;
};

inline constexpr std::uint8_t kFlagIntegrity = 1;  // destination compares checksums of every piece
inline constexpr std::uint8_t kFlagLease = 2;      // `lease` is the only one that may allow it
// In OFFER: DONE or FAIL is the destination's last word. It sends exactly one of them, when none of the
// write's bytes can land any more, even if the source has failed first.
inline constexpr std::uint8_t kFlagLastWord = 8;
struct TransferSpec {                 // common to OFFER and REQUEST
  TransferId transfer = 0;
  std::uint32_t program = 0;
  PieceGrid grid;
  std::uint8_t priority = 0;          // 0 goes first
  std::uint8_t flags = 0;
  std::uint64_t timeout_ns = 0;
  // The lease under which it was posted. If none was named: the newest lease that its poster had been told
  // of by then. Blocks change hands, so a late transfer must not be served under a right that was granted
  // after it.
  std::uint64_t lease = 0;
  std::vector<std::uint32_t> src_ids, dst_ids;  // of units, the last grid.num_fine of tokens
  Bytes notify;
  Bytes context = {};  // whose request it is, as the poster names it: UTF-8, or empty
};
struct Offer {                        // source -> destination: these pages may be fetched
  TransferSpec spec;
  std::uint32_t layers_ready = 0;     // of grid.num_layers, counted from grid.first_layer
  std::uint32_t fence_slot = 0;
  std::uint64_t fence_generation = 0;
  // All of its bytes, piece after piece as they cross a stream, so that a write that is permitted at once
  // lands at once. Sent only to a peer that said that it takes so many.
  Bytes pages = {};
};
struct Request { TransferSpec spec; };  // destination -> source: may these pages be fetched?
struct Accept {                       // source -> destination: yes
  TransferId transfer = 0;
  std::uint32_t fence_slot = 0;
  std::uint64_t fence_generation = 0;
  std::uint64_t ttl_ns = 0;           // of the lease that allows it: all of it, counted from
                                       // the newest heartbeat that was acknowledged, where it is
                                       // renewable; else what is left, from REQUEST's sending
  bool renewable = true;              // heartbeats extend it
};
struct Credit {                       // destination -> source: send these now
  TransferId transfer = 0;
  RailName rail;                      // kNoRail: send nothing, only say the checksums
  std::uint32_t first_piece = 0, num_pieces = 0;
};
struct LayersReady {
  TransferId transfer = 0;
  std::uint32_t layers_ready = 0;
};
struct Checksums {  // source -> destination, for pieces that a CREDIT asked for
  TransferId transfer = 0;
  std::uint32_t first_piece = 0;
  std::vector<std::uint32_t> crc32c;
};
// Each frame that ends a transfer also tells the other end how this end's caller names the request, if that
// caller expected the write.
struct Done {                         // destination -> source: every byte is in place
  TransferId transfer = 0;
  Bytes context = {};
};
struct Fail {
  TransferId transfer = 0;
  Code code = Code::kRefused;         // of one transfer (status.h)
  std::string text;
  Bytes context = {};
};

struct AgentMessage { Bytes payload; };  // from the sender's caller to the receiver's
struct MessagesTaken {                // receiver -> sender of messages
  // Charge of all messages that the receiver's caller has taken in this session.
  std::uint64_t charge = 0;
};

using Message =
    std::variant<Hello, Challenge, Proof, RailHello, RailWelcome, RailDown, Heartbeat, HeartbeatAck, Goodbye,
                 Region, RegionGone, RegionsEnd, Program, Lease, LeaseEnded, Offer, Request, Accept, Credit,
                 LayersReady, Checksums, Done, Fail, AgentMessage, MessagesTaken>;

inline std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A peer's words inside ours: characters that would break a log line are shown as "?".
std::string on_one_line(std::string text);

FrameType type_of(const Message& message) noexcept;
std::string_view name_of(FrameType type) noexcept;  // "OFFER"

// As it lies in a frame.
struct Header {
  std::uint32_t body_nbytes = 0;
  FrameType type = FrameType::kHello;
  std::uint16_t flags = 0;  // none defined: must be 0
  std::uint64_t sequence = 0;
  std::size_t frame_nbytes() const noexcept { return kHeaderNbytes + body_nbytes + kMacNbytes; }
};

// Reads a header. kAgain: fewer than kHeaderNbytes bytes are there. kProtocol: a type that does
// not exist, flags, or a body longer than `max_body`.
Result<Header> decode_header(ByteSpan bytes, std::uint32_t max_body);

// A whole frame with `sequence` in its header and zeros where the mac goes.
Bytes encode(const Message& message, std::uint64_t sequence);

// The body's message. kProtocol with the field's name where the bytes are not what encode writes; what is in
// `into` then means nothing.
Status decode(const Header& header, ByteSpan body, Message& into);
Result<Message> decode(const Header& header, ByteSpan body);

}  // namespace kvxfer::wire
