// Classes of priorities over verbs rails: their option, how their queue pairs are set up, and that works of
// one class do not wait for works of another.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "transports/verbs/classes.h"
#include "verbs_ends.h"

namespace verbs_ends {
namespace {

using block_programs::says;
using verbs::PairClass;
using verbs::abi::Rate;

constexpr const char* kTwo =
    "0-63: pairs=1 traffic_class=104; 64-255: pairs=2 traffic_class=26 service_level=3 rate_gbps=100";
constexpr std::uint8_t kUrgent = 0, kBulk = 64, kBulkTraffic = 26;

verbs::Options with(const std::string& classes) {
  verbs::Options options;
  options.traffic_class = 7;
  Result<std::vector<PairClass>> parsed = verbs::parse_classes(classes, options.only_class());
  REQUIRE_OK(parsed);
  options.classes = std::move(parsed).value();
  return options;
}

// ---- the option ---------------------------------------------------------------------------------

TEST(classes_are_read_as_they_are_written) {
  const PairClass rest{0, 4, 7, 1, 0};
  const std::pair<const char*, const char*> cases[] = {
      {"", "priorities 0 to 255: 4 queue pairs, traffic class 7, service level 1"},
      {" ", "priorities 0 to 255: 4 queue pairs, traffic class 7, service level 1"},
      {"0-255", "priorities 0 to 255: 4 queue pairs, traffic class 7, service level 1"},
      {"0-255: pairs=1;", "priorities 0 to 255: 1 queue pair, traffic class 7, service level 1"},
      {"0-0:traffic_class=104 service_level=0;1-255:rate_gbps=10",
       "priorities 0 to 0: 4 queue pairs, traffic class 104; 1 to 255: 4 queue pairs, traffic class 7, "
       "service level "
       "1, 10 Gb/s"},
      {kTwo,
       "priorities 0 to 63: 1 queue pair, traffic class 104, service level 1; 64 to 255: 2 queue pairs, "
       "traffic class "
       "26, service level 3, 100 Gb/s"},
  };
  for (const auto& [text, words] : cases) {
    const auto classes = verbs::parse_classes(text, rest);
    REQUIRE_OK(classes);
    CHECK_EQ(verbs::in_words(classes.value()), words);
  }
}

TEST(classes_that_are_wrong_are_refused_in_words) {
  const std::pair<const char*, const char*> cases[] = {
      {"0-63", "priorities from 64 to 255 are in no class"},
      {"1-255", "priorities from 0 to 0 are in no class"},
      {"0-63; 65-255", "priorities from 64 to 64 are in no class"},
      {"0-63; 63-255", "priority 63 is in two classes"},
      {"64-255; 0-63", "priorities from 0 to 63 are in no class"},
      {"0-255; 0-255", "\"0-255\" comes after priority 255"},
      {"0-256", "\"0-256\" is not a range of priorities within 0-255, such as 0-63"},
      {"63-0; 64-255", "\"63-0\" is not a range"},
      {"urgent: pairs=1", "\"urgent\" is not a range"},
      {"-1-255", "\"-1-255\" is not a range"},
      {"0", "\"0\" is not a range"},
      {"; 0-255", "\"\" is not a range"},
      {"0-255: pears=2", "\"pears\" is not one of pairs, traffic_class, service_level and rate_gbps"},
      {"0-255: pairs", "pairs is \"\": it must be a whole number from 1 to 16"},
      {"0-255: pairs=0", "pairs is \"0\": it must be a whole number from 1 to 16"},
      {"0-255: pairs=17", "pairs is \"17\""},
      {"0-255: pairs=2.5", "pairs is \"2.5\""},
      {"0-255: traffic_class=256", "traffic_class is \"256\": it must be a whole number from 0 to 255"},
      {"0-255: service_level=16", "service_level is \"16\": it must be a whole number from 0 to 15"},
      {"0-255: rate_gbps=0", "rate_gbps is \"0\""},
      {"0-255: rate_gbps=99999999999", "rate_gbps is \"99999999999\""},
      {"0-255: pairs=1 pairs=2", "a class names pairs twice"},
      {"0-255: pairs=4 rate_gbps=9", "9 Gb/s for 4 queue pairs is less than 2.5 Gb/s for each"},
      {"0-9: pairs=9; 10-255: pairs=8", "its classes have 17 queue pairs in all; at most 16 are allowed"},
      {"0-0;1-1;2-2;3-3;4-4;5-5;6-6;7-7;8-255", "there are more than 8 classes"},
  };
  for (const auto& [text, words] : cases) {
    const Status refused = verbs::parse_classes(text, {0, 1, 0, 0, 0}).status();
    CHECK_REFUSED(refused, Code::kInvalidArgument, "verbs.classes: ");
    if (!says(refused, words)) FAIL(std::string(text) + ": " + refused.message());
  }
}

TEST(a_rate_is_the_highest_that_devices_know_up_to_what_was_asked) {
  const std::pair<std::uint32_t, Rate> cases[] = {
      {25, Rate::k2_5}, {49, Rate::k2_5},   {50, Rate::k5},     {130, Rate::k10},   {270, Rate::k25},
      {999, Rate::k80}, {1000, Rate::k100}, {1119, Rate::k100}, {3999, Rate::k300}, {1000000, Rate::k1200}};
  for (const auto& [tenths, rate] : cases) CHECK(verbs::rate_below(tenths) == rate);
  CHECK(!verbs::rate_below(24));
  CHECK((PairClass{0, 2, 0, 0, 100}.path().rate == Rate::k50));
  CHECK((PairClass{0, 3, 0, 0, 100}.path().rate == Rate::k30));
  CHECK((PairClass{0, 2, 0, 0, 0}.path().rate == Rate::kPort));
}

TEST(a_priority_is_of_the_class_that_names_it) {
  PriorityClasses classes;
  CHECK_EQ(classes.of(255), 0u);
  for (const std::uint8_t first : {0, 1, 64, 255}) classes.add(first);
  REQUIRE_EQ(classes.size(), 4u);
  const std::pair<std::uint8_t, std::size_t> cases[] = {{0, 0}, {1, 1}, {63, 1}, {64, 2}, {254, 2}, {255, 3}};
  for (const auto& [priority, of_class] : cases) CHECK_EQ(classes.of(priority), of_class);
  CHECK_EQ(classes.end(0), 1u);
  CHECK_EQ(classes.end(3), 256u);
}

// ---- queue pairs --------------------------------------------------------------------------------

// The path of packets of each end's queue pairs: traffic class, service level and rate, pair by pair.
std::string travel(const Fabric& fabric, int device) {
  std::string words;
  for (const auto& [nic, address] : fabric.addresses())
    if (nic == device)
      words += std::to_string(address.grh.traffic_class) + "/" + std::to_string(address.service_level) + "/" +
               std::to_string(address.static_rate) + " ";
  return words;
}

TEST(queue_pairs_of_both_ends_are_set_up_as_their_classes_say) {
  Fabric fabric;
  {
    End a(on("nic0", with(kTwo))), b(on("nic1", with(kTwo)));
    const auto [b_at_a, a_at_b] = connect_both(a, b);
    for (const int device : {0, 1}) CHECK_EQ(travel(fabric, device), "104/0/0 26/3/20 26/3/20 ");
    CHECK(a.transport->path_to(b_at_a).ends_with(
        ", priorities 0 to 63: 1 queue pair, traffic class 104; 64 to 255: 2 queue pairs, traffic class 26, "
        "service level 3, 100 Gb/s, by READ"));
    CHECK_EQ(a.transport->capabilities().classes.of(kUrgent), 0u);
    CHECK_EQ(a.transport->capabilities().classes.of(kBulk), 1u);
  }
  End a(on("nic0", with(""))), b(on("nic1"));
  const auto [b_at_a, a_at_b] = connect_both(a, b);
  CHECK_EQ(travel(fabric, 0), "7/0/0 7/0/0 7/0/0 7/0/0 ");
  CHECK_EQ(travel(fabric, 1), "0/0/0 0/0/0 0/0/0 0/0/0 ");
  CHECK(a.transport->path_to(b_at_a).ends_with(" (nic1 port 1), by READ"));
  CHECK_EQ(a.transport->capabilities().classes.size(), 1u);
}

TEST(each_end_sets_up_its_own_where_only_how_they_travel_differs) {
  Fabric fabric;
  End a(on("nic0", with("0-63: pairs=1 traffic_class=1; 64-255: pairs=1 rate_gbps=10"))),
      b(on("nic1", with("0-63: pairs=1 traffic_class=2; 64-255: pairs=1 rate_gbps=50")));
  connect_both(a, b);
  CHECK_EQ(travel(fabric, 0), "1/0/0 7/0/3 ");
  CHECK_EQ(travel(fabric, 1), "2/0/0 7/0/20 ");
}

TEST(ends_whose_classes_differ_have_one) {
  const std::pair<const char*, std::size_t> cases[] = {
      {"", 3},  // of four
      {"0-255: pairs=5", 3},
      {"0-64: pairs=1; 65-255: pairs=2", 3},
      {"0-63: pairs=2; 64-255: pairs=1", 3},
      {"0-63: pairs=1; 64-255: pairs=1", 2},
      {"0-63: pairs=1; 64-99: pairs=2; 100-255: pairs=1", 3},
  };
  for (const auto& [other, num_pairs] : cases) {
    Fabric fabric;
    End a(on("nic0", with(kTwo))), b(on("nic1", with(other)));
    Region from(b, 1, 64 * kPage), to(a, 100, 64 * kPage);
    check::Random(check::seed()).fill(from.memory.data(), from.memory.size());
    const auto [b_at_a, a_at_b] = connect_both(a, b);
    CHECK_EQ(fabric.num_pairs(), 2 * num_pairs);
    CHECK_EQ(travel(fabric, 0).substr(0, 6), "7/0/0 ");
    CHECK_EQ(travel(fabric, 0).find("26/"), std::string::npos);
    for (const auto& [end, peer] : {std::pair(&a, b_at_a), std::pair(&b, a_at_b)})
      CHECK(end->transport->path_to(peer).ends_with("so there is one class, by READ"));
    REQUIRE_OK(a.transport->attach(b_at_a, from.remote()));
    std::vector<std::uint32_t> ids(64);
    std::iota(ids.begin(), ids.end(), 0u);
    for (const std::uint8_t priority : {kUrgent, kBulk}) {
      auto move = std::make_shared<Move>(*testing::block_move(1, to.memory.data(), kPage, ids, ids, 64));
      move->local = std::make_shared<const LocalRegion>(to.local);
      move->priority = priority;
      std::fill(to.memory.begin(), to.memory.end(), std::byte{0});
      const Work work = fetch_work(1 + priority, move, 0);
      REQUIRE_EQ(a.transport->post(b_at_a, work), Code::kOk);
      REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); },
                                  [&] { return a.completion_of(work.id) != nullptr; }));
      CHECK_EQ(a.completion_of(work.id)->code, Code::kOk);
      CHECK(from.memory == to.memory);
    }
  }
}

