// Encodes and decodes every message. It is one long file on purpose: each message's reader stands beside its
// writer, and the table of all messages below them.
#include "core/control/wire.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/bytes.h"

namespace kvxfer::wire {
namespace {

// A Time is a signed 64-bit number of nanoseconds: a longer duration cannot be kept.
constexpr std::uint64_t kMaxDurationNs = INT64_MAX;

// ---------------------------------------------------------------------------------------------
// Each message is one put and one get, next to each other and in the same order of fields.

void put(Writer& out, const Identity& identity) {
  out.text(identity.name);
  out.raw(identity.incarnation);
  out.raw(identity.host);
  out.raw(identity.process);
  out.text(identity.unix_name);
  out.number(static_cast<std::uint32_t>(identity.transports.size()));
  for (const std::string& transport : identity.transports) out.text(transport);
}
void get(Reader& in, Identity& identity) {
  identity.name = in.text("identity.name", kMaxName);
  identity.incarnation = in.array<16>("identity.incarnation");
  identity.host = in.array<16>("identity.host");
  identity.process = in.array<16>("identity.process");
  identity.unix_name = in.text("identity.unix_name", kMaxName);
  identity.transports.resize(in.count("identity.transports", "names", kMaxTransports, sizeof(std::uint32_t)));
  for (std::string& transport : identity.transports) transport = in.text("identity.transports", kMaxName);
}

std::string versions_in_words(std::uint16_t oldest, std::uint16_t newest) {
  return oldest == newest ? std::to_string(newest) : std::to_string(oldest) + " to " + std::to_string(newest);
}

// These are first in their frames and never move, so that a peer of any release can be told what is wrong.
void get_versions(Reader& in, std::uint16_t& newest, std::uint16_t& oldest) {
  newest = in.number<std::uint16_t>("version");
  if (in.ok() && newest < kOldestProtocolVersion)
    return in.fail("version", "the peer speaks protocol version " + std::to_string(newest) +
                                  " at most, this agent " +
                                  versions_in_words(kOldestProtocolVersion, kProtocolVersion) +
                                  "; upgrade kvxfer at the peer");
  oldest = in.number<std::uint16_t>("oldest");
  if (in.ok() && (oldest > kProtocolVersion || oldest > newest))
    in.fail("version", "the peer speaks protocol version " + versions_in_words(oldest, newest) +
                           ", this agent " + versions_in_words(kOldestProtocolVersion, kProtocolVersion) +
                           "; upgrade kvxfer here");
}

// A code that stands for a loss: an end is never "ok" and never "try again".
Code get_loss(Reader& in) {
  const Code code{in.number<std::uint16_t>("code")};
  if (in.ok() && (code == Code::kOk || code == Code::kAgain || name_of(code) == "unknown"))
    in.fail("code", std::to_string(static_cast<unsigned>(code)) + " is not an error code");
  return in.ok() ? code : Code::kInternal;
}

void put(Writer& out, const Hello& hello) {
  out.number(hello.version);
  out.number(hello.oldest);
  out.raw(hello.nonce);
  put(out, hello.identity);
  out.table<std::byte>(hello.extensions);
}
void get(Reader& in, Hello& hello) {
  get_versions(in, hello.version, hello.oldest);
  hello.nonce = in.array<32>("nonce");
  get(in, hello.identity);
  hello.extensions = in.table<std::byte>("extensions", "bytes", kMaxExtensions);
}

// The proof is last: it proves the body before it (core/control/session.h).
void put(Writer& out, const Challenge& challenge) {
  out.number(challenge.version);
  out.number(challenge.oldest);
  out.raw(challenge.nonce);
  put(out, challenge.identity);
  out.table<std::byte>(challenge.extensions);
  out.raw(challenge.session);
  out.raw(challenge.proof);
}
void get(Reader& in, Challenge& challenge) {
  get_versions(in, challenge.version, challenge.oldest);
  challenge.nonce = in.array<32>("nonce");
  get(in, challenge.identity);
  challenge.extensions = in.table<std::byte>("extensions", "bytes", kMaxExtensions);
  challenge.session = in.array<16>("session");
  challenge.proof = in.array<32>("proof");
}

void put(Writer& out, const Proof& proof) { out.raw(proof.proof); }
void get(Reader& in, Proof& proof) { proof.proof = in.array<32>("proof"); }

void put(Writer& out, const RailName& rail) {
  out.number(rail.index);
  out.number(rail.attempt);
}
RailName get_rail(Reader& in, std::uint16_t last_index) {
  const auto index = in.number<std::uint16_t>("rail", 0, last_index);
  return {index, in.number<std::uint32_t>("attempt")};
}

void put(Writer& out, const RailHello& hello) {
  out.raw(hello.session);
  put(out, hello.rail);
  out.text(hello.transport);
  out.number(hello.instance);
  out.raw(hello.proof);
}
void get(Reader& in, RailHello& hello) {
  hello.session = in.array<16>("session");
  hello.rail = get_rail(in, kNoRail - 1);
  hello.transport = in.text("transport", kMaxName);
  hello.instance = in.number<std::uint16_t>("instance", 0, UINT16_MAX);
  hello.proof = in.array<32>("proof");
}

void put(Writer& out, const RailDown& down) { put(out, down.rail); }
void get(Reader& in, RailDown& down) { down.rail = get_rail(in, kNoRail - 1); }

void put(Writer& out, const RailWelcome& welcome) {
  out.number(welcome.instance);
  out.raw(welcome.proof);
}
void get(Reader& in, RailWelcome& welcome) {
  welcome.instance = in.number<std::uint16_t>("instance", 0, UINT16_MAX);
  welcome.proof = in.array<32>("proof");
}

void put(Writer& out, const Heartbeat& heartbeat) { out.number(heartbeat.number); }
void get(Reader& in, Heartbeat& heartbeat) { heartbeat.number = in.number<std::uint64_t>("number"); }

void put(Writer& out, const HeartbeatAck& ack) { out.number(ack.number); }
void get(Reader& in, HeartbeatAck& ack) { ack.number = in.number<std::uint64_t>("number"); }

void put(Writer& out, const Goodbye& goodbye) {
  out.number(goodbye.code);
  out.words(goodbye.text, kMaxText);
}
void get(Reader& in, Goodbye& goodbye) {
  goodbye.code = get_loss(in);
  goodbye.text = in.text("text", kMaxText);
}

void put(Writer& out, const Region& region) {
  out.number(region.id);
  out.text(region.name);
  out.number(region.base);
  out.table<MemorySpan>(region.spans);
  out.number(region.num_blocks);
  out.table<std::byte>(region.layout);
  out.number(static_cast<std::uint32_t>(region.keys.size()));
  for (const TransportKeys& keys : region.keys) {
    out.text(keys.transport);
    out.number(keys.instance);
    out.table<std::byte>(keys.keys);
  }
}
void check_spans(Reader& in, std::uint64_t base, std::span<const MemorySpan> spans) {
  std::uint64_t end = 0;  // of the spans so far, from the base
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const MemorySpan& span = spans[i];
    const char* const wrong = span.offset < end ? " begins before the end of the one before it"
                              : span.nbytes > UINT64_MAX - span.offset ? " ends beyond 2^64"
                              : base > UINT64_MAX - span.offset - span.nbytes
                                  ? " ends beyond the address space"
                                  : nullptr;
    if (wrong != nullptr) return in.fail("spans", "span " + std::to_string(i) + wrong);
    end = span.offset + span.nbytes;
  }
}
void get(Reader& in, Region& region) {
  region.id = in.number<std::uint64_t>("id");
  region.name = in.text("name", kMaxName);
  region.base = in.number<std::uint64_t>("base");
  region.spans = in.table<MemorySpan>("spans", "spans", kMaxSpans);
  check_spans(in, region.base, region.spans);
  region.num_blocks = in.number<std::uint32_t>("num_blocks");
  region.layout = in.table<std::byte>("layout", "bytes", kMaxLayout);
  region.keys.resize(
      in.count("keys", "rails", kMaxRegionKeys, 2 * sizeof(std::uint32_t) + sizeof(std::uint16_t)));
  for (TransportKeys& keys : region.keys) {
    keys.transport = in.text("keys.transport", kMaxName);
    keys.instance = in.number<std::uint16_t>("keys.instance", 0, UINT16_MAX);
    keys.keys = in.table<std::byte>("keys.keys", "bytes", kMaxKeyBytes);
  }
}

void put(Writer& out, const RegionGone& gone) { out.number(gone.id); }
void get(Reader& in, RegionGone& gone) { gone.id = in.number<std::uint64_t>("id"); }

void put(Writer&, const RegionsEnd&) {}
void get(Reader&, RegionsEnd&) {}

void put(Writer& out, const Program& program) {
  out.number(program.id);
  out.number(program.src_region);
  out.number(program.dst_region);
  out.number(program.program.num_layers);
  for (const UnitsPerBlock& units : program.program.units) {
    out.number(units.src);
    out.number(units.dst);
  }
  out.number(program.program.dst_heads.first);
  out.number(program.program.dst_heads.num);
  out.number(program.program.dst_heads.total);
  out.table<CopyLoop>(program.program.loops);
  out.table<Conversion>(program.program.conversions);
  out.table<float>(program.program.scales);
}
void check_loop(Reader& in, const CopyLoop& loop, std::size_t num_conversions) {
  if (loop.grain >= kNumGrains)
    in.fail("loops.grain", std::to_string(loop.grain) + ", only 0 (units) and 1 (tokens) exist");
  if (loop.conversion > num_conversions)
    in.fail("loops.conversion", std::to_string(loop.conversion) + ", but there are " +
                                    std::to_string(num_conversions) + " conversions");
}
void check_conversion(Reader& in, const Conversion& conversion) {
  for (const Dtype dtype : {conversion.src_dtype, conversion.dst_dtype})
    if (dtype == Dtype::kBytes || static_cast<std::size_t>(dtype) >= kNumDtypes)
      in.fail("conversions.dtype", std::to_string(static_cast<unsigned>(dtype)) + " is not a numeric dtype");
  for (const ScalePlace place : {conversion.src_scales, conversion.dst_scales})
    if (place > ScalePlace::kRegion)
      in.fail("conversions.scales",
              std::to_string(static_cast<unsigned>(place)) + " is not a place of scales");
  if (conversion.saturate > 1 || conversion.reserved[0] != 0 || conversion.reserved[1] != 0 ||
      conversion.reserved[2] != 0)
    in.fail("conversions.reserved", "must be 0");
}
void get(Reader& in, Program& program) {
  program.id = in.number<std::uint32_t>("id");
  program.src_region = in.number<std::uint64_t>("src_region");
  program.dst_region = in.number<std::uint64_t>("dst_region");
  program.program.num_layers = in.number<std::uint32_t>("num_layers", 1, kMaxLayers);
  for (UnitsPerBlock& units : program.program.units) {
    units.src = in.number<std::uint32_t>("units", 0, kMaxUnits);
    units.dst = in.number<std::uint32_t>("units", 0, kMaxUnits);
  }
  program.program.dst_heads.first = in.number<std::uint32_t>("dst_heads", 0, kMaxHeads);
  program.program.dst_heads.num = in.number<std::uint32_t>("dst_heads", 1, kMaxHeads);
  program.program.dst_heads.total = in.number<std::uint32_t>("dst_heads", 1, kMaxHeads);
  // Offsets, counts and layers are checked against both regions where those are known
  // (core/region.h).
  program.program.loops = in.table<CopyLoop>("loops", "loops", kMaxLoops);
  program.program.conversions = in.table<Conversion>("conversions", "conversions", kMaxLoops);
  program.program.scales = in.table<float>("scales", "scales", kMaxScales);
  for (const CopyLoop& loop : program.program.loops) check_loop(in, loop, program.program.conversions.size());
  for (const Conversion& conversion : program.program.conversions) check_conversion(in, conversion);
}

void put(Writer& out, const Lease& lease) {
  out.number(lease.id);
  out.number(lease.region);
  out.number(lease.mode);
  out.number(lease.renewable);
  out.number(lease.ttl_ns);
  out.number(lease.all_blocks);
  out.table<std::uint32_t>(lease.blocks);
}
void get(Reader& in, Lease& lease) {
  lease.id = in.number<std::uint64_t>("id");
  lease.region = in.number<std::uint64_t>("region");
  lease.mode = LeaseMode{
      in.number<std::uint8_t>("mode", std::uint8_t(LeaseMode::kRead), std::uint8_t(LeaseMode::kWrite))};
  lease.renewable = in.boolean("renewable");
  lease.ttl_ns = in.number<std::uint64_t>("ttl_ns", 0, kMaxDurationNs);
  lease.all_blocks = in.boolean("all_blocks");
  lease.blocks = in.table<std::uint32_t>("blocks", "ids", kMaxBlocks);
}

void put(Writer& out, const LeaseEnded& ended) {
  out.number(ended.id);
  out.number(ended.code);
}
void get(Reader& in, LeaseEnded& ended) {
  ended.id = in.number<std::uint64_t>("id");
  ended.code = get_loss(in);
}

void put(Writer& out, const PieceGrid& grid) {
  out.number(grid.first_layer);
  out.number(grid.num_layers);
  out.number(grid.num_pairs);
  out.number(grid.pairs_per_piece);
  out.number(grid.num_fine);
}
void get(Reader& in, PieceGrid& grid) {
  grid.first_layer = in.number<std::uint32_t>("grid.first_layer", 0, kMaxLayers - 1);
  grid.num_layers = in.number<std::uint32_t>("grid.num_layers", 1, kMaxLayers);
  grid.num_pairs = in.number<std::uint32_t>("grid.num_pairs", 0, kMaxBlocks);
  // Bounded like num_pairs: PieceGrid adds the two in 32 bits.
  grid.pairs_per_piece = in.number<std::uint32_t>("grid.pairs_per_piece", 1, kMaxBlocks);
  grid.num_fine = in.number<std::uint32_t>("grid.num_fine", 0, grid.num_pairs);
  if (!in.ok()) {
    grid = PieceGrid();
    return;
  }
  if (grid.first_layer + grid.num_layers > kMaxLayers)
    in.fail("grid.num_layers", std::to_string(grid.num_layers) + " from layer " +
                                   std::to_string(grid.first_layer) + ", at most " +
                                   std::to_string(kMaxLayers) + " layers exist");
  const std::uint64_t num_pieces = std::uint64_t{grid.pieces_per_layer()} * grid.num_layers;
  if (num_pieces > kMaxPieces)
    in.fail("grid.pairs_per_piece",
            std::to_string(num_pieces) + " pieces, at most " + std::to_string(kMaxPieces));
}

// Set only if the caller gave a context: a transfer without one does not even carry its length.
constexpr std::uint8_t kFlagContext = 4;

void put_context(Writer& out, const Bytes& context) {
  if (!context.empty()) out.table<std::byte>(context);
}
Bytes get_context(Reader& in) {
  Bytes context = in.table<std::byte>("context", "bytes", kMaxContext);
  if (in.ok() && context.empty()) in.fail("context", "empty");
  if (in.ok() && utf8_prefix(text_of(context)) != context.size()) in.fail("context", "not UTF-8");
  return context;
}

void put(Writer& out, const TransferSpec& spec) {
  out.number(spec.transfer);
  out.number(spec.program);
  put(out, spec.grid);
  out.number(spec.priority);
  out.number(static_cast<std::uint8_t>(spec.flags | (spec.context.empty() ? 0 : kFlagContext)));
  out.number(spec.timeout_ns);
  out.number(spec.lease);
  out.table<std::uint32_t>(spec.src_ids);
  out.table<std::uint32_t>(spec.dst_ids);
  out.table<std::byte>(spec.notify);
  put_context(out, spec.context);
}
void get_ids(Reader& in, std::string_view field, const PieceGrid& grid, std::vector<std::uint32_t>& ids) {
  ids = in.table<std::uint32_t>(field, "ids", kMaxBlocks);
  if (in.ok() && ids.size() != grid.num_pairs)
    in.fail(field, std::to_string(ids.size()) + " ids for " + std::to_string(grid.num_pairs) + " pairs");
}
void get(Reader& in, TransferSpec& spec) {
  spec.transfer = in.number<std::uint64_t>("transfer");
  spec.program = in.number<std::uint32_t>("program");
  get(in, spec.grid);
  spec.priority = in.number<std::uint8_t>("priority");
  const auto flags =
      in.number<std::uint8_t>("flags", 0, kFlagIntegrity | kFlagLease | kFlagContext | kFlagLastWord);
  spec.flags = flags & ~kFlagContext;
  spec.timeout_ns = in.number<std::uint64_t>("timeout_ns", 0, kMaxDurationNs);
  spec.lease = in.number<std::uint64_t>("lease");
  get_ids(in, "src_ids", spec.grid, spec.src_ids);
  get_ids(in, "dst_ids", spec.grid, spec.dst_ids);
  spec.notify = in.table<std::byte>("notify", "bytes", kMaxNotify);
  if (flags & kFlagContext) spec.context = get_context(in);
}
// Every bit below the bound is a flag.
static_assert((kFlagIntegrity | kFlagLease | kFlagContext | kFlagLastWord) == 15);

void put(Writer& out, const Offer& offer) {
  put(out, offer.spec);
  out.number(offer.layers_ready);
  out.number(offer.fence_slot);
  out.number(offer.fence_generation);
  if (!offer.pages.empty()) out.table<std::byte>(offer.pages);
}
// The reader of this number indexes the peer's table with it.
std::uint32_t get_fence_slot(Reader& in) {
  return in.number<std::uint32_t>("fence_slot", 0, FenceTable::kNumSlots - 1);
}
void get(Reader& in, Offer& offer) {
  get(in, offer.spec);
  offer.layers_ready = in.number<std::uint32_t>("layers_ready", 0, offer.spec.grid.num_layers);
  offer.fence_slot = get_fence_slot(in);
  offer.fence_generation = in.number<std::uint64_t>("fence_generation");
  if (!in.has_more()) return;
  offer.pages = in.table<std::byte>("pages", "bytes", kMaxEagerNbytes);
  if (in.ok() && offer.pages.empty()) in.fail("pages", "empty");
}

void put(Writer& out, const Request& request) { put(out, request.spec); }
void get(Reader& in, Request& request) {
  get(in, request.spec);
  if (in.ok() && (request.spec.flags & kFlagLastWord) != 0)
    in.fail("flags", "only an OFFER asks for a last word");
}

void put(Writer& out, const Accept& accept) {
  out.number(accept.transfer);
  out.number(accept.fence_slot);
  out.number(accept.fence_generation);
  out.number(accept.ttl_ns);
  out.number(accept.renewable);
}
void get(Reader& in, Accept& accept) {
  accept.transfer = in.number<std::uint64_t>("transfer");
  accept.fence_slot = get_fence_slot(in);
  accept.fence_generation = in.number<std::uint64_t>("fence_generation");
  accept.ttl_ns = in.number<std::uint64_t>("ttl_ns", 0, kMaxDurationNs);
  accept.renewable = in.boolean("renewable");
}

// `first_piece` is below kMaxPieces and `num_pieces` within kMaxCreditPieces: no overflow.
void check_pieces(Reader& in, std::string_view field, std::uint32_t first_piece, std::size_t num_pieces) {
  if (num_pieces == 0) in.fail(field, "names no piece");
  if (first_piece + num_pieces > kMaxPieces)
    in.fail(field, std::to_string(num_pieces) + " pieces from piece " + std::to_string(first_piece) +
                       ", at most " + std::to_string(kMaxPieces) + " exist");
}

void put(Writer& out, const Credit& credit) {
  out.number(credit.transfer);
  put(out, credit.rail);
  out.number(credit.first_piece);
  out.number(credit.num_pieces);
}
void get(Reader& in, Credit& credit) {
  credit.transfer = in.number<std::uint64_t>("transfer");
  credit.rail = get_rail(in, kNoRail);
  credit.first_piece = in.number<std::uint32_t>("first_piece", 0, kMaxPieces - 1);
  credit.num_pieces = in.number<std::uint32_t>("num_pieces", 1, kMaxCreditPieces);
  check_pieces(in, "num_pieces", credit.first_piece, credit.num_pieces);
}

void put(Writer& out, const LayersReady& ready) {
  out.number(ready.transfer);
  out.number(ready.layers_ready);
}
void get(Reader& in, LayersReady& ready) {
  ready.transfer = in.number<std::uint64_t>("transfer");
  ready.layers_ready = in.number<std::uint32_t>("layers_ready", 0, kMaxLayers);
}

void put(Writer& out, const Checksums& checksums) {
  out.number(checksums.transfer);
  out.number(checksums.first_piece);
  out.table<std::uint32_t>(checksums.crc32c);
}
void get(Reader& in, Checksums& checksums) {
  checksums.transfer = in.number<std::uint64_t>("transfer");
  checksums.first_piece = in.number<std::uint32_t>("first_piece", 0, kMaxPieces - 1);
  checksums.crc32c = in.table<std::uint32_t>("crc32c", "checksums", kMaxCreditPieces);
  check_pieces(in, "crc32c", checksums.first_piece, checksums.crc32c.size());
}

void put(Writer& out, const Done& done) {
  out.number(done.transfer);
  put_context(out, done.context);
}
void get(Reader& in, Done& done) {
  done.transfer = in.number<std::uint64_t>("transfer");
  if (in.has_more()) done.context = get_context(in);
}

void put(Writer& out, const Fail& fail) {
  out.number(fail.transfer);
  out.number(fail.code);
  out.words(fail.text, kMaxText);
  put_context(out, fail.context);
}
void get(Reader& in, Fail& fail) {
  fail.transfer = in.number<std::uint64_t>("transfer");
  fail.code = Code{in.number<std::uint16_t>("code")};
  if (in.ok() && (!is_of_transfer(fail.code) || name_of(fail.code) == "unknown"))
    in.fail("code", std::to_string(static_cast<unsigned>(fail.code)) + " is not an error code of a transfer");
  fail.text = in.text("text", kMaxText);
  if (in.has_more()) fail.context = get_context(in);
}

void put(Writer& out, const AgentMessage& message) { out.table<std::byte>(message.payload); }
void get(Reader& in, AgentMessage& message) {
  message.payload = in.table<std::byte>("payload", "bytes", kMaxMessage);
}

void put(Writer& out, const MessagesTaken& taken) { out.number(taken.charge); }
void get(Reader& in, MessagesTaken& taken) { taken.charge = in.number<std::uint64_t>("charge"); }

// ---------------------------------------------------------------------------------------------

// In the order of Message's alternatives.
struct Kind {
  FrameType type;
  std::string_view name;
};
constexpr Kind kKinds[] = {
    {FrameType::kHello, "HELLO"},
    {FrameType::kChallenge, "CHALLENGE"},
    {FrameType::kProof, "PROOF"},
    {FrameType::kRailHello, "RAIL_HELLO"},
    {FrameType::kRailWelcome, "RAIL_WELCOME"},
    {FrameType::kRailDown, "RAIL_DOWN"},
    {FrameType::kHeartbeat, "HEARTBEAT"},
    {FrameType::kHeartbeatAck, "HEARTBEAT_ACK"},
    {FrameType::kGoodbye, "GOODBYE"},
    {FrameType::kRegion, "REGION"},
    {FrameType::kRegionGone, "REGION_GONE"},
    {FrameType::kRegionsEnd, "REGIONS_END"},
    {FrameType::kProgram, "PROGRAM"},
    {FrameType::kLease, "LEASE"},
    {FrameType::kLeaseEnded, "LEASE_ENDED"},
    {FrameType::kOffer, "OFFER"},
    {FrameType::kRequest, "REQUEST"},
    {FrameType::kAccept, "ACCEPT"},
    {FrameType::kCredit, "CREDIT"},
    {FrameType::kLayersReady, "LAYERS_READY"},
    {FrameType::kChecksums, "CHECKSUMS"},
    {FrameType::kDone, "DONE"},
    {FrameType::kFail, "FAIL"},
    {FrameType::kMessage, "MESSAGE"},
    {FrameType::kMessagesTaken, "MESSAGES_TAKEN"},
};
constexpr std::size_t kNumKinds = std::size(kKinds);
static_assert(kNumKinds == std::variant_size_v<Message>);

// The alternative's index, or kNumKinds for a type that does not exist.
std::size_t kind_of(FrameType type) noexcept {
  constexpr std::size_t kNumTypes = static_cast<std::size_t>(kKinds[kNumKinds - 1].type) + 1;
  static constexpr auto kKindOf = [] {
    std::array<std::uint8_t, kNumTypes> kinds{};
    kinds.fill(kNumKinds);
    for (std::size_t kind = 0; kind < kNumKinds; ++kind)
      kinds[static_cast<std::size_t>(kKinds[kind].type)] = static_cast<std::uint8_t>(kind);
    return kinds;
  }();
  const auto number = static_cast<std::size_t>(type);
  return number < kNumTypes ? kKindOf[number] : kNumKinds;
}

template <std::size_t I>
void get_alternative(Reader& in, Message& into) {
  get(in, into.emplace<I>());
}

template <std::size_t... I>
void get_message(std::size_t kind, Reader& in, Message& into, std::index_sequence<I...>) {
  using Get = void (*)(Reader&, Message&);
  static constexpr Get kGets[] = {&get_alternative<I>...};
  kGets[kind](in, into);
}

// What encode reserves: tables dominate, the fixed fields of every message fit into the rest.
std::size_t estimate_nbytes(const Message& message) noexcept {
  constexpr std::size_t kFixed = 256;
  if (const auto* offer = std::get_if<Offer>(&message))
    return kFixed + 8 * offer->spec.src_ids.size() + offer->spec.notify.size() + offer->spec.context.size() +
           offer->pages.size();
  if (const auto* request = std::get_if<Request>(&message))
    return kFixed + 8 * request->spec.src_ids.size() + request->spec.notify.size() +
           request->spec.context.size();
  if (const auto* sent = std::get_if<AgentMessage>(&message)) return kFixed + sent->payload.size();
  if (const auto* lease = std::get_if<Lease>(&message)) return kFixed + 4 * lease->blocks.size();
  if (const auto* program = std::get_if<Program>(&message))
    return kFixed + sizeof(CopyLoop) * program->program.loops.size() +
           sizeof(Conversion) * program->program.conversions.size() +
           sizeof(float) * program->program.scales.size();
  return kFixed;
}

// Kinds of `extensions`.
constexpr std::uint16_t kEagerNbytes = 1;
constexpr std::uint16_t kSecondProof = 3;

// Calls `each` with the kind and the field of every feature, in the order of `extensions`.
template <class F, class Each>
void for_each_feature(F& features, Each&& each) {
  each(kEagerNbytes, features.eager_nbytes);
  each(kSecondProof, features.second_proof);
}

}  // namespace

