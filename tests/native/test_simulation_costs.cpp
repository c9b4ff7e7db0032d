// The cost of an event does not depend on idle things: peers, parked transfers, leases, expectations, blocks
// of the region. Counted in instructions of an engine on a simulated network.
#include "count_steps.h"
#include "simulation.h"

namespace simulation {
namespace {

// Idle things. A prefill and a decode have this many sessions with each other, in place of so many peers.
struct Crowd {
  std::size_t num_sessions = 1;
  std::uint32_t num_blocks = 16;  // of the decode's region
  std::size_t num_parked = 0;  // writes of tags without an expectation
  std::size_t num_expected = 0;  // tags without a write
  std::size_t num_leases = 0;  // of one block each, with a read under way that waits for its layers
};

class Costs {
 public:
  explicit Costs(const Crowd& crowd, RailPlan rail = one_sided_rail(4096))
      : world_(check::seed(), limits()), src_(world_.add("prefill")), dst_(world_.add("decode")) {
    layout_ = {.num_layers = 1, .num_blocks = 16, .chunk_nbytes = 16, .gap_nbytes = 0};
    src_region_ = src_.add_region(layout_);
    layout_.num_blocks = crowd.num_blocks;
    dst_region_ = dst_.add_region(layout_);
    for (std::size_t i = 0; i < crowd.num_sessions; ++i) src_.call(dst_, {rail});
    REQUIRE(world_.until([&] {
      return src_.engine().open_peers().size() == crowd.num_sessions &&
             dst_.engine().open_peers().size() == crowd.num_sessions;
    }));
    Layout of_src = layout_;
    of_src.num_blocks = 16;
    const CopyProgram copies = program_between(of_src, layout_);
    for (const SessionKey key : src_.engine().open_peers())
      writes_[key] =
          src_.engine().install_program(src_.now(), key, true, src_region_, dst_region_, copies).value();
    for (const SessionKey key : dst_.engine().open_peers())
      reads_[key] =
          dst_.engine().install_program(dst_.now(), key, false, src_region_, dst_region_, copies).value();
    to_dst_ = session(src_, 0), to_src_ = session(dst_, 0);
    src_.settle(), dst_.settle();
    for (std::size_t i = 0; i < crowd.num_parked; ++i)
      write(session(src_, i), "parked " + std::to_string(i), 1);
    for (std::size_t i = 0; i < crowd.num_expected; ++i) expect("expected " + std::to_string(i), {1});
    for (std::size_t i = 0; i < crowd.num_leases; ++i) read(session(dst_, i), grant_read(i));
    world_.run_for(100 * kMillisecond);
    CHECK_EQ(dst_.engine().num_transfers(), crowd.num_parked + crowd.num_leases);
  }

  static SessionKey session(Node& node, std::size_t i) {
    const std::vector<SessionKey> all = node.engine().open_peers();
    return all[i % all.size()];
  }
  std::shared_ptr<Handle> expect(const std::string& tag, Blocks blocks) {
    auto handle = dst_.engine().expect(dst_.now(), bytes(tag), dst_region_, std::move(blocks), 0, 1, {}, {},
                                       1000 * kSecond);
    REQUIRE_OK(handle);
    return handle.value();
  }
  std::shared_ptr<Handle> write(SessionKey to, const std::string& tag, std::uint32_t block) {
    return post(src_, to, writes_.at(to), tag, {block}, 0, 1);
  }
  // A read of which no layer is released.
  std::shared_ptr<Handle> read(SessionKey from, LeaseId lease, Blocks blocks = {1}) {
    return post(dst_, from, reads_.at(from), "", std::move(blocks), lease, 0);
  }
  LeaseId grant_read(std::size_t i, const Blocks& blocks = {1}) {
    const SessionKey to = i == 0 ? to_dst_ : session(src_, i);
    auto lease = src_.engine().grant(
        src_.now(), {to, src_region_, wire::LeaseMode::kRead, false, blocks, 1000 * kSecond, true});
    REQUIRE_OK(lease);
    return lease.value();
  }
  LeaseId grant_write() {
    const std::vector<std::uint32_t> blocks{2};
    auto lease = dst_.engine().grant(
        dst_.now(), {to_src_, dst_region_, wire::LeaseMode::kWrite, false, blocks, 1000 * kSecond, true});
    REQUIRE_OK(lease);
    return lease.value();
  }
  bool ends(const std::shared_ptr<Handle>& handle) {
    return world_.until([&] { return handle->outcome() != Outcome::kPending; }, kSecond);
  }

  World world_;
  Node &src_, &dst_;
  SessionKey to_dst_ = 0, to_src_ = 0;  // the first of the sessions

