// Small writes whose bytes go with their OFFER: where this is possible, under the rights of any write, and
// never twice.
#include "mallory.h"
#include "simulated_pair.h"

namespace simulation {
namespace {

EngineConfig taking(std::uint32_t nbytes) {
  EngineConfig config;
  config.session.features.eager_nbytes = nbytes;
  return config;
}

// The bytes of a write from kFrom to kTo.
std::uint32_t nbytes_of_all() {
  const Layout layout;
  return static_cast<std::uint32_t>(kFrom.size()) * 2 * layout.chunk_nbytes * layout.num_layers;
}

bool went_along(const Handle& handle) { return handle.rails() == std::vector<std::string>{"eager"}; }

TEST(a_small_write_lands_with_its_offer_where_both_ends_take_it) {
  const std::uint32_t all = nbytes_of_all();
  const auto streams = std::vector{two_sided_rail()};
  struct Case {
    std::vector<RailPlan> rails;
    std::uint32_t src, dst;
    bool goes_along;
  };
  for (const auto& [rails, src, dst, goes_along] :
       std::vector<Case>{{streams, 8192, all, true},
                         {streams, all, 8192, true},
                         {streams, 8192, all - 1, false},
                         {streams, all - 1, 8192, false},
                         {streams, 0, 8192, false},
                         {streams, 8192, 0, false},
                         {{two_sided_rail(32), two_sided_rail()}, 8192, 8192, true},
                         // With a one-sided rail the peer fetches just as soon.
                         {{one_sided_rail()}, 8192, 8192, false},
                         {{two_sided_rail(), one_sided_rail()}, 8192, 8192, false}})
    for (const bool expected : {false, true}) {
      Pair pair(rails, check::seed(), taking(src), taking(dst));
      const auto incoming = expected ? pair.expect("tag", kTo) : nullptr;
      if (!expected) pair.grant_write();
      const auto handle = pair.write(kFrom, kTo, "tag", "req-7");
      CHECK(pair.ends(handle));
      CHECK(handle->outcome() == Outcome::kDone);
      CHECK(pair.equal(kFrom, kTo));
      CHECK_EQ(went_along(*handle), goes_along);
      CHECK_EQ(pair.bytes_landed == 0, goes_along);
      if (expected) {
        CHECK(pair.ends(incoming));
        CHECK(incoming->outcome() == Outcome::kDone);
        CHECK_EQ(went_along(*incoming), goes_along);
        CHECK_EQ(incoming->context(), Pair::bytes("req-7"));
      } else {
        CHECK(pair.notified(pair.dst, "tag"));
      }
      pair.check_quiet();
    }
}

TEST(what_is_not_ready_or_summed_goes_over_a_rail) {
  const auto over_a_rail = [](auto&& change) {
    Pair pair({two_sided_rail()}, check::seed(), taking(8192));
    pair.grant_write();
    TransferRequest request = pair.request(true, kFrom, kTo, "tag");
    change(request);
    const auto handle = Pair::post(pair.src, request);
    if (request.layers_ready < request.num_layers) {
      pair.world.run_for(20 * kMillisecond);
      pair.src.engine().layers_ready(pair.src.now(), handle->id(), request.num_layers);
      pair.src.settle();
    }
    CHECK(pair.ends(handle));
    CHECK(handle->outcome() == Outcome::kDone);
    CHECK(pair.equal(kFrom, kTo));
    CHECK(!went_along(*handle));
    pair.check_quiet();
  };
  over_a_rail([](TransferRequest& request) { request.layers_ready = 1; });
  over_a_rail([](TransferRequest& request) { request.integrity = true; });
}

// The processor could neither pack nor land pages of a GPU.
TEST(pages_on_a_gpu_go_over_a_rail) {
  for (const bool at_src : {true, false}) {
    Pair pair({staged_rail()}, check::seed(), taking(8192));
    const RegionId on_gpu = at_src ? pair.src.add_region(pair.src_layout, MemoryKind::kGpu, true)
                                   : pair.dst.add_region(pair.dst_layout, MemoryKind::kGpu, true);
    pair.world.run_for(20 * kMillisecond);
    const RegionId from = at_src ? on_gpu : pair.src_region, to = at_src ? pair.dst_region : on_gpu;
    const auto program = pair.src.engine().install_program(pair.src.now(), pair.to_dst, true, from, to,
                                                           program_between(pair.src_layout, pair.dst_layout));
    REQUIRE_OK(program);
    Pair::grant(pair.dst, pair.to_src, to, wire::LeaseMode::kWrite, {}, 10 * kSecond, true);
    for (const std::uint32_t block : kFrom) pair.src.memory(from).fill(block, 5000 + block);
    TransferRequest request = pair.request(true, kFrom, kTo);
    request.program = program.value();
    const auto handle = Pair::post(pair.src, request);
    CHECK(pair.ends(handle));
    CHECK(handle->outcome() == Outcome::kDone);
    CHECK(handle->rails() == std::vector<std::string>{"stream"});
    for (std::size_t i = 0; i < kFrom.size(); ++i)
      CHECK(pair.src.memory(from).read(0, kFrom[i]) == pair.dst.memory(to).read(0, kTo[i]));
    pair.check_quiet();
  }
}

TEST(one_that_comes_before_its_right_is_asked_for_when_that_comes) {
  Pair pair({two_sided_rail()}, check::seed(), taking(8192));
  const Memory before(pair.destination());
  const auto handle = pair.write(kFrom, kTo, "tag");
  pair.world.run_for(20 * kMillisecond);
  CHECK(pair.destination().bytes == before.bytes);
  const auto incoming = pair.expect("tag", kTo);
  CHECK(pair.ends(handle));
  CHECK(pair.ends(incoming));
  CHECK(incoming->outcome() == Outcome::kDone);
  CHECK(pair.equal(kFrom, kTo));
  CHECK(pair.bytes_landed != 0);
  CHECK(handle->rails() == std::vector<std::string>{"stream"});
  CHECK(incoming->rails() == handle->rails());
  pair.check_quiet();
}

TEST(without_a_right_nothing_of_it_lands) {
  // No lease; one of other blocks; one that ends while the OFFER is on its way.
  for (const int which : {0, 1, 2}) {
    Pair pair({two_sided_rail()}, check::seed() + static_cast<std::uint64_t>(which), taking(8192));
    const LeaseId lease = which == 0 ? 0 : which == 1 ? pair.grant_write({0, 1}) : pair.grant_write();
    pair.world.run_for(20 * kMillisecond);
    pair.freeze_destination();
    TransferRequest request = pair.request(true, kFrom, kTo);
    request.timeout_ns = kSecond;
    const auto handle = Pair::post(pair.src, request);
    if (which == 2) {
      pair.dst.engine().revoke(pair.dst.now(), lease);
      pair.dst.settle();
    }
    CHECK(pair.ends(handle));
    CHECK(handle->outcome() == Outcome::kFailed);
    CHECK_EQ(handle->failed_blocks().size(), kFrom.size());
    pair.check_quiet();
  }
}

TEST(a_peer_that_reads_nothing_is_sent_so_much_and_no_more) {
  Pair pair({two_sided_rail()}, check::seed(), taking(8192));
  pair.grant_write();
  pair.world.run_for(20 * kMillisecond);
  pair.dst.pause();
  std::vector<std::shared_ptr<Handle>> handles;
  std::size_t num_along = 0;
  for (std::uint32_t i = 0; i < 2 * (1024 * 1024) / nbytes_of_all() && handles.size() < 1000; ++i)
    handles.push_back(pair.write(kFrom, kTo));
  pair.dst.resume();
  for (const auto& handle : handles) CHECK(pair.ends(handle));
  for (const auto& handle : handles) num_along += went_along(*handle);
  CHECK_EQ(num_along, std::min<std::size_t>(handles.size(), 1024 * 1024 / nbytes_of_all()));
  CHECK(num_along < handles.size());
  pair.check_quiet();
}

TEST(pages_that_were_not_asked_for_or_are_too_few_end_the_session) {
  for (const std::uint32_t taken : {0u, 8192u}) {
    Pair pair({two_sided_rail()}, check::seed(), taking(taken));
    Mallory mallory(pair.world, pair.dst);
    pair.grant(pair.dst, mallory.key(), pair.dst_region, wire::LeaseMode::kWrite, {}, 10 * kSecond, true);
    pair.freeze_destination();
    mallory.layout = pair.dst_layout;
    mallory.tell_program(1, pair.dst_region, true, [](CopyProgram&) {});
    wire::Offer offer{mallory.spec(2, 1, {1, 2}, {3, 4}), pair.dst_layout.num_layers, 0, 0};
    const std::uint32_t nbytes = 2 * 2 * pair.dst_layout.chunk_nbytes * pair.dst_layout.num_layers;
    offer.pages.resize(taken == 0 ? nbytes : nbytes - 1);
    mallory.send(offer);
    CHECK(mallory.ended);
    check_undisturbed(pair);
  }
}

}  // namespace
}  // namespace simulation
