// Many peers at once, and peers that read slowly: what one call of the engine does for them is bounded, and so
// is what waits to be sent.
#include "count_steps.h"
#include "mallory.h"

namespace simulation {
namespace {

class Caller : public FarEnd {
 public:
  Caller(World& world, Node& victim, const std::string& name, Time heartbeat_ns = kSecond / 2)
      : FarEnd(world, victim, config(world, name, heartbeat_ns)) {}
  // Whether it was told of the victim's regions: only a peer that has its name is.
  bool has_name() const { return !ended && count<wire::RegionsEnd>() != 0; }

 private:
  static SessionConfig config(World& world, const std::string& name, Time heartbeat_ns) {
    SessionConfig config = config_of(name);
    config.heartbeat_ns = heartbeat_ns;
    world.random().fill(config.self.incarnation.data(), config.self.incarnation.size());
    return config;
  }
};
using Callers = std::vector<std::unique_ptr<Caller>>;

// An agent, and callers of it whose sessions are open. They have one name, or each its own.
struct Throng {
  Throng(std::size_t num, bool one_name, const EngineConfig& config = {})
      : world(check::seed(), config), victim(world.add("victim")) {
    for (std::size_t i = 0; i < num; ++i) {
      const std::string name = one_name ? "replica" : "replica " + std::to_string(i);
      callers.push_back(std::make_unique<Caller>(world, victim, name, config.session.heartbeat_ns));
      if (i == 0) REQUIRE(world.until([&] { return callers[0]->has_name(); }));
    }
    REQUIRE(world.until([&] {
      return std::all_of(callers.begin(), callers.end(), [](const auto& each) { return each->is_open(); });
    }));
    world.run_for(kMillisecond);
  }
  std::vector<Caller*> named() const {
    std::vector<Caller*> named;
    for (const auto& each : callers)
      if (each->has_name()) named.push_back(each.get());
    return named;
  }
  // From now on no step of the world may end, or send, more than so much.
  void bound_steps(std::size_t most_ended, std::size_t most_nbytes) {
    victim.on_event = [this](Node&, const Event& event) {
      num_ended += event.kind == EventKind::kPeerLost ? 1 : 0;
    };
    world.after_step = [this, most_ended, most_nbytes, ended = num_ended,
                        sent = victim.num_sent_nbytes]() mutable {
      CHECK(num_ended - std::exchange(ended, num_ended) <= most_ended);
      CHECK(victim.num_sent_nbytes - std::exchange(sent, victim.num_sent_nbytes) <= most_nbytes);
    };
  }

