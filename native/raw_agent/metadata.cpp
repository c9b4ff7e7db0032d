#include "raw_agent/metadata.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/bytes.h"

namespace kvxfer::raw_agent {
namespace {

constexpr char kMagic[8] = {'k', 'v', 'x', 'f', 'e', 'r', 'M', '1'};
constexpr std::size_t kMostSections = std::size_t{1} << 20;

// As a section goes: little-endian, no padding.
struct PackedSection {
  std::uint64_t address, nbytes, region, offset;
  std::uint32_t kind;
  std::int32_t device;
};
static_assert(sizeof(PackedSection) == 40);

template <class T>
void put(wire::Bytes& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::size_t at = out.size();
  out.resize(at + sizeof value);
  std::memcpy(out.data() + at, &value, sizeof value);
}

void put(wire::Bytes& out, const std::string& text) {
  put(out, static_cast<std::uint32_t>(text.size()));
  const std::size_t at = out.size();
  out.resize(at + text.size());
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(out.data() + at));
}

struct Reader {
  wire::ByteSpan left;
  bool ok = true;

  template <class T>
  T get() {
    T value{};
    if (left.size() < sizeof value) {
      ok = false;
      return value;
    }
    std::memcpy(&value, left.data(), sizeof value);
    left = left.subspan(sizeof value);
    return value;
  }
  std::string text(std::size_t most) {
    const auto size = get<std::uint32_t>();
    if (!ok || size > most || size > left.size()) {
      ok = false;
      return {};
    }
    std::string out(reinterpret_cast<const char*>(left.data()), size);
    left = left.subspan(size);
    ok = wire::utf8_prefix(out) == out.size();  // it goes into messages, and to callers that take text
    return out;
  }
};

}  // namespace

wire::Bytes Metadata::encode() const {
  wire::Bytes out;
  put(out, kMagic);
  put(out, name);
  put(out, incarnation);
  put(out, address);
  put(out, token);
  put(out, static_cast<std::uint32_t>(sections.size()));
  for (const Section& section : sections)
    put(out, PackedSection{section.address, section.nbytes, section.region, section.offset,
                           static_cast<std::uint32_t>(section.kind), section.device});
  return out;
}

Result<Metadata> Metadata::decode(wire::ByteSpan bytes) {
  const Status bad(Code::kProtocol, "the bytes are not metadata of this version of kvxfer");
  Reader in{bytes};
  if (bytes.size() < sizeof kMagic || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) return bad;
  in.left = in.left.subspan(sizeof kMagic);
  Metadata out;
  out.name = in.text(wire::kMaxName);
  out.incarnation = in.get<wire::Id128>();
  out.address = in.text(1024);
  out.token = in.get<Token>();
  const auto num = in.get<std::uint32_t>();
  if (!in.ok || out.name.empty() || num > kMostSections || in.left.size() != num * sizeof(PackedSection))
    return bad;
  for (std::uint32_t i = 0; i < num; ++i) {
    const auto packed = in.get<PackedSection>();
    if (packed.nbytes == 0 || packed.address > UINT64_MAX - packed.nbytes ||
        packed.offset > UINT64_MAX - packed.nbytes || packed.device < 0 ||
        packed.kind > static_cast<std::uint32_t>(MemoryKind::kGpu))
      return bad;
    const auto kind = static_cast<MemoryKind>(packed.kind);
    out.sections.push_back({packed.address, packed.nbytes, packed.region, packed.offset, kind,
                            kind == MemoryKind::kHost ? 0 : packed.device});
  }
  return out;
}

}  // namespace kvxfer::raw_agent
