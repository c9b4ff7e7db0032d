// Agents alive in one process whose rails are verbs over counting devices, with TCP beside them: what TSan is to look
// at.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "counting_device.h"

namespace kvxfer {
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

// Transfers that a caller waits for, and others.
constexpr std::uint8_t kUrgent = 10, kBulk = 200, kUrgentTraffic = 104, kBulkTraffic = 26;
constexpr const char* kClasses =
    "0-63: pairs=1 traffic_class=104; 64-255: pairs=2 traffic_class=26 rate_gbps=50";

TEST(pages_come_over_verbs_and_nothing_else_moves_them) {
  Fabric fabric;
  {
    check::Random random(check::seed());
    Pair both(over_verbs());
    const auto paths =
        both.src.runtime->with_engine([&](Engine&, Time) { return both.src.runtime->paths(both.there); });
    REQUIRE_EQ(paths.size(), 2u);  // the sockets' say nothing more
    for (const char* const device : {"nic0", "nic1"})
      CHECK(std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
        return path.starts_with("verbs: " + std::string(device) + " port 1 from GID ") &&
               path.find(", RoCE v2, to ") != std::string::npos &&
               path.ends_with(" (" + std::string(device) + " port 1)");
      }));
    for (const bool write : {true, false}) {
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
    }
    CHECK(fabric.counts().doorbells > 0);
  }
  CHECK_EQ(fabric.num_pairs(), 0u);
  CHECK_EQ(fabric.num_regions(), 0u);
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
    std::this_thread::sleep_for(std::chrono::milliseconds(random.below(3)));  // it may be asleep
    fabric.hold(false);
    REQUIRE(is_done(handle));
    CHECK(both.src.memory == both.dst.memory);
  }
}

TEST(pages_come_by_write_where_both_ends_are_set_so) {
  for (const std::string ways : {"write", "measured"}) {
    Fabric fabric;
    check::Random random(check::seed());
    Pair both(over_verbs(8, ways));
    for (int round = 0; round < 20; ++round)
      for (const bool write : {true, false}) {
        both.fill_source(random);
        REQUIRE(is_done(both.end(write).post(both.request(write))));
        CHECK(both.src.memory == both.dst.memory);
      }
    both.dst.runtime->with_engine([&](Engine&, Time) {
      for (const std::string& path : both.dst.runtime->paths(both.here))
        CHECK_EQ(path.ends_with(", by READ") || path.ends_with(", by WRITE"), ways == "measured");
    });
  }
}

TEST(a_way_that_there_is_not_is_refused) {
  Fabric fabric;
  RuntimeOptions options = options_of("alone", over_verbs(1, "wriet"));
  const auto refused = Runtime::create(std::move(options));
  CHECK_EQ(refused.status().code(), Code::kInvalidArgument);
  CHECK(refused.status().message().find("read, write or measured") != std::string::npos);
}

TEST(classes_that_are_wrong_are_refused) {
  Fabric fabric;
  RuntimeOptions options = options_of("alone", over_verbs(1, "read", "0-63: pairs=2"));
  const auto refused = Runtime::create(std::move(options));
  CHECK_EQ(refused.status().code(), Code::kInvalidArgument);
  CHECK(refused.status().message().find("priorities from 64 to 255 are of no class") != std::string::npos);
}

// More pieces than rails take at a time wait behind queue pairs that do not move.
TEST(transfers_of_one_class_wait_for_none_of_another) {
  for (const std::string ways : {"read", "write", "measured"}) {
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
        REQUIRE(await([&] {
          return both.dst.runtime->with_engine(
              [](Engine& engine, Time) { return engine.load().outstanding_pieces >= 2 * 64; });
        }));
        CHECK(is_done(post(bulk_stands ? kUrgent : kBulk)));
        CHECK(both.src.memory == both.dst.memory);
        for (const auto& handle : standing) CHECK(handle->outcome() == Outcome::kPending);
        fabric.hold_class(held, false);
        for (const auto& handle : standing) CHECK(is_done(handle));
      }
  }
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
    REQUIRE(await([&] {
      return num_rails(*both.src.runtime, both.there) == kRails &&
             num_rails(*both.dst.runtime, both.here) == kRails;
    }));
  }
}

TEST(agents_with_other_classes_move_pages_all_the_same_and_say_so) {
  Fabric fabric;
  check::Random random(check::seed());
  Pair both(over_verbs(2, "read", kClasses), over_verbs());
  CHECK(both.hand_over(random));
  for (const std::string& path :
       both.dst.runtime->with_engine([&](Engine&, Time) { return both.dst.runtime->paths(both.here); }))
    CHECK(path.find("so that there is one class") != std::string::npos);
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
    // It is dialled again.
    REQUIRE(await([&] {
      return num_rails(*both.src.runtime, both.there) == kRails &&
             num_rails(*both.dst.runtime, both.here) == kRails;
    }));
  }
}

void a_revoke_returns_though_the_network_stands_still(const std::string& ways) {
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

TEST(a_revoke_returns_though_no_read_ends) { a_revoke_returns_though_the_network_stands_still("read"); }
TEST(a_revoke_returns_though_no_write_ends) { a_revoke_returns_though_the_network_stands_still("write"); }

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
  fabric.stall(1);
  check::Random random(check::seed());
  Options options = over_verbs();
  options.num_rails = kRails - 1;
  {
    Pair both(options);
    for (int round = 0; round < 3; ++round) CHECK(both.hand_over(random));
    REQUIRE(await([&] { return fabric.num_stalled() > 0; }));
    CHECK(both.hand_over(random));
    const std::jthread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      fabric.let_go(ETIMEDOUT);
    });
    both.dst.runtime->close(kBound);
  }
  CHECK_EQ(fabric.num_pairs(), 0u);
}

// Pages whose elements change on their way: no NIC does that.
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

TEST(without_a_device_an_agent_says_why_it_has_no_such_rail) {
  Limits limits;
  limits.num_devices = 0;
  Fabric fabric(limits);
  RuntimeOptions options;
  options.name = "alone";
  options.transports = {"verbs"};
  const auto refused = Runtime::create(std::move(options));
  CHECK_EQ(refused.status().code(), Code::kInvalidArgument);
  CHECK(refused.status().message().find("no RDMA device is here") != std::string::npos);
}

}  // namespace
}  // namespace kvxfer
