// Streams that carry pages of a GPU through pinned memory, over a driver whose device is this process: the
// suite of conformance.h, and what a rail does when slots run out, kernels do not end, or the device fails.
#include "conformance.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu_memory.h"
#include "held_launches.h"
#include "one_sided_ends.h"
#include "transports/stream/staged_transport.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer::gpu_staged_test {
namespace {

using conformance::Subject;

constexpr std::uint64_t kMiB = 1024 * 1024;

std::shared_ptr<Staging> make_staging(std::uint64_t nbytes) {
  return std::make_shared<Staging>(emulated::driver(),
                                   Staging::Options{.device = 0,
                                                    .kernels = emulated::fast_kernels(),
                                                    .stream = {.calibration = emulated::calibration()},
                                                    .nbytes = nbytes});
}
std::unique_ptr<StagedTransport> make_rail(Reactor& reactor, std::shared_ptr<Staging> staging) {
  return std::make_unique<StagedTransport>(
      std::make_unique<StreamTransport>(reactor, StreamTransport::Options()), std::move(staging));
}
std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable&) {
  return make_rail(reactor, make_staging(64 * kMiB));
}
// A peer has room for one of the suite's largest pieces (4.8 MB) each way.
std::unique_ptr<Transport> make_small(Reactor& reactor, const FenceTable&) {
  return make_rail(reactor, make_staging(40 * kMiB));
}

Subject gpu_to_gpu() {
  return {"staged", make, conformance::tcp_sockets, false, {}, gpu_memory::allocate, gpu_memory::release};
}
Subject gpu_to_host() {
  Subject subject = gpu_to_gpu();
  subject.name = "staged, to host memory";
  subject.dst_on_host = true;
  return subject;
}
Subject host_to_gpu() {
  Subject subject = gpu_to_gpu();
  subject.name = "staged, from host memory";
  subject.src_on_host = true;
  return subject;
}
Subject over_unix() {
  Subject subject = gpu_to_gpu();
  subject.name = "staged over unix";
  subject.sockets = conformance::unix_sockets;
  return subject;
}
Subject small_arena() {
  Subject subject = gpu_to_gpu();
  subject.name = "staged in a small arena";
  subject.make = make_small;
  return subject;
}
Subject faulty() {
  return conformance::with_faults(small_arena(), "again=0.3,delay=0.3,reorder=0.5,fail=0.05");
}