  World world;
  Node& victim;
  Callers callers;
  std::size_t num_ended = 0;
};

TEST(newcomers_of_one_name_are_refused_a_few_at_a_time_once_its_owner_answers) {
  Throng throng(300, true);
  CHECK_EQ(throng.named().size(), 1);
  throng.bound_steps(20, SIZE_MAX);
  REQUIRE(throng.world.until([&] { return throng.num_ended == 299; }));
  CHECK(throng.named() == std::vector{throng.callers[0].get()});
}

// Each gets the name that the one before it has left, and hears nothing of it until then.
TEST(newcomers_of_one_name_get_it_one_after_the_other) {
  EngineConfig patient;  // nobody answers a heartbeat meanwhile
  patient.session.silent_ns = 1000 * kSecond;
  patient.session.heartbeat_ns = 200 * kSecond;
  Throng throng(200, true, patient);
  throng.bound_steps(20, SIZE_MAX);
  for (std::size_t i = 0; i < throng.callers.size(); ++i) {
    REQUIRE(throng.world.until([&] { return !throng.named().empty(); }, kSecond));
    CHECK_EQ(throng.named().size(), 1);
    Caller& owner = *throng.named().front();
    owner.hang_up();
    owner.ended = true;
  }
}

// The owner hangs. The first newcomer that answers gets the name, and the others are refused.
TEST(one_newcomer_takes_over_the_name_of_a_process_that_hangs) {
  EngineConfig patient;
  patient.session.silent_ns = 600 * kSecond;
  Throng throng(50, true, patient);
  throng.callers[0]->is_mute = true;
  throng.bound_steps(20, SIZE_MAX);
  throng.world.run_for(6 * patient.session.heartbeat_ns + kSecond);
  CHECK_EQ(throng.num_ended, 49);  // the owner, and all newcomers but one
  CHECK(throng.callers[0]->ended);
  CHECK_EQ(throng.named().size(), 1);
}

// Peers know the rest of the region. One that is told of it only now is not confused by a change in between.
TEST(keys_that_come_late_are_told_alone) {
  Throng throng(1, false);
  const Caller& peer = *throng.callers.front();
  Engine& engine = throng.victim.engine();
  const auto add_region = [&] {
    auto region = std::make_unique<Region>();
    region->name = "late";
    region->num_blocks = 1;
    region->layout.resize(1000);
    return engine.register_region(throng.victim.now(), std::move(region)).value();
  };
  const auto told = [&](RegionId id) {
    throng.victim.settle();
    throng.world.run_for(kMillisecond);
    std::vector<wire::Region> all;
    for (const wire::Message& each : peer.received)
      if (const auto* const region = std::get_if<wire::Region>(&each); region != nullptr && region->id == id)
        all.push_back(*region);
    return all;
  };
  const RegionId known = add_region();
  CHECK_EQ(told(known).size(), 1u);
  for (const char* const rail : {"first", "second"}) {
    engine.add_keys(throng.victim.now(), known, {rail, {}, 0});
    const wire::Region last = told(known).back();
    CHECK(last.layout.empty() && last.keys.size() == 1 && last.keys.front().transport == rail);
  }
  const RegionId unknown = add_region();
  add_region();
  engine.add_keys(throng.victim.now(), unknown, {"first", {}, 0});
  CHECK_EQ(told(unknown).front().layout.size(), 1000u);
}

TEST(a_newcomer_is_refused_although_the_owner_of_its_name_was_quiet_for_long) {
  Pair pair;
  pair.world.run_for(60 * kSecond);
  Caller newcomer(pair.world, pair.src, "decode");
  CHECK(pair.world.until([&] { return newcomer.ended; }, 3 * kSecond));
  CHECK_EQ(pair.src.session_with("decode"), pair.to_dst);
}

TEST(newcomers_that_wait_cost_the_frames_of_others_nothing) {
  EngineConfig patient;
  patient.session.silent_ns = 1000 * kSecond;
  patient.session.heartbeat_ns = 200 * kSecond;
  const auto count = [&](std::size_t num_callers, std::uint64_t at_most) {
    Throng throng(num_callers, true, patient);
    Caller other(throng.world, throng.victim, "other", patient.session.heartbeat_ns);
    REQUIRE(throng.world.until([&] { return other.has_name(); }));
    const auto act = [&] {
      other.send(wire::AgentMessage{wire::Bytes(16)});
      throng.world.run_for(kMillisecond);
    };
    other.send(wire::RegionsEnd{});
    act();
    return check::count_steps(act, at_most);
  };
  const auto beside_one = count(2, UINT64_MAX);
  if (!beside_one) {
    std::printf("  skipped: this process may not trace its children\n");
    return;
  }
  const std::uint64_t at_most = *beside_one + *beside_one * 3 / 10;
  CHECK(*count(100, at_most) <= at_most);
}

RegionId add_region(Node& node, std::size_t layout_nbytes) {
  auto region = std::make_unique<Region>();
  region->name = "large";
  region->num_blocks = 1;
  region->layout = wire::Bytes(layout_nbytes);
  const auto added = node.engine().register_region(node.now(), std::move(region));
  REQUIRE_OK(added);
  (*node.memories())[added.value()] = std::make_shared<Memory>(Layout());
  return added.value();
}

TEST(a_large_region_is_told_to_many_peers_a_part_of_them_at_a_time) {
  Throng throng(100, false);
  throng.bound_steps(0, 1024 * 1024);
  const RegionId id = add_region(throng.victim, wire::kMaxLayout);
  throng.victim.settle();
  // A frame of a caller's that goes out earlier is read behind what was registered before it.
  const SessionKey last = throng.victim.session_with("replica 99");
  if (last != 0) CHECK(throng.victim.send_message(last, wire::Bytes(1)).ok());
  const auto all_have = [&](auto&& has) {
    return throng.world.until([&] { return std::all_of(throng.callers.begin(), throng.callers.end(), has); });
  };
  CHECK(all_have([](const auto& each) { return each->template count<wire::Region>() == 1; }));
  // A region that comes and goes at once is told as one change.
  CHECK(throng.victim.engine().deregister_region(throng.victim.now(), id).ok());
  const RegionId brief = add_region(throng.victim, wire::kMaxLayout);
  CHECK(throng.victim.engine().deregister_region(throng.victim.now(), brief).ok());
  throng.victim.settle();
  CHECK(all_have([](const auto& each) { return each->template count<wire::RegionGone>() == 2; }));
  for (const auto& each : throng.callers) CHECK_EQ(each->count<wire::Region>(), 1);
}

// A session is given up for four of the largest frames that its peer does not read (frame_socket.h).
constexpr std::size_t kMostOfASocket = 4 * (wire::kMaxBody + 64);

// Two agents with regions of so many blocks that tables of all of them are large frames.
struct Slow {
  explicit Slow(const EngineConfig& config = {}) : world(check::seed(), config) {
    for (Node* node : {&src, &dst}) regions.push_back(node->add_region(layout));
    world.connect(src, dst, {one_sided_rail(1024 * 1024)});
    to_dst = src.session_with("decode");
    to_src = dst.session_with("prefill");
    const auto installed = src.engine().install_program(src.now(), to_dst, true, regions[0], regions[1],
                                                        program_between(layout, layout));
    REQUIRE_OK(installed);
    program = installed.value();
    Pair::grant(dst, to_src, regions[1], wire::LeaseMode::kWrite, {}, 100 * kSecond, true);
    world.run_for(10 * kMillisecond);
    std::iota(blocks.begin(), blocks.end(), 0);
  }
  std::size_t num_unsent() { return src.pipe(to_dst)->num_unsent(src.side(to_dst)); }

