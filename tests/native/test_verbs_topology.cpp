// Machines as their sysfs shows them (topology/*.txt): the rails of each GPU and each NUMA node, and how far they are.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "sysfs_tree.h"
#include "transports/verbs/rail_choice.h"
#include "transports/verbs/sysfs.h"
#include "transports/verbs/topology.h"

namespace kvxfer::verbs {
namespace {

std::string named(const Rail& rail) { return rail.device + ":" + std::to_string(rail.port); }

// "mlx5_0:1 PIX", the near rails alone.
std::string near_words(const RailChoice& choice) {
  std::string words;
  for (const Rail& rail : choice.rails)
    if (rail.is_near) words += (words.empty() ? "" : " ") + named(rail);
  return words.empty() ? words : words + " " + std::string(name_of(choice.rails.front().distance));
}

// "PXB NODE NODE SYS": of all rails, nearest first.
std::string distance_words(const RailChoice& choice) {
  std::string words;
  for (const Rail& rail : choice.rails)
    words += (words.empty() ? "" : " ") + std::string(name_of(rail.distance));
  return words;
}

std::string left_words(const Topology& topology) {
  std::string words;
  for (const LeftOut& left : left_out(topology))
    words += (words.empty() ? "" : " ") + left.device + ":" + std::to_string(left.port);
  return words;
}

std::string why_left(const Topology& topology, const std::string& device) {
  for (const LeftOut& left : left_out(topology))
    if (left.device == device) return left.why;
  return {};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const std::string kUnread = "the state of its port cannot be read";

// What must hold for every choice on any machine.
void check_choice(const Topology& topology, const RailChoice& choice) {
  CHECK_EQ(choice.rails.empty(), choice.num_near == 0);
  CHECK_EQ(choice.rails.empty(), !why_no_rail(topology).empty());
  CHECK(choice.rails.empty() ? choice.turn == 0 : choice.turn < choice.num_near);
  std::size_t num_ports = 0, num_left = 0;
  for (const Nic& nic : topology.nics) num_ports += nic.ports.size();
  for (const LeftOut& left : choice.left_out) {
    CHECK(!left.why.empty());
    num_left += left.port != 0;
  }
  CHECK_EQ(choice.rails.size() + num_left, num_ports);
  for (std::size_t i = 0; i < choice.rails.size(); ++i) {
    const Rail& rail = choice.rails[i];
    CHECK_EQ(rail.is_near, i < choice.num_near);
    CHECK(has(rail.why, std::string(name_of(rail.distance))));
    if (i == 0) continue;
    const Rail& before = choice.rails[i - 1];
    if (has(before.why, kUnread) || has(rail.why, kUnread)) {
      CHECK(has(rail.why, kUnread));
      continue;
    }
    CHECK(before.distance <= rail.distance);
    CHECK(before.distance != rail.distance || before.node_distance != rail.node_distance ||
          !sysfs::natural_less(named(rail), named(before)));
  }
}

struct Expected {
  MemoryPlace memory;
  std::string near;
  std::size_t turn = 0;
  std::string distances = {};  // of all rails; "": not checked
};

struct Shown {
  std::string fixture;
  std::size_t num_nics, num_gpus, num_nodes;
  std::string left;
};
struct Machine : Shown { std::vector<Expected> expected; };

MemoryPlace gpu(std::string address) { return MemoryPlace::on_gpu(std::move(address)); }
MemoryPlace node(int number) { return MemoryPlace::on_node(number); }

const std::vector<Machine>& machines() {
  static const std::vector<Machine> all = {
      {{"dgx_h100", 12, 8, 2, "mlx5_2:1 mlx5_8:1"},
       {{gpu("0000:1b:00.0"), "mlx5_0:1 PXB", 0, "PXB NODE NODE NODE NODE SYS SYS SYS SYS SYS"},
        {gpu("0000:43:00.0"), "mlx5_3:1 PXB"},
        {gpu("0000:52:00.0"), "mlx5_4:1 PXB"},
        {gpu("0000:61:00.0"), "mlx5_5:1 PXB"},
        {gpu("0000:9d:00.0"), "mlx5_6:1 PXB", 0, "PXB NODE NODE NODE NODE SYS SYS SYS SYS SYS"},
        {gpu("0000:c3:00.0"), "mlx5_9:1 PXB"},
        {gpu("0000:d1:00.0"), "mlx5_10:1 PXB"},
        {gpu("0000:df:00.0"), "mlx5_11:1 PXB"},
        {node(0), "mlx5_0:1 mlx5_1:1 mlx5_3:1 mlx5_4:1 mlx5_5:1 NODE", 0,
         "NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS"},
        {node(1), "mlx5_6:1 mlx5_7:1 mlx5_9:1 mlx5_10:1 mlx5_11:1 NODE"}}},
      {{"hgx_b200", 8, 8, 4, ""},
       {{gpu("0000:1b:00.0"), "mlx5_0:1 PIX", 0, "PIX NODE SYS SYS SYS SYS SYS SYS"},
        {gpu("0000:3d:00.0"), "mlx5_1:1 PIX"},
        {gpu("0000:4e:00.0"), "mlx5_2:1 PIX"},
        {gpu("0000:60:00.0"), "mlx5_3:1 PIX"},
        {gpu("0000:9d:00.0"), "mlx5_4:1 PIX"},
        {gpu("0000:bd:00.0"), "mlx5_5:1 PIX"},
        {gpu("0000:cd:00.0"), "mlx5_6:1 PIX"},
        {gpu("0000:dd:00.0"), "mlx5_7:1 PIX"},
        {node(0), "mlx5_0:1 mlx5_1:1 NODE"},
        {node(1), "mlx5_2:1 mlx5_3:1 NODE"},
        {node(2), "mlx5_4:1 mlx5_5:1 NODE"},
        {node(3), "mlx5_6:1 mlx5_7:1 NODE"}}},
      {{"two_nics", 2, 0, 2, ""},
       {{node(0), "mlx5_0:1 NODE", 0, "NODE SYS"},
        {node(1), "mlx5_1:1 NODE", 0, "NODE SYS"},
        {node(kNoNode), "mlx5_0:1 mlx5_1:1 unknown", 0, "unknown unknown"},
        {node(7), "mlx5_0:1 mlx5_1:1 SYS"},
        {gpu("0000:01:00.0"), "mlx5_0:1 mlx5_1:1 unknown"}}},
      {{"cloud_vm", 1, 0, 1, ""}, {{node(0), "mlx5_0:1 NODE"}, {node(kNoNode), "mlx5_0:1 unknown"}}},
      {{"numa_decides", 4, 4, 2, ""},
       {{gpu("0000:01:00.0"), "mlx5_0:1 mlx5_1:1 NODE", 0, "NODE NODE SYS SYS"},
        {gpu("0000:21:00.0"), "mlx5_0:1 mlx5_1:1 NODE", 1},
        {gpu("0000:81:00.0"), "mlx5_2:1 mlx5_3:1 NODE", 0},
        {gpu("0000:a1:00.0"), "mlx5_2:1 mlx5_3:1 NODE", 1},
        {node(0), "mlx5_0:1 mlx5_1:1 NODE"},
        {node(1), "mlx5_2:1 mlx5_3:1 NODE"}}},
      {{"shared_switch", 4, 4, 2, ""},
       {{gpu("0000:1a:00.0"), "mlx5_0:1 mlx5_1:1 PIX", 0, "PIX PIX SYS SYS"},
        {gpu("0000:1b:00.0"), "mlx5_0:1 mlx5_1:1 PIX", 1},
        {gpu("0000:9a:00.0"), "mlx5_2:1 mlx5_3:1 PIX", 0},
        {gpu("0000:9b:00.0"), "mlx5_2:1 mlx5_3:1 PIX", 1}}},
      {{"soft_roce", 2, 0, 1, ""},
       {{node(0), "rxe0:1 rxe1:1 unknown"}, {gpu("0000:01:00.0"), "rxe0:1 rxe1:1 unknown"}}},
  };
  return all;
}

TEST(memory_has_the_rails_that_are_near_it_on_each_machine) {
  for (const Machine& machine : machines()) {
    const SysfsTree tree(SysfsTree::fixture(machine.fixture));
    const Topology topology = read_topology(tree.root());
    CHECK_EQ(topology.nics.size(), machine.num_nics);
    CHECK_EQ(topology.gpus.size(), machine.num_gpus);
    CHECK_EQ(topology.nodes.size(), machine.num_nodes);
    CHECK_EQ(left_words(topology), machine.left);
    for (const Expected& expected : machine.expected) {
      const RailChoice choice = rails_for(topology, expected.memory);
      check_choice(topology, choice);
      const std::string at = machine.fixture + " " + expected.memory.gpu + ": ";
      CHECK_EQ(at + near_words(choice), at + expected.near);
      CHECK_EQ(choice.turn, expected.turn);
      if (!expected.distances.empty()) CHECK_EQ(distance_words(choice), expected.distances);
    }
  }
}

// "2 0! 1": indexes of ports that were opened; ! marks those that are far.
std::string used(const RailChoice& choice, const std::vector<PortName>& opened, bool are_named = false) {
  std::string words;
  for (const PortUse& use : ports_to_use(choice, opened, are_named))
    words += (words.empty() ? "" : " ") + std::to_string(use.index) + (use.is_near ? "" : "!");
  return words;
}

TEST(ports_that_were_opened_are_used_in_the_order_of_the_choice) {
  RailChoice choice;
  for (const char* const name : {"near0", "near1", "near2", "far0", "far1"})
    choice.rails.push_back({name, 1, Distance::kUnknown, 0, name[0] == 'n', ""});
  choice.num_near = 3;
  choice.left_out = {{"bonded", 1, "it is a part"}, {"odd", 0, "it has no ports"}};
  const std::vector<PortName> opened = {{"far1", 1},   {"near2", 1}, {"bonded", 1},
                                        {"unseen", 1}, {"near0", 1}, {"near0", 2},
                                        {"far0", 1},   {"odd", 1},   {"near1", 1}};
  CHECK_EQ(used(choice, opened), "4 8 1 3 5 6! 0!");
  choice.turn = 2;
  CHECK_EQ(used(choice, opened), "1 4 8 3 5 6! 0!");
  CHECK_EQ(used(choice, opened, true), "1 4 8 2 3 5 7 6 0");
  CHECK_EQ(used({}, opened), "0 1 2 3 4 5 6 7 8");
  CHECK_EQ(used(choice, {}), "");
}

// "0: nic1; 1: nic0": which ports are far from the memory of each node.
std::string far_words(const Topology& topology) {
  std::string words;
  for (const NumaNode& node : topology.nodes) {
    words += (words.empty() ? "" : "; ") + std::to_string(node.number) + ":";
    for (const Nic& nic : topology.nics)
      for (const Port& port : nic.ports) {
        const std::vector<int> far = nodes_far_from(topology, {nic.name, port.number});
        if (std::count(far.begin(), far.end(), node.number) != 0) words += " " + nic.name;
      }
  }
  return words;
}

TEST(host_memory_is_far_from_the_ports_of_other_nodes) {
  struct {
    const char* fixture;
    std::string far;
  } const machines_and_far[] = {
      {"two_nics", "0: mlx5_1; 1: mlx5_0"},
      {"numa_decides", "0: mlx5_2 mlx5_3; 1: mlx5_0 mlx5_1"},
      {"dgx_h100", "0: mlx5_6 mlx5_7 mlx5_9 mlx5_10 mlx5_11; 1: mlx5_0 mlx5_1 mlx5_3 mlx5_4 mlx5_5"},
      {"cloud_vm", "0:"},
      {"soft_roce", "0:"},
  };
  for (const auto& [fixture, far] : machines_and_far) {
    const SysfsTree tree(SysfsTree::fixture(fixture));
    CHECK_EQ(far_words(read_topology(tree.root())), far);
  }
  // A node without NICs uses those of the nearest node that has some.
  SysfsTree tree(SysfsTree::fixture("hgx_b200"));
  for (const char* name : {"mlx5_0", "mlx5_1"})
    tree.add("$" + std::string(name) + "/infiniband/" + name + "/ports/1/state = 1: DOWN\n");
  const Topology topology = read_topology(tree.root());
  CHECK(far_words(topology).starts_with("0: mlx5_4 mlx5_5 mlx5_6 mlx5_7; 1: mlx5_4"));
  // If no NIC reports its node, as in many virtual machines, all count as equally near.
  SysfsTree unknown(SysfsTree::fixture("two_nics"));
  for (const char* name : {"mlx5_0", "mlx5_1"}) unknown.add("$" + std::string(name) + "/numa_node = -1\n");
  CHECK_EQ(far_words(read_topology(unknown.root())), "0:; 1:");
  CHECK(nodes_far_from(read_topology(tree.root()), {"unseen", 1}).empty());
}

TEST(the_memory_of_each_node_is_described_where_ports_differ) {
  const SysfsTree two(SysfsTree::fixture("two_nics")), one(SysfsTree::fixture("cloud_vm"));
  const std::vector<std::string> words = describe(read_topology(two.root()));
  REQUIRE_EQ(words.size(), 2u);
  CHECK(words[0].starts_with("host memory on NUMA node 0: mlx5_0 port 1 (NODE, "));
  CHECK(words[1].starts_with("host memory on NUMA node 1: mlx5_1 port 1 (NODE, "));
  CHECK(has(words[1], "; if these are lost: mlx5_0 port 1"));
  CHECK(describe(read_topology(one.root()))[0].starts_with("host memory: "));
}

TEST(each_gpu_is_described_with_its_ports_and_what_is_left_out_with_its_reason) {
  const SysfsTree tree(SysfsTree::fixture("dgx_h100"));
  const std::vector<std::string> dgx = describe(read_topology(tree.root()));
  REQUIRE_EQ(dgx.size(), 8u + 2u + 2u);  // and lines for each node, and for those that are left out
  CHECK(dgx[0].starts_with("GPU 0000:1b:00.0: mlx5_0 port 1 (PXB, several PCIe switches"));
  CHECK(has(dgx[0], "; if these are lost: mlx5_1 port 1, "));
  CHECK(dgx[10].starts_with("mlx5_2 port 1 is not used: "));
  CHECK(describe(Topology{}).empty());
}

TEST(ports_are_read_with_state_rate_and_net_device) {
  const SysfsTree tree(SysfsTree::fixture("dgx_h100"));
  const Topology topology = read_topology(tree.root());
  REQUIRE_EQ(topology.nics.size(), 12);
  const Nic& first = topology.nics[0];
  CHECK_EQ(first.name, "mlx5_0");
  CHECK_EQ(first.place.pci.host_bridge, "pci0000:15");
  CHECK_EQ(first.place.pci.address(), "0000:18:00.0");
  CHECK_EQ(first.place.pci.functions.size(), 4);
  CHECK_EQ(first.place.numa_node, 0);
  CHECK(!first.is_software);
  REQUIRE_EQ(first.ports.size(), 1);
  CHECK(first.ports[0].state == PortState::kActive);
  CHECK(first.ports[0].link_layer == LinkLayer::kInfiniBand);
  CHECK(first.ports[0].rate_gbps == 400);
  CHECK_EQ(first.ports[0].net_device, "ibp24s0");
  CHECK_EQ(topology.nics[2].ports[0].net_device, "enp41s0f1np1");
  CHECK(topology.nics[2].ports[0].link_layer == LinkLayer::kEthernet);
  CHECK_EQ(topology.nics[10].name, "mlx5_10");  // not behind mlx5_1

  const SysfsTree soft(SysfsTree::fixture("soft_roce"));
  const Topology software = read_topology(soft.root());
  REQUIRE_EQ(software.nics.size(), 2);
  CHECK(software.nics[1].is_software);
  CHECK(!software.nics[1].place.pci.known());
  CHECK_EQ(software.nics[1].ports[0].net_device, "veth1");
  CHECK(has(rails_for(software, node(0)).rails[0].why, "software device"));

  const SysfsTree cloud(SysfsTree::fixture("cloud_vm"));
  const Topology machine = read_topology(cloud.root());
  CHECK_EQ(machine.nics[0].place.pci.host_bridge, "pci0101:00");
  CHECK_EQ(machine.nics[0].ports[0].net_device, "enP257s1");
  CHECK_EQ(machine.nics[0].ports[0].bond.name, "");
}

TEST(gpus_are_known_by_any_way_to_write_their_address) {
  const SysfsTree tree(SysfsTree::fixture("dgx_h100"));
  const Topology all = read_topology(tree.root());
  for (const char* text : {"0000:1B:00.0", "00000000:1b:00.0", "0:1b:0.0"})
    CHECK_EQ(near_words(rails_for(all, gpu(text))), "mlx5_0:1 PXB");
  // The caller names them in its own order; one of them does not exist.
  const std::vector<std::string> named_gpus = {"0000:DF:00.0", "0000:1B:00.0", "0000:77:00.0"};
  const Topology some = read_topology(tree.root(), named_gpus);
  REQUIRE_EQ(some.gpus.size(), 3);
  CHECK_EQ(some.gpus[0].address, "0000:1b:00.0");
  CHECK_EQ(near_words(rails_for(some, gpu("0000:df:00.0"))), "mlx5_11:1 PXB");
  const RailChoice absent = rails_for(some, gpu("0000:77:00.0"));
  CHECK_EQ(absent.num_near, 10);
  CHECK(absent.rails[0].distance == Distance::kUnknown);
  CHECK(has(rails_for(all, gpu("0000:77:00.0")).rails[0].why, "not on the PCI bus"));
  for (const char* text : {"", "nonsense", "0000:1b:00", "0000:1b:00.0 ", "0000:1b:00.0.0", "-1:1b:00.0"})
    CHECK_EQ(pci_address(text), text);
}

Place place(std::string host_bridge, std::vector<std::string> functions, int numa_node) {
  return {{std::move(host_bridge), std::move(functions)}, numa_node};
}

TEST(distances_have_the_meaning_that_nvidia_smi_gives_them) {
  // Distances of a GPU behind a switch of two levels.
  const Place gpu_place = place("pci0000:10", {"root", "up", "down0", "gpu"}, 0);
  const struct {
    Place nic;
    Distance distance;
  } rows[] = {
      {place("pci0000:10", {"root", "up", "down1", "nic"}, 0), Distance::kPix},
      {place("pci0000:10", {"root", "up", "down0", "nic"}, 0), Distance::kPix},  // on one bus
      {place("pci0000:10", {"root", "up", "down1", "up2", "down2", "nic"}, 0), Distance::kPxb},
      {place("pci0000:10", {"root", "up", "down0", "up2", "down2", "nic"}, 0), Distance::kPxb},
      {place("pci0000:10", {"root", "up2", "down2", "nic"}, 0), Distance::kPxb},
      {place("pci0000:10", {"root2", "nic"}, 0), Distance::kPhb},
      {place("pci0000:20", {"root", "up", "down1", "nic"}, 0), Distance::kNode},
      {place("pci0000:20", {"root", "nic"}, 1), Distance::kSys},
      {place("pci0000:20", {"root", "nic"}, kNoNode), Distance::kUnknown},
      {place("pci0000:10", {"root", "up", "down1", "nic"}, kNoNode), Distance::kPix},
      {place("", {}, 0), Distance::kNode},
      {place("", {}, kNoNode), Distance::kUnknown},
  };
  for (const auto& row : rows) {
    CHECK_EQ(name_of(distance_between(gpu_place, row.nic)), name_of(row.distance));
    CHECK_EQ(name_of(distance_between(row.nic, gpu_place)), name_of(row.distance));
  }
  // If both places are unknown, so is their distance.
  CHECK(distance_between({}, {}) == Distance::kUnknown);
  CHECK(Distance::kPix < Distance::kPxb && Distance::kSys < Distance::kUnknown);
}

// A NIC's lines on a bus of its own: $NAME, on NUMA node 0.
std::string nic(const std::string& name, const std::string& address, const std::string& layer = "Ethernet") {
  const std::string own = "$" + name, device = own + "/infiniband/" + name;
  return own + " = devices/pci0000:00/0000:00:01.0/" + address + "\n" + own + "/numa_node = 0\n" +
         "class/infiniband/" + name + " -> " + device + "\n" + device + "/device -> " + own + "\n" + device +
         "/node_type = 1: CA\n" + device + "/ports/1/state = 4: ACTIVE\n" + device +
         "/ports/1/link_layer = " + layer + "\n";
}

std::string net_of(const std::string& nic_name, const std::string& net_device,
                   const std::string& master = {}) {
  const std::string folder = "$" + nic_name + "/net/" + net_device;
  std::string text = folder + "/dev_port = 0\n" + folder + "/device -> $" + nic_name + "\nclass/net/" +
                     net_device + " -> " + folder + "\n";
  if (!master.empty())
    text += folder + "/master -> devices/virtual/net/" + master + "\nclass/net/" + master +
            " -> devices/virtual/net/" + master + "\n";
  return text;
}

std::string bond(const std::string& name, const std::string& mode, const std::string& members,
                 const std::string& active = {}) {
  const std::string folder = "devices/virtual/net/" + name + "/bonding/";
  return folder + "mode = " + mode + "\n" + folder + "slaves = " + members + "\n" + folder +
         "active_slave = " + active + "\n";
}

TEST(inactive_ports_are_left_out_with_a_reason) {
  const struct {
    const char *state, *layer, *reason;
  } rows[] = {
      {"1: DOWN", "Ethernet", "ip link set eth0 up"},       {"1: DOWN", "InfiniBand", "check its cable"},
      {"2: INIT", "InfiniBand", "no subnet manager"},       {"3: ARMED", "InfiniBand", "no subnet manager"},
      {"5: ACTIVE_DEFER", "InfiniBand", "5: ACTIVE_DEFER"},
  };
  for (const auto& row : rows) {
    SysfsTree tree(nic("mlx5_0", "0000:01:00.0", row.layer) + net_of("mlx5_0", "eth0") +
                   nic("mlx5_1", "0000:02:00.0", row.layer));
    tree.add("class/infiniband/mlx5_0/ports/1/state = " + std::string(row.state) + "\n");
    const Topology topology = read_topology(tree.root());
    CHECK_EQ(left_words(topology), "mlx5_0:1");
    CHECK(has(why_left(topology, "mlx5_0"), row.reason));
    CHECK(has(why_left(topology, "mlx5_0"), row.state));
    CHECK_EQ(rails_for(topology, node(0)).rails.size(), 1);
  }
}

TEST(a_port_whose_state_cannot_be_read_comes_last) {
  SysfsTree tree(nic("mlx5_0", "0000:01:00.0") + nic("mlx5_1", "0000:02:00.0"));
  tree.remove("$mlx5_0/infiniband/mlx5_0/ports/1/state");
  const RailChoice choice = rails_for(read_topology(tree.root()), node(0));
  CHECK_EQ(near_words(choice), "mlx5_1:1 NODE");
  REQUIRE_EQ(choice.rails.size(), 2);
  CHECK_EQ(choice.rails[1].device, "mlx5_0");
  CHECK(has(choice.rails[1].why, kUnread));
}

TEST(devices_that_have_no_such_queue_pairs_are_left_out) {
  SysfsTree tree(nic("iwarp0", "0000:01:00.0") + nic("efa0", "0000:02:00.0") + nic("mlx5_0", "0000:03:00.0"));
  tree.add("$iwarp0/infiniband/iwarp0/node_type = 4: RNIC\n$efa0/infiniband/efa0/node_type = 7: <unknown>\n");
  const Topology topology = read_topology(tree.root());
  CHECK_EQ(left_words(topology), "efa0:1 iwarp0:1");
  CHECK(has(why_left(topology, "iwarp0"), "iWARP"));
  CHECK(!has(why_left(topology, "efa0"), "iWARP"));
}

TEST(two_ports_of_one_card_that_are_one_device_are_a_rail) {
  // RoCE LAG: the second function has no RDMA device.
  SysfsTree tree(nic("mlx5_bond_0", "0000:5e:00.0") + net_of("mlx5_bond_0", "ens1f0np0", "bond0") +
                 "$second = devices/pci0000:00/0000:00:01.0/0000:5e:00.1\n" +
                 net_of("second", "ens1f1np1", "bond0") + bond("bond0", "802.3ad 4", "ens1f0np0 ens1f1np1"));
  const Topology topology = read_topology(tree.root());
  CHECK_EQ(topology.nics[0].ports[0].bond.name, "bond0");
  CHECK_EQ(topology.nics[0].ports[0].bond.mode, "802.3ad");
  CHECK_EQ(topology.nics[0].ports[0].bond.member_addresses,
           std::vector<std::string>({"0000:5e:00.0", "0000:5e:00.1"}));
  CHECK_EQ(left_words(topology), "");
  CHECK_EQ(near_words(rails_for(topology, node(0))), "mlx5_bond_0:1 NODE");
}

TEST(parts_of_a_bond_that_are_devices_of_their_own_are_left_out) {
  SysfsTree tree(nic("mlx5_0", "0000:5e:00.0") + net_of("mlx5_0", "eth0", "bond0") +
                 nic("mlx5_1", "0000:86:00.0") + net_of("mlx5_1", "eth1", "bond0") +
                 bond("bond0", "802.3ad 4", "eth0 eth1"));
  const Topology spread = read_topology(tree.root());
  CHECK_EQ(left_words(spread), "mlx5_0:1 mlx5_1:1");
  CHECK(has(why_left(spread, "mlx5_0"), "eth0 is a member of bond0 (mode 802.3ad)"));
  CHECK(has(why_no_rail(spread), "mlx5_1:1: its net device eth1"));

  tree.add(bond("bond0", "active-backup 1", "eth0 eth1", "eth1"));
  const Topology standby = read_topology(tree.root());
  CHECK_EQ(left_words(standby), "mlx5_0:1");
  CHECK(has(why_left(standby, "mlx5_0"), "which uses eth1 now"));
  check_choice(standby, rails_for(standby, node(0)));

  // A file that cannot be read excludes nothing.
  tree.remove("devices/virtual/net/bond0/bonding/mode");
  CHECK_EQ(left_words(read_topology(tree.root())), "");
}

TEST(only_one_device_for_all_ports_of_one_card_makes_a_bond_a_rail) {
  const std::string members = net_of("mlx5_0", "eth0", "bond0") + net_of("other", "eth1", "bond0") +
                              bond("bond0", "802.3ad 4", "eth0 eth1");
  // A bond that the card cannot offer as one device: each port keeps its own device.
  const SysfsTree two_devices(nic("mlx5_0", "0000:5e:00.0") + nic("other", "0000:5e:00.1") + members);
  CHECK_EQ(left_words(read_topology(two_devices.root())), "mlx5_0:1 other:1");
  // The bond's other port belongs to a card without RDMA.
  const SysfsTree two_cards(nic("mlx5_0", "0000:5e:00.0") +
                            "$other = devices/pci0000:00/0000:00:01.0/0000:86:00.0\n" + members);
  CHECK_EQ(left_words(read_topology(two_cards.root())), "mlx5_0:1");
}

TEST(a_virtual_function_is_a_rail_only_where_its_physical_one_is_none) {
  SysfsTree tree(nic("mlx5_0", "0000:01:00.0") + nic("mlx5_1", "0000:01:00.1") +
                 "$mlx5_1/physfn -> $mlx5_0\n");
  const Topology host = read_topology(tree.root());
  CHECK_EQ(host.nics[1].physical_function, "0000:01:00.0");
  CHECK_EQ(left_words(host), "mlx5_1:1");
  CHECK(has(why_left(host, "mlx5_1"), "virtual function of mlx5_0"));
  CHECK_EQ(near_words(rails_for(host, node(0))), "mlx5_0:1 NODE");

  tree.add("$mlx5_0/infiniband/mlx5_0/ports/1/state = 1: DOWN\n");
  CHECK_EQ(near_words(rails_for(read_topology(tree.root()), node(0))), "mlx5_1:1 NODE");
  tree.remove("class/infiniband/mlx5_0");  // a container that has the virtual function only
  CHECK_EQ(near_words(rails_for(read_topology(tree.root()), node(0))), "mlx5_1:1 NODE");
  tree.add("$mlx5_1/physfn -> $mlx5_1\n");  // a loop
  CHECK_EQ(read_topology(tree.root()).nics.size(), 1);
}

TEST(of_several_net_devices_the_ports_own_is_taken) {
  // A card that switches for its virtual functions shows their representors beside its own.
  SysfsTree tree(nic("mlx5_0", "0000:01:00.0") + net_of("mlx5_0", "eth0") + net_of("mlx5_0", "eth1") +
                 "$mlx5_0/net/eth0/phys_port_name = pf0vf0\n" + "$mlx5_0/net/eth1/phys_port_name = p0\n");
  CHECK_EQ(read_topology(tree.root()).nics[0].ports[0].net_device, "eth1");
  // Two ports of one function.
  tree.add(
      "$mlx5_0/net/eth7/dev_port = 1\n$mlx5_0/infiniband/mlx5_0/ports/2/state = 4: ACTIVE\n"
      "$mlx5_0/infiniband/mlx5_0/ports/2/link_layer = Ethernet\n");
  const Topology two = read_topology(tree.root());
  REQUIRE_EQ(two.nics[0].ports.size(), 2);
  CHECK_EQ(two.nics[0].ports[0].net_device, "eth1");
  CHECK_EQ(two.nics[0].ports[1].net_device, "eth7");
  CHECK_EQ(near_words(rails_for(two, node(0))), "mlx5_0:1 mlx5_0:2 NODE");
}

TEST(a_software_device_lies_nowhere_though_its_net_device_does) {
  // Kernels before 5.10 report the place of its net device as its own.
  SysfsTree tree(nic("mlx5_0", "0000:01:00.0") + nic("rxe0", "0000:02:00.0") +
                 "$rxe0/infiniband/rxe0/parent = eth0\n");
  const RailChoice choice = rails_for(read_topology(tree.root()), node(0));
  CHECK_EQ(near_words(choice), "mlx5_0:1 NODE");
  REQUIRE_EQ(choice.rails.size(), 2);
  CHECK_EQ(name_of(choice.rails[1].distance), "unknown");
}

TEST(of_two_far_nodes_the_nearer_one_serves) {
  // Memory on a node without NICs: its socket's other node comes before the other socket.
  SysfsTree tree(SysfsTree::fixture("hgx_b200"));
  for (const char* name : {"mlx5_0", "mlx5_1"})
    tree.add("$" + std::string(name) + "/infiniband/" + name + "/ports/1/state = 1: DOWN\n");
  const Topology topology = read_topology(tree.root());
  CHECK_EQ(near_words(rails_for(topology, node(0))), "mlx5_2:1 mlx5_3:1 SYS");
  CHECK_EQ(near_words(rails_for(topology, gpu("0000:1b:00.0"))), "mlx5_2:1 mlx5_3:1 SYS");
  CHECK_EQ(topology.node_distance(0, 1), 12);
  CHECK_EQ(topology.node_distance(0, 0), 10);
  CHECK_EQ(topology.node_distance(0, 9), Topology::kFar);
  CHECK_EQ(topology.node_distance(9, 0), Topology::kFar);
}

TEST(a_machine_without_rdma_says_so) {
  for (const std::string text : {"", "class/infiniband/uverbs = x\n", "devices/nothing = 1\n"}) {
    const SysfsTree tree(text);
    const Topology topology = read_topology(tree.root());
    CHECK(rails_for(topology, node(0)).rails.empty());
    CHECK(!why_no_rail(topology).empty());
  }
  const Topology none = read_topology("/nowhere/at/all");
  CHECK(none.nics.empty() && none.gpus.empty() && none.nodes.empty());
  CHECK(has(why_no_rail(none), "no RDMA device"));
}

// Every file and link of a machine, broken in some way: reading still gives a valid answer.
TEST(whatever_is_missing_or_nonsense_costs_no_more_than_knowledge) {
  check::Random random(check::seed());
  for (const Machine& machine : machines()) {
    for (int round = 0; round < 4; ++round) {
      SysfsTree tree(SysfsTree::fixture(machine.fixture));
      namespace fs = std::filesystem;
      std::vector<fs::path> paths;
      for (const auto& entry : fs::recursive_directory_iterator(tree.root()))
        if (!entry.is_directory() || entry.is_symlink()) paths.push_back(entry.path());
      std::sort(paths.begin(), paths.end());  // a folder's order depends on the file system
      for (const fs::path& path : paths) {
        if (!random.chance(15)) continue;
        std::error_code ignored;
        const bool is_link = fs::is_symlink(fs::symlink_status(path, ignored));
        fs::remove(path, ignored);
        switch (random.below(5)) {
          case 0: break;  // removed
          case 1: fs::create_symlink(path.filename(), path, ignored); break;  // a link to itself
          case 2: fs::create_directory(path, ignored); break;
          case 3:
            if (is_link)
              fs::create_symlink("/nowhere", path, ignored);
            else
              CHECK_EQ(::mkfifo(path.c_str(), 0600), 0);  // which has no writer
            break;
          default: {
            std::vector<char> noise(random.below(6000));
            random.fill(noise.data(), noise.size());
            std::ofstream(path).write(noise.data(), static_cast<std::streamsize>(noise.size()));
          }
        }
      }
      const Topology topology = read_topology(tree.root());
      for (const Expected& expected : machine.expected)
        check_choice(topology, rails_for(topology, expected.memory));
      for (const Gpu& each : topology.gpus) check_choice(topology, rails_for(topology, gpu(each.address)));
    }
  }
}

// Whatever it has: in the machine of `make test-rdma` two software devices.
TEST(this_machine_can_be_read) {
  const Topology topology = read_topology();
  for (const int number : {kNoNode, 0, 1}) {
    const RailChoice choice = rails_for(topology, node(number));
    check_choice(topology, choice);
    for (const Rail& rail : choice.rails) std::printf("  %s %s\n", named(rail).c_str(), rail.why.c_str());
    for (const LeftOut& left : choice.left_out)
      std::printf("  %s: %s\n", left.device.c_str(), left.why.c_str());
  }
}

TEST(names_are_in_natural_order) {
  const std::vector<std::string> ordered = {"",
                                            "efa0",
                                            "mlx5_0",
                                            "mlx5_01",
                                            "mlx5_1",
                                            "mlx5_2",
                                            "mlx5_9",
                                            "mlx5_10",
                                            "mlx5_11",
                                            "mlx5_100000000000000000000000",
                                            "mlx5_bond_0",
                                            "rxe0"};
  for (std::size_t i = 0; i < ordered.size(); ++i)
    for (std::size_t j = 0; j < ordered.size(); ++j)
      CHECK_EQ(sysfs::natural_less(ordered[i], ordered[j]), i < j && ordered[i] != ordered[j]);
}

}  // namespace
}  // namespace kvxfer::verbs
