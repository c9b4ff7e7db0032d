#include "transports/verbs/gids.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <charconv>
#include <tuple>

#include "transports/verbs/sysfs.h"

namespace kvxfer::verbs {
namespace {

enum class Scope : std::uint8_t { kRoutable, kLinkLocal };

bool is_zero(const Gid& gid) {
  return std::all_of(gid.begin(), gid.end(), [](std::uint8_t byte) { return byte == 0; });
}

// ::ffff:a.b.c.d
bool is_ipv4(const Gid& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](std::uint8_t byte) { return byte == 0; }) &&
         gid[10] == 0xff && gid[11] == 0xff;
}

// fe80::/10, and 169.254.0.0/16.
Scope scope_of(const Gid& gid) {
  const bool is_link_local =
      is_ipv4(gid) ? gid[12] == 169 && gid[13] == 254 : gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
  return is_link_local ? Scope::kLinkLocal : Scope::kRoutable;
}

int rank_of(GidType type) {
  switch (type) {
    case GidType::kInfiniBand:
    case GidType::kRoceV2: return 0;
    case GidType::kRoceV1: return 1;
    case GidType::kUnknown: break;
  }
  return 2;
}

int rank_of(NetState state) {
  switch (state) {
    case NetState::kUp: return 0;
    case NetState::kUnknown: return 1;
    case NetState::kDown: break;
  }
  return 2;
}

// Lower is better.
auto rank_of(const GidRow& row) {
  const bool is_infiniband = row.type == GidType::kInfiniBand;
  const bool is_down = !is_infiniband && row.net_state == NetState::kDown;
  const Scope scope = is_infiniband ? Scope::kRoutable : scope_of(row.gid);
  const int net_state = is_infiniband ? 0 : rank_of(row.net_state);
  return std::tuple(is_down, rank_of(row.type), scope, net_state, row.index);
}

std::string_view name_of(GidType type) {
  switch (type) {
    case GidType::kInfiniBand: return "InfiniBand";
    case GidType::kRoceV1: return "RoCE v1";
    case GidType::kRoceV2: return "RoCE v2";
    case GidType::kUnknown: break;
  }
  return "of a type that cannot be read";
}

std::string_view kind_of(const Gid& gid) {
  if (scope_of(gid) == Scope::kLinkLocal) return "a link-local address, which reaches one network alone";
  return is_ipv4(gid) ? "an IPv4 address" : "a global IPv6 address";
}

std::string state_words(const GidRow& row) {
  const std::string device = row.net_device.empty() ? "its net device" : row.net_device;
  switch (row.net_state) {
    case NetState::kUp: return device + " is up";
    case NetState::kDown: return device + " is down, so nothing arrives there: ip link set " + device + " up";
    case NetState::kUnknown: break;
  }
  return "whether " + device + " is up cannot be read";
}

std::string why(const GidRow& row) {
  std::string words = describe(row);
  if (row.type == GidType::kInfiniBand)
    return words + (row.index == 0 ? ": the port's own address" : ": a further address of the port");
  if (row.type == GidType::kRoceV1) words += ", which no router forwards";
  return words + ": " + std::string(kind_of(row.gid)) + "; " + state_words(row);
}

NetState state_of(const std::string& net_device, const std::string& root) {
  if (net_device.empty()) return NetState::kUnknown;
  const std::string folder = root + "/class/net/" + net_device;
  const std::string words = sysfs::read_line(folder + "/operstate");
  if (words == "up") return NetState::kUp;
  if (words == "unknown") {
    // The driver does not report its state; whether it is set up is all that we know.
    const auto flags = sysfs::read_number(folder + "/flags", 0);
    if (!flags) return NetState::kUnknown;
    return (*flags & IFF_UP) != 0 ? NetState::kUp : NetState::kDown;
  }
  return words.empty() ? NetState::kUnknown : NetState::kDown;
}

const GidRow* find_row(std::span<const GidRow> rows, int index) {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const GidRow& row) { return row.index == index; });
  return found == rows.end() ? nullptr : &*found;
}

std::string words_of(const GidChange& change) {
  if (!change.before) return describe(*change.after) + ", was added";
  if (!change.after) return describe(*change.before) + ", is gone";
  if (change.before->gid != change.after->gid)
    return describe(*change.after) + ", was " + to_text(change.before->gid);
  if (change.before->type != change.after->type)
    return describe(*change.after) + ", was " + std::string(name_of(change.before->type));
  if (change.before->net_device != change.after->net_device)
    return describe(*change.after) + ", is of " + change.after->net_device + " now, was of " +
           change.before->net_device;
  return describe(*change.after) + ": " + state_words(*change.after) + " now";
}

