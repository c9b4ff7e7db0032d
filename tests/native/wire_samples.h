// Random valid messages, and their comparison field by field.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "core/control/wire.h"

namespace wire_samples {

using namespace kvxfer;
using namespace kvxfer::wire;
using wire::Lease;  // not those of core/lease.h and core/region.h, if these are included too
using wire::Region;

inline constexpr std::size_t kNumKinds = std::variant_size_v<Message>;

// ---- comparison. A structured binding names every field: a field added to a message does not
// compile here until it is compared.
// clang-format off
inline auto fields(const MemorySpan& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const PieceGrid& m) { const auto& [a, b, c, d, e] = m; return std::tie(a, b, c, d, e); }
inline auto fields(const UnitsPerBlock& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const HeadSlice& m) { const auto& [a, b, c] = m; return std::tie(a, b, c); }
inline auto fields(const CopyProgram& m) {
  const auto& [a, b, c, d, e, f, counted, counts] = m;
  (void)counted, (void)counts;  // of the rest, by who has it; they do not cross
  return std::tie(a, b, c, d, e, f);
}
inline auto fields(const Identity& m) {
  const auto& [a, b, c, d, e, f] = m;
  return std::tie(a, b, c, d, e, f);
}
inline auto fields(const Hello& m) { const auto& [a, b, c, d, e] = m; return std::tie(a, b, c, d, e); }
inline auto fields(const Challenge& m) {
  const auto& [a, b, c, d, e, f, g] = m;
  return std::tie(a, b, c, d, e, f, g);
}
inline auto fields(const Proof& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const RailHello& m) { const auto& [a, b, c, d, e] = m; return std::tie(a, b, c, d, e); }
inline auto fields(const RailDown& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const RailWelcome& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const Heartbeat& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const HeartbeatAck& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const Goodbye& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const TransportKeys& m) { const auto& [a, b, c] = m; return std::tie(a, b, c); }
inline auto fields(const Region& m) {
  const auto& [a, b, c, d, e, f, g] = m;
  return std::tie(a, b, c, d, e, f, g);
}
inline auto fields(const RegionGone& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const RegionsEnd&) { return std::tuple<>(); }
inline auto fields(const Program& m) { const auto& [a, b, c, d] = m; return std::tie(a, b, c, d); }
inline auto fields(const Lease& m) {
  const auto& [a, b, c, d, e, f, g] = m;
  return std::tie(a, b, c, d, e, f, g);
}
inline auto fields(const LeaseEnded& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const TransferSpec& m) {
  const auto& [a, b, c, d, e, f, g, h, i, j, k] = m;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k);
}
inline auto fields(const Offer& m) {
  const auto& [a, b, c, d, e] = m;
  return std::tie(a, b, c, d, e);
}
inline auto fields(const Request& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const Accept& m) { const auto& [a, b, c, d, e] = m; return std::tie(a, b, c, d, e); }
inline auto fields(const Credit& m) { const auto& [a, b, c, d] = m; return std::tie(a, b, c, d); }
inline auto fields(const LayersReady& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const Checksums& m) { const auto& [a, b, c] = m; return std::tie(a, b, c); }
inline auto fields(const Done& m) { const auto& [a, b] = m; return std::tie(a, b); }
inline auto fields(const Fail& m) { const auto& [a, b, c, d] = m; return std::tie(a, b, c, d); }
inline auto fields(const AgentMessage& m) { const auto& [a] = m; return std::tie(a); }
inline auto fields(const MessagesTaken& m) { const auto& [a] = m; return std::tie(a); }

// clang-format on

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

template <class T>
bool same(const T& a, const T& b) {
  if constexpr (IsVector<T>::value) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!same(a[i], b[i])) return false;
    return true;
  } else if constexpr (std::is_array_v<T>) {
    return std::equal(std::begin(a), std::end(a), std::begin(b),
                      [](const auto& of_a, const auto& of_b) { return same(of_a, of_b); });
  } else if constexpr (std::is_same_v<T, Message>) {
    return a.index() == b.index() &&
           std::visit([&](const auto& of_a) { return same(of_a, std::get<std::decay_t<decltype(of_a)>>(b)); },
                      a);
  } else if constexpr (std::is_same_v<T, CopyLoop> || std::is_same_v<T, Conversion> ||
                       std::is_same_v<T, float>) {  // NaNs compare as equal
    return std::memcmp(&a, &b, sizeof a) == 0;
  } else if constexpr (requires { fields(a); }) {
    return std::apply(
        [&](const auto&... of_a) {
          return std::apply([&](const auto&... of_b) { return (same(of_a, of_b) && ...); }, fields(b));
        },
        fields(a));
  } else {
    return a == b;
  }
}

// ---- generation. `size` bounds the tables: 0 gives the smallest messages.
class Sampler {
 public:
  // `with_features`: also fields that are sent only to a peer that has the feature (wire::Features).
  explicit Sampler(check::Random& random, std::uint64_t size, bool with_features = false)
      : random_(random), size_(size), with_features_(with_features) {}

  Message message(std::size_t kind) { return any(kind, std::make_index_sequence<kNumKinds>()); }