CONFORMANCE(gpu_to_gpu)
CONFORMANCE_PROMISE(gpu_to_host, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(gpu_to_host, transfers_in_both_directions_do_not_mix)
CONFORMANCE_PROMISE(gpu_to_host, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(gpu_to_host, the_end_of_the_peer_ends_every_work)
CONFORMANCE_PROMISE(host_to_gpu, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(host_to_gpu, programs_of_every_kind_arrive)
CONFORMANCE_PROMISE(host_to_gpu, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(host_to_gpu, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(host_to_gpu, the_end_of_the_peer_ends_every_work)
CONFORMANCE_PROMISE(over_unix, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(small_arena, post_accepts_a_prefix_and_the_rest_later)
CONFORMANCE_PROMISE(small_arena, transfers_in_both_directions_do_not_mix)
CONFORMANCE_PROMISE(small_arena, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(small_arena, a_source_that_cancels_is_never_counted_as_done)
CONFORMANCE_PROMISE(faulty, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(faulty, a_disconnect_is_complete_with_its_completions)

// ---- slots ----

std::vector<SlotHolder> holders(std::size_t number) {
  std::vector<SlotHolder> all(number);
  for (SlotHolder& holder : all) holder = std::make_shared<int>();
  return all;
}

TEST(slots_do_not_overlap_and_all_come_back) {
  check::Random random(check::seed());
  constexpr std::uint64_t kCapacity = 64 * Slots::kAlignment;
  const std::vector<SlotHolder> all = holders(5);
  Slots slots(kCapacity + 100);  // a rest that is not a whole page is not used
  CHECK_EQ(slots.capacity(), kCapacity);
  std::vector<Slot> taken;
  for (int round = 0; round < 4000; ++round) {
    if (random.chance(45) && !taken.empty()) {
      const std::size_t which = random.below(taken.size());
      slots.give_back(taken[which]);
      taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const std::uint64_t nbytes = random.between(1, kCapacity / 4);
    // Looks for a gap, page by page.
    std::vector<bool> used(kCapacity / Slots::kAlignment);
    for (const Slot& each : taken)
      for (std::uint64_t at = each.offset; at < each.offset + each.nbytes; at += Slots::kAlignment)
        used[at / Slots::kAlignment] = true;
    std::uint64_t longest = 0, gap = 0;
    for (const bool page : used) longest = std::max(longest, gap = page ? 0 : gap + Slots::kAlignment);
    const SlotHolder& holder = all[random.below(all.size())];
    std::uint64_t held = 0;
    for (const Slot& each : taken) held += each.holder == holder ? each.nbytes : 0;
    const std::uint64_t whole = (nbytes + Slots::kAlignment - 1) / Slots::kAlignment * Slots::kAlignment;
    const bool may = held == 0 || 3 * (held + whole) + slots.used() + whole <= kCapacity;
    REQUIRE_EQ(slots.may_take(holder, nbytes), may);
    const std::optional<Slot> slot = slots.take(holder, nbytes);
    REQUIRE_EQ(slot.has_value(), may && nbytes <= longest);
    if (!slot) continue;
    CHECK(slot->nbytes >= nbytes && slot->offset % Slots::kAlignment == 0);
    CHECK(slot->offset + slot->nbytes <= kCapacity);
    for (const Slot& each : taken)
      CHECK(slot->offset + slot->nbytes <= each.offset || each.offset + each.nbytes <= slot->offset);
    taken.push_back(*slot);
  }
  for (const Slot& each : taken) slots.give_back(each);
  CHECK_EQ(slots.used(), 0);
  CHECK(!slots.take(all[0], kCapacity / 4 + 1).has_value());
  for (std::size_t k = 0; k < 4; ++k) CHECK(slots.take(all[k], kCapacity / 4).has_value());
  CHECK(!slots.take(all[4], 1).has_value());
}

TEST(fourteen_holders_that_give_nothing_back_leave_room_for_another) {
  constexpr std::uint64_t kPiece = Slots::kAlignment;
  Slots slots(64 * kPiece);
  const std::vector<SlotHolder> all = holders(15);
  std::vector<std::uint64_t> held;
  for (std::size_t k = 0; k < 14; ++k) {
    const std::uint64_t before = slots.used();
    while (slots.take(all[k], kPiece)) {}
    held.push_back((slots.used() - before) / kPiece);
  }
  CHECK_EQ(held[0], 16);
  for (const std::uint64_t pieces : held) CHECK(pieces != 0);
  const std::optional<Slot> last = slots.take(all[14], kPiece);
  REQUIRE(last.has_value());
  slots.give_back(*last);
  CHECK(slots.take(all[14], kPiece).has_value());  // and again
}

// ---- a rail by hand ----

using emulated::launches;
using gpu_memory::DeviceMemory;

constexpr std::uint32_t kBlocks = 16;
constexpr std::uint64_t kBlockNbytes = 256 * 1024;

// An agent's end: a cache on the GPU and one in host memory, and a rail that stages.
struct Agent {
  explicit Agent(std::shared_ptr<Staging> arena, std::uint64_t seed)
      : staging(std::move(arena)),
        end([&](Reactor& reactor, const FenceTable&) { return make_rail(reactor, staging); }),
        gpu(kBlocks * kBlockNbytes),
        host(kBlocks * kBlockNbytes) {
    check::Random random(seed);
    random.fill(gpu.data(), gpu.size());
    random.fill(host.data(), host.size());
    LocalRegion region{.id = 1, .base = gpu.data(), .spans = {{0, gpu.size()}}};
    region.kind = MemoryKind::kGpu;
    REQUIRE_OK(testing::register_memory(*end.transport, region));
  }
  StagedTransport& rail() { return *end.transport; }
  Completion await(WorkId work) { return end.await(work); }

  std::shared_ptr<Staging> staging;
  testing::End<StagedTransport> end;
  DeviceMemory gpu;
  std::vector<std::byte> host;
  PeerId peer = 0;
};

std::shared_ptr<Staging> held_staging(std::uint64_t nbytes, gpu::FunctionHandle& copy = emulated::held_copy) {
  return std::make_shared<Staging>(emulated::driver(),
                                   Staging::Options{.device = 0,
                                                    .kernels = {{&copy, nullptr, &emulated::convert}},
                                                    .stream = {.calibration = emulated::calibration()},
                                                    .nbytes = nbytes});
}

struct Two {
  explicit Two(std::uint64_t nbytes = 16 * kMiB, gpu::FunctionHandle& copy = emulated::held_copy)
      : src(held_staging(nbytes, copy), check::seed()), dst(held_staging(nbytes, copy), check::seed() + 1) {
    launches().reset();
    std::tie(src.peer, dst.peer) = testing::connect_ends(src.end, dst.end);
  }
  ~Two() {
    launches().let_all();
    emulated::device().stream_error = 0;
    emulated::hang_launches() = false;
  }
  void step() {
    src.end.step();
    dst.end.step();
  }
  template <class Done>
  bool run_until(Done&& done) {
    return src.end.reactor.run_until([&] { step(); }, done);
  }
  // One end's work for one block, from the source's cache of a kind to the destination's.
  static Work work_of(Agent& agent, WorkKind kind, MemoryKind memory, std::uint32_t block,
                      TransferId transfer = 1, std::uint64_t nbytes = kBlockNbytes) {
    std::byte* const base = memory == MemoryKind::kGpu ? agent.gpu.data() : agent.host.data();
    auto move = std::make_shared<Move>(*testing::block_move(1, base, nbytes, {block}, {block}, 1));
    move->local = unregistered(base, memory);
    move->transfer = transfer;
    Work work;
    work.id = conformance::next_work_id();
    work.kind = kind;
    work.move = move;
    return work;
  }
  Code post(Agent& agent, const Work& work) { return agent.rail().post(agent.peer, work); }

  Agent src, dst;
};

TEST(a_gather_that_is_cancelled_completes_with_its_kernel_and_the_peer_is_told) {
  Two two;
  launches().let(0);
  const Work receive = Two::work_of(two.dst, WorkKind::kReceive, MemoryKind::kHost, 3);
  const Work send = Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, 3);
  REQUIRE_EQ(two.post(two.dst, receive), Code::kOk);
  REQUIRE_EQ(two.post(two.src, send), Code::kOk);
  two.step();
  launches().await_held(1);
  two.src.rail().cancel(std::span(&send.id, 1));
  for (int i = 0; i < 100; ++i) two.step();
  CHECK(two.src.end.completion_of(send.id) == nullptr);  // the kernel still reads the pages
  CHECK(two.src.staging->sends().slots.used() != 0);
  launches().let_all();
  REQUIRE(two.run_until([&] {
    return two.src.end.completion_of(send.id) != nullptr && two.dst.end.completion_of(receive.id) != nullptr;
  }));
  CHECK_EQ(two.src.end.completion_of(send.id)->code, Code::kCancelled);
  CHECK_EQ(two.dst.end.completion_of(receive.id)->code, Code::kLeaseEnded);
  CHECK_EQ(two.src.staging->sends().slots.used(), 0);
}

// Sockets that the peer does not read: a part of the first piece goes out, and the other pieces wait.
TEST(rails_of_one_session_whose_peer_reads_nothing_leave_room_for_others) {
  Two two(16 * kMiB);  // 8 MiB for sends, 2 MiB of them a peer's
  const auto session = std::make_shared<Budget>(Budget::Amounts{});
  constexpr std::uint64_t kPieceNbytes = kMiB;  // twice as much as a socket holds
  std::vector<UniqueFd> unread;
  std::vector<WorkId> stuck;
  for (std::uint16_t rail = 0; rail < 3; ++rail) {
    auto [ours, theirs] = testing::socket_pair();
    unread.push_back(std::move(theirs));
    const auto peer = two.src.rail().connect(std::move(ours), {true, rail, "stopped", session});
    REQUIRE_OK(peer);
    for (int k = 0; k < 3; ++k) {
      const Work send =
          Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, 0, 100 * rail + k + 1, kPieceNbytes);
      REQUIRE_EQ(two.src.rail().post(peer.value(), send), Code::kOk);
      stuck.push_back(send.id);
    }
  }
  const Work receive = Two::work_of(two.dst, WorkKind::kReceive, MemoryKind::kHost, 0, 1, kPieceNbytes);
  const Work send = Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, 0, 1, kPieceNbytes);
  for (int i = 0; i < 20; ++i) two.step();
  REQUIRE_EQ(two.post(two.dst, receive), Code::kOk);
  REQUIRE_EQ(two.post(two.src, send), Code::kOk);
  REQUIRE(two.run_until([&] { return two.dst.end.completion_of(receive.id) != nullptr; }));
  CHECK_EQ(two.dst.end.completion_of(receive.id)->code, Code::kOk);
  CHECK(std::memcmp(two.dst.host.data(), two.src.gpu.data(), kPieceNbytes) == 0);
  CHECK_EQ(two.src.staging->sends().slots.used(), 2 * kPieceNbytes);
  for (const WorkId id : stuck) CHECK(two.src.end.completion_of(id) == nullptr);
}

TEST(a_rail_whose_peer_brings_nothing_leaves_room_for_others) {
  Two two(8 * kMiB);  // 4 MiB for receives, 1 MiB a peer
  std::uint32_t accepted = 0;
  const auto post = [&] {
    return two.post(two.dst, Two::work_of(two.dst, WorkKind::kReceive, MemoryKind::kGpu, 0, accepted + 1));
  };
  while (post() == Code::kOk) ++accepted;
  CHECK_EQ(post(), Code::kAgain);
  CHECK_EQ(accepted, kMiB / kBlockNbytes);
  // Another rail of the same agent, with the same arena.
  Agent other(two.dst.staging, check::seed() + 2);
  Agent far(held_staging(8 * kMiB), check::seed() + 3);
  std::tie(other.peer, far.peer) = testing::connect_ends(other.end, far.end);
  const Work receive = Two::work_of(other, WorkKind::kReceive, MemoryKind::kGpu, 5);
  const Work send = Two::work_of(far, WorkKind::kSend, MemoryKind::kHost, 5);
  REQUIRE_EQ(two.post(other, receive), Code::kOk);
  REQUIRE_EQ(two.post(far, send), Code::kOk);
  REQUIRE(two.run_until([&] {
    other.end.step();
    far.end.step();
    return other.end.completion_of(receive.id) != nullptr;
  }));
  CHECK_EQ(other.end.completion_of(receive.id)->code, Code::kOk);
  CHECK(std::memcmp(other.gpu.data() + 5 * kBlockNbytes, far.host.data() + 5 * kBlockNbytes, kBlockNbytes) ==
        0);
  // The rail's slots are free when the rail is gone.
  two.dst.rail().disconnect(two.dst.peer);
  two.run_until([&] { return !two.dst.rail().busy(); });
  CHECK_EQ(two.dst.staging->receives().slots.used(), 0);
}

TEST(sends_wait_for_slots_and_are_not_refused) {
  Two two(4 * kMiB);  // sends have eight slots, of which a peer takes two
  std::vector<Work> sends, receives;
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    receives.push_back(Two::work_of(two.dst, WorkKind::kReceive, MemoryKind::kHost, block, block + 1));
    sends.push_back(Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, block, block + 1));
    REQUIRE_EQ(two.post(two.dst, receives.back()), Code::kOk);
    REQUIRE_EQ(two.post(two.src, sends.back()), Code::kOk);
  }
  REQUIRE(two.run_until([&] {
    CHECK(two.src.staging->sends().slots.used() <= 2 * kBlockNbytes);
    return std::ranges::all_of(
        receives, [&](const Work& work) { return two.dst.end.completion_of(work.id) != nullptr; });
  }));
  CHECK(std::memcmp(two.dst.host.data(), two.src.gpu.data(), kBlocks * kBlockNbytes) == 0);
}

TEST(a_piece_larger_than_a_peers_part_of_the_arena_is_refused_in_words) {
  Two two(4 * kMiB);
  CHECK_EQ(two.src.rail().capabilities().max_piece_nbytes, kMiB / 2);
  for (const WorkKind kind : {WorkKind::kSend, WorkKind::kReceive}) {
    const Work work = Two::work_of(two.src, kind, MemoryKind::kGpu, 0, 1, kMiB);
    REQUIRE_EQ(two.post(two.src, work), Code::kOk);
    const Completion ended = two.src.await(work.id);
    CHECK_EQ(ended.code, Code::kExhausted);
    CHECK_HAS(ended.detail, "raise staging_nbytes");
  }
}

TEST(a_device_that_fails_under_way_ends_works_of_its_pages_alone) {
  Two two(16 * kMiB, emulated::fast_copy);
  emulated::hang_launches() = true;
  const Work send = Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, 1, 1);
  const Work receive = Two::work_of(two.src, WorkKind::kReceive, MemoryKind::kGpu, 2, 2);
  REQUIRE_EQ(two.post(two.src, receive), Code::kOk);  // the peer does not send it
  REQUIRE_EQ(two.post(two.src, send), Code::kOk);
  two.step();
  emulated::device().stream_error = emulated::kLaunchFailed;
  for (const Work* work : {&send, &receive}) {
    const Completion ended = two.src.await(work->id);
    CHECK_EQ(ended.code, Code::kSystem);
    CHECK_HAS(ended.detail, "staging");
  }
  const Work later = Two::work_of(two.src, WorkKind::kSend, MemoryKind::kGpu, 1, 3);
  REQUIRE_EQ(two.post(two.src, later), Code::kOk);
  CHECK_EQ(two.src.await(later.id).code, Code::kSystem);

  const Work here = Two::work_of(two.src, WorkKind::kSend, MemoryKind::kHost, 4, 4);
  const Work there = Two::work_of(two.dst, WorkKind::kReceive, MemoryKind::kHost, 4, 4);
  REQUIRE_EQ(two.post(two.dst, there), Code::kOk);
  REQUIRE_EQ(two.post(two.src, here), Code::kOk);
  REQUIRE(two.run_until([&] { return two.dst.end.completion_of(there.id) != nullptr; }));
  CHECK_EQ(two.dst.end.completion_of(there.id)->code, Code::kOk);
}

}  // namespace
}  // namespace kvxfer::gpu_staged_test