std::string why_no_candidate(std::span<const GidRow> rows, std::optional<int> forced) {
  std::string indices;
  for (const GidRow& row : rows)
    if (!is_zero(row.gid)) indices += (indices.empty() ? "" : ", ") + std::to_string(row.index);
  if (indices.empty())
    return "the port has no address: give its net device one (ip address add), or start a subnet manager on "
           "InfiniBand";
  return "the port has no GID " + std::to_string(forced.value_or(0)) + ", which was asked for; it has " +
         indices;
}

}  // namespace

std::vector<GidRow> read_gids(const std::string& device, int port, const std::string& root) {
  const std::string folder = root + "/class/infiniband/" + device + "/ports/" + std::to_string(port);
  const bool is_infiniband = sysfs::read_line(folder + "/link_layer") == "InfiniBand";
  std::vector<GidRow> rows;
  for (const std::string& name : sysfs::names_in(folder + "/gids")) {
    const std::optional<int> index = sysfs::index_of(name);
    if (!index) continue;
    const std::optional<Gid> gid = parse_gid(sysfs::read_line(folder + "/gids/" + name));
    if (!gid || is_zero(*gid)) continue;  // most rows of the table
    GidRow row;
    row.index = *index;
    row.gid = *gid;
    // The kernel uses one word for InfiniBand and RoCE v1.
    const std::string type = sysfs::read_line(folder + "/gid_attrs/types/" + name);
    if (is_infiniband)
      row.type = GidType::kInfiniBand;
    else if (type == "RoCE v2")
      row.type = GidType::kRoceV2;
    else if (type == "IB/RoCE v1")
      row.type = GidType::kRoceV1;
    if (!is_infiniband) {
      row.net_device = sysfs::read_line(folder + "/gid_attrs/ndevs/" + name);
      row.net_state = state_of(row.net_device, root);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

GidRanking rank_gids(std::span<const GidRow> rows, std::optional<int> forced) {
  GidRanking ranking;
  for (const GidRow& row : rows) {
    if (is_zero(row.gid) || (forced && row.index != *forced)) continue;
    ranking.candidates.push_back({row, why(row) + (forced ? "; it was asked for" : "")});
  }
  std::sort(ranking.candidates.begin(), ranking.candidates.end(),
            [](const GidCandidate& left, const GidCandidate& right) {
              return rank_of(left.row) < rank_of(right.row);
            });
  if (ranking.candidates.empty()) ranking.why_none = why_no_candidate(rows, forced);
  return ranking;
}

const GidCandidate* next_candidate(const GidRanking& ranking, std::span<const GidRow> tried) {
  for (const GidCandidate& candidate : ranking.candidates) {
    const bool was_tried = std::any_of(tried.begin(), tried.end(), [&](const GidRow& row) {
      return row.index == candidate.row.index && row.gid == candidate.row.gid &&
             row.type == candidate.row.type;
    });
    if (!was_tried) return &candidate;
  }
  return nullptr;
}

std::vector<GidChange> changed(std::span<const GidRow> before, std::span<const GidRow> after) {
  std::vector<GidChange> changes;
  for (const GidRow& row : before) {
    const GidRow* const now = find_row(after, row.index);
    if (now == nullptr)
      changes.push_back({row.index, row, std::nullopt, {}});
    else if (*now != row)
      changes.push_back({row.index, row, *now, {}});
  }
  for (const GidRow& row : after)
    if (find_row(before, row.index) == nullptr) changes.push_back({row.index, std::nullopt, row, {}});
  std::sort(changes.begin(), changes.end(),
            [](const GidChange& left, const GidChange& right) { return left.index < right.index; });
  for (GidChange& change : changes) change.words = words_of(change);
  return changes;
}

std::optional<Gid> parse_gid(std::string_view text) {
  Gid gid{};
  if (text.size() != 39) return std::nullopt;
  for (std::size_t i = 0; i < gid.size(); i += 2) {
    const char* const from = text.data() + i / 2 * 5;
    std::uint16_t group = 0;
    if (std::from_chars(from, from + 4, group, 16).ptr != from + 4) return std::nullopt;
    if (i + 2 < gid.size() && from[4] != ':') return std::nullopt;
    gid[i] = static_cast<std::uint8_t>(group >> 8);
    gid[i + 1] = static_cast<std::uint8_t>(group);
  }
  return gid;
}

std::string describe(const GidRow& row) {
  return "GID " + std::to_string(row.index) + ", " + to_text(row.gid) + ", " + std::string(name_of(row.type));
}

std::string to_text(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid))
    ::inet_ntop(AF_INET, gid.data() + 12, text, sizeof(text));
  else
    ::inet_ntop(AF_INET6, gid.data(), text, sizeof(text));
  return text;
}

}  // namespace kvxfer::verbs
