// Two ends of a cuda_ipc rail, driven by hand, with regions of eight blocks a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"
#include "one_sided_ends.h"
#include "transports/cuda_ipc/cuda_ipc_transport.h"

namespace ipc_ends {

using namespace kvxfer;
using Ends = testing::End<CudaIpcTransport>;

inline constexpr std::size_t kNbytes = 1 << 16;  // of a layer
inline constexpr std::uint32_t kBlocks = 8;

inline std::unique_ptr<CudaIpcTransport> make(Reactor& reactor, const FenceTable& fences) {
  auto made = CudaIpcTransport::create(reactor, fences, emulated::driver(),
                                       {.device = 0, .kernels = emulated::fast_kernels(), .stream = {}});
  REQUIRE_OK(made);
  return std::move(made).value();
}

inline LocalRegion region_of(RegionId id, std::byte* base, std::vector<MemorySpan> spans = {{0, kNbytes}}) {
  LocalRegion region;
  region.id = id;
  region.kind = MemoryKind::kGpu;
  region.base = base;
  region.spans = std::move(spans);
  return region;
}

// A region as its peer hears of it.
inline RemoteRegion told(CudaIpcTransport& owner, const LocalRegion& region) {
  auto keys = testing::register_memory(owner, region);
  REQUIRE_OK(keys);
  return {region.id, reinterpret_cast<std::uintptr_t>(region.base), region.spans, std::move(keys).value()};
}

// A move of all blocks of some layers, which are `layer_stride` apart at the source.
inline std::shared_ptr<const Move> move_of(RegionId src, std::byte* dst, std::uint32_t num_layers,
                                           std::uint64_t layer_stride) {
  CopyProgram program = block_programs::pages_of(kNbytes / kBlocks, num_layers, kNbytes);
  program.loops[0].src_layer_stride = layer_stride;
  auto move = std::make_shared<Move>();
  move->program = std::make_shared<CopyProgram>(std::move(program));
  move->grid = {0, num_layers, kBlocks, kBlocks, 0};
  for (std::uint32_t k = 0; k < kBlocks; ++k) {
    move->src_ids.push_back(k);
    move->dst_ids.push_back(kBlocks - 1 - k);
  }
  move->local = unregistered(dst);
  move->remote_region = src;
  return move;
}

// A destination that has attached a region of its peer's: region 1, which is `memory`.
struct Two {
  explicit Two(const Ends::Make& of_dst = make) : dst(of_dst) {
    std::tie(dst_at_src, src_at_dst) = testing::connect_ends(src, dst);
    REQUIRE_OK(dst.transport->attach(src_at_dst, told(*src.transport, region_of(1, memory.data()))));
  }
  void step() { src.step(), dst.step(); }
  bool comes(const std::function<bool()>& is_so) {
    return dst.reactor.run_until([&] { step(); }, is_so);
  }
  // Posts the fetch of all blocks of a region into `arrived`.
  void fetch(WorkId id, RegionId region = 1) {
    const Work works[] = {testing::fetch_work(id, move_of(region, arrived.data(), 1, 0), 0)};
    REQUIRE_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, 1);
  }
  bool src_is_held(RegionId region) const { return src.transport->lender()->held_by_peers(region); }

  Ends src{make}, dst;
  gpu_memory::DeviceMemory memory{kNbytes}, arrived{kNbytes};
  PeerId dst_at_src = 0, src_at_dst = 0;
};

}  // namespace ipc_ends
