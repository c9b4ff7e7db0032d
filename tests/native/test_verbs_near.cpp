// Agents of a machine with two NUMA nodes and a NIC on each: pages of host memory go through the NIC that is near it.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "counting_device.h"
#include "near_machine.h"

namespace kvxfer::verbs_near_test {
namespace {

using namespace agent_pair;
using counting_device::Fabric;

constexpr std::uint64_t kFences = 64 * 8;  // words of them, which come over any rail

// The node that is reported for regions.
int node_at_src = -1, node_at_dst = -1;
const std::byte* src_memory = nullptr;
int said_node(const LocalRegion& region) { return region.base == src_memory ? node_at_src : node_at_dst; }

struct End : Agent<> {
  using Agent::add;
  using Agent::Agent;
  void add() {
    if (src_memory == nullptr) src_memory = memory.data();  // the source is made first
    Agent::add();
  }
};

struct Near {
  explicit Near(int src_node, int dst_node, const std::string& ways = "read",
                const std::string& devices = "") {
    node_at_src = src_node, node_at_dst = dst_node, src_memory = nullptr;
    both.emplace(Options{.transports = {"verbs"},
                         .layout = {64, 16 * 1024, 2},
                         .num_rails = 4,
                         .transport_options = {{"verbs.ways", ways}, {"verbs.devices", devices}},
                         .numa_node_of = said_node});
  }
  // Returns which devices moved the pages: "nic0", "nic1", or "nic0 nic1".
  std::string hand_over(bool write = true) {
    both->fill_source(random);
    fabric.forget_counts();
    if (!is_done(both->end(write).post(both->request(write))) || both->src.memory != both->dst.memory)
      return "not handed over";
    const auto counts = fabric.counts();
    std::string used;
    for (std::size_t i = 0; i < 2; ++i)
      if (counts.nbytes_of[i] > kFences) used += (used.empty() ? "nic" : " nic") + std::to_string(i);
    return used;
  }

  const NearMachine machine;
  Fabric fabric;
  check::Random random{check::seed()};
  std::optional<Pair<End>> both;
};

TEST(pages_come_through_the_nic_that_is_near_the_destination) {
  const struct {
    int src, dst;
    std::string ways, devices, expected;
  } cases[] = {
      {0, 0, "read", "", "nic0"},
      {1, 1, "read", "", "nic1"},
      {1, 0, "read", "", "nic0"},
      {0, 1, "write", "", "nic1"},  // the destination also chooses the rail by which the source writes
      {0, -1, "read", "", "nic0 nic1"},  // interleaved, or unknown
      {0, 7, "read", "", "nic0 nic1"},
      {0, 0, "read", "nic0,nic1", "nic0 nic1"},  // named devices take precedence
  };
  for (const auto& [src, dst, ways, devices, expected] : cases) {
    Near near(src, dst, ways, devices);
    for (const bool write : {true, false}) CHECK_EQ(near.hand_over(write), expected);
  }
}

TEST(the_far_nic_carries_pages_where_the_near_one_is_lost_and_until_it_is_back) {
  Near near(0, 0);
  CHECK_EQ(near.hand_over(), "nic0");
  near.fabric.set_port(0, false);
  REQUIRE(await([&] { return num_rails(*near.both->dst.runtime, near.both->here) == 3; }));
  CHECK_EQ(near.hand_over(), "nic1");
  near.fabric.set_port(0, true);
  REQUIRE(await([&] { return num_rails(*near.both->dst.runtime, near.both->here) == 4; }));
  CHECK_EQ(near.hand_over(), "nic0");
}

TEST(each_region_of_an_agent_has_rails_of_its_own) {
  Near near(0, 0);
  auto& dst = near.both->dst;
  node_at_dst = 1;
  std::vector<std::byte> more(dst.memory.size());
  const RegionId other = dst.add(more.data(), "other");
  REQUIRE(await([&] {
    const auto regions = near.both->src.runtime->with_engine(
        [&](Engine& engine, Time) { return engine.peer_regions(near.both->there); });
    return regions.ok() && regions.value().size() == 2;
  }));
  grant(*dst.runtime, near.both->here, other, wire::LeaseMode::kWrite);
  CHECK_EQ(near.hand_over(), "nic0");
  near.fabric.forget_counts();
  const std::uint32_t program = dst.install(near.both->here, false, near.both->src.region, other);
  TransferRequest request = near.both->request(false);
  request.program = program;
  REQUIRE(is_done(dst.post(std::move(request))));
  CHECK(near.both->src.memory == more);
  CHECK(near.fabric.counts().nbytes_of[0] <= kFences);
  CHECK_EQ(near.hand_over(), "nic0");
  dst.runtime->close(kBound);  // before `more` is destroyed
}

}  // namespace
}  // namespace kvxfer::verbs_near_test
