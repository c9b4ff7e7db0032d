// Agents in one process whose rails are verbs over counting devices, with TCP beside them, for TSan.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/system/pool_memory.h"
#include "counting_device.h"

namespace kvxfer::verbs_runtime_test {
namespace {

using namespace agent_pair;
using counting_device::Fabric;
using counting_device::Limits;

constexpr std::uint32_t kBlocks = 64;
// Each agent has a rail on each of two devices, and two sockets beside them.
constexpr std::size_t kRails = 4;

Options over_verbs(std::uint32_t num_layers = 2, const std::string& ways = "read",
                   const std::string& classes = "") {
  return {.transports = {"verbs"},
          .layout = {kBlocks, 16 * 1024, num_layers},
          .num_rails = kRails,
          .transport_options = {{"verbs.ways", ways}, {"verbs.classes", classes}}};
}

// Classes of transfers that a caller waits for, and of others.
constexpr std::uint8_t kUrgent = 10, kBulk = 200, kUrgentTraffic = 104, kBulkTraffic = 26;
constexpr const char* kClasses =
    "0-63: pairs=1 traffic_class=104; 64-255: pairs=2 traffic_class=26 rate_gbps=50";

TEST(pages_come_over_verbs_and_nothing_else_moves_them) {
  for (const auto& [ways, by, num_layers] :
       {std::tuple("read", ", by READ", 2u), {"write", ", by WRITE", 8u}}) {
    Fabric fabric;
    {
      check::Random random(check::seed());
      Pair both(over_verbs(num_layers, ways));
      for (const bool at_src : {true, false}) {
        Runtime& runtime = *(at_src ? both.src : both.dst).runtime;
        const auto paths = runtime.with_engine(
            [&](Engine&, Time) { return runtime.paths(at_src ? both.there : both.here); });
        REQUIRE_EQ(paths.size(), 2u);  // the sockets' paths say nothing more
        for (const std::string device : {"nic0", "nic1"})
          CHECK(std::any_of(paths.begin(), paths.end(), [&, by = by](const std::string& path) {
            return path.starts_with("verbs: " + device + " port 1 from GID ") &&
                   path.find(", RoCE v2, to ") != std::string::npos &&
                   path.ends_with(" (" + device + " port 1)" + by);
          }));
      }
      for (const bool write : {true, false})
        for (int round = 0; round < 20; ++round) {
          both.fill_source(random);
          fabric.forget_counts();
          const auto handle = both.end(write).post(both.request(write));
          REQUIRE(is_done(handle));
          CHECK(both.src.memory == both.dst.memory);
          const auto counts = fabric.counts();
          CHECK(counts.nbytes >= both.src.memory.size());
          CHECK(counts.nbytes <= both.src.memory.size() + 64 * 8);  // and fence words
          if (!write) CHECK_EQ(handle->rails(), (std::vector<std::string>{"verbs"}));
        }
      CHECK(fabric.counts().doorbells > 0);
    }
    CHECK_EQ(fabric.num_pairs(), 0u);
    CHECK_EQ(fabric.num_regions(), 0u);
  }
}

// Memory that the test maps and unmaps itself.
class Mapped {
 public:
  explicit Mapped(std::size_t nbytes, void* at = nullptr, int advice = MADV_NORMAL) : nbytes_(nbytes) {
    const int fixed = at == nullptr ? 0 : MAP_FIXED_NOREPLACE;
    void* const got = ::mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    REQUIRE(got != MAP_FAILED && (at == nullptr || got == at));
    ::madvise(got, nbytes, advice);
    data_ = static_cast<std::byte*>(got);
  }
  ~Mapped() { ::munmap(data_, nbytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  std::byte* data() const { return data_; }

 private:
  const std::size_t nbytes_;
  std::byte* data_;
};

// How many keys a region has: a local and a remote one on each of two devices.
constexpr std::size_t kKeys = 4;

// The keys as peers hear of them, for each device.
std::vector<RegionKeys> keys_of(Agent<>& agent, RegionId region) {
  std::vector<RegionKeys> keys;
  agent.runtime->with_engine([&](Engine& engine, Time) {
    for (const wire::TransportKeys& each : engine.region(region)->keys)
      if (each.transport == "verbs") keys.push_back(each.keys);
  });
  return keys;
}

// Whether the destination can read all of that region.
bool reads(Pair<>& both, RegionId from, const std::byte* memory) {
  REQUIRE(await([&] {
    const auto regions =
        both.dst.runtime->with_engine([&](Engine& engine, Time) { return engine.peer_regions(both.here); });
    return regions.ok() && std::any_of(regions.value().begin(), regions.value().end(),
                                       [&](const auto& each) { return each.region.id == from; });
  }));
  TransferRequest request = both.request(false);
  request.program = both.dst.install(both.here, false, from, both.dst.region);
  request.lease = grant(*both.src.runtime, both.there, from, wire::LeaseMode::kRead);
  return is_done(both.dst.post(std::move(request))) &&
         std::memcmp(memory, both.dst.memory.data(), both.dst.memory.size()) == 0;
}

TEST(memory_that_is_mapped_anew_at_its_address_has_a_registration_of_its_own) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs());
  const std::size_t nbytes = both.src.memory.size();
  auto memory = std::make_unique<Mapped>(nbytes);
  std::byte* const at = memory->data();
  std::vector<RegionKeys> before;
  for (int life = 0; life < 3; ++life) {
    const std::size_t registered = fabric.num_regions();
    const RegionId region = both.src.add(at, "mapped");
    CHECK_EQ(fabric.num_regions(), registered + kKeys);  // one registration with each device
    const std::vector<RegionKeys> keys = keys_of(both.src, region);
    REQUIRE_EQ(keys.size(), 2u);
    CHECK(keys != before);
    before = keys;
    fabric.forget_counts();
    random.fill(at, nbytes);
    CHECK(reads(both, region, at));
    CHECK(fabric.counts().nbytes >= nbytes);
    CHECK_OK(both.src.runtime->deregister_region(region, kBound));
    CHECK_EQ(fabric.num_regions(), registered);  // before the memory is unmapped
    memory.reset();
    memory = std::make_unique<Mapped>(nbytes, at);
  }
}

TEST(regions_that_overlap_have_registrations_of_their_own) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs());
  const std::size_t nbytes = both.src.memory.size(), registered = fabric.num_regions();
  const Mapped memory(2 * nbytes);
  const RegionId first = both.src.add(memory.data(), "first");
  const RegionId second = both.src.add(memory.data() + nbytes / 2, "second");
  CHECK_EQ(fabric.num_regions(), registered + 2 * kKeys);
  CHECK(keys_of(both.src, first) != keys_of(both.src, second));
  random.fill(memory.data(), 2 * nbytes);
  CHECK(reads(both, first, memory.data()));
  CHECK_OK(both.src.runtime->deregister_region(first, kBound));
  CHECK_EQ(fabric.num_regions(), registered + kKeys);
  CHECK(reads(both, second, memory.data() + nbytes / 2));  // the second region's keys still work
  both.src.runtime->close(kBound);
}

