// Leases for any peer: a peer that names one may read under it, together with others and repeatedly; without
// it, a peer is refused. The end of such a lease is a fence for all of its readers.
#include <functional>

#include "simulated_pair.h"

namespace simulation {
namespace {

// A prefill, and decodes that read its pages.
struct Readers {
  struct Reader {
    Node* node;
    RegionId region;
    SessionKey to_src;
    std::uint32_t program;
    std::uint64_t bytes_landed = 0;
  };

  explicit Readers(const std::vector<RailPlan>& plans, std::uint64_t seed = check::seed(), int count = 2)
      : rails(plans), world(seed), src(world.add("prefill")), region(src.add_region(layout)) {
    to_layout.block_major = true;
    for (std::uint32_t block = 0; block < layout.num_blocks; ++block) source().fill(block, 1000 + block);
    for (int i = 0; i < count; ++i) add("decode-" + std::to_string(i));
  }
  Reader& add(const std::string& name) {
    Node& node = world.add(name);
    return connect(
        *readers.emplace_back(std::make_unique<Reader>(Reader{&node, node.add_region(to_layout), 0, 0})));
  }
  Reader& connect(Reader& reader) {
    Node& node = *reader.node;
    world.connect(node, src, rails);
    reader.to_src = node.session_with("prefill");
    reader.program = node.engine()
                         .install_program(node.now(), reader.to_src, false, region, reader.region,
                                          program_between(layout, to_layout))
                         .value();
    node.on_write = [&reader](Node&, SessionKey, Memory&, std::uint64_t, std::uint64_t nbytes) {
      reader.bytes_landed += nbytes;
    };
    return reader;
  }

  Memory& source() { return src.memory(region); }
  LeaseId grant(Blocks blocks = kFrom, Time ttl = 10 * kSecond) {
    return Pair::grant(src, std::nullopt, region, wire::LeaseMode::kRead, std::move(blocks), ttl, false);
  }
  std::shared_ptr<Handle> read(Reader& reader, LeaseId lease, Time timeout = 5 * kSecond) {
    TransferRequest out;
    out.peer = reader.to_src;
    out.program = reader.program;
    out.num_layers = out.layers_ready = layout.num_layers;
    out.src_ids = kFrom;
    out.dst_ids = kTo;
    out.notify = Pair::bytes(reader.node->name());
    out.timeout_ns = timeout;
    out.lease = lease;
    return Pair::post(*reader.node, std::move(out));
  }
  Code code_of(Reader& reader, LeaseId lease) {
    auto handle = read(reader, lease);
    REQUIRE(ends(handle));
    return handle->status().code();
  }
  bool ends(const std::shared_ptr<Handle>& handle) {
    return world.until([&] { return handle->outcome() != Outcome::kPending; }, 12 * kSecond);
  }
  // Runs until about a quarter of what each reader reads has landed.
  bool until_midway() {
    const std::uint64_t all = kFrom.size() * 2 * layout.chunk_nbytes * layout.num_layers;
    return world.until([&] {
      return std::all_of(readers.begin(), readers.end(),
                         [&](const auto& reader) { return reader->bytes_landed >= all / 4; });
    });
  }
  // Whether the reader has what the pages hold, or what they held before they were used again.
  bool equal(const Reader& reader, Memory& from) const {
    Memory& to = reader.node->memory(reader.region);
    for (std::uint32_t layer = 0; layer < layout.num_layers; ++layer)
      for (std::size_t i = 0; i < kFrom.size(); ++i)
        if (from.read(layer, kFrom[i]) != to.read(layer, kTo[i])) return false;
    return true;
  }
  bool told_of_a_lease(const Reader& reader) const {
    const auto& events = reader.node->events;
    return std::any_of(events.begin(), events.end(), [](const Event& event) { return event.lease != 0; });
  }
  bool notified_by(const Reader& reader) const {
    return std::any_of(src.events.begin(), src.events.end(), [&](const Event& event) {
      return event.kind == EventKind::kNotification && event.payload == Pair::bytes(reader.node->name());
    });
  }
  void check_quiet() {
    world.run_for(10 * kSecond);
    for (const auto& node : world.nodes())
      if (node->alive()) Pair::check_nothing_left(*node);
  }

