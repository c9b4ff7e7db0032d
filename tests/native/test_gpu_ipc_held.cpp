// cuda_ipc while its kernels do not end: what they read stays mapped, who waits for that, and how much is
// under way at a time.
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "gpu_memory.h"
#include "held_launches.h"
#include "ipc_ends.h"

namespace kvxfer::gpu_ipc_held_test {
namespace {

using emulated::launches;
using gpu_memory::DeviceMemory;
using testing::connect_ends;
using testing::fetch_work;
using namespace ipc_ends;

Ends::Make holding(std::uint64_t most_flying_nbytes = cuda_ipc::Flights::kMostNbytes) {
  return [=](Reactor& reactor, const FenceTable& fences) {
    CudaIpcTransport::Options options;
    options.kernels = {{&emulated::held_copy, nullptr, &emulated::convert}};
    options.most_flying_nbytes = most_flying_nbytes;
    auto made = CudaIpcTransport::create(reactor, fences, emulated::driver(), options);
    REQUIRE_OK(made);
    return std::move(made).value();
  };
}

// A destination whose device holds its fetch of a source's region.
struct Scene : Two {
  Scene() : Two(holding()) {
    launches().reset();
    launches().let(0);
    fetch(1);
    REQUIRE(comes([] { return launches().num_begun() == 1; }));
  }
  ~Scene() { launches().let_all(); }  // closing waits for them
  void step_on() {
    for (int k = 0; k < 10; ++k) step();
  }
};

TEST(a_region_that_is_detached_stays_mapped_for_the_kernel_that_reads_it) {
  Scene held;
  held.dst.transport->detach(held.src_at_dst, 1);
  held.step_on();
  CHECK_EQ(held.dst.transport->num_mappings(), 1);
  launches().let_all();
  REQUIRE(held.comes([&] { return held.dst.completion_of(1) != nullptr; }));
  CHECK(held.dst.completion_of(1)->code == Code::kOk);
  CHECK_EQ(held.dst.transport->num_mappings(), 0);
}

TEST(memory_that_is_taken_back_is_held_for_the_kernel_that_reads_it) {
  Scene held;
  held.src.transport->deregister_memory(1);
  held.step_on();
  CHECK(held.src.transport->lender()->held_by_peers(1));
  CHECK(held.dst.completion_of(1) == nullptr);
  launches().let_all();
  REQUIRE(held.comes([&] { return !held.src.transport->lender()->held_by_peers(kEveryRegion); }));
  CHECK(held.dst.completion_of(1) != nullptr);
}

TEST(a_peer_that_is_disconnected_has_its_memory_held_for_the_kernel_that_reads_it) {
  Scene held;
  held.src.transport->deregister_memory(1);
  held.dst.transport->disconnect(held.src_at_dst);
  held.step_on();
  CHECK(held.src.transport->lender()->held_by_peers(1));
  CHECK(held.dst.completion_of(1) == nullptr);
  launches().let_all();
  REQUIRE(held.comes([&] { return !held.src.transport->lender()->held_by_peers(kEveryRegion); }));
  CHECK(held.dst.completion_of(1)->code == Code::kCancelled);
}

TEST(a_peer_that_is_given_up_while_kernels_read_its_memory_is_not_waited_for_again) {
  Scene held;
  DeviceMemory first(kNbytes), second(kNbytes);
  told(*held.dst.transport, region_of(5, first.data()));
  told(*held.dst.transport, region_of(6, second.data()));
  held.dst.transport->deregister_memory(5);  // src does not have to answer
  CHECK(held.dst.transport->lender()->held_by_peers(5));
  CHECK_EQ(held.dst.transport->lender()->give_up_holders(5), std::vector<std::string>{"a"});
  CHECK(!held.dst.transport->lender()->held_by_peers(kEveryRegion));
  held.dst.transport->deregister_memory(6);
  CHECK(!held.dst.transport->lender()->held_by_peers(6));
  launches().let_all();
  CHECK(held.dst.await(1).code == Code::kOk);
  CHECK(!held.dst.transport->lender()->held_by_peers(kEveryRegion));
}

TEST(no_more_than_so_many_bytes_are_under_way_and_what_ended_makes_room) {
  constexpr std::uint32_t kLayers = 12;
  launches().reset();
  launches().let(0);
  // Launches cover two layers each; the next one goes when fewer than four are under way.
  Ends src(make), dst(holding(4 * kNbytes));
  const PeerId src_at_dst = connect_ends(src, dst).second;
  DeviceMemory memory(kLayers * kNbytes), arrived(kLayers * kNbytes);
  check::Random random(check::seed());
  random.fill(memory.data(), memory.size());
  const RemoteRegion remote = told(*src.transport, region_of(1, memory.data(), {{0, kLayers * kNbytes}}));
  REQUIRE(dst.transport->attach(src_at_dst, remote).ok());
  const auto move = move_of(1, arrived.data(), kLayers, kNbytes);
  std::vector<Work> works;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) works.push_back(fetch_work(1 + layer, move, layer));
  REQUIRE_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, kLayers);
  REQUIRE(dst.reactor.run_until([&] { src.step(), dst.step(); }, [] { return launches().num_begun() == 1; }));
  for (int step = 0; step < 10; ++step) dst.step();
  // Works that are not launched can still be stopped: all but the first four.
  std::vector<WorkId> ids;
  for (const Work& work : works) ids.push_back(work.id);
  dst.transport->cancel(ids);
  for (std::uint32_t layer = 4; layer < kLayers; ++layer)
    CHECK(dst.await(1 + layer).code == Code::kCancelled);
  for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK(dst.completion_of(1 + layer) == nullptr);

  for (Work& work : works) work.id += kLayers;
  REQUIRE_EQ(testing::post_all(*dst.transport, src_at_dst, works).accepted, kLayers);
  launches().let_all();
  for (const Work& work : works) CHECK(dst.await(work.id).code == Code::kOk);
  for (std::uint32_t layer = 0; layer < 4; ++layer) CHECK(dst.await(1 + layer).code == Code::kOk);
  CHECK_EQ(launches().num_begun(), 2 + kLayers / 2);
}

TEST(peers_take_turns) {
  launches().reset();
  launches().let(0);
  Ends one(make), other(make), dst(holding(1));  // one launch at a time
  DeviceMemory memory(kNbytes), arrived(kNbytes);
  std::vector<PeerId> peers;
  for (Ends* src : {&one, &other}) {
    peers.push_back(connect_ends(*src, dst).second);
    REQUIRE(dst.transport->attach(peers.back(), told(*src->transport, region_of(1, memory.data()))).ok());
  }
  const auto step = [&] { one.step(), other.step(), dst.step(); };
  REQUIRE(dst.reactor.run_until(step, [&] { return dst.transport->num_mappings() == 2; }));
  WorkId id = 1;
  for (const PeerId peer : peers)
    for (int k = 0; k < 3; ++k) {
      const Work work[] = {fetch_work(id++, move_of(1, arrived.data(), 1, 0), 0)};
      REQUIRE_EQ(testing::post_all(*dst.transport, peer, work).accepted, 1);
    }
  launches().let_all();
  for (const WorkId work : {3, 6})
    REQUIRE(dst.reactor.run_until(step, [&] { return dst.completion_of(work) != nullptr; }));
  std::vector<WorkId> ended;
  for (const Completion& each : dst.completions)
    if (each.kind == CompletionKind::kWork) ended.push_back(each.work);
  CHECK_EQ(ended, (std::vector<WorkId>{1, 4, 2, 5, 3, 6}));
}

}  // namespace
}  // namespace kvxfer::gpu_ipc_held_test
