// Two simulated agents with one region each, and what scenarios do with them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "simulation.h"

namespace simulation {

using RailSets = std::vector<std::vector<RailPlan>>;
inline const RailSets& rail_sets() {
  static const RailSets sets = {{one_sided_rail()},
                                {two_sided_rail()},
                                {two_sided_rail(), two_sided_rail()},
                                {one_sided_rail(), two_sided_rail()},
                                {either_rail()},
                                {either_rail(), two_sided_rail()}};
  return sets;
}

inline const RailSets kTwoStreams = {{two_sided_rail(), two_sided_rail()}};

// A prefill and a decode that gets its pages; they are connected, and have programs for writes and for reads.
struct Pair {
  static constexpr Time kTimeout = 5 * kSecond;

  explicit Pair(std::vector<RailPlan> rails = {one_sided_rail()}, std::uint64_t seed = check::seed(),
                const EngineConfig& limits = {})
      : Pair(std::move(rails), seed, limits, limits) {}
  Pair(std::vector<RailPlan> rails, std::uint64_t seed, const EngineConfig& of_src,
       const EngineConfig& of_dst)
      : world(seed, of_src), src(world.add("prefill")), dst((world.limits = of_dst, world.add("decode"))) {
    dst_layout.block_major = true;
    src_region = src.add_region(src_layout);
    dst_region = dst.add_region(dst_layout);
    for (std::uint32_t block = 0; block < src_layout.num_blocks; ++block) source().fill(block, 1000 + block);
    connect(std::move(rails));
    dst.on_write = [this](Node&, SessionKey, Memory&, std::uint64_t, std::uint64_t nbytes) {
      bytes_landed += nbytes;
    };
  }
  void connect(std::vector<RailPlan> rails) {
    world.connect(src, dst, std::move(rails));
    to_dst = src.session_with("decode");
    to_src = dst.session_with("prefill");
    const CopyProgram program = program_between(src_layout, dst_layout);
    const auto write = src.engine().install_program(src.now(), to_dst, true, src_region, dst_region, program);
    const auto read = dst.engine().install_program(dst.now(), to_src, false, src_region, dst_region, program);
    REQUIRE_OK(write);
    REQUIRE_OK(read);
    write_program = write.value();
    read_program = read.value();
  }

  Memory& source() { return src.memory(src_region); }
  Memory& destination() { return dst.memory(dst_region); }

  TransferRequest request(bool write, Blocks from, Blocks to, const std::string& notify = "",
                          const std::string& context = "") const {
    TransferRequest out;
    out.peer = write ? to_dst : to_src;
    out.program = write ? write_program : read_program;
    out.num_layers = src_layout.num_layers;
    out.layers_ready = out.num_layers;
    out.src_ids = std::move(from);
    out.dst_ids = std::move(to);
    out.notify = bytes(notify);
    out.context = bytes(context);
    out.timeout_ns = kTimeout;
    return out;
  }
  static wire::Bytes bytes(const std::string& text) {
    wire::Bytes out(text.size());
    std::transform(text.begin(), text.end(), out.begin(), [](char c) { return static_cast<std::byte>(c); });
    return out;
  }
  static std::shared_ptr<Handle> post(Node& node, TransferRequest what) {
    auto handle = node.engine().post(node.now(), std::move(what));
    REQUIRE_OK(handle);
    node.settle();
    return handle.value();
  }
  std::shared_ptr<Handle> write(Blocks from, Blocks to, const std::string& notify = "",
                                const std::string& context = "") {
    return post(src, request(true, std::move(from), std::move(to), notify, context));
  }
  std::shared_ptr<Handle> read(Blocks from, Blocks to, const std::string& notify = "",
                               const std::string& context = "") {
    return post(dst, request(false, std::move(from), std::move(to), notify, context));
  }
  std::shared_ptr<Handle> expect(const std::string& tag, Blocks blocks, Time timeout = kTimeout,
                                 const std::string& context = "", std::optional<SessionKey> from = {}) {
    auto handle = dst.engine().expect(dst.now(), bytes(tag), dst_region, std::move(blocks), 0,
                                      dst_layout.num_layers, {}, from, timeout, bytes(context));
    REQUIRE_OK(handle);
    dst.settle();
    return handle.value();
  }
  // Grants the named blocks, or all.
  LeaseId grant_write(Blocks blocks = {}, Time ttl = 10 * kSecond, bool renewable = true) {
    return grant(dst, to_src, dst_region, wire::LeaseMode::kWrite, std::move(blocks), ttl, renewable);
  }
  LeaseId grant_read(Blocks blocks = {}, Time ttl = 10 * kSecond, bool renewable = true) {
    return grant(src, to_dst, src_region, wire::LeaseMode::kRead, std::move(blocks), ttl, renewable);
  }
  // Without a peer it is a lease for any peer.
  static LeaseId grant(Node& node, std::optional<SessionKey> to, RegionId region, wire::LeaseMode mode,
                       Blocks blocks, Time ttl, bool renewable) {
    auto lease = node.engine().grant(node.now(), {to, region, mode, blocks.empty(), blocks, ttl, renewable});
    REQUIRE_OK(lease);
    node.settle();
    return lease.value();
  }