// ---- works --------------------------------------------------------------------------------------

// A destination and its sources, with works of either priority. That one class waits for none of another, and that a
// failure in one costs no transfer, is test_verbs_runtime.cpp's.
struct Classes : Rails {
  explicit Classes(std::uint32_t pages = 2048) : Rails(pages, with(kTwo)) {}
  std::vector<Work> works_of(std::uint8_t priority, std::uint32_t num, std::uint32_t pairs_per_piece) {
    std::vector<Work> works = some_works(num, pairs_per_piece);
    auto move = std::make_shared<Move>(*works.front().move);
    move->priority = priority;
    move->transfer = priority + std::uint64_t{1};
    for (Work& work : works) work.move = move;
    return works;
  }
};

TEST(what_is_cancelled_in_a_class_that_stands_ends_by_a_reset) {
  Classes rails;
  rails.fabric.hold_class(kBulkTraffic, true);
  const std::vector<Work> standing = rails.works_of(kBulk, 1024, 16);
  rails.post(standing);
  for (int i = 0; i < 20; ++i) rails.step();
  rails.dst.cancel(standing.back().id);  // waits for room
  REQUIRE(rails.run_until([&] { return rails.ended({standing.back()}); }));
  CHECK_EQ(rails.code_of(standing.back()), Code::kCancelled);
  CHECK(!rails.is_down(rails.peer));
  rails.dst.cancel(standing.front().id);
  REQUIRE(rails.run_until([&] {
    if (!rails.dst.transport->busy()) rails.dst.transport->arm();
    return rails.ended(standing);
  }));
  CHECK_EQ(rails.code_of(standing.front()), Code::kCancelled);
  CHECK_HAS(rails.down_words(rails.peer), "cancelled READs or WRITEs did not end in time");
  rails.fabric.hold_class(kBulkTraffic, false);
  rails.other_is_undisturbed();
}

TEST(a_class_costs_no_more_requests_than_all_pages_of_one_would) {
  for (const std::uint8_t priority : {kUrgent, kBulk}) {
    Classes rails(1024);
    rails.fabric.forget_counts();
    rails.finish(rails.works_of(priority, 1024, 128));
    const auto counts = rails.fabric.counts();
    CHECK(counts.requests <= 1024 + 1024 / 128);  // each piece has a fence word
    CHECK(counts.doorbells * 32 <= 1024 + 32 * 1024 / 128);
    CHECK_EQ(counts.signalled, counts.doorbells);
  }
}

}  // namespace
}  // namespace verbs_ends
