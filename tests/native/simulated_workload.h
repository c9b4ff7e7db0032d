// Random copies between random agents with pages of random sizes, under random faults. The judge checks its
// promises after every step.
#pragma once

#include "simulated_judge.h"
#include "simulated_messages.h"

namespace simulation {

class Workload : public Judge {
 public:
  explicit Workload(std::uint64_t seed) : Judge(seed), network_(world_.network()) {
    rails_ = rail_sets()[random_.below(rail_sets().size())];
    if (random_.chance(30))
      world_.limits.max_open_transfers = 1 + static_cast<std::uint32_t>(random_.below(4));
    if (random_.chance(30)) world_.limits.max_open_pairs = 20 + random_.below(30);
    if (random_.chance(50))
      world_.limits.session.features.eager_nbytes = static_cast<std::uint32_t>(random_.between(64, 4096));
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
      node.read_ns = random_.chance(50) ? 50 * kMillisecond : kMillisecond;
      node.fence_ns = random_.chance(50) ? static_cast<Time>(random_.between(1, 50)) * kMillisecond : 0;
      node.on_region_fenced = [this](Node& of, RegionId region) { region_is_over(of, region); };
      node.on_event = [this](Node& of, const Event& event) {
        on_event(of, event);
        messages_.on_event(of, event);
      };
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
    for (Agent& agent : agents_) {
      if (!agent.node->alive()) continue;
      Pair::check_nothing_left(*agent.node);
      messages_.check_nobody_waits(*agent.node);
    }
    world_.after_step = nullptr;
  }
  std::size_t num_with_single_tokens() const { return num_fine_; }
  const MessageBook& messages() const { return messages_; }

 private:
  using Kind = Copy::Kind;

  Layout layout() {
    constexpr std::uint32_t kTokens[] = {1, 2, 4, 4, 6};
    const std::uint32_t block_tokens = kTokens[random_.below(std::size(kTokens))];
    return {.num_layers = 3,
            .num_blocks = 64,
            .chunk_nbytes = block_tokens * kHeads * 2,
            .block_major = random_.chance(50),
            .gap_nbytes = random_.chance(50) ? 0u : 16u,
            .block_tokens = block_tokens,
            .num_heads = kHeads};
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
        Part& part = any_part(copy);
        if ((faults_ & 8) != 0 && random_.chance(50))
          cut_off(part.src, copy.dst, false);  // neither end is told
        cancel_at_source(copy, part);
      });
    if (dice < 680) return with_copy([&](Copy& copy) { end_at_destination(copy); });
    if (dice < 780) return with_copy([&](Copy& copy) { release_layers(copy); });
    if (dice < 850) return end_leases_that_served();
    if (dice < 900) {
      const std::size_t index = any_agent();
      if (may_act(index)) messages_.send_some(*agents_[index].node);
      return;
    }
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
      if (copy->read() && !copy->parts[0].src_over) cancel_at_source(*copy, copy->parts[0]);
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
    const std::size_t to = any_agent();
    if (!may_act(to)) return;
    Agent& dst = agents_[to];
    auto owned = std::make_unique<Copy>();
    Copy& copy = *owned;
    copy.kind = static_cast<Kind>(random_.below(3));
    copy.dst_name = dst.node->name();
    copy.dst = to;
    copy.dst_life = dst.node->life();
    copy.to = dst.node->memories()->at(dst.region);
    const std::size_t count = random_.between(1, dst.layout.block_tokens > 2 ? 3 : 6);
    if (dst.free.size() < count) return;
    copy.end_token = static_cast<std::uint32_t>(count) * dst.layout.block_tokens;
    if (random_.chance(50)) {
      copy.first_token = static_cast<std::uint32_t>(random_.below(copy.end_token));
      copy.end_token = static_cast<std::uint32_t>(random_.between(copy.first_token + 1, copy.end_token));
    }
    copy.first_layer = static_cast<std::uint32_t>(random_.below(2));
    copy.num_layers = static_cast<std::uint32_t>(random_.between(1, 3 - copy.first_layer));
    copy.tag = Pair::bytes("copy-" + std::to_string(copies_.size()));
    if (!choose_parts(copy)) return;
    copy.blocks = take(dst, count);
    for (const std::uint32_t block : copy.blocks) dst.landing[block] = &copy;
    const Time timeout = static_cast<Time>(random_.between(5, 3000)) * kMillisecond;
    copy.ends_by = world_.now() + timeout + kMaxStop + kSecond;
    copies_.push_back(std::move(owned));

