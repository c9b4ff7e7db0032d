// Which rails carry what: each region goes over rails for its kind of memory, and transfers do not wait for a
// rail that cannot come.
#include "simulated_pair.h"

namespace simulation {
namespace {

// A pair with caches on GPUs beside those in host memory.
struct GpuPair : Pair {
  explicit GpuPair(std::vector<RailPlan> rails, std::uint64_t seed = check::seed(), bool staged = false)
      : Pair(std::move(rails), seed),
        src_gpu(src.add_region(src_layout, MemoryKind::kGpu, staged)),
        dst_gpu(dst.add_region(dst_layout, MemoryKind::kGpu, staged)) {
    for (std::uint32_t block = 0; block < src_layout.num_blocks; ++block)
      src.memory(src_gpu).fill(block, 5000 + block);
    REQUIRE(world.until([&] {
      return src.engine().peer_regions(to_dst).value().size() == 2 &&
             dst.engine().peer_regions(to_src).value().size() == 2;
    }));
    grant(src, to_dst, src_gpu, wire::LeaseMode::kRead, {}, 30 * kSecond, true);
    grant(dst, to_src, dst_gpu, wire::LeaseMode::kWrite, {}, 30 * kSecond, true);
    world.run_for(kSecond);
  }
  // Posts a copy between two regions, in any kind of memory.
  Result<std::shared_ptr<Handle>> try_post(bool write, RegionId from, RegionId to, bool integrity = false) {
    Node& node = write ? src : dst;
    const auto program = node.engine().install_program(node.now(), write ? to_dst : to_src, write, from, to,
                                                       program_between(src_layout, dst_layout));
    REQUIRE_OK(program);
    TransferRequest what = request(write, kFrom, kTo);
    what.program = program.value();
    what.integrity = integrity;
    auto handle = node.engine().post(node.now(), std::move(what));
    node.settle();
    return handle;
  }
  bool gpu_equal() { return regions_equal(src_gpu, dst_gpu); }
  bool regions_equal(RegionId from, RegionId to) {
    for (std::uint32_t layer = 0; layer < src_layout.num_layers; ++layer)
      for (std::size_t i = 0; i < kFrom.size(); ++i)
        if (src.memory(from).read(layer, kFrom[i]) != dst.memory(to).read(layer, kTo[i])) return false;
    return true;
  }