TEST(memory_in_huge_pages_is_one_registration_wherever_it_begins_in_them) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs());
  constexpr std::size_t kHuge = 2 * 1024 * 1024;
  const std::size_t nbytes = both.src.memory.size(), registered = fabric.num_regions();
  const Mapped advised(3 * kHuge, nullptr, MADV_HUGEPAGE);
  const auto pool =
      PoolMemory::create({.nbytes = 3 * kHuge, .name = "huge", .huge_pages = true, .numa_node = -1});
  REQUIRE_OK(pool);
  std::printf("  the pool lies in %s pages\n", std::string(pool.value()->page_kind()).c_str());
  for (std::byte* const base : {advised.data(), pool.value()->data()}) {
    std::byte* const memory =
        base + kHuge - nbytes / 2 + 64;  // across the edge of a huge page, where no page begins
    const RegionId region = both.src.add(memory, "huge");
    CHECK_EQ(fabric.num_regions(), registered + kKeys);
    random.fill(memory, nbytes);
    fabric.forget_counts();
    CHECK(reads(both, region, memory));
    CHECK(fabric.counts().nbytes >= nbytes);
    CHECK_OK(both.src.runtime->deregister_region(region, kBound));
  }
}

TEST(an_agent_at_rest_is_woken_by_what_completes) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs());
  for (int round = 0; round < 20; ++round) {
    both.fill_source(random);
    fabric.hold(true);
    const auto handle = both.dst.post(both.request(false));
    REQUIRE(await([&] { return fabric.num_under_way() > 0; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(random.below(3)));  // the agent may be asleep
    fabric.hold(false);
    REQUIRE(is_done(handle));
    CHECK(both.src.memory == both.dst.memory);
  }
}

TEST(what_an_agent_cannot_have_is_refused_in_words) {
  const struct {
    const char *ways, *classes;
    int num_devices;
    Code code;
    const char* words;
  } cases[] = {
      {"wriet", "", 2, Code::kInvalidArgument, "read or write"},
      {"read", "0-63: pairs=2", 2, Code::kInvalidArgument, "priorities from 64 to 255 are in no class"},
      {"read", "", 0, Code::kUnsupported, "no RDMA device was found"},
  };
  for (const auto& each : cases) {
    Limits limits;
    limits.num_devices = each.num_devices;
    Fabric fabric(limits);
    const Status refused =
        Runtime::create(options_of("alone", over_verbs(1, each.ways, each.classes))).status();
    CHECK_EQ(refused.code(), each.code);
    CHECK_HAS(refused.message(), each.words);
  }
}

// More pieces than rails accept at a time wait behind queue pairs that do not move.
TEST(transfers_of_one_class_wait_for_none_of_another) {
  for (const std::string ways : {"read", "write"}) {
    Fabric fabric;
    check::Random random(check::seed());
    Pair both(over_verbs(8, ways, kClasses));
    for (const std::string& path :
         both.src.runtime->with_engine([&](Engine&, Time) { return both.src.runtime->paths(both.there); }))
      CHECK(path.find("priorities 0 to 63: 1 queue pair, traffic class 104; 64 to 255: 2 queue pairs, "
                      "traffic class 26, 50 Gb/s") != std::string::npos);
    for (const bool bulk_stands : {true, false})
      for (const bool write : {true, false}) {
        both.fill_source(random);
        const auto post = [&](std::uint8_t priority) {
          TransferRequest request = both.request(write);
          request.priority = priority;
          return both.end(write).post(std::move(request));
        };
        const std::uint8_t held = bulk_stands ? kBulkTraffic : kUrgentTraffic;
        fabric.hold_class(held, true);
        std::vector<std::shared_ptr<Handle>> standing;
        for (int i = 0; i < 12; ++i)
          standing.push_back(post(bulk_stands ? kBulk : kUrgent));  // 16 pieces each
        // At least a window of one rail; the other rail may have been found slower, and then has fewer.
        REQUIRE(await([&] {
          return both.dst.runtime->with_engine(
              [](Engine& engine, Time) { return engine.load().outstanding_pieces >= 64; });
        }));
        CHECK(is_done(post(bulk_stands ? kUrgent : kBulk)));
        CHECK(both.src.memory == both.dst.memory);
        for (const auto& handle : standing) CHECK(handle->outcome() == Outcome::kPending);
        fabric.hold_class(held, false);
        for (const auto& handle : standing) CHECK(is_done(handle));
      }
  }
}

// Rails that were lost are dialled again.
bool are_whole(Pair<>& both) {
  return await([&] {
    return num_rails(*both.src.runtime, both.there) == kRails &&
           num_rails(*both.dst.runtime, both.here) == kRails;
  });
}

TEST(a_queue_pair_of_one_class_that_fails_costs_no_transfer_of_any) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs(8, check::seed() % 2 == 0 ? "read" : "write", kClasses));
  for (int round = 0; round < 6; ++round) {
    both.fill_source(random);
    fabric.hold(true);
    std::vector<std::shared_ptr<Handle>> handles;
    for (const std::uint8_t priority : {kUrgent, kBulk}) {
      TransferRequest request = both.request(round % 2 == 0);
      request.priority = priority;
      handles.push_back(both.end(round % 2 == 0).post(std::move(request)));
    }
    REQUIRE(await([&] { return fabric.num_under_way() > 0; }));
    fabric.fail(verbs::abi::WorkStatus::kRetriesExceeded, random.below(20));
    fabric.hold(false);
    for (const auto& handle : handles) REQUIRE(is_done(handle));
    CHECK(both.src.memory == both.dst.memory);
    REQUIRE(are_whole(both));
  }
}