    grant(copy);
    // The receiver expects its blocks before the first offer, after the last one, or between.
    const std::size_t expected_before = random_.below(copy.parts.size() + 1);
    for (std::size_t i = 0; i <= copy.parts.size(); ++i) {
      if (copy.kind == Kind::kExpected && i == expected_before) expect(copy, timeout);
      if (random_.chance(30)) world_.run_for(static_cast<Time>(random_.below(1'000)) * kMicrosecond);
      if (i < copy.parts.size()) post(copy, i, timeout);
    }
  }

  // Chooses the source of each head. An expectation may have several sources; some heads come twice, or
  // never.
  bool choose_parts(Copy& copy) {
    std::vector<Heads> slices = {{0, kHeads}};
    if (random_.chance(50)) {
      const auto cut = static_cast<std::uint32_t>(random_.between(1, kHeads - 1));
      slices = {{0, cut}, {cut, kHeads - cut}};
      if (copy.kind != Kind::kExpected) slices.resize(1);  // a write or a read of some heads
    }
    if (copy.kind == Kind::kExpected && slices.size() > 1 && random_.chance(10)) {
      slices.pop_back();
      copy.is_whole = false;
    }
    random_.shuffle(slices);
    if (copy.kind == Kind::kExpected && random_.chance(15)) slices.push_back(slices[0]);
    if (copy.read() && share_part(copy, slices[0])) return true;
    for (const Heads& heads : slices) {
      const std::size_t from = any_agent();
      Agent& src = agents_[from];
      const std::size_t count = (copy.end_token + src.layout.block_tokens - 1) / src.layout.block_tokens;
      const auto between = sessions(from, copy.dst);
      if (from == copy.dst || !may_act(from) || src.free.size() < count || between.first == 0) {
        for (Part& part : copy.parts) give_back(part.src, part.src_life, part.from, part.blocks);
        return false;
      }
      Part& part = copy.parts.emplace_back();
      part.src_name = src.node->name();
      part.src = from;
      part.src_life = src.node->life();
      part.sessions = between;
      part.from = src.node->memories()->at(src.region);
      part.blocks = take(src, count);
      part.heads = heads;
      fill_cells(copy, part);
    }
    return true;
  }
  // One more agent reads under a lease for any peer, while others may still be reading under it.
  bool share_part(Copy& copy, const Heads& heads) {
    for (auto it = copies_.rbegin(); it != copies_.rend(); ++it) {
      const Copy& other = **it;
      const Part& shared = other.parts[0];
      if (!other.of_bearer() || shared.src_over || shared.src == copy.dst ||
          !can(shared.src, shared.src_life) || !random_.chance(70))
        continue;
      const std::uint32_t block_tokens = shared.from->layout.block_tokens;
      const std::size_t count = (copy.end_token + block_tokens - 1) / block_tokens;
      const auto between = sessions(shared.src, copy.dst);
      if (shared.blocks.size() < count || between.first == 0) continue;
      copy.lease = other.lease;
      Part& part = copy.parts.emplace_back();
      part.src_name = shared.src_name;
      part.src = shared.src;
      part.src_life = shared.src_life;
      part.sessions = between;
      part.from = shared.from;
      part.blocks.assign(shared.blocks.begin(), shared.blocks.begin() + static_cast<std::ptrdiff_t>(count));
      part.heads = heads;
      fill_cells(copy, part);
      return true;
    }
    return false;
  }
  void fill_cells(Copy& copy, Part& part) {
    for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
      for (std::uint32_t token = copy.first_token; token < copy.end_token; ++token)
        for (std::uint32_t head = part.heads.first; head < part.heads.first + part.heads.num; ++head) {
          const auto [found, is_first] = copy.cells.try_emplace({layer, token, head});
          if (is_first)
            found->second = part.from->read(layer, part.blocks, token, head);
          else  // a replica
            part.from->write(layer, part.blocks, token, head, found->second);
        }
  }
  // Each end's number for the session between them; 0, 0 if there is none.
  std::pair<SessionKey, SessionKey> sessions(std::size_t from, std::size_t to) {
    Node &src = *agents_[from].node, &dst = *agents_[to].node;
    const SessionKey to_dst = src.alive() && dst.alive() ? src.session_with(dst.name()) : 0;
    if (to_dst == 0) return {0, 0};
    const SessionKey to_src = dst.session_on(*src.pipe(to_dst));
    return to_src == 0 ? std::pair<SessionKey, SessionKey>{0, 0} : std::pair{to_dst, to_src};
  }
  void grant(Copy& copy) {
    if (copy.kind == Kind::kExpected || copy.lease != 0) return;
    const Part& part = copy.parts[0];
    const auto [to_dst, to_src] = part.sessions;
    const Time ttl = static_cast<Time>(random_.between(20, 3000)) * kMillisecond;
    const bool renewable = random_.chance(70);
    Agent &src = agents_[part.src], &dst = agents_[copy.dst];
    if (copy.read())
      copy.lease = Pair::grant(*src.node, random_.chance(60) ? std::nullopt : std::optional(to_dst),
                               src.region, wire::LeaseMode::kRead, part.blocks, ttl, renewable);
    else
      copy.lease =
          Pair::grant(*dst.node, to_src, dst.region, wire::LeaseMode::kWrite, copy.blocks, ttl, renewable);
  }
  void expect(Copy& copy, Time timeout) {
    if (!can(copy.dst, copy.dst_life) || !is_current(copy.dst, copy.to)) return;
    Agent& dst = agents_[copy.dst];
    std::optional<SessionKey> from;
    if (random_.chance(30) && std::all_of(copy.parts.begin(), copy.parts.end(),
                                          [&](const Part& part) { return part.src == copy.parts[0].src; }))
      from = copy.parts[0].sessions.second;
    auto expected = dst.node->engine().expect(
        world_.now(), copy.tag, dst.region, copy.blocks, copy.first_layer, copy.num_layers,
        {copy.to->layout.block_tokens, copy.first_token, copy.end_token, kHeads}, from, timeout);
    if (!expected.ok()) return;  // the session ended meanwhile
    copy.expected = expected.value();
    for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
      copy.expected->watch_layer(layer);
    expected_[{copy.dst, copy.dst_life, copy.expected->id()}] = {&copy, 0};
    dst.node->settle();
  }
  void post(Copy& copy, std::size_t index, Time timeout) {
    Part& part = copy.parts[index];
    const auto gone = [&] { copy.read() ? end_destination(copy) : end_source(part); };
    const bool write = !copy.read();
    const std::size_t at = write ? part.src : copy.dst;
    if (!can(at, write ? part.src_life : copy.dst_life) ||
        !agents_[write ? copy.dst : part.src].node->alive())
      return gone();
    Agent &src = agents_[part.src], &dst = agents_[copy.dst];
    Node& poster = *agents_[at].node;
    if (src.node->life() != part.src_life || dst.node->life() != copy.dst_life) return gone();
    const SessionKey peer = write ? part.sessions.first : part.sessions.second;
    const Layout &src_layout = part.from->layout, &dst_layout = copy.to->layout;
    const Ids ids =
        ids_between(src_layout, dst_layout, part.blocks, copy.blocks, copy.first_token, copy.end_token);
    if (!is_current(part.src, part.from) || !is_current(copy.dst, copy.to)) return gone();
    const auto program = poster.engine().install_program(
        poster.now(), peer, write, src.region, dst.region,
        program_between(src_layout, dst_layout, ids.num_fine != 0 || random_.chance(50), part.heads));
    if (!program.ok()) return gone();
    TransferRequest request;
    request.peer = peer;
    request.program = program.value();
    request.src_ids = ids.src;
    request.dst_ids = ids.dst;
    request.num_fine = ids.num_fine;
    request.first_layer = copy.first_layer;
    request.num_layers = copy.num_layers;
    request.layers_ready =
        static_cast<std::uint32_t>(random_.chance(60) ? copy.num_layers : random_.below(copy.num_layers + 1));
    request.notify = copy.tag;
    request.priority = static_cast<std::uint8_t>(random_.below(3));
    request.timeout_ns = timeout;
    request.integrity = integrity_ || random_.chance(20);
    if (copy.of_bearer() || random_.chance(50)) request.lease = copy.lease;
    auto handle = poster.engine().post(world_.now(), request);
    if (!handle.ok()) return gone();
    num_fine_ += ids.num_fine != 0;
    part.handle = handle.value();
    posted_[{at, write ? part.src_life : copy.dst_life, part.handle->id()}] = {&copy, index};
    if (!write)
      for (std::uint32_t layer = copy.first_layer; layer < copy.first_layer + copy.num_layers; ++layer)
        part.handle->watch_layer(layer);
    poster.settle();
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
  Part& any_part(Copy& copy) { return copy.parts[random_.below(copy.parts.size())]; }
  void cancel_at_source(Copy& copy, Part& part) {
    if (!can(part.src, part.src_life)) return;
    Node& node = *agents_[part.src].node;
    if (copy.read())
      node.revoke(copy.lease);
    else if (part.handle)
      node.cancel(part.handle);
  }
  void end_at_destination(Copy& copy) {
    if (!can(copy.dst, copy.dst_life)) return;
    Node& node = *agents_[copy.dst].node;
    if (copy.kind == Kind::kUnderWriteLease)
      node.revoke(copy.lease);
    else if (copy.read() && copy.parts[0].handle)
      node.cancel(copy.parts[0].handle);
    else if (copy.expected)
      node.cancel(copy.expected);
  }
  void release_layers(Copy& copy) {
    Part& part = any_part(copy);
    const std::size_t at = copy.read() ? copy.dst : part.src;
    if (!part.handle || !can(at, copy.read() ? copy.dst_life : part.src_life)) return;
    Node& node = *agents_[at].node;
    node.engine().layers_ready(node.now(), part.handle->id(),
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
      for (Part& part : copy->parts)
        if (part.src == index && part.src_life == agent.node->life()) part.src_over = true;
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
    CHECK_OK(agent.node->deregister(agent.region));
    agent.layout = layout();
    add_region(agent);
  }
  // The owner uses the region's memory for something else.
  void region_is_over(Node& node, RegionId region) {
    const auto memory = node.memories()->at(region);
    for (auto& copy : copies_) {
      for (Part& part : copy->parts)
        if (part.from == memory) part.src_over = true;
      if (copy->to == memory) copy->dst_over = true;
    }
    for (std::uint32_t block = 0; block < memory->layout.num_blocks; ++block)
      memory->fill(block, random_.next());
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

  Network& network_;
  MessageBook messages_{random_};
  std::vector<RailPlan> rails_;
  bool integrity_ = false;
  std::uint64_t faults_ = 0;  // one bit for each kind
  std::size_t num_fine_ = 0;  // transfers with single tokens
};

}  // namespace simulation