  RegionId src_gpu, dst_gpu;
};

std::vector<RailPlan> with_gpu(std::vector<RailPlan> rails) {
  rails.push_back(gpu_rail());
  return rails;
}

void cut(Pair& pair, std::string_view transport) {
  for (const RailId rail : pair.dst.rails_with(pair.to_src))
    if (pair.dst.link(rail)->capabilities.name == transport) pair.dst.cut_rail(rail, "cut");
}

TEST(each_region_goes_over_the_rails_of_its_kind) {
  for (const auto& rails : rail_sets())
    for (std::uint64_t i = 0; i < 5; ++i) {
      GpuPair pair(with_gpu(rails), check::seed() * 1000 + i);
      pair.grant_read();
      const auto on_gpu = pair.try_post(false, pair.src_gpu, pair.dst_gpu);
      const auto written = pair.try_post(true, pair.src_gpu, pair.dst_gpu);
      const auto on_host = pair.read(kFrom, kTo);
      REQUIRE_OK(on_gpu);
      REQUIRE_OK(written);
      for (const auto& handle : {on_gpu.value(), written.value(), on_host}) {
        REQUIRE(pair.ends(handle));
        CHECK_EQ(handle->outcome(), Outcome::kDone);
      }
      CHECK_EQ(on_gpu.value()->rails(), std::vector<std::string>{"kernels"});
      for (const std::string& rail : on_host->rails()) CHECK(rail != "kernels");
      CHECK(pair.equal(kFrom, kTo));
      CHECK(pair.gpu_equal());
      pair.check_quiet();
    }
}

TEST(regions_of_different_kinds_are_refused_when_a_transfer_is_posted) {
  GpuPair pair(with_gpu({one_sided_rail(), two_sided_rail()}));
  for (const bool write : {false, true})
    for (const auto& [from, to] :
         {std::pair(pair.src_gpu, pair.dst_region), std::pair(pair.src_region, pair.dst_gpu)}) {
      const auto refused = pair.try_post(write, from, to);
      CHECK_REFUSED(refused.status(), Code::kUnsupported, "sent over a stream");
    }
  for (const bool write : {false, true}) {
    const Status refused = pair.try_post(write, pair.src_gpu, pair.dst_gpu, true).status();
    CHECK_REFUSED(refused, Code::kUnsupported, "integrity=False");
  }
  pair.check_quiet();
}

TEST(a_stream_that_stages_carries_what_no_other_rail_does) {
  for (std::uint64_t i = 0; i < 5; ++i) {
    GpuPair pair({one_sided_rail(), staged_rail()}, check::seed() * 1000 + i, true);
    pair.grant_read();
    pair.grant_write();
    for (const auto& [from, to] :
         {std::pair(pair.src_gpu, pair.dst_region), std::pair(pair.src_region, pair.dst_gpu),
          std::pair(pair.src_gpu, pair.dst_gpu)})
      for (const bool write : {false, true}) {
        const auto handle = pair.try_post(write, from, to);
        REQUIRE_OK(handle);
        REQUIRE(pair.ends(handle.value()));
        CHECK_EQ(handle.value()->outcome(), Outcome::kDone);
        CHECK(pair.regions_equal(from, to));
        if (!write) CHECK_EQ(handle.value()->rails(), std::vector<std::string>{"stream"});
      }
    pair.check_quiet();
  }
}

TEST(a_stream_that_stages_takes_over_from_a_rail_of_gpus) {
  for (const bool write : {false, true})
    for (std::uint64_t i = 0; i < 5; ++i) {
      GpuPair pair(with_gpu({staged_rail()}), check::seed() * 1000 + i, true);
      const auto handle = pair.try_post(write, pair.src_gpu, pair.dst_gpu);
      REQUIRE_OK(handle);
      REQUIRE(pair.until_midway(kFrom.size()));
      cut(pair, "kernels");
      REQUIRE(pair.ends(handle.value()));
      CHECK_EQ(handle.value()->outcome(), Outcome::kDone);
      CHECK(pair.gpu_equal());
      pair.check_quiet();
    }
}

TEST(pieces_of_one_transfer_are_fetched_and_sent_over_one_rail) {
  for (const bool write : {false, true})
    for (const bool integrity : {false, true})
      for (std::uint64_t i = 0; i < 5; ++i) {
        Pair pair({either_rail()}, check::seed() * 1000 + i);
        pair.grant_read();
        pair.grant_write();
        TransferRequest what = pair.request(write, kFrom, kTo);
        what.integrity = integrity;
        const auto handle = Pair::post(write ? pair.src : pair.dst, what);
        REQUIRE(pair.ends(handle));
        CHECK_EQ(handle->outcome(), Outcome::kDone);
        CHECK(pair.equal(kFrom, kTo));
        CHECK(pair.dst.posted[WorkKind::kFetch] > 0);
        CHECK(pair.dst.posted[WorkKind::kReceive] > 0);
        CHECK_EQ(pair.src.posted[WorkKind::kSend], pair.dst.posted[WorkKind::kReceive]);
        pair.check_quiet();
      }
}

// Both have caches on GPUs and no rail between these, as on two hosts. The caller knows that at once, the
// other end when it is told.
TEST(caches_on_gpus_without_a_rail_between_them_are_refused_before_the_deadline) {
  GpuPair pair({one_sided_rail()});
  CHECK_EQ(pair.try_post(true, pair.src_gpu, pair.dst_gpu).status().code(), Code::kUnsupported);
  const auto read = pair.try_post(false, pair.src_gpu, pair.dst_gpu);
  REQUIRE_OK(read);
  REQUIRE(pair.ends(read.value(), Pair::kTimeout / 5));
  CHECK_REFUSED(read.value()->status(), Code::kRefused, "unsupported");
  pair.check_quiet();
}

TEST(what_one_rail_alone_could_bring_ends_with_it_and_not_at_its_deadline) {
  for (const bool write : {false, true})
    for (std::uint64_t i = 0; i < 5; ++i) {
      GpuPair pair(with_gpu({two_sided_rail()}), check::seed() * 1000 + i);
      pair.grant_read();
      const auto handle = pair.try_post(write, pair.src_gpu, pair.dst_gpu);
      REQUIRE_OK(handle);
      REQUIRE(pair.until_midway(kFrom.size()));
      cut(pair, "kernels");
      REQUIRE(pair.ends(handle.value(), Pair::kTimeout / 5));
      CHECK_EQ(handle.value()->status().code(), Code::kNoPath);
      REQUIRE(pair.world.until(
          [&] { return pair.src.engine().num_transfers() + pair.dst.engine().num_transfers() == 0; },
          Pair::kTimeout / 5));
      CHECK_EQ(pair.try_post(write, pair.src_gpu, pair.dst_gpu).status().code(), Code::kRailFailed);
      const auto beside = pair.read(kFrom, kTo);
      REQUIRE(pair.ends(beside));
      CHECK_EQ(beside->outcome(), Outcome::kDone);
      CHECK(pair.equal(kFrom, kTo));
      pair.check_quiet();
    }
}

// A NIC copies bytes as they are; the stream beside it converts.
TEST(what_converts_goes_over_rails_that_do_and_ends_with_the_last_of_them) {
  RailPlan nic = one_sided_rail();
  nic.capabilities.converts = false;
  for (const bool write : {false, true})
    for (const bool is_cut : {false, true})
      for (std::uint64_t i = 0; i < 5; ++i) {
        Pair pair({nic, two_sided_rail()}, check::seed() * 1000 + i);
        pair.grant_read();
        pair.grant_write();
        pair.world.run_for(kSecond);
        Node& node = write ? pair.src : pair.dst;
        CopyProgram converting = program_between(pair.src_layout, pair.dst_layout);
        Conversion conversion{};  // the simulation does not convert bytes
        conversion.src_dtype = Dtype::kBf16;
        conversion.dst_dtype = Dtype::kF16;
        converting.conversions = {conversion};
        for (CopyLoop& loop : converting.loops) loop.conversion = 1;
        const auto program =
            node.engine().install_program(node.now(), write ? pair.to_dst : pair.to_src, write,
                                          pair.src_region, pair.dst_region, std::move(converting));
        REQUIRE_OK(program);
        TransferRequest what = pair.request(write, kFrom, kTo);
        what.program = program.value();
        const auto converted = Pair::post(node, what);
        if (is_cut) {
          REQUIRE(pair.until_midway(kFrom.size()));
          pair.src.takes_rails = pair.dst.takes_rails = false;
          cut(pair, "stream");
        }
        REQUIRE(pair.ends(converted, Pair::kTimeout / 5));
        CHECK_EQ(converted->status().code(), is_cut ? Code::kNoPath : Code::kOk);
        if (!is_cut) CHECK(pair.equal(kFrom, kTo));
        if (!is_cut && !write) CHECK_EQ(converted->rails(), std::vector<std::string>{"stream"});
        CHECK_EQ(pair.dst.posted[WorkKind::kFetch], 0u);
        const auto plain = write ? pair.write(kFrom, kTo) : pair.read(kFrom, kTo);
        REQUIRE(pair.ends(plain));
        CHECK_OK(plain->status());
        if (!write) CHECK_EQ(plain->rails(), std::vector<std::string>{"mapped"});
        CHECK(pair.equal(kFrom, kTo));
        pair.check_quiet();
      }
}

}  // namespace
}  // namespace simulation