// A feature that is zero is left out.
Bytes encode(const Features& features) {
  Writer out(sizeof(Features) + 16);
  for_each_feature(features, [&]<class T>(std::uint16_t kind, const T& value) {
    if (value == T{}) return;
    out.number(kind);
    out.number(static_cast<std::uint16_t>(sizeof value));
    out.raw(value);
  });
  return out.take();
}

Features decode_features(ByteSpan extensions) {
  Features features;
  for (std::uint16_t head[2]; extensions.size() >= sizeof head;) {
    std::memcpy(head, extensions.data(), sizeof head);
    const auto [kind, nbytes] = head;
    extensions = extensions.subspan(sizeof head);
    if (nbytes > extensions.size()) break;
    for_each_feature(features, [&, kind = kind, nbytes = nbytes](std::uint16_t known, auto& value) {
      if (kind == known && nbytes == sizeof value) std::memcpy(&value, extensions.data(), nbytes);
    });
    extensions = extensions.subspan(nbytes);
  }
  return features;
}

std::string on_one_line(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

FrameType type_of(const Message& message) noexcept { return kKinds[message.index()].type; }

std::string_view name_of(FrameType type) noexcept {
  const std::size_t kind = kind_of(type);
  return kind < kNumKinds ? kKinds[kind].name : "UNKNOWN";
}

Result<Header> decode_header(ByteSpan bytes, std::uint32_t max_body) {
  if (bytes.size() < kHeaderNbytes) return Status(Code::kAgain, "the header is incomplete");
  Header header;
  static_assert(sizeof header == kHeaderNbytes && kPlain<Header>);
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.flags != 0)
    return Status(Code::kProtocol, "header.flags: " + std::to_string(header.flags) + ", must be 0 to 0");
  if (kind_of(header.type) == kNumKinds)
    return Status(Code::kProtocol, "header.type: " + std::to_string(static_cast<unsigned>(header.type)) +
                                       " is not a frame type; is the other end a kvxfer agent?");
  if (header.body_nbytes > max_body)
    return Status(Code::kProtocol, std::string(name_of(header.type)) + ": a body of " +
                                       std::to_string(header.body_nbytes) + " bytes, but at most " +
                                       std::to_string(max_body) + " are accepted here");
  return header;
}