 private:
  std::uint64_t upto(std::uint64_t limit) { return random_.below(std::min(size_, limit) + 1); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(random_.next()); }
  std::uint64_t duration() { return random_.next() >> 1; }
  std::uint32_t between(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(random_.between(low, high));
  }

  std::string text(std::uint64_t limit) {
    static constexpr const char* kParts[] = {"a", "-", "0", "é", "€", "\U0001F600"};  // 1 to 4 bytes each
    std::string out;
    const std::uint64_t target = upto(limit);
    for (;;) {
      const char* const part = kParts[random_.below(std::size(kParts))];
      if (out.size() + std::strlen(part) > target) return out;
      out += part;
    }
  }
  Bytes context() {
    const std::string words = text(kMaxContext);
    const auto* const first = reinterpret_cast<const std::byte*>(words.data());
    return {first, first + words.size()};
  }
  Bytes bytes(std::uint64_t limit) {
    Bytes out(upto(limit));
    random_.fill(out.data(), out.size());
    return out;
  }
  std::vector<std::uint32_t> words(std::uint64_t count) {
    std::vector<std::uint32_t> out(count);
    for (auto& word : out) word = u32();
    return out;
  }
  Code loss() {
    static constexpr Code kLosses[] = {Code::kOutOfRange, Code::kLeaseEnded, Code::kDeadline,
                                       Code::kRailFailed, Code::kAuthFailed, Code::kInternal};
    return kLosses[random_.below(std::size(kLosses))];
  }

