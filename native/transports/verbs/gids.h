// The addresses (GIDs) of a port, and which one a queue pair should use.
//
// A port has a table of GIDs. A connection works only with a GID whose network the peer can reach. No table
// tells which those are, so we try them, likeliest first. All functions but read_gids are pure; a caller may
// also take the rows from the device.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvxfer::verbs {

using Gid = std::array<std::uint8_t, 16>;

enum class GidType : std::uint8_t { kUnknown, kInfiniBand, kRoceV1, kRoceV2 };

enum class NetState : std::uint8_t { kUnknown, kUp, kDown };

struct GidRow {
  int index = 0;
  Gid gid{};
  GidType type = GidType::kUnknown;
  std::string net_device;  // "" on InfiniBand, and where it is not known
  NetState net_state = NetState::kUnknown;

  friend bool operator==(const GidRow&, const GidRow&) = default;
};

// The rows that have an address. `root` is where sysfs is.
std::vector<GidRow> read_gids(const std::string& device, int port, const std::string& root = "/sys");

struct GidCandidate {
  GidRow row;
  std::string why;  // a sentence, for people
};

struct GidRanking {
  std::vector<GidCandidate> candidates;  // best first
  std::string why_none;  // in words, if there is no candidate
};

// Ranks GIDs. InfiniBand: by index; index 0 is the port's own. RoCE: addresses of a net device that is down
// come last, since nothing can arrive there. Then version 2 comes before version 1, which no router forwards.
// Then IPv4 and global IPv6 come before link-local, which no router forwards either. Then the lowest index. A
// zero address is never a candidate. `forced`: only the row with this index.
GidRanking rank_gids(std::span<const GidRow> rows, std::optional<int> forced = std::nullopt);

// The best candidate that is not in `tried`, which lists rows whose connections failed; null: none is left. A
// row whose address has changed since counts as another row.
const GidCandidate* next_candidate(const GidRanking& ranking, std::span<const GidRow> tried);

// A difference between two readings of one table, by index: the row before (absent: it was added) and after
// (absent: it was removed).
struct GidChange {
  int index = 0;
  std::optional<GidRow> before, after;
  std::string words;  // a sentence, for people

  // A queue pair with this row's address cannot go on using it.
  bool moved() const {
    return before && (!after || before->gid != after->gid || before->type != after->type);
  }
};

std::vector<GidChange> changed(std::span<const GidRow> before, std::span<const GidRow> after);

std::optional<Gid> parse_gid(std::string_view text);  // as sysfs has it: eight groups of four digits
std::string describe(const GidRow& row);  // "GID 1, 10.0.0.1, RoCE v2"
std::string to_text(const Gid& gid);  // "10.0.0.1" of an IPv4 address, else as IPv6 is written

}  // namespace kvxfer::verbs
