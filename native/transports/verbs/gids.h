// The addresses (GIDs) of a port, and which of them a queue pair should have.
//
// A port has a table of them, and a connection works with one whose network the peer can reach. No table says what
// that is, so they are tried, likeliest first. Pure but for read_gids; the rows may come from the device as well.
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

// Rows that have an address. `root` is where sysfs is.
std::vector<GidRow> read_gids(const std::string& device, int port, const std::string& root = "/sys");

struct GidCandidate {
  GidRow row;
  std::string why;  // a sentence, for people
};

struct GidRanking {
  std::vector<GidCandidate> candidates;  // best first
  std::string why_none;  // in words, where there is none
};

// InfiniBand: by index, of which 0 is the port's own. RoCE: addresses of a net device that is down last, since nothing
// can arrive there; else version 2 before version 1, which no router forwards; else IPv4 and global IPv6 before
// link-local, likewise; else the lowest index. Addresses of zeros never. `forced`: the row of that index alone.
GidRanking rank_gids(std::span<const GidRow> rows, std::optional<int> forced = std::nullopt);

// After connections with those in `tried` failed: the best that is left, null where none is. A row that has another
// address since is another row.
const GidCandidate* next_candidate(const GidRanking& ranking, std::span<const GidRow> tried);

// What differs between two readings of one table, by index: the row before (absent: it was added) and after (absent:
// it is gone).
struct GidChange {
  int index = 0;
  std::optional<GidRow> before, after;
  std::string words;  // a sentence, for people

  // A queue pair that has this row's address cannot go on with it.
  bool moved() const {
    return before && (!after || before->gid != after->gid || before->type != after->type);
  }
};

std::vector<GidChange> changed(std::span<const GidRow> before, std::span<const GidRow> after);

std::optional<Gid> parse_gid(std::string_view text);  // as sysfs has it: eight groups of four digits
std::string describe(const GidRow& row);  // "GID 1, 10.0.0.1, RoCE v2"
std::string to_text(const Gid& gid);  // "10.0.0.1" of an IPv4 address, else as IPv6 is written

}  // namespace kvxfer::verbs
