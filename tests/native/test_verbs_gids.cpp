// The addresses of ports: the order in which they are tried, and what is known of each.
#include <algorithm>

#include "check.h"
#include "sysfs_tree.h"
#include "transports/verbs/gids.h"

namespace kvxfer::verbs::verbs_gids_test {
namespace {

constexpr std::string_view kZero = "0000:0000:0000:0000:0000:0000:0000:0000";
constexpr std::string_view kLinkLocal = "fe80:0000:0000:0000:0000:00ff:fe00:0001";
constexpr std::string_view kIpv4 = "0000:0000:0000:0000:0000:ffff:0a63:0001";
constexpr std::string_view kGlobal = "2001:0db8:0000:0000:0000:00ff:fe00:0001";
constexpr std::string_view kIpv4LinkLocal = "0000:0000:0000:0000:0000:ffff:a9fe:0001";

constexpr GidType kIb = GidType::kInfiniBand, kV1 = GidType::kRoceV1, kV2 = GidType::kRoceV2;
constexpr NetState kUp = NetState::kUp, kDown = NetState::kDown, kUnsure = NetState::kUnknown;

GidRow row(int index, std::string_view gid, GidType type, NetState state = kUp,
           std::string net_device = "eth0") {
  const std::optional<Gid> bytes = parse_gid(gid);
  REQUIRE(bytes.has_value());
  return {index, *bytes, type, type == kIb ? std::string() : std::move(net_device),
          type == kIb ? kUnsure : state};
}

std::string order_of(const GidRanking& ranking) {
  std::string words;
  for (const GidCandidate& candidate : ranking.candidates)
    words += (words.empty() ? "" : " ") + std::to_string(candidate.row.index);
  return words;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Table {
  std::string_view name;
  std::vector<GidRow> rows;
  std::string order;
  std::optional<int> forced = std::nullopt;
};

TEST(gids_are_tried_in_the_order_in_which_they_are_likely_to_work) {
  const Table tables[] = {
      {"infiniband", {row(0, kLinkLocal, kIb), row(1, kGlobal, kIb), row(2, kZero, kIb)}, "0 1"},
      {"infiniband without its own",
       {row(0, kZero, kIb), row(3, kGlobal, kIb), row(1, kLinkLocal, kIb)},
       "1 3"},
      {"infiniband by option", {row(0, kLinkLocal, kIb), row(1, kGlobal, kIb)}, "1", 1},
      {"roce as mlx5 has it",
       {row(0, kLinkLocal, kV1), row(1, kLinkLocal, kV2), row(2, kIpv4, kV1), row(3, kIpv4, kV2)},
       "3 1 2 0"},
      {"soft-roce", {row(0, kLinkLocal, kV2), row(1, kIpv4, kV2), row(2, kZero, kV2)}, "1 0"},
      {"ipv6 alone", {row(0, kLinkLocal, kV2), row(1, kGlobal, kV2)}, "1 0"},
      {"ipv4 and ipv6 are one as good as the other", {row(5, kIpv4, kV2), row(4, kGlobal, kV2)}, "4 5"},
      {"an ipv4 address that nobody gave", {row(0, kIpv4LinkLocal, kV2), row(1, kIpv4, kV2)}, "1 0"},
      {"version 1 alone", {row(0, kLinkLocal, kV1), row(1, kIpv4, kV1)}, "1 0"},
      {"a net device that is down comes last",
       {row(0, kIpv4, kV2, kDown), row(1, kLinkLocal, kV1), row(2, kLinkLocal, kV2),
        row(3, kIpv4, kV2, kDown)},
       "2 1 0 3"},
      {"up, unknown, down",
       {row(0, kIpv4, kV2, kDown), row(1, kIpv4, kV2, kUnsure), row(2, kIpv4, kV2)},
       "2 1 0"},
      {"what it is comes before whether it is known to be up",
       {row(0, kLinkLocal, kV2), row(1, kIpv4, kV2, kUnsure)},
       "1 0"},
      {"a type that cannot be read", {row(0, kIpv4, GidType::kUnknown), row(1, kLinkLocal, kV1)}, "1 0"},
      {"zeros", {row(0, kZero, kV2), row(1, kZero, kV1)}, ""},
      {"nothing", {}, ""},
      {"roce by option", {row(0, kLinkLocal, kV1), row(3, kIpv4, kV2)}, "0", 0},
      {"by option, and it is down", {row(0, kIpv4, kV2), row(1, kIpv4, kV2, kDown)}, "1", 1},
      {"by option, and it is not there", {row(0, kIpv4, kV2)}, "", 5},
      {"by option, and it is zero", {row(0, kIpv4, kV2), row(1, kZero, kV2)}, "", 1},
  };
  check::Random random(check::seed());
  for (const Table& table : tables) {
    std::vector<GidRow> rows = table.rows;
    for (int round = 0; round < 3; ++round) {
      const GidRanking ranking = rank_gids(rows, table.forced);
      const std::string at = std::string(table.name) + ": ";
      CHECK_EQ(at + order_of(ranking), at + table.order);
      CHECK_EQ(ranking.candidates.empty(), !ranking.why_none.empty());
      for (const GidCandidate& candidate : ranking.candidates) {
        CHECK(has(candidate.why, "GID " + std::to_string(candidate.row.index) + ", "));
        CHECK_EQ(has(candidate.why, "it was asked for"), table.forced.has_value());
      }
      random.shuffle(rows);
    }
  }
}

TEST(each_choice_says_why) {
  const std::vector<GidRow> rows = {row(0, kLinkLocal, kV1, kDown), row(1, kIpv4, kV2),
                                    row(2, kGlobal, kV2, kUnsure, "")};
  const GidRanking ranking = rank_gids(rows);
  REQUIRE_EQ(ranking.candidates.size(), 3);
  CHECK_EQ(ranking.candidates[0].why, "GID 1, 10.99.0.1, RoCE v2: an IPv4 address; eth0 is up");
  CHECK_EQ(ranking.candidates[1].why,
           "GID 2, 2001:db8::ff:fe00:1, RoCE v2: a global IPv6 address; whether its net device is up cannot "
           "be read");
  CHECK_EQ(
      ranking.candidates[2].why,
      "GID 0, fe80::ff:fe00:1, RoCE v1, which no router forwards: a link-local address, which reaches one "
      "network alone; eth0 is down, so nothing arrives there: ip link set eth0 up");
  CHECK_EQ(rank_gids(std::vector{row(0, kLinkLocal, kIb)}).candidates[0].why,
           "GID 0, fe80::ff:fe00:1, InfiniBand: the port's own address");
  CHECK(has(rank_gids({}).why_none, "ip address add"));
  CHECK_EQ(rank_gids(rows, 7).why_none, "the port has no GID 7, which was asked for; it has 0, 1, 2");
}

TEST(after_a_failed_connection_comes_the_next_and_none_twice) {
  const std::vector<GidRow> rows = {row(0, kLinkLocal, kV1), row(1, kLinkLocal, kV2), row(2, kIpv4, kV1),
                                    row(3, kIpv4, kV2)};
  const GidRanking ranking = rank_gids(rows);
  std::vector<GidRow> tried;
  std::string order;
  while (const GidCandidate* candidate = next_candidate(ranking, tried)) {
    order += std::to_string(candidate->row.index);
    tried.push_back(candidate->row);
    REQUIRE(tried.size() <= rows.size());
  }
  CHECK_EQ(order, "3120");
  CHECK(next_candidate(ranking, rows) == nullptr);
  CHECK(next_candidate(rank_gids({}), {}) == nullptr);

  // The net device went down and up again: the address counts as the same. Another address counts as new.
  std::vector<GidRow> later = rows;
  later[3].net_state = kDown;
  CHECK(next_candidate(rank_gids(later), rows) == nullptr);
  later[3] = row(3, kGlobal, kV2);
  const GidRanking again = rank_gids(later);
  const GidCandidate* const anew = next_candidate(again, rows);
  REQUIRE(anew != nullptr);
  CHECK_EQ(anew->row.index, 3);
}

TEST(what_a_gid_change_altered_is_told_by_index) {
  const std::vector<GidRow> before = {row(0, kLinkLocal, kV1), row(1, kLinkLocal, kV2), row(2, kIpv4, kV1),
                                      row(3, kIpv4, kV2),      row(4, kIpv4, kV2),      row(6, kIpv4, kV2)};
  const std::vector<GidRow> after = {row(0, kLinkLocal, kV1), row(1, kLinkLocal, kV2, kDown),
                                     row(2, kIpv4, kV2),      row(3, kGlobal, kV2),
                                     row(5, kIpv4, kV2),      row(6, kIpv4, kV2, kUp, "bond0")};
  CHECK(changed(before, before).empty());
  CHECK(changed({}, {}).empty());
  const std::vector<GidChange> changes = changed(before, after);
  const struct {
    int index;
    bool moved;
    const char* words;
  } expected[] = {
      {1, false,
       "GID 1, fe80::ff:fe00:1, RoCE v2: eth0 is down, so nothing arrives there: ip link set eth0 up now"},
      {2, true, "GID 2, 10.99.0.1, RoCE v2, was RoCE v1"},
      {3, true, "GID 3, 2001:db8::ff:fe00:1, RoCE v2, was 10.99.0.1"},
      {4, true, "GID 4, 10.99.0.1, RoCE v2, is gone"},
      {5, false, "GID 5, 10.99.0.1, RoCE v2, was added"},
      {6, false, "GID 6, 10.99.0.1, RoCE v2, is of bond0 now, was of eth0"},
  };
  REQUIRE_EQ(changes.size(), std::size(expected));
  for (std::size_t i = 0; i < changes.size(); ++i) {
    CHECK_EQ(changes[i].index, expected[i].index);
    CHECK_EQ(changes[i].moved(), expected[i].moved);
    CHECK_EQ(changes[i].words, expected[i].words);
  }
  CHECK(!changes[3].after && !changes[4].before);
}

TEST(tables_are_read_as_the_kernel_shows_them) {
  const struct {
    const char *fixture, *device;
    std::size_t num_rows;
    const char* order;
    GidType best;
  } rows[] = {
      {"dgx_h100", "mlx5_0", 1, "0", kIb},       {"dgx_h100", "mlx5_2", 2, "1 0", kV2},
      {"hgx_b200", "mlx5_7", 4, "3 1 2 0", kV2}, {"two_nics", "mlx5_1", 4, "3 1 2 0", kV2},
      {"cloud_vm", "mlx5_0", 4, "3 1 2 0", kV2}, {"soft_roce", "rxe1", 2, "1 0", kV2},
  };
  for (const auto& expected : rows) {
    const SysfsTree tree(SysfsTree::fixture(expected.fixture));
    const std::vector<GidRow> table = read_gids(expected.device, 1, tree.root());
    CHECK_EQ(table.size(), expected.num_rows);
    const GidRanking ranking = rank_gids(table);
    CHECK_EQ(order_of(ranking), expected.order);
    REQUIRE(!ranking.candidates.empty());
    CHECK(ranking.candidates[0].row.type == expected.best);
    CHECK(read_gids(expected.device, 2, tree.root()).empty());
    CHECK(read_gids("mlx5_99", 1, tree.root()).empty());
  }
  const SysfsTree tree(SysfsTree::fixture("soft_roce"));
  const GidRow best = rank_gids(read_gids("rxe0", 1, tree.root())).candidates[0].row;
  CHECK_EQ(to_text(best.gid), "10.99.0.1");
  CHECK_EQ(best.net_device, "veth0");
  CHECK(best.net_state == kUp);
}

TEST(whether_a_net_device_is_up_is_as_the_kernel_says) {
  const struct {
    const char *operstate, *flags;
    NetState state;
  } rows[] = {
      {"up", "0x1003", kUp},      {"down", "0x1002", kDown},    {"lowerlayerdown", "0x1003", kDown},
      {"unknown", "0x1003", kUp}, {"unknown", "0x1002", kDown}, {"unknown", "", kUnsure},
      {"", "0x1003", kUnsure},
  };
  for (const auto& expected : rows) {
    SysfsTree tree(SysfsTree::fixture("soft_roce"));
    tree.add("class/net/veth0/operstate = " + std::string(expected.operstate) +
             "\nclass/net/veth0/flags = " + expected.flags + "\n");
    const std::vector<GidRow> table = read_gids("rxe0", 1, tree.root());
    REQUIRE_EQ(table.size(), 2);
    CHECK(table[0].net_state == expected.state);
  }
  // A net device in another network namespace is invisible.
  SysfsTree tree(SysfsTree::fixture("soft_roce"));
  tree.remove("class/net/veth0");
  CHECK(read_gids("rxe0", 1, tree.root())[1].net_state == kUnsure);
}

TEST(tables_that_are_half_there_give_what_they_have) {
  SysfsTree tree(SysfsTree::fixture("two_nics"));
  const std::string port = "$mlx5_0/infiniband/mlx5_0/ports/1/";
  tree.add(port + "gids/1 = nonsense\n" + port + "gids/x = fe80::1\n" + port +
           "gids/99999999999 = " + std::string(kIpv4) + "\n");
  tree.remove(port + "gid_attrs/types/2");
  tree.remove(port + "gid_attrs/ndevs");
  const std::vector<GidRow> table = read_gids("mlx5_0", 1, tree.root());
  REQUIRE_EQ(table.size(), 3);
  CHECK_EQ(order_of(rank_gids(table)), "3 0 2");
  CHECK(table[1].type == GidType::kUnknown);
  CHECK_EQ(table[1].net_device, "");
}

TEST(gids_are_read_and_written_as_addresses_are) {
  const struct {
    std::string_view text;
    const char* shown;
  } rows[] = {
      {kZero, "::"},
      {kLinkLocal, "fe80::ff:fe00:1"},
      {kIpv4, "10.99.0.1"},
      {kGlobal, "2001:db8::ff:fe00:1"},
      {"FE80:0000:0000:0000:0000:00FF:FE00:0001", "fe80::ff:fe00:1"},
  };
  for (const auto& expected : rows) {
    const std::optional<Gid> gid = parse_gid(expected.text);
    REQUIRE(gid.has_value());
    CHECK_EQ(to_text(*gid), expected.shown);
  }
  for (const std::string_view text :
       {"", "fe80::1", "fe80:0000:0000:0000:0000:00ff:fe00:00011", "fe80:0000:0000:0000:0000:00ff:fe00:000",
        "fe80.0000:0000:0000:0000:00ff:fe00:0001", "fe80:0000:0000:0000:0000:00ff:fe00:000g",
        "fe8:00000:0000:0000:0000:00ff:fe00:0001", "-e80:0000:0000:0000:0000:00ff:fe00:0001"})
    CHECK(!parse_gid(text).has_value());
  check::Random random(check::seed());
  for (int i = 0; i < 10000; ++i) {
    std::string text(i % 3 == 0 ? kIpv4 : kLinkLocal);
    for (std::uint64_t changes = random.between(1, 3); changes > 0; --changes)
      text[random.below(text.size())] = static_cast<char>(random.next());
    if (const std::optional<Gid> gid = parse_gid(text)) CHECK(!to_text(*gid).empty());
  }
}

}  // namespace
}  // namespace kvxfer::verbs::verbs_gids_test