  void make(Identity& m) {
    m.name = text(20);
    random_.fill(m.incarnation.data(), m.incarnation.size());
    random_.fill(m.host.data(), m.host.size());
    random_.fill(m.process.data(), m.process.size());
    m.unix_name = text(20);
    m.transports.resize(upto(kMaxTransports));
    for (auto& transport : m.transports) transport = text(8);
  }
  void make(Hello& m) {
    m.version = static_cast<std::uint16_t>(between(kProtocolVersion, UINT16_MAX));
    m.oldest = static_cast<std::uint16_t>(between(0, kProtocolVersion));
    random_.fill(m.nonce.data(), m.nonce.size());
    make(m.identity);
    m.extensions = bytes(kMaxExtensions);
  }
  void make(Challenge& m) {
    m.version = static_cast<std::uint16_t>(between(kProtocolVersion, UINT16_MAX));
    m.oldest = static_cast<std::uint16_t>(between(0, kProtocolVersion));
    random_.fill(m.nonce.data(), m.nonce.size());
    make(m.identity);
    m.extensions = bytes(kMaxExtensions);
    random_.fill(m.session.data(), m.session.size());
    random_.fill(m.proof.data(), m.proof.size());
  }
  void make(Proof& m) { random_.fill(m.proof.data(), m.proof.size()); }
  void make(RailHello& m) {
    random_.fill(m.session.data(), m.session.size());
    m.rail = {static_cast<std::uint16_t>(random_.below(kNoRail)), u32()};
    m.transport = text(kMaxName);
    m.instance = static_cast<std::uint16_t>(u32());
    random_.fill(m.proof.data(), m.proof.size());
  }
  void make(RailWelcome& m) {
    m.instance = static_cast<std::uint16_t>(u32());
    random_.fill(m.proof.data(), m.proof.size());
  }
  void make(RailDown& m) { m.rail = {static_cast<std::uint16_t>(random_.below(kNoRail)), u32()}; }
  void make(Heartbeat& m) { m.number = random_.next(); }
  void make(HeartbeatAck& m) { m.number = random_.next(); }
  void make(Goodbye& m) { m = {loss(), text(kMaxText)}; }
  void make(Region& m) {
    m.id = random_.next();
    m.name = text(kMaxName);
    m.base = random_.next() >> 2;
    m.spans.resize(upto(kMaxSpans));
    std::uint64_t end = 0;
    for (auto& span : m.spans) {
      span = {end + random_.below(1u << 20), random_.below(1u << 30)};
      end = span.offset + span.nbytes;
    }
    m.num_blocks = u32();
    m.layout = bytes(kMaxLayout);
    m.keys.resize(upto(kMaxRegionKeys));
    for (auto& keys : m.keys) {
      keys.transport = text(kMaxName);
      keys.keys = bytes(kMaxKeyBytes);
      keys.instance = static_cast<std::uint16_t>(u32());
    }
  }
  void make(RegionGone& m) { m.id = random_.next(); }
  void make(RegionsEnd&) {}
  void make(Conversion& m) {
    std::byte raw[sizeof m];
    random_.fill(raw, sizeof raw);
    std::memcpy(&m, raw, sizeof m);
    m.src_dtype = static_cast<Dtype>(between(1, kNumDtypes - 1));
    m.dst_dtype = static_cast<Dtype>(between(1, kNumDtypes - 1));
    m.src_scales = static_cast<ScalePlace>(between(0, 2));
    m.dst_scales = static_cast<ScalePlace>(between(0, 2));
    m.saturate = static_cast<std::uint8_t>(between(0, 1));
    std::fill(std::begin(m.reserved), std::end(m.reserved), std::uint8_t{0});
  }
  void make(Program& m) {
    m.id = u32();
    m.src_region = random_.next();
    m.dst_region = random_.next();
    m.program.num_layers = between(1, kMaxLayers);
    for (UnitsPerBlock& units : m.program.units) units = {between(0, kMaxUnits), between(0, kMaxUnits)};
    m.program.dst_heads = {between(0, kMaxHeads), between(1, kMaxHeads), between(1, kMaxHeads)};
    m.program.conversions.resize(upto(kMaxLoops));
    for (Conversion& conversion : m.program.conversions) make(conversion);
    m.program.scales.resize(upto(kMaxScales));
    for (float& scale : m.program.scales) scale = number::float_of(u32());
    m.program.loops.resize(upto(kMaxLoops));
    for (auto& loop : m.program.loops) {
      std::byte raw[sizeof loop];
      random_.fill(raw, sizeof raw);
      std::memcpy(&loop, raw, sizeof loop);
      loop.grain = between(0, kNumGrains - 1);
      loop.conversion = static_cast<std::uint32_t>(random_.below(m.program.conversions.size() + 1));
    }
  }
  void make(Lease& m) {
    m.id = random_.next();
    m.region = random_.next();
    m.mode = random_.chance(50) ? LeaseMode::kRead : LeaseMode::kWrite;
    m.renewable = random_.chance(50);
    m.ttl_ns = duration();
    m.all_blocks = random_.chance(50);
    m.blocks = words(upto(kMaxBlocks));
  }
  void make(LeaseEnded& m) { m = {random_.next(), loss()}; }
  void make(TransferSpec& m) {
    m.transfer = random_.next();
    m.program = u32();
    m.grid.first_layer = between(0, kMaxLayers - 1);
    m.grid.num_pairs = static_cast<std::uint32_t>(upto(kMaxBlocks));
    m.grid.num_fine = static_cast<std::uint32_t>(upto(m.grid.num_pairs));
    m.grid.pairs_per_piece = random_.chance(10) ? kMaxBlocks : between(1, m.grid.num_pairs + 1);
    const std::uint32_t most = kMaxLayers - m.grid.first_layer;
    const std::uint32_t per_layer = std::max(1u, m.grid.pieces_per_layer());
    m.grid.num_layers = between(1, std::min(most, kMaxPieces / per_layer));
    m.priority = static_cast<std::uint8_t>(random_.next());
    m.flags = static_cast<std::uint8_t>(random_.below(4));
    m.lease = random_.next();
    m.timeout_ns = duration();
    m.src_ids = words(m.grid.num_pairs);
    m.dst_ids = words(m.grid.num_pairs);
    m.notify = bytes(kMaxNotify);
    m.context = context();
  }
  void make(Offer& m) {
    make(m.spec);
    if (random_.chance(50)) m.spec.flags |= kFlagLastWord;
    m.layers_ready = between(0, m.spec.grid.num_layers);
    m.fence_slot = fence_slot();
    m.fence_generation = random_.next();
    if (with_features_ && random_.chance(50)) m.pages = bytes(kMaxEagerNbytes);
  }
  void make(Request& m) { make(m.spec); }
  void make(Accept& m) { m = {random_.next(), fence_slot(), random_.next(), duration(), random_.chance(50)}; }
  void make(Credit& m) {
    m.transfer = random_.next();
    m.rail = {static_cast<std::uint16_t>(random_.next()), u32()};
    m.first_piece = between(0, kMaxPieces - 1);
    m.num_pieces = between(1, std::min(kMaxCreditPieces, kMaxPieces - m.first_piece));
  }
  void make(LayersReady& m) { m = {random_.next(), between(0, kMaxLayers)}; }
  void make(Checksums& m) {
    m.transfer = random_.next();
    m.first_piece = between(0, kMaxPieces - kMaxCreditPieces);
    m.crc32c = words(1 + upto(kMaxCreditPieces - 1));
  }
  void make(Done& m) { m = {random_.next(), context()}; }
  void make(Fail& m) {
    static constexpr Code kLosses[] = {Code::kNotPermitted, Code::kDeadline, Code::kRefused, Code::kNoPath};
    m = {random_.next(), kLosses[random_.below(std::size(kLosses))], text(kMaxText), context()};
  }
  void make(AgentMessage& m) { m.payload = bytes(kMaxMessage); }
  void make(MessagesTaken& m) { m.charge = random_.next(); }

  std::uint32_t fence_slot() { return between(0, FenceTable::kNumSlots - 1); }
  template <std::size_t I>
  Message one() {
    Message message(std::in_place_index<I>);
    make(std::get<I>(message));
    return message;
  }
  template <std::size_t... I>
  Message any(std::size_t kind, std::index_sequence<I...>) {
    Message message;
    ((kind == I ? void(message = one<I>()) : void()), ...);
    return message;
  }

  check::Random& random_;
  const std::uint64_t size_;
  const bool with_features_;
};

inline ByteSpan body_of(const Bytes& frame) {
  return ByteSpan(frame).subspan(kHeaderNbytes, frame.size() - kHeaderNbytes - kMacNbytes);
}

}  // namespace wire_samples
