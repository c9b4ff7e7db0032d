// Random copies between random agents under random faults, and the promises that hold after every
// step whatever happens. The judge keeps its own books: who may write what, and what was where.
#pragma once

#include <set>

#include "simulated_copy.h"
#include "simulated_pair.h"

namespace simulation {

class Workload {
 public:
  explicit Workload(std::uint64_t seed) : world_(seed), random_(world_.random()), network_(world_.network()) {
    rails_ = rail_sets()[random_.below(rail_sets().size())];
    if (random_.chance(30))
      world_.limits.max_open_transfers = 1 + static_cast<std::uint32_t>(random_.below(4));
    if (random_.chance(30)) world_.limits.max_open_pairs = 6 + random_.below(12);
    const auto num_nodes = static_cast<int>(random_.between(2, 4));
    const bool flips = random_.chance(20);
    integrity_ = flips;
    if (random_.chance(30)) network_.max_latency = 5 * kMillisecond;
    faults_ =
        random_.chance(20) ? 0 : random_.next() & (random_.chance(50) ? random_.next() : ~std::uint64_t{0});
    for (int i = 0; i < num_nodes; ++i) {
      Node& node = world_.add("agent-" + std::to_string(i));
      node.again_percent = random_.chance(30) ? 30 : 0;
      node.work_ns = static_cast<Time>(random_.between(20, random_.chance(20) ? 20'000 : 500)) * kMicrosecond;
      node.flip_percent = flips ? 2 : 0;
      node.lost_rail_percent = random_.chance(20) ? 20 : 0;
      node.on_event = [this](Node& of, const Event& event) { on_event(of, event); };
      node.on_write = [this](Node& of, SessionKey from, Memory& memory, std::uint64_t offset,
                             std::uint64_t nbytes) { on_write(of, from, memory, offset, nbytes); };
      agents_.push_back({&node, layout(), 0, {}, {}});
      add_region(agents_.back());
    }
  }

  void run(int num_actions) {
    connect_all();
    world_.run_for(20 * kMillisecond);
    world_.after_step = [this] { check_bounded(); };
    for (int i = 0; i < num_actions && check::state().num_failures == 0; ++i) {
      act();
      world_.run_for(static_cast<Time>(random_.between(0, 5'000)) * kMicrosecond);
    }
    settle_down();
    world_.run_for(12 * kSecond);
    for (auto& copy : copies_) check_ended(*copy);
    for (Agent& agent : agents_)
      if (agent.node->alive()) Pair::check_nothing_left(*agent.node);
    world_.after_step = nullptr;
  }
  std::size_t num_done() const { return num_done_; }
  std::size_t num_copies() const { return copies_.size(); }

 private:
  using Kind = Copy::Kind;
  struct Agent {
    Node* node;
    Layout layout;
    RegionId region;
    std::set<std::uint32_t> free;
    std::map<std::uint32_t, Copy*> landing;  // block -> the copy that may write it
  };

  Layout layout() {
    return {.num_layers = 3,
            .num_blocks = 64,
            .chunk_nbytes = 32,
            .block_major = random_.chance(50),
            .gap_nbytes = random_.chance(50) ? 0u : 16u};
  }
  std::size_t any_agent() { return random_.below(agents_.size()); }
  bool may_act(std::size_t agent) const {
    return agents_[agent].node->alive() && !agents_[agent].node->paused();
  }

  void add_region(Agent& agent) {
    agent.region = agent.node->add_region(agent.layout);
    agent.free.clear();
    agent.landing.clear();
    for (std::uint32_t block = 0; block < agent.layout.num_blocks; ++block) {
      agent.free.insert(block);
      agent.node->memory(agent.region).fill(block, random_.next());
    }
  }
  void connect_all() {
    for (std::size_t a = 0; a < agents_.size(); ++a)
      for (std::size_t b = a + 1; b < agents_.size(); ++b)
        if (may_act(a) && agents_[b].node->alive() &&
            agents_[a].node->session_with(agents_[b].node->name()) == 0)
          agents_[a].node->call(*agents_[b].node, rails_);
  }

  // ---- actions
  void act() {
    const std::uint64_t dice = random_.below(1000);
    if (dice < 600) return begin_copy();
    if (dice < 640)
      return with_copy([&](Copy& copy) {
        if ((faults_ & 8) != 0 && random_.chance(50)) cut_off(copy.src, copy.dst, false);  // nobody is told
        cancel_at_source(copy);
      });
    if (dice < 680) return with_copy([&](Copy& copy) { end_at_destination(copy); });
    if (dice < 780) return with_copy([&](Copy& copy) { release_layers(copy); });
    if (dice < 850) return end_leases_that_served();
    connect_all();
    // Some seeds see every fault, some a few, some none.
    const std::uint64_t fault = random_.below(8);
    if ((faults_ >> fault & 1) == 0 || !random_.chance(40)) return;
    switch (fault) {
      case 0:
      case 1: return stop_for_a_while();
      case 2: return crash();
      case 3: return cut_off(any_agent(), any_agent(), random_.chance(50));
      case 4: return break_frames();
      case 5: return cut_rail();
      case 6: return replace_region();
      default: return end_session();
    }
  }
  void end_leases_that_served() {
    for (auto& copy : copies_) {
      if (copy->lease == 0 || !copy->dst_done) continue;
      if (copy->kind == Kind::kUnderReadLease && !copy->src_over) cancel_at_source(*copy);
      if (copy->kind == Kind::kUnderWriteLease && !copy->dst_over) end_at_destination(*copy);
    }
  }

  Blocks take(Agent& agent, std::size_t count) {
    Blocks out;
    while (out.size() < count && !agent.free.empty()) {
      auto it = std::next(agent.free.begin(), static_cast<std::ptrdiff_t>(random_.below(agent.free.size())));
      out.push_back(*it);
      agent.free.erase(it);
    }
    return out;
  }

  void begin_copy() {
    const std::size_t a = any_agent(), b = any_agent();
    if (a == b || !may_act(a) || !may_act(b)) return;
    Agent &src = agents_[a], &dst = agents_[b];
    const SessionKey to_dst = src.node->session_with(dst.node->name()),
                     to_src = to_dst == 0 ? 0 : dst.node->session_on(*src.node->pipe(to_dst));
    const std::size_t count = random_.between(1, 6);
    if (to_dst == 0 || to_src == 0 || src.free.size() < count || dst.free.size() < count) return;
    const auto kind = static_cast<Kind>(random_.below(3));
    const bool write = kind != Kind::kUnderReadLease;
    Node& poster = write ? *src.node : *dst.node;
    const auto program =
        poster.engine().install_program(poster.now(), write ? to_dst : to_src, write, src.region, dst.region,
                                        program_between(src.layout, dst.layout));
    if (!program.ok()) return;

    auto owned = std::make_unique<Copy>();
    Copy& copy = *owned;
    copy.kind = kind;
    copy.src_name = src.node->name();
    copy.dst_name = dst.node->name();
    copy.src = a;
    copy.dst = b;
    copy.src_life = src.node->life();
    copy.dst_life = dst.node->life();
    copy.from = src.node->memories()->at(src.region);
    copy.to = dst.node->memories()->at(dst.region);
    copy.src_blocks = take(src, count);
    copy.dst_blocks = take(dst, count);
    copy.first_layer = static_cast<std::uint32_t>(random_.below(2));
    copy.num_layers = static_cast<std::uint32_t>(random_.between(1, 3 - copy.first_layer));
    copy.tag = Pair::bytes("copy-" + std::to_string(copies_.size()));
    const Time timeout = static_cast<Time>(random_.between(5, 3000)) * kMillisecond;
    copy.ends_by = world_.now() + timeout + kMaxStop + kSecond;
    for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
      for (std::size_t i = 0; i < count; ++i)
        copy.bytes[{layer, i}] = copy.from->read(layer, copy.src_blocks[i]);
    for (const std::uint32_t block : copy.dst_blocks) dst.landing[block] = &copy;
    copies_.push_back(std::move(owned));

    const Time ttl = static_cast<Time>(random_.between(20, 3000)) * kMillisecond;
    const bool renewable = random_.chance(70);
    if (kind == Kind::kUnderReadLease)
      copy.lease =
          Pair::grant(*src.node, to_dst, src.region, wire::LeaseMode::kRead, copy.src_blocks, ttl, renewable);
    else if (kind == Kind::kUnderWriteLease)
      copy.lease = Pair::grant(*dst.node, to_src, dst.region, wire::LeaseMode::kWrite, copy.dst_blocks, ttl,
                               renewable);
    const auto expect = [&] {
      auto expected = dst.node->engine().expect(
          world_.now(), copy.tag, dst.region, copy.dst_blocks, copy.first_layer, copy.num_layers,
          random_.chance(50) ? std::optional(to_src) : std::nullopt, timeout);
      if (!expected.ok()) return;  // the session ended meanwhile
      copy.expected = expected.value();
      for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
        copy.expected->watch_layer(layer);
      expected_[{b, copy.dst_life, copy.expected->id()}] = &copy;
      dst.node->settle();
    };
    const bool expect_first = random_.chance(50);
    if (kind == Kind::kExpected && expect_first) expect();
    if (random_.chance(30)) world_.run_for(static_cast<Time>(random_.below(1'000)) * kMicrosecond);
    if (kind == Kind::kExpected && !copy.expected && may_act(b) && dst.node->life() == copy.dst_life &&
        copy.to->registered)
      expect();

    TransferRequest request;
    request.peer = write ? to_dst : to_src;
    request.program = program.value();
    request.src_blocks = copy.src_blocks;
    request.dst_blocks = copy.dst_blocks;
    request.first_layer = copy.first_layer;
    request.num_layers = copy.num_layers;
    request.layers_ready =
        static_cast<std::uint32_t>(random_.chance(60) ? copy.num_layers : random_.below(copy.num_layers + 1));
    request.notify = copy.tag;
    request.priority = static_cast<std::uint8_t>(random_.below(3));
    request.timeout_ns = timeout;
    request.integrity = integrity_ || random_.chance(20);
    if (random_.chance(50)) request.lease = copy.lease;
    if (!poster.alive() || poster.paused()) return over_without_transfer(copy);
    auto handle = poster.engine().post(world_.now(), request);
    if (!handle.ok()) return over_without_transfer(copy);
    copy.handle = handle.value();
    posted_[{write ? a : b, write ? copy.src_life : copy.dst_life, copy.handle->id()}] = &copy;
    if (!write)
      for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
        copy.handle->watch_layer(layer);
    poster.settle();
  }
  void over_without_transfer(Copy& copy) {
    if (copy.kind == Kind::kUnderReadLease)
      end_destination(copy);
    else
      end_source(copy);
  }

  template <class Do>
  void with_copy(Do&& run) {
    if (copies_.empty()) return;
    const std::size_t newest = std::min<std::size_t>(copies_.size(), 8);
    run(*copies_[copies_.size() - 1 - random_.below(newest)]);
  }
  bool can(std::size_t agent, std::uint64_t life) const {
    return may_act(agent) && agents_[agent].node->life() == life;
  }
  void cancel_at_source(Copy& copy) {
    if (!can(copy.src, copy.src_life)) return;
    Node& node = *agents_[copy.src].node;
    if (copy.kind == Kind::kUnderReadLease)
      node.revoke(copy.lease);
    else if (copy.handle)
      node.cancel(copy.handle);
    end_source(copy);
  }
  void end_at_destination(Copy& copy) {
    if (!can(copy.dst, copy.dst_life)) return;
    Node& node = *agents_[copy.dst].node;
    if (copy.kind == Kind::kUnderWriteLease)
      node.revoke(copy.lease);
    else if (copy.kind == Kind::kUnderReadLease && copy.handle)
      node.cancel(copy.handle);
    else if (copy.expected)
      node.cancel(copy.expected);
    else
      return;
    end_destination(copy);
  }
  void release_layers(Copy& copy) {
    if (copy.kind == Kind::kUnderReadLease || !copy.handle || !can(copy.src, copy.src_life)) return;
    Node& node = *agents_[copy.src].node;
    node.engine().layers_ready(node.now(), copy.handle->id(),
                               static_cast<std::uint32_t>(random_.between(0, copy.num_layers)));
    node.settle();
  }
  void stop_for_a_while() {
    Node& node = *agents_[any_agent()].node;
    if (!node.alive() || node.paused()) return;
    node.pause();
    const auto longest = static_cast<std::uint64_t>(random_.chance(50) ? 50 * kMillisecond : kMaxStop);
    world_.clock().after(static_cast<Time>(random_.below(longest)), [&node, life = node.life()] {
      if (node.life() == life) node.resume();
    });
  }
  void crash() {
    const std::size_t index = any_agent();
    Agent& agent = agents_[index];
    if (!agent.node->alive()) return;
    for (auto& copy : copies_) {
      if (copy->src == index && copy->src_life == agent.node->life()) copy->src_over = true;
      if (copy->dst == index && copy->dst_life == agent.node->life()) copy->dst_over = true;
    }
    agent.node->crash(random_.chance(50));
    world_.clock().after(static_cast<Time>(random_.below(200)) * kMillisecond, [this, &agent] {
      if (agent.node->alive()) return;
      agent.node->start();
      add_region(agent);
    });
  }
  void cut_off(std::size_t from, std::size_t to, bool both_ways) {
    Node &a = *agents_[from].node, &b = *agents_[to].node;
    if (&a == &b) return;
    world_.partition(a, b, both_ways);
    world_.clock().after(static_cast<Time>(random_.below(random_.chance(50) ? 100 : 4000)) * kMillisecond,
                         [this, &a, &b] { world_.heal(a, b); });
  }
  void break_frames() {
    unsigned Network::* const faults[] = {&Network::lose, &Network::repeat, &Network::swap, &Network::flip};
    unsigned Network::* const fault = faults[random_.below(4)];
    network_.*fault = 300;
    world_.clock().after(10 * kMillisecond, [this, fault] { network_.*fault = 0; });
  }
  void cut_rail() {
    const std::size_t index = any_agent();
    if (!may_act(index)) return;
    Node& node = *agents_[index].node;
    for (const SessionKey key : node.engine().open_peers())
      if (const auto rails = node.rails_with(key); !rails.empty() && random_.chance(50))
        return random_.chance(70) ? node.cut_rail(rails[random_.below(rails.size())], "cut")
                                  : void(node.link(rails[random_.below(rails.size())])->muted = true);
  }
  void replace_region() {
    const std::size_t index = any_agent();
    if (!may_act(index)) return;
    Agent& agent = agents_[index];
    auto memory = agent.node->memories()->at(agent.region);
    CHECK_OK(agent.node->deregister(agent.region));
    for (auto& copy : copies_) {
      if (copy->from == memory) copy->src_over = true;
      if (copy->to == memory) copy->dst_over = true;
    }
    for (std::uint32_t block = 0; block < agent.layout.num_blocks; ++block)
      memory->fill(block, random_.next());
    agent.layout = layout();
    add_region(agent);
  }
  void end_session() {
    const std::size_t index = any_agent();
    if (!may_act(index)) return;
    Node& node = *agents_[index].node;
    const auto keys = node.engine().open_peers();
    if (keys.empty()) return;
    const SessionKey key = keys[random_.below(keys.size())];
    if (random_.chance(50)) {
      node.pipe(key)->half_close(node.side(key));
    } else {
      node.engine().end_session(node.now(), key, Code::kClosed, "enough");
      node.settle();
    }
  }
  void settle_down() {
    network_.lose = network_.repeat = network_.swap = network_.flip = 0;
    for (Agent& a : agents_) {
      for (Agent& b : agents_)
        if (&a != &b) world_.heal(*a.node, *b.node);
      if (a.node->alive()) a.node->resume();
    }
  }

  // ---- the books
  // What is over is named again at once, by whichever copy comes next: an offer that is parked, an
  // offer or a request that is still on its way must not be served under that one's right.
  void end_source(Copy& copy) {
    if (std::exchange(copy.src_over, true)) return;
    for (const std::uint32_t block : copy.src_blocks) copy.from->fill(block, random_.next());
    give_back(copy.src, copy.src_life, copy.from, copy.src_blocks);
  }
  void end_destination(Copy& copy) {
    if (std::exchange(copy.dst_over, true)) return;
    for (const std::uint32_t block : copy.dst_blocks) agents_[copy.dst].landing.erase(block);
    give_back(copy.dst, copy.dst_life, copy.to, copy.dst_blocks);
  }
  void give_back(std::size_t index, std::uint64_t life, const std::shared_ptr<Memory>& memory,
                 const Blocks& blocks) {
    Agent& agent = agents_[index];
    if (agent.node->life() == life && memory->registered) agent.free.insert(blocks.begin(), blocks.end());
  }
  std::size_t index_of(const Node& node) const { return static_cast<std::size_t>(node.place()); }
  void check_layer(Copy& copy, std::uint32_t layer, const char* when) {
    for (std::size_t i = 0; i < copy.dst_blocks.size(); ++i)
      if (copy.to->read(layer, copy.dst_blocks[i]) != copy.bytes.at({layer, i}))
        return FAIL(std::string(when) + ", but the bytes of layer " + std::to_string(layer) +
                    " are not the source's: " + copy.words());
  }
  void check_bytes(Copy& copy, const char* when) {
    if (copy.dst_over) FAIL(std::string(when) + ", but its right had ended: " + copy.words());
    for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
      check_layer(copy, layer, when);
    copy.dst_done = true;
    ++num_done_;
  }

  void on_event(Node& node, const Event& event) {
    const std::size_t index = index_of(node);
    const auto of = [&](auto& books) -> Copy* {
      auto found = books.find({index, node.life(), event.handle});
      return found == books.end() ? nullptr : found->second;
    };
    if (event.kind == EventKind::kLayer) {
      if (Copy* copy = of(posted_)) check_layer(*copy, event.layer, "a layer was reported");
      if (Copy* copy = of(expected_)) check_layer(*copy, event.layer, "a layer was reported");
    } else if (event.kind == EventKind::kEnded) {
      if (Copy* copy = of(posted_)) {
        CHECK_EQ(++copy->num_ended, 1);
        const bool done = copy->handle->outcome() == Outcome::kDone;
        CHECK(copy->handle->outcome() != Outcome::kPending);
        if (copy->kind == Kind::kUnderReadLease) {
          if (done) check_bytes(*copy, "a read is done");
          end_destination(*copy);
        } else {
          if (done) CHECK(copy->dst_done);
          end_source(*copy);
        }
      }
      if (Copy* copy = of(expected_)) {
        CHECK_EQ(++copy->num_expected_ended, 1);
        if (copy->expected->outcome() == Outcome::kDone) check_bytes(*copy, "what was expected is done");
        end_destination(*copy);
      }
    } else if (event.kind == EventKind::kNotification) {
      for (auto& copy : copies_) {
        if (copy->tag != event.payload) continue;
        if (copy->kind == Kind::kUnderReadLease)
          CHECK(copy->dst_done);
        else if (copy->kind == Kind::kUnderWriteLease)
          check_bytes(*copy, "a notification came");
        else
          FAIL("a notification came for what is expected");
      }
    } else if (event.kind == EventKind::kLeaseEnded && !event.held) {
      for (auto& copy : copies_) {
        if (copy->lease != event.lease || copy->lease == 0) continue;
        if (copy->kind == Kind::kUnderReadLease && copy->src == index && copy->src_life == node.life())
          end_source(*copy);
        if (copy->kind == Kind::kUnderWriteLease && copy->dst == index && copy->dst_life == node.life())
          end_destination(*copy);
      }
    }
  }
  void on_write(Node& node, SessionKey from, Memory& memory, std::uint64_t offset, std::uint64_t nbytes) {
    Agent& agent = agents_[index_of(node)];
    if (&memory != &node.memory(agent.region)) return FAIL("bytes land in a region that is gone");
    const auto peer = node.engine().peer(from);
    for (std::uint64_t at = offset; at < offset + nbytes; ++at) {
      const auto place = memory.layout.place_of(at);
      auto found = place ? agent.landing.find(place->block) : agent.landing.end();
      if (found == agent.landing.end()) return FAIL("bytes land where no live right is");
      const Copy& copy = *found->second;
      if (copy.dst_over || place->layer - copy.first_layer >= copy.num_layers)
        return FAIL("bytes land in block " + std::to_string(place->block) + ", layer " +
                    std::to_string(place->layer) + ", which is for " + copy.words());
      CHECK(peer && peer->name == agents_[copy.src].node->name());
    }
  }
  void check_bounded() {
    if (++num_steps_ % 64 != 0) return;
    for (auto& copy : copies_)
      if (world_.now() > copy->ends_by) check_ended(*copy);
  }
  void check_ended(Copy& copy) {
    const bool write = copy.kind != Kind::kUnderReadLease;
    if (copy.handle &&
        agents_[write ? copy.src : copy.dst].node->life() == (write ? copy.src_life : copy.dst_life))
      CHECK_EQ(copy.num_ended, 1);
    if (copy.expected && agents_[copy.dst].node->life() == copy.dst_life)
      CHECK_EQ(copy.num_expected_ended, 1);
  }

  static constexpr Time kMaxStop = 4 * kSecond;
  using BookKey = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;  // agent, life, handle
  World world_;
  check::Random& random_;
  Network& network_;
  std::vector<RailPlan> rails_;
  std::vector<Agent> agents_;
  std::vector<std::unique_ptr<Copy>> copies_;
  std::map<BookKey, Copy*> posted_, expected_;
  bool integrity_ = false;
  std::uint64_t faults_ = 0;  // a bit each
  std::size_t num_done_ = 0;
  std::uint64_t num_steps_ = 0;
};

}  // namespace simulation