  std::vector<RailPlan> rails;
  World world;
  Node& src;
  Layout layout, to_layout;
  RegionId region;
  std::vector<std::unique_ptr<Reader>> readers;
};

void on_every_rail_of_readers(const std::function<void(Readers&)>& scenario, int count = 2) {
  for (const auto& rails : rail_sets())
    for (std::uint64_t i = 0; i < 5; ++i) {
      Readers all(rails, check::seed() * 1000 + i, count);
      scenario(all);
      all.check_quiet();
    }
}

TEST(peers_that_name_it_read_under_it_at_once_and_again) {
  on_every_rail_of_readers([](Readers& all) {
    const LeaseId lease = all.grant();
    all.add("latecomer");  // it was unknown when the lease was granted
    for (int round = 0; round < 2; ++round) {
      std::vector<std::shared_ptr<Handle>> handles;
      for (auto& reader : all.readers) handles.push_back(all.read(*reader, lease));
      REQUIRE(all.until_midway());
      for (std::size_t i = 0; i < handles.size(); ++i) {
        REQUIRE(all.ends(handles[i]));
        CHECK_OK(handles[i]->status());
        CHECK(all.equal(*all.readers[i], all.source()));
        all.readers[i]->bytes_landed = 0;
      }
    }
    all.world.run_for(100 * kMillisecond);
    for (auto& reader : all.readers) {
      CHECK(all.notified_by(*reader));
      CHECK(!all.told_of_a_lease(*reader));
    }
    CHECK(all.src.engine().lease_state(lease) == LeaseState::kActive);
  });
}

TEST(who_does_not_name_it_is_refused) {
  on_every_rail_of_readers([](Readers& all) {
    const LeaseId lease = all.grant(), few = all.grant({1, 2});
    Readers::Reader& reader = *all.readers[0];
    CHECK_EQ(all.code_of(reader, 0), Code::kNotPermitted);
    // The reader's own lease covers a part; a lease for any peer does not cover the rest.
    all.src.engine().revoke(all.world.now(), few);
    const SessionKey key = all.src.session_with(reader.node->name());
    const LeaseId held = Pair::grant(all.src, key, all.region, wire::LeaseMode::kRead, {1, 2}, kSecond, true);
    CHECK_EQ(all.code_of(reader, 0), Code::kNotPermitted);
    CHECK_EQ(all.code_of(reader, held), Code::kNotPermitted);
    for (const LeaseId guess : {lease - 1, lease + 1, lease ^ kBearerBit, kBearerBit, few, held + 1,
                                LeaseId{1}, UINT64_MAX, lease | LeaseId{1} << 63})
      CHECK(guess == held || all.code_of(reader, guess) == Code::kLeaseEnded);
    // A lease of one peer does not serve another peer, even if that peer names it.
    CHECK_EQ(all.code_of(*all.readers[1], held), Code::kLeaseEnded);
    CHECK_EQ(reader.bytes_landed + all.readers[1]->bytes_landed, 0);
    CHECK_EQ(all.code_of(reader, lease), Code::kOk);
  });
}

TEST(a_lease_of_a_name_is_worth_nothing_to_others) {
  on_every_rail_of_readers(
      [](Readers& all) {
        const auto grant = [&](std::string name) {
          return all.src.engine()
              .grant(all.world.now(), {std::nullopt,
                                       all.region,
                                       wire::LeaseMode::kRead,
                                       true,
                                       {},
                                       10 * kSecond,
                                       false,
                                       0,
                                       std::move(name)})
              .value();
        };
        const LeaseId one = grant("decode-1"), engine = grant("decode-2/*");
        Readers::Reader& later = all.add("decode-2/0");  // it connected after the lease was granted
        for (const auto& [lease, holder] :
             {std::pair{one, all.readers[1].get()}, std::pair{engine, &later}}) {
          for (auto& reader : all.readers) {
            if (reader.get() == holder) continue;
            auto handle = all.read(*reader, lease);
            REQUIRE(all.ends(handle));
            CHECK_REFUSED(handle->status(), Code::kNotPermitted, "and you are '" + reader->node->name());
            CHECK(handle->status().message().find(std::to_string(lease)) == std::string::npos);
            CHECK_EQ(reader->bytes_landed, 0);
          }
          CHECK_EQ(all.code_of(*holder, lease), Code::kOk);
          holder->bytes_landed = 0;
        }
        // A stranger that guesses a number does not learn whose lease it is.
        all.src.engine().revoke(all.world.now(), one);
        CHECK_EQ(all.code_of(*all.readers[0], one), Code::kLeaseEnded);
        // The reader's process restarts under the same name; the new one has the lease's number, too.
        Readers::Reader& victim = *all.readers[0];
        const LeaseId again = grant(victim.node->name());
        victim.node->crash(true);
        victim.node->start();
        victim.region = victim.node->add_region(all.to_layout);
        all.connect(victim);
        CHECK_EQ(all.code_of(victim, again), Code::kOk);
      },
      2);
}

TEST(it_covers_its_blocks_of_its_region_alone) {
  on_every_rail_of_readers([](Readers& all) {
    Blocks most(kFrom.begin(), kFrom.end() - 1);
    auto handle = all.read(*all.readers[0], all.grant(most));
    REQUIRE(all.ends(handle));
    CHECK_REFUSED(handle->status(), Code::kNotPermitted, "does not cover block 8");
    const RegionId other = all.src.add_region(all.layout);
    const LeaseId elsewhere =
        Pair::grant(all.src, std::nullopt, other, wire::LeaseMode::kRead, {}, 10 * kSecond, false);
    CHECK_EQ(all.code_of(*all.readers[1], elsewhere), Code::kLeaseEnded);
  });
}

TEST(it_lets_nobody_write) {
  for (const auto& rails : rail_sets()) {
    Pair pair(rails);
    const auto refused = pair.dst.engine().grant(
        pair.dst.now(), {std::nullopt, pair.dst_region, wire::LeaseMode::kWrite, true, {}, kSecond, false});
    CHECK_EQ(refused.status().code(), Code::kInvalidArgument);
    const LeaseId lease =
        Pair::grant(pair.dst, std::nullopt, pair.dst_region, wire::LeaseMode::kRead, {}, 10 * kSecond, false);
    pair.freeze_destination();
    TransferRequest request = pair.request(true, kFrom, kTo, "req");
    request.lease = lease;
    auto handle = Pair::post(pair.src, request);
    REQUIRE(pair.ends(handle));
    CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
    pair.check_quiet();
  }
}

TEST(ids_are_of_their_own_kind_and_do_not_repeat) {
  Readers all({one_sided_rail()});
  std::set<LeaseId> ids;
  LeaseId any = 0, all_of_them = ~LeaseId{0};
  for (int i = 0; i < 200; ++i) {
    const LeaseId id = all.grant();
    CHECK((id & kBearerBit) != 0 && id >> 63 == 0);
    ids.insert(id);
    any |= id, all_of_them &= id;
  }
  CHECK_EQ(ids.size(), 200);
  // All other bits are random.
  CHECK_EQ(any, (kBearerBit << 1) - 1);
  CHECK_EQ(all_of_them, kBearerBit);
}

TEST(whoever_told_its_number_before_brings_it) {
  on_every_rail_of_readers([](Readers& all) {
    const auto grant = [&](std::optional<SessionKey> peer, LeaseId drawn) {
      return all.src.engine().grant(
          all.world.now(), {peer, all.region, wire::LeaseMode::kRead, true, {}, 10 * kSecond, false, drawn});
    };
    const LeaseId drawn = kBearerBit | 77;
    CHECK_EQ(all.code_of(*all.readers[0], drawn), Code::kLeaseEnded);
    CHECK_EQ(grant(std::nullopt, drawn).value(), drawn);
    CHECK_EQ(all.code_of(*all.readers[0], drawn), Code::kOk);
    CHECK_EQ(grant(std::nullopt, drawn).status().code(), Code::kInvalidArgument);
    all.src.revoke(drawn);
    CHECK_EQ(grant(std::nullopt, drawn).status().code(), Code::kInvalidArgument);
    CHECK_EQ(all.code_of(*all.readers[0], drawn), Code::kLeaseEnded);
    for (const LeaseId wrong : {LeaseId{1}, kBearerBit - 1, kBearerBit << 1, kBearerBit * 3})
      CHECK_EQ(grant(std::nullopt, wrong).status().code(), Code::kInvalidArgument);
    const SessionKey key = all.src.session_with(all.readers[0]->node->name());
    CHECK_EQ(grant(key, kBearerBit | 78).status().code(), Code::kInvalidArgument);
    CHECK_EQ(all.src.engine().load().leases, 0);
  });
}

// ---- its end ------------------------------------------------------------------------------------

// While two agents read, the right ends and the pages are used again at once: neither read is done with later
// bytes. One reader may be stopped, or cut off.
enum class First { kListens, kStopped, kCutOff };
void all_reads_are_fenced(const std::function<void(Readers&, LeaseId)>& end, const std::vector<Code>& codes,
                          Time ttl = 10 * kSecond, Time work_ns = 100 * kMicrosecond) {
  std::size_t num_failed = 0;
  for (const First first : {First::kListens, First::kStopped, First::kCutOff})
    on_every_rail_of_readers([&](Readers& all) {
      for (const auto& node : all.world.nodes()) node->work_ns = work_ns;
      const LeaseId lease = all.grant(kFrom, ttl);
      std::vector<std::shared_ptr<Handle>> handles;
      for (auto& reader : all.readers) handles.push_back(all.read(*reader, lease));
      REQUIRE(all.until_midway());
      Node& odd = *all.readers[0]->node;
      if (first == First::kStopped) odd.pause();
      if (first == First::kCutOff) all.world.partition(all.src, odd, false);
      end(all, lease);
      Memory held = all.source();
      for (const std::uint32_t block : kFrom) {
        all.source().fill(block, 77'000 + block);
        all.source().reused.insert(block);
      }
      if (first == First::kStopped) {
        all.world.run_for(all.world.random().chance(50) ? 100 * kMillisecond : 4 * kSecond);
        odd.resume();
      }
      for (std::size_t i = 0; i < handles.size(); ++i) {
        REQUIRE(all.ends(handles[i]));
        if (handles[i]->outcome() == Outcome::kDone) {  // it had read all and checked the fence before
          CHECK(all.equal(*all.readers[i], held));
          continue;
        }
        ++num_failed;
        CHECK_EQ(handles[i]->outcome(), Outcome::kFailed);
        if (i != 0 || first == First::kListens)
          CHECK(std::find(codes.begin(), codes.end(), handles[i]->status().code()) != codes.end());
        all.world.run_for(kSecond);
        CHECK(!all.notified_by(*all.readers[i]));
      }
      CHECK_EQ(all.src.engine().num_transfers(), 0);
      CHECK(all.src.engine().lease_state(lease) != LeaseState::kActive);
    });
  CHECK(num_failed >= 90);  // of 120: few are done
}

TEST(its_revocation_fences_all_its_readers) {
  all_reads_are_fenced([](Readers& all, LeaseId lease) { all.src.revoke(lease); }, {Code::kLeaseEnded});
}

TEST(its_regions_end_fences_all_its_readers) {
  all_reads_are_fenced([](Readers& all, LeaseId) { CHECK_OK(all.src.deregister(all.region)); },
                       {Code::kLeaseEnded, Code::kRegionGone});
}

TEST(its_expiry_fences_all_its_readers_though_they_live) {
  all_reads_are_fenced(
      [](Readers& all, LeaseId lease) {
        REQUIRE(all.world.until([&] { return all.src.engine().lease_state(lease) == LeaseState::kExpired; },
                                2 * kSecond));
      },
      {Code::kLeaseEnded}, kSecond, 200 * kMillisecond);
}

// The source's word says that the right is over, and its frame never comes.
TEST(a_reader_that_hears_no_reason_ends_by_the_fence_word_alone) {
  std::size_t num_stale = 0;
  for (std::uint64_t i = 0; i < 20; ++i) {
    Readers all({one_sided_rail()}, check::seed() * 1000 + i, 1);
    Node& reader = *all.readers[0]->node;
    const LeaseId lease = all.grant();
    const auto handle = all.read(*all.readers[0], lease);
    REQUIRE(all.until_midway());
    all.world.partition(all.src, reader, false);
    all.src.revoke(lease);
    // Sooner than a peer counts as silent.
    REQUIRE(all.world.until([&] { return handle->outcome() != Outcome::kPending; }, 200 * kMillisecond));
    if (handle->outcome() == Outcome::kDone) continue;
    ++num_stale;
    CHECK_EQ(handle->status().code(), Code::kLeaseEnded);
    CHECK_EQ(reader.engine().stats().fences_stale, 1u);
    CHECK_EQ(reader.engine().num_transfers(), 0);
  }
  CHECK(num_stale >= 10);
}

TEST(its_agents_end_is_its_end) {
  on_every_rail_of_readers([](Readers& all) {
    const LeaseId lease = all.grant();
    auto handle = all.read(*all.readers[0], lease);
    all.src.engine().close(all.world.now());
    all.src.settle();
    CHECK(all.src.engine().lease_state(lease) == LeaseState::kRegionGone);
    CHECK_EQ(all.src.engine().load().leases, 0);
    REQUIRE(all.ends(handle));
    const auto again = all.src.engine().grant(
        all.world.now(), {std::nullopt, all.region, wire::LeaseMode::kRead, true, {}, kSecond, false});
    CHECK_EQ(again.status().code(), Code::kClosed);
  });
}

TEST(nobodys_heartbeats_renew_it_and_a_reader_counts_what_is_left) {
  on_every_rail_of_readers([](Readers& all) {
    const auto lease = Pair::grant(all.src, std::nullopt, all.region, wire::LeaseMode::kRead, {}, kSecond,
                                   /*renewable=*/true);
    all.world.run_for(900 * kMillisecond);
    for (const auto& node : all.world.nodes()) node->work_ns = 20 * kMillisecond;
    // The reader stops by itself, before the grantor has to.
    auto late = all.read(*all.readers[0], lease);
    REQUIRE(all.ends(late));
    CHECK_REFUSED(late->status(), Code::kLeaseEnded, "is about to expire");
    all.world.run_for(400 * kMillisecond);
    CHECK(all.src.engine().lease_state(lease) == LeaseState::kExpired);
    CHECK_EQ(all.code_of(*all.readers[1], lease), Code::kLeaseEnded);
  });
}

TEST(a_reader_that_is_lost_ends_its_own_reads_alone) {
  for (const int way : {0, 1, 2})
    on_every_rail_of_readers([&](Readers& all) {
      const LeaseId lease = all.grant();
      auto lost = all.read(*all.readers[0], lease), kept = all.read(*all.readers[1], lease);
      REQUIRE(all.until_midway());
      Readers::Reader& victim = *all.readers[0];
      const SessionKey key = all.src.session_with(victim.node->name());
      if (way == 2) {
        all.src.engine().end_session(all.world.now(), key, Code::kClosed, "enough");
        all.src.settle();
      } else {
        victim.node->crash(way == 0);
      }
      REQUIRE(all.ends(kept));
      CHECK_OK(kept->status());
      CHECK(all.equal(*all.readers[1], all.source()));
      REQUIRE(all.world.until([&] { return all.src.engine().num_transfers() == 0; }));
      CHECK(all.src.engine().lease_state(lease) == LeaseState::kActive);
      // Its successor has the lease's number, too.
      if (way == 2) {
        REQUIRE(all.ends(lost));
      } else {
        victim.node->start();
        victim.region = victim.node->add_region(all.to_layout);
      }
      all.connect(victim);
      CHECK_EQ(all.code_of(victim, lease), Code::kOk);
    });
}

TEST(the_newest_that_ended_are_remembered_whatever_their_numbers) {
  Readers all({one_sided_rail()});
  const SessionKey key = all.src.session_with("decode-0");
  const LeaseId oldest = Pair::grant(all.src, key, all.region, wire::LeaseMode::kRead, {}, kSecond, true);
  std::vector<LeaseId> ended;
  for (int i = 0; i < 5000; ++i) {
    ended.push_back(i % 2 == 0
                        ? all.grant()
                        : Pair::grant(all.src, key, all.region, wire::LeaseMode::kRead, {}, kSecond, true));
    all.src.engine().revoke(all.world.now(), ended.back());
  }
  all.src.revoke(oldest);
  CHECK(all.src.engine().lease_state(oldest) == LeaseState::kRevoked);
  for (std::size_t i = 1; i <= 4000; ++i)
    CHECK(all.src.engine().lease_state(ended[ended.size() - i]) == LeaseState::kRevoked);
  CHECK(!all.src.engine().lease_state(ended[0]));
  CHECK(!all.src.engine().lease_state(ended[1]));
}

}  // namespace
}  // namespace simulation