  bool ends(const std::shared_ptr<Handle>& handle, Time limit = 12 * kSecond) {
    return world.until([&] { return handle->outcome() != Outcome::kPending; }, limit);
  }
  // Whether the bytes of the pairs are equal, in every layer below `num_layers`.
  bool equal(const Blocks& from, const Blocks& to, std::uint32_t first_layer = 0,
             std::uint32_t num_layers = UINT32_MAX) {
    for (std::uint32_t layer = first_layer; layer < std::min(num_layers, src_layout.num_layers); ++layer)
      for (std::size_t i = 0; i < from.size(); ++i)
        if (source().read(layer, from[i]) != destination().read(layer, to[i])) return false;
    return true;
  }
  // Whether the destination has the bytes that the pairs had before the source reused its pages.
  bool equal_held(const Blocks& from, const Blocks& to) {
    for (std::uint32_t layer = 0; layer < src_layout.num_layers; ++layer)
      for (std::size_t i = 0; i < from.size(); ++i)
        if (held->read(layer, from[i]) != destination().read(layer, to[i])) return false;
    return true;
  }
  // Runs until about a quarter of what `num_blocks` pairs hold has landed.
  bool until_midway(std::size_t num_blocks) {
    const std::uint64_t all = num_blocks * 2 * src_layout.chunk_nbytes * src_layout.num_layers;
    const std::uint64_t before = bytes_landed;
    return world.until([&] { return bytes_landed >= before + all / 4; });
  }
  // From now on, a byte that changes at the destination is a failure.
  void freeze_destination() {
    world.after_step = [memory = dst.memories()->at(dst_region), was = destination().bytes,
                        told = false]() mutable {
      if (told || memory->bytes == was) return;
      told = true;
      FAIL("a byte landed after the right to it had ended");
    };
  }
  // The source uses the pages for something else; their former bytes are kept for comparison.
  void reuse_source(const Blocks& blocks) {
    held = std::make_unique<Memory>(source());
    for (const std::uint32_t block : blocks) {
      source().fill(block, 77'000 + block);
      source().reused.insert(block);
    }
  }
  // Checks that neither end has anything left of a transfer.
  void check_quiet() {
    world.after_step = nullptr;
    world.run_for(10 * kSecond);
    for (Node* node : {&src, &dst})
      if (node->alive()) check_nothing_left(*node);
  }
  static void check_nothing_left(Node& node) {
    const EngineLoad load = node.engine().load();
    CHECK_EQ(node.engine().num_transfers(), 0);
    CHECK_EQ(node.num_works(), 0);
    CHECK_EQ(load.works, 0);
    CHECK_EQ(load.outstanding_pieces, 0);
    CHECK_EQ(load.fences, 0);
    CHECK_EQ(load.expectations, 0);
    CHECK_EQ(load.handles, 0);
    CHECK(load.windows <= node.engine().open_peers().size());
    CHECK(load.timers <= node.engine().open_peers().size() + load.leases + load.redials);
  }
  bool notified(Node& node, const std::string& payload) const {
    return std::any_of(node.events.begin(), node.events.end(), [&](const Event& event) {
      return event.kind == EventKind::kNotification && event.payload == bytes(payload);
    });
  }
  std::size_t num_ended(Node& node, const std::shared_ptr<Handle>& handle) const {
    return static_cast<std::size_t>(std::count_if(
        node.events.begin(), node.events.end(),
        [&](const Event& event) { return event.kind == EventKind::kEnded && event.handle == handle->id(); }));
  }

  World world;
  Node &src, &dst;
  Layout src_layout, dst_layout;
  RegionId src_region = 0, dst_region = 0;
  SessionKey to_dst = 0, to_src = 0;
  std::uint32_t write_program = 0, read_program = 0;
  std::uint64_t bytes_landed = 0;
  std::unique_ptr<Memory> held;
};

inline const Blocks kFrom = {1, 2, 3, 9, 5, 6, 7, 8}, kTo = {4, 5, 6, 0, 1, 9, 11, 15};

// Runs a scenario on each of these sets of rails, with a transfer that either side has posted, once a quarter
// of it has landed. Both ends grant each other everything. `handle` is the poster's.
inline void in_mid_transfer(const RailSets& sets, std::uint64_t num_seeds,
                            const std::function<void(Pair&, bool write, std::shared_ptr<Handle>)>& scenario,
                            Time timeout_ns = Pair::kTimeout) {
  for (const auto& rails : sets)
    for (const bool write : {false, true})
      for (std::uint64_t i = 0; i < num_seeds; ++i) {
        Pair pair(rails, check::seed() * 1000 + i);
        pair.grant_read();
        pair.grant_write();
        TransferRequest request = pair.request(write, kFrom, kTo, "req");
        request.timeout_ns = timeout_ns;
        const auto handle = Pair::post(write ? pair.src : pair.dst, std::move(request));
        REQUIRE(pair.until_midway(kFrom.size()));
        scenario(pair, write, handle);
        pair.check_quiet();
      }
}

inline void on_every_rail(const std::function<void(Pair&)>& scenario) {
  for (const auto& rails : rail_sets())
    for (std::uint64_t i = 0; i < 5; ++i) {
      Pair pair(rails, check::seed() * 1000 + i);
      scenario(pair);
      pair.check_quiet();
    }
}

}  // namespace simulation