TEST(agents_with_other_classes_move_pages_all_the_same_and_say_so) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs(2, "read", kClasses), over_verbs());
  CHECK(both.hand_over(random));
  for (const std::string& path :
       both.dst.runtime->with_engine([&](Engine&, Time) { return both.dst.runtime->paths(both.here); }))
    CHECK_HAS(path, "so there is one class");
}

TEST(a_port_that_goes_down_costs_no_transfer) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs(8, check::seed() % 2 == 0 ? "read" : "write", check::seed() % 3 == 0 ? kClasses : ""));
  for (int round = 0; round < 3; ++round) {
    both.fill_source(random);
    fabric.hold(true);
    const auto handle = both.dst.post(both.request(false));
    REQUIRE(await([&] { return fabric.num_under_way() > 0; }));
    fabric.set_port(round % 2, false);
    fabric.hold(false);
    REQUIRE(is_done(handle));
    CHECK(both.src.memory == both.dst.memory);
    fabric.set_port(round % 2, true);
    REQUIRE(are_whole(both));
  }
}

TEST(a_revoke_returns_though_the_network_stands_still) {
  for (const std::string ways : {"read", "write"}) {
    Fabric fabric;
    check::Random random(check::seed());
    Pair both(over_verbs(2, ways));
    both.fill_source(random);
    fabric.hold(true);
    const auto handle = both.src.post(both.request(true));
    REQUIRE(await([&] { return fabric.num_under_way() > 0; }));
    CHECK(both.dst.runtime->revoke(both.write_lease, kBound));
    const std::vector<std::byte> at_fence = both.dst.memory;
    fabric.hold(false);
    REQUIRE(ends(handle));
    CHECK(handle->outcome() != Outcome::kDone);
    REQUIRE(both.quiet());
    both.dst.runtime->with_engine([&](Engine&, Time) { CHECK(at_fence == both.dst.memory); });
  }
}

