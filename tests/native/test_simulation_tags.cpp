// Contexts of requests, at both ends; and tags that are over, of which a later call is told at once.
#include <map>

#include "mallory.h"

namespace simulation {
namespace {

// ---- contexts -------------------------------------------------------------------------------------

TEST(each_end_keeps_its_own_context_and_else_has_the_others) {
  struct Case { std::string of_write, of_expect, at_src, at_dst; };
  const Case cases[] = {{"", "", "", ""}, {"w", "", "w", "w"}, {"", "e", "e", "e"}, {"w", "e", "w", "e"}};
  on_every_rail([&](Pair& pair) {
    for (const auto& [of_write, of_expect, at_src, at_dst] : cases) {
      auto expected = pair.expect("req", kTo, Pair::kTimeout, of_expect);
      auto written = pair.write(kFrom, kTo, "req", of_write);
      REQUIRE(pair.ends(written) && pair.ends(expected));
      CHECK_EQ(written->outcome(), Outcome::kDone);
      CHECK_EQ(wire::text_of(written->context()), at_src);
      CHECK_EQ(wire::text_of(expected->context()), at_dst);
      // The same for a failure: the blocks of the expectation differ.
      expected = pair.expect("req", {1}, Pair::kTimeout, of_expect);
      written = pair.write(kFrom, kTo, "req", of_write);
      REQUIRE(pair.ends(written));
      CHECK_EQ(written->status().code(), Code::kRefused);
      CHECK_EQ(wire::text_of(written->context()), at_src);
      CHECK_EQ(wire::text_of(expected->context()), of_expect);  // it is not over, and has no writer yet
      pair.dst.cancel(expected);
    }
  });
}

TEST(notifications_say_whose_request_they_are_of) {
  on_every_rail([](Pair& pair) {
    pair.grant_write();
    pair.grant_read();
    auto written = pair.write(kFrom, kTo, "written", "w");
    auto read = pair.read(kFrom, kTo, "read", "r");
    REQUIRE(pair.ends(written) && pair.ends(read));
    CHECK_EQ(wire::text_of(read->context()), "r");
    const auto context_of = [&](Node& node, const std::string& payload) {
      REQUIRE(pair.world.until([&] { return pair.notified(node, payload); }));
      for (const Event& event : node.events)
        if (event.payload == Pair::bytes(payload)) return wire::text_of(event.context);
      return std::string("none");
    };
    CHECK_EQ(context_of(pair.dst, "written"), "w");
    CHECK_EQ(context_of(pair.src, "read"), "r");
  });
}

// Among several writers, the one that failed is named, not the first or the last.
TEST(an_expectation_that_fails_names_the_writer_that_failed) {
  on_every_rail([](Pair& pair) {
    auto expected = pair.expect("req", {4, 5, 6});
    const auto held = [&](const Blocks& from, const Blocks& to, const std::string& context) {
      auto request = pair.request(true, from, to, "req", context);
      request.layers_ready = 0;
      return Pair::post(pair.src, std::move(request));
    };
    held({1}, {4}, "first");
    auto second = held({2}, {5}, "second");
    held({3}, {6}, "third");
    pair.world.run_for(10 * kMillisecond);
    CHECK_EQ(wire::text_of(expected->context()), "third");
    pair.src.cancel(second);
    REQUIRE(pair.ends(expected));
    CHECK_EQ(expected->status().code(), Code::kCancelled);
    CHECK_EQ(wire::text_of(expected->context()), "second");
  });
}

// ---- tags that are over ---------------------------------------------------------------------------

bool ends_at_once(Pair& pair, const std::shared_ptr<Handle>& handle) {
  return pair.ends(handle, 100 * kMillisecond);
}

TEST(a_write_of_a_tag_that_was_given_up_is_refused_at_once) {
  on_every_rail([](Pair& pair) {
    for (const bool by_time : {false, true}) {
      const std::string tag = by_time ? "late" : "cancelled";
      auto expected = pair.expect(tag, kTo, by_time ? kSecond : Pair::kTimeout, "its request");
      if (!by_time) pair.dst.cancel(expected);
      REQUIRE(pair.ends(expected));
      auto written = pair.write(kFrom, kTo, tag);
      REQUIRE(ends_at_once(pair, written));
      CHECK_EQ(written->status().code(), by_time ? Code::kDeadline : Code::kCancelled);
      CHECK_HAS(written->status().message(), "the expectation of its tag had ended (context 'its request')");
      CHECK_EQ(wire::text_of(written->context()), "its request");
      // A new expectation begins the tag anew. What was done may be written again before it is expected.
      for (int i = 0; i < 2; ++i) {
        if (i == 0) expected = pair.expect(tag, kTo);
        written = pair.write(kFrom, kTo, tag);
        if (i == 1) {
          CHECK(!ends_at_once(pair, written));
          expected = pair.expect(tag, kTo);
        }
        REQUIRE(pair.ends(written) && pair.ends(expected));
        CHECK_EQ(written->outcome(), Outcome::kDone);
        CHECK_EQ(expected->outcome(), Outcome::kDone);
      }
    }
    // A lease gives the right without the tag.
    pair.dst.cancel(pair.expect("leased", kTo));
    pair.grant_write(kTo);
    pair.world.run_for(10 * kMillisecond);  // until the writer has heard of it
    auto written = pair.write(kFrom, kTo, "leased");
    REQUIRE(pair.ends(written));
    CHECK_EQ(written->outcome(), Outcome::kDone);
  });
}

// ---- writes that wait for a right -----------------------------------------------------------------

TEST(a_parked_write_begins_with_the_last_right_that_it_lacks) {
  const std::vector<Blocks> orders[] = {{{4}, {5}, {6}}, {{6}, {5}, {4}}, {{5}, {4, 6}},
                                        {{4, 5}, {6}},   {{6, 5, 4}},     {{}}};  // {}: all blocks
  on_every_rail([&](Pair& pair) {
    for (const std::vector<Blocks>& grants : orders) {
      pair.write({9}, {9}, "another");  // it goes on waiting
      auto written = pair.write({1, 2, 3}, {4, 5, 6}, "req");
      pair.world.run_for(10 * kMillisecond);
      pair.grant_write({0, 7});
      std::vector<LeaseId> leases;
      for (const Blocks& blocks : grants) {
        CHECK(!ends_at_once(pair, written));
        leases.push_back(pair.grant_write(blocks));
      }
      REQUIRE(ends_at_once(pair, written));
      CHECK_EQ(written->outcome(), Outcome::kDone);
      CHECK(pair.equal({1, 2, 3}, {4, 5, 6}));
      // What has ended takes no part in the next round: no right is left to write under.
      pair.dst.end_session_with(pair.to_src);
      pair.world.run_for(kSecond);
      pair.connect({one_sided_rail()});
    }
  });
}

// A lease that covers only some of its blocks does not serve the write.
TEST(a_write_that_is_expected_outlives_leases_on_its_blocks) {
  on_every_rail([](Pair& pair) {
    auto request = pair.request(true, {1, 2}, {4, 5}, "req");
    request.layers_ready = 0;
    auto written = Pair::post(pair.src, std::move(request));
    pair.world.run_for(10 * kMillisecond);
    const LeaseId lease = pair.grant_write({4});
    auto expected = pair.expect("req", {4, 5});
    pair.world.run_for(10 * kMillisecond);
    pair.dst.revoke(lease);
    CHECK(!ends_at_once(pair, written));
    pair.src.engine().layers_ready(pair.src.now(), written->id(), pair.src_layout.num_layers);
    pair.src.settle();
    REQUIRE(pair.ends(written) && pair.ends(expected));
    CHECK_EQ(written->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kDone);
  });
}

TEST(parked_writes_of_one_tag_are_let_in_as_they_came) {
  on_every_rail([](Pair& pair) {
    auto first = pair.write({1}, {4}, "req"), second = pair.write({2}, {4}, "req");
    pair.world.run_for(10 * kMillisecond);
    auto expected = pair.expect("req", {4, 5});
    REQUIRE(pair.ends(second));
    CHECK_EQ(second->status().code(), Code::kRefused);  // another write brings that block
    auto third = pair.write({3}, {5}, "req");
    REQUIRE(pair.ends(first) && pair.ends(third) && pair.ends(expected));
    CHECK_EQ(first->outcome(), Outcome::kDone);
    CHECK_EQ(expected->outcome(), Outcome::kDone);
  });
}

TEST(who_expects_a_write_that_ended_before_is_told_at_once) {
  enum class Way { kByCaller, kLate, kCrashed };
  on_every_rail([](Pair& pair) {
    for (const Way end : {Way::kByCaller, Way::kLate, Way::kCrashed}) {
      auto request = pair.request(true, kFrom, kTo, "req", "its request");
      if (end == Way::kLate) request.timeout_ns = kSecond;
      auto written = Pair::post(pair.src, std::move(request));
      pair.world.run_for(10 * kMillisecond);
      if (end == Way::kByCaller) pair.src.cancel(written);
      if (end == Way::kCrashed) pair.src.crash();
      if (end != Way::kCrashed) REQUIRE(pair.ends(written));
      pair.world.run_for(100 * kMillisecond);
      CHECK_EQ(pair.dst.engine().load().tags_remembered, 1);
      auto expected = pair.expect("req", kTo);
      REQUIRE(ends_at_once(pair, expected));
      CHECK_EQ(expected->outcome(), end == Way::kByCaller ? Outcome::kCancelled : Outcome::kFailed);
      CHECK_EQ(expected->status().code(), end == Way::kByCaller ? Code::kCancelled
                                          : end == Way::kLate   ? Code::kDeadline
                                                                : Code::kPeerLost);
      CHECK_HAS(expected->status().message(),
                "the write with its tag by 'prefill' had ended before the tag was expected");
      CHECK_EQ(wire::text_of(expected->context()), "its request");
      CHECK(expected->failed_blocks().size() == kTo.size());
      // It is reported once: the next write waits.
      CHECK_EQ(pair.dst.engine().load().tags_remembered, 0);
      expected = pair.expect("req", kTo);
      CHECK(!ends_at_once(pair, expected));
      if (end == Way::kCrashed) {
        pair.dst.cancel(expected);
        continue;
      }
      written = pair.write(kFrom, kTo, "req");
      REQUIRE(pair.ends(written) && pair.ends(expected));
      CHECK_EQ(expected->outcome(), Outcome::kDone);
    }
  });
}

// The other end's write does not satisfy an expectation of this end's only.
TEST(only_writes_that_were_meant_count) {
  Pair pair({two_sided_rail()});
  auto written = pair.write(kFrom, kTo, "req");
  pair.world.run_for(10 * kMillisecond);
  pair.src.cancel(written);
  pair.world.run_for(10 * kMillisecond);
  Node& other = pair.world.add("other");
  pair.world.connect(other, pair.dst, {two_sided_rail()});
  auto expected = pair.expect("req", kTo, Pair::kTimeout, "", pair.dst.session_with("other"));
  CHECK(!ends_at_once(pair, expected));
  pair.dst.cancel(expected);
  // The cancelled expectation was for the other end's writes only, so this write waits.
  written = pair.write(kFrom, kTo, "req");
  CHECK(!ends_at_once(pair, written));
  pair.check_quiet();
}

// Random orders of both ends' calls, compared step by step with what the docstring says.
TEST(any_order_of_both_ends_is_as_documented) {
  struct Tag {
    std::shared_ptr<Handle> written, expected;  // those that wait
    bool given_up = false, lost = false;
  };
  for (std::uint64_t i = 0; i < 20; ++i) {
    Pair pair({i % 2 == 0 ? one_sided_rail() : two_sided_rail()}, check::seed() * 1000 + i);
    check::Random& random = pair.world.random();
    std::map<std::string, Tag> tags;
    for (int step = 0; step < 100; ++step) {
      const std::string name(1, static_cast<char>('a' + random.below(3)));
      Tag& tag = tags[name];
      const std::uint32_t block = static_cast<std::uint32_t>(name[0] - 'a');
      std::shared_ptr<Handle> ended;  // by this call
      Outcome outcome = Outcome::kDone;
      switch (random.below(4)) {
        case 0:
          if (tag.expected) continue;
          ended = pair.expect(name, {block}, 1000 * kSecond);
          tag.given_up = false;
          outcome = tag.written ? Outcome::kDone : Outcome::kCancelled;
          if (!tag.written && !tag.lost) tag.expected = std::exchange(ended, nullptr);
          tag.written = nullptr;
          tag.lost = false;
          break;
        case 1: {
          if (tag.written) continue;
          auto request = pair.request(true, {block}, {block}, name);
          request.timeout_ns = 1000 * kSecond;
          ended = Pair::post(pair.src, std::move(request));
          tag.lost = false;
          outcome = tag.expected ? Outcome::kDone : Outcome::kCancelled;
          if (!tag.expected && !tag.given_up) tag.written = std::exchange(ended, nullptr);
          tag.expected = nullptr;
          break;
        }
        case 2:
          if (!tag.expected) continue;
          ended = std::exchange(tag.expected, nullptr);
          pair.dst.cancel(ended);
          tag.given_up = true;
          outcome = Outcome::kCancelled;
          break;
        default:
          if (!tag.written) continue;
          ended = std::exchange(tag.written, nullptr);
          pair.src.cancel(ended);
          tag.lost = true;
          outcome = Outcome::kCancelled;
      }
      pair.world.run_for(20 * kMillisecond);
      if (ended) CHECK_EQ(ended->outcome(), outcome);
      for (const auto& [each, waiting] : tags)
        for (const auto& handle : {waiting.written, waiting.expected})
          CHECK(!handle || handle->outcome() == Outcome::kPending);
    }
    for (auto& [name, tag] : tags) {
      if (tag.written) pair.src.cancel(tag.written);
      if (tag.expected) pair.dst.cancel(tag.expected);
    }
    pair.check_quiet();
  }
}

// ---- bounds ---------------------------------------------------------------------------------------

TEST(tags_that_were_given_up_are_forgotten_the_oldest_first) {
  Pair pair;
  for (std::size_t i = 0; i <= TagMemory::kMaxTags; ++i) pair.dst.cancel(pair.expect(std::to_string(i), {1}));
  CHECK_EQ(pair.dst.engine().load().tags_remembered, TagMemory::kMaxTags);
  auto forgotten = pair.write({1}, {1}, "0");
  CHECK(!ends_at_once(pair, forgotten));
  auto remembered = pair.write({1}, {1}, "1");
  CHECK(ends_at_once(pair, remembered));
  // Fewer long tags are remembered.
  const std::string filler(wire::kMaxNotify - 8, 'x');
  for (std::size_t i = 0; i < 1000; ++i) pair.dst.cancel(pair.expect(filler + std::to_string(i), {1}));
  CHECK(pair.dst.engine().load().tags_remembered <= TagMemory::kMaxNbytes / wire::kMaxNotify);
  pair.check_quiet();
}

// Mallory's writes are charged to her, displace only her own, and stay as few when she comes again.
TEST(a_peer_fills_its_own_memory_alone) {
  Pair pair;
  auto written = pair.write(kFrom, kTo, "honest");
  pair.world.run_for(10 * kMillisecond);
  pair.src.cancel(written);
  pair.world.run_for(10 * kMillisecond);
  std::size_t remembered = 1;
  std::vector<std::unique_ptr<Mallory>> lives;  // frames to them are still under way
  for (int life = 0; life < 3; ++life) {
    lives.push_back(std::make_unique<Mallory>(pair.world, pair.dst));
    Mallory* const mallory = lives.back().get();
    const SessionKey key = mallory->key();
    mallory->layout = pair.dst_layout;
    mallory->tell_program(1, pair.dst_region, true, [](CopyProgram&) {});
    const auto used = [&]() -> std::uint64_t {
      const std::shared_ptr<Budget> budget = pair.dst.engine().budget(key);
      return budget == nullptr ? 0 : budget->used(Resource::kBytes);
    };
    const std::uint64_t before = used();
    for (TransferId id = 0; id < 2 * TagMemory::kMaxTags; id += 2) {
      wire::Offer offer{mallory->spec(id + 2, 1, {1}, {1}), 0, 0, 0};
      offer.spec.notify = Pair::bytes(std::to_string(life) + " " + std::to_string(id));
      mallory->send(offer);
      mallory->send(wire::Fail{id + 2, Code::kCancelled, "", wire::Bytes(wire::kMaxContext, std::byte{'c'})});
      if (mallory->ended) break;
    }
    REQUIRE(!mallory->ended);
    CHECK_EQ(pair.dst.engine().load().tags_remembered, remembered + TagMemory::kMaxTags);
    CHECK(used() > before && used() - before <= TagMemory::kMaxNbytes);
    pair.dst.engine().end_session(pair.dst.now(), key, Code::kPeerLost, "enough");
    pair.dst.settle();
    remembered = 1 + TagMemory::kMaxTags;
    CHECK_EQ(pair.dst.engine().load().tags_remembered, remembered);
  }
  auto expected = pair.expect("honest", kTo);
  CHECK(ends_at_once(pair, expected));
  check_undisturbed(pair);
}

}  // namespace
}  // namespace simulation