  Layout layout{.num_layers = 1, .num_blocks = wire::kMaxBlocks, .chunk_nbytes = 8, .gap_nbytes = 0};
  World world;
  Node &src = world.add("prefill"), &dst = world.add("decode");
  std::vector<RegionId> regions;
  SessionKey to_dst = 0, to_src = 0;
  std::uint32_t program = 0;
  Blocks blocks = Blocks(wire::kMaxBlocks);
};

TEST(writes_to_a_peer_that_stands_still_wait_and_then_end) {
  Slow slow;
  slow.world.partition(slow.src, slow.dst, false);
  std::vector<std::shared_ptr<Handle>> handles;
  for (int i = 0; i < 12; ++i) {
    TransferRequest request;
    request.peer = slow.to_dst;
    request.program = slow.program;
    request.num_layers = request.layers_ready = 1;
    request.src_ids = request.dst_ids = slow.blocks;
    request.timeout_ns = 60 * kSecond;
    handles.push_back(Pair::post(slow.src, std::move(request)));
    CHECK(slow.num_unsent() <= kMostOfASocket / 2);
  }
  slow.world.run_for(10 * kMillisecond);
  CHECK(slow.num_unsent() <= kMostOfASocket / 2);
  slow.world.heal(slow.src, slow.dst);
  for (const auto& handle : handles) {
    REQUIRE(slow.world.until([&] { return handle->outcome() != Outcome::kPending; }, 60 * kSecond));
    CHECK_EQ(handle->outcome(), Outcome::kDone);
  }
}

TEST(leases_are_refused_and_regions_wait_while_a_peer_reads_nothing) {
  Slow slow;
  slow.world.partition(slow.src, slow.dst, false);
  Result<LeaseId> lease(LeaseId{0});
  int num_granted = 0;
  for (; lease.ok() && num_granted < 100; num_granted += lease.ok() ? 1 : 0)
    lease = slow.src.engine().grant(slow.src.now(), {slow.to_dst, slow.regions[0], wire::LeaseMode::kRead,
                                                     false, slow.blocks, 100 * kSecond, true});
  CHECK_EQ(lease.status().code(), Code::kExhausted);
  CHECK(num_granted > 1);
  for (int i = 0; i < 300; ++i) add_region(slow.src, wire::kMaxLayout);
  slow.src.settle();
  slow.world.run_for(10 * kMillisecond);
  CHECK(slow.num_unsent() <= kMostOfASocket / 4 * 3);
  slow.world.heal(slow.src, slow.dst);
  CHECK(slow.world.until([&] { return slow.dst.engine().peer_regions(slow.to_src).value().size() == 301; }));
  CHECK(slow.src.engine()
            .grant(slow.src.now(), {slow.to_dst, slow.regions[0], wire::LeaseMode::kRead, false, slow.blocks,
                                    100 * kSecond, true})
            .ok());
}

}  // namespace
}  // namespace simulation