TEST(an_agent_closes_though_the_network_stands_still) {
  Fabric fabric;
  {
    Pair both(over_verbs());
    fabric.hold(true);
    const auto handle = both.src.post(both.request(true));
    REQUIRE(await([&] { return fabric.num_under_way() > 0; }));
    both.dst.runtime->close(kBound);
    REQUIRE(ends(handle));
    fabric.hold(false);
  }
  CHECK_EQ(fabric.num_pairs(), 0u);
}

TEST(an_address_that_nobody_answers_for_holds_up_no_transfer_and_no_close) {
  Fabric fabric;
  check::Random random(check::seed());
  {
    Pair both(over_verbs());
    fabric.stall(1);
    fabric.set_port(1, false);
    REQUIRE(await([&] { return num_rails(*both.src.runtime, both.there) < kRails; }));
    fabric.set_port(1, true);
    REQUIRE(await([&] { return fabric.num_stalled() > 0; }));  // it is dialled again
    for (int round = 0; round < 3; ++round) CHECK(both.hand_over(random));
    const std::jthread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      fabric.let_go(ETIMEDOUT);
    });
    both.dst.runtime->close(kBound);
  }
  CHECK_EQ(fabric.num_pairs(), 0u);
}

// Pages whose elements are converted: a NIC cannot do that.
CopyProgram converting(const Layout& layout) {
  CopyProgram program = layout.pages();
  Conversion conversion{};
  conversion.src_dtype = Dtype::kBf16;
  conversion.dst_dtype = Dtype::kF16;
  program.conversions = {conversion};
  program.loops[0].conversion = 1;
  return program;
}

TEST(what_converts_goes_over_another_rail_and_the_rest_still_over_verbs) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs());
  const auto installed = both.src.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.install_program(now, both.there, true, both.src.region, both.dst.region,
                                  converting(both.src.layout));
  });
  REQUIRE_OK(installed);
  both.fill_source(random);
  fabric.forget_counts();
  TransferRequest request = both.request(true);
  request.program = installed.value();
  REQUIRE(is_done(both.src.post(std::move(request))));
  CHECK_EQ(fabric.counts().requests, 0u);
  CHECK(both.hand_over(random));
  CHECK(fabric.counts().requests > 0);
}

TEST(memory_that_cannot_be_registered_goes_over_another_rail) {
  Fabric fabric;
  check::Random random(check::seed());
  fabric.limit_registered(1024 * 1024);  // a region has twice as much
  Options options = over_verbs();
  options.num_rails = 0;
  Pair both(options);
  CHECK(both.hand_over(random));
  const auto notes = both.src.runtime->with_engine(
      [&](Engine& engine, Time) { return engine.region(both.src.region)->notes; });
  const auto says = [](const std::string& note) {
    return note.find("could not register") != std::string::npos;
  };
  CHECK(std::any_of(notes.begin(), notes.end(), says));
}

}  // namespace
}  // namespace kvxfer::verbs_runtime_test