 private:
  static EngineConfig limits() {
    EngineConfig config;
    config.max_open_transfers = 1'000'000;
    config.session.silent_ns = 1000 * kSecond;  // no heartbeat is due while instructions are counted
    config.session.heartbeat_ns = 250 * kSecond;
    config.peer_budget = peer_budget(config.max_open_transfers, config.max_open_pairs);
    for (std::uint64_t& limit : config.peer_budget) limit = UINT64_MAX;
    return config;
  }
  static wire::Bytes bytes(const std::string& text) {
    wire::Bytes out(text.size());
    std::transform(text.begin(), text.end(), out.begin(), [](char c) { return static_cast<std::byte>(c); });
    return out;
  }
  static std::shared_ptr<Handle> post(Node& node, SessionKey peer, std::uint32_t program,
                                      const std::string& tag, Blocks blocks, LeaseId lease,
                                      std::uint32_t layers_ready) {
    TransferRequest request;
    request.peer = peer;
    request.program = program;
    request.num_layers = 1;
    request.layers_ready = layers_ready;
    request.src_ids = request.dst_ids = std::move(blocks);
    request.notify = bytes(tag);
    request.timeout_ns = 1000 * kSecond;
    request.lease = lease;
    auto handle = node.engine().post(node.now(), std::move(request));
    REQUIRE_OK(handle);
    node.settle();
    return handle.value();
  }

  Layout layout_;
  RegionId src_region_ = 0, dst_region_ = 0;
  std::map<SessionKey, std::uint32_t> writes_, reads_;
};

struct Counted {
  const char* name;
  // Prepares, and returns what is counted. It runs once before the run that is counted, so that memory kept
  // from building up is in order.
  std::function<std::function<void()>(Costs&, const std::string& tag)> act;
};

const Counted kCounted[] = {
    {"an expectation ends",
     [](Costs& all, const std::string& tag) {
       auto expected = all.expect(tag, {3, 5, 7});
       return [&all, expected] { all.dst_.engine().cancel(all.dst_.now(), expected->id()); };
     }},
    {"a tag is expected",
     [](Costs& all, const std::string& tag) { return [&all, tag] { all.expect(tag, {3, 5, 7}); }; }},
#ifndef __SANITIZE_ADDRESS__  // a step costs 30 us, and there are five times as many
    {"a parked write is expected",
     [](Costs& all, const std::string& tag) {
       all.write(all.to_dst_, tag, 3);
       all.world_.run_for(kMillisecond);
       return [&all, tag] { all.expect(tag, {3}); };
     }},
    {"a lease ends",
     [](Costs& all, const std::string&) {
       const LeaseId lease = all.grant_read(0);
       return [&all, lease] { all.src_.engine().revoke(all.src_.now(), lease); };
     }},
    {"a lease to write is granted",
     [](Costs& all, const std::string&) { return [&all] { all.grant_write(); }; }},
    {"a page is written",
     [](Costs& all, const std::string& tag) {
       return [&all, tag] {
         all.expect(tag, {3});
         REQUIRE(all.ends(all.write(all.to_dst_, tag, 3)));
         all.world_.run_for(kMillisecond);
       };
     }},
#endif
};

// Counts each of the cases beside that crowd.
void cost_nothing_beside(const Crowd& crowd, std::span<const Counted> cases) {
  for (const Counted& each : cases) {
    // Returns a count of at most `at_most` if one of three tries has it: once in a while malloc tidies up
    // memory that was freed before.
    const auto count = [&](const Crowd& beside, std::uint64_t at_most) {
      Costs costs(beside);
      each.act(costs, "first")();
      std::optional<std::uint64_t> steps;
      for (const char* tag : {"second", "third", "fourth"}) {
        const auto act = each.act(costs, tag);
        steps = check::count_steps(act, at_most);
        if (!steps || *steps <= at_most) break;
        act();
      }
      return steps;
    };
    const auto alone = count({}, UINT64_MAX);
    if (!alone) {
      std::printf("  skipped: this process may not trace its children\n");
      return;
    }
    const std::uint64_t at_most = *alone + *alone * 3 / 10;
    if (*count(crowd, at_most) > at_most)
      FAIL(std::string(each.name) + ": " + std::to_string(*alone) + " instructions alone, more than " +
           std::to_string(at_most) + " beside what stands still");
  }
}

TEST(what_stands_still_costs_nothing) {
  cost_nothing_beside({.num_sessions = 40,
                       .num_blocks = 256 * 1024,
                       .num_parked = 1000,
                       .num_expected = 1000,
                       .num_leases = 1000},
                      kCounted);
}

// A read that names no lease uses the newest lease that its poster was told of.
TEST(other_leases_of_its_peer_cost_a_read_nothing) {
  const Counted read = {"a page is read", [](Costs& all, const std::string&) {
                          all.grant_read(0);
                          all.world_.run_for(kMillisecond);
                          return [&all] {
                            all.read(all.to_src_, 0);
                            all.world_.run_for(kMillisecond);
                          };
                        }};
  cost_nothing_beside({.num_leases = 1000}, std::span(&read, 1));
}

// Of several leases that it needs, the newest allows a part, and the others are found by their blocks.
TEST(leases_on_other_blocks_cost_a_read_under_several_nothing) {
  const Counted read = {"pages of four leases are read", [](Costs& all, const std::string&) {
                          for (const std::uint32_t block : {2, 3, 4, 5}) all.grant_read(0, {block});
                          all.world_.run_for(kMillisecond);
                          return [&all] {
                            all.read(all.to_src_, 0, {2, 3, 4, 5});
                            all.world_.run_for(kMillisecond);
                          };
                        }};
  cost_nothing_beside({.num_leases = 1000}, std::span(&read, 1));
}

}  // namespace
}  // namespace simulation