Bytes encode(const Message& message, std::uint64_t sequence) {
  Writer out(kHeaderNbytes + estimate_nbytes(message) + kMacNbytes);
  out.raw(Header{.type = type_of(message), .sequence = sequence});  // its length is known at the end
  std::visit([&](const auto& alternative) { put(out, alternative); }, message);
  out.raw(std::array<std::byte, kMacNbytes>{});
  Bytes frame = out.take();
  const auto body_nbytes = static_cast<std::uint32_t>(frame.size() - kHeaderNbytes - kMacNbytes);
  std::memcpy(frame.data(), &body_nbytes, sizeof body_nbytes);
  return frame;
}

Status decode(const Header& header, ByteSpan body, Message& into) {
  const std::size_t kind = kind_of(header.type);
  if (kind == kNumKinds || body.size() != header.body_nbytes)
    return Status(Code::kProtocol, std::string(name_of(header.type)) + ": its header announces " +
                                       std::to_string(header.body_nbytes) + " bytes, but there are " +
                                       std::to_string(body.size()));
  Reader in(kKinds[kind].name, body);
  get_message(kind, in, into, std::make_index_sequence<kNumKinds>());
  in.end();
  return in.status();
}

Result<Message> decode(const Header& header, ByteSpan body) {
  Message message;
  if (Status status = decode(header, body, message); !status.ok()) return status;
  return message;
}

}  // namespace kvxfer::wire
