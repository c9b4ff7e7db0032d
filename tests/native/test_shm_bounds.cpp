// Bounds on what a peer of an shm rail can make us do and hold: pieces of any size, memory without end,
// descriptors that it does not read. A second peer, which keeps the rules, loses nothing (Impostor's
// destructor checks).
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "check.h"
#include "core/system/memfd.h"
#include "shm_ends.h"

namespace {

using namespace shm_ends;

constexpr std::uint64_t kNbytes = Memfd::kNbytes;
constexpr std::uint64_t kPollNbytes = SlicedCopy::kSliceCost * 3 / 2 + SlicedCopy::kChunkNbytes;

// A pool of kNbytes, all ones. `by_kernel`: it is not mapped, but read by the kernel.
struct Ones : Memfd {
  explicit Ones(bool by_kernel) : Memfd("ones") {
    std::fill_n(data, kNbytes, std::byte{1});
    seal(by_kernel);
  }
};

// One piece of kNbytes: `num_pairs` blocks of equal size.
struct Case {
  const char* what;
  bool by_kernel;
  std::uint32_t num_pairs;
};
constexpr Case kCases[] = {{"a run, mapped", false, 1},
                           {"blocks, mapped", false, 16384},
                           {"a run, by the kernel", true, 1},
                           {"blocks, by the kernel", true, 16384}};

struct HugePiece {
  explicit HugePiece(const Case& which) : pool(which.by_kernel), to(kNbytes) {
    impostor.hello(true);
    impostor.say(impostor.memfd(kNbytes), pool.fd.get());
    REQUIRE_OK(
        impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kNbytes, pool.data)));
    std::vector<std::uint32_t> ids(which.num_pairs);
    for (std::uint32_t i = 0; i < which.num_pairs; ++i) ids[i] = i;
    const Work work =
        fetch_work(1, block_move(9, to.data(), kNbytes / which.num_pairs, ids, ids, which.num_pairs), 0);
    REQUIRE_EQ(impostor.destination.transport->post(impostor.peer, work), Code::kOk);
    while (landed_nbytes() == 0) impostor.destination.step();
  }
  std::uint64_t landed_nbytes() const {
    return static_cast<std::uint64_t>(std::count(to.begin(), to.end(), std::byte{1}));
  }

  Ones pool;
  std::vector<std::byte> to;
  Impostor impostor;  // destroyed first: it still moves what is under way, into `to`
};

TEST(one_poll_moves_a_slice_of_a_piece_of_any_size) {
  for (const Case& which : kCases) {
    HugePiece piece(which);
    std::uint64_t before = piece.landed_nbytes();
    while (piece.impostor.destination.completion_of(1) == nullptr) {
      piece.impostor.destination.step();
      const std::uint64_t now = piece.landed_nbytes();
      if (now - before > kPollNbytes) FAIL(which.what);
      before = now;
    }
    CHECK_EQ(piece.impostor.destination.await(1).code, Code::kOk);
    CHECK_EQ(before, kNbytes);
  }
}

TEST(others_have_their_turn_between_slices) {
  for (const Case& which : kCases) {
    HugePiece piece(which);
    Impostor& impostor = piece.impostor;
    std::vector<std::byte> page(kBlockNbytes);
    const Work work = fetch_work(2, block_move(1, page.data(), kBlockNbytes, {3}, {0}, 1), 0);
    REQUIRE_EQ(impostor.destination.transport->post(impostor.bystander_peer, work), Code::kOk);
    for (int polls = 0; polls < 2; ++polls) impostor.destination.step();
    REQUIRE(impostor.destination.completion_of(2) != nullptr);
    CHECK_EQ(impostor.destination.completion_of(2)->code, Code::kOk);
    CHECK(holds_block(page.data(), 0, 3));
    CHECK(impostor.destination.completion_of(1) == nullptr);
  }
}

// An event that ends a piece between two slices, and the code with which its work ends.
struct Ending {
  const char* what;
  Code code;
  void (*end)(HugePiece&);
};
const Ending kEnds[] = {
    {"cancel", Code::kCancelled, [](HugePiece& piece) { piece.impostor.destination.cancel(1); }},
    {"disconnect", Code::kCancelled,
     [](HugePiece& piece) { piece.impostor.destination.transport->disconnect(piece.impostor.peer); }},
    {"detach", Code::kRegionGone,
     [](HugePiece& piece) { piece.impostor.destination.transport->detach(piece.impostor.peer, 9); }},
    {"its pool is taken back", Code::kRailFailed,
     [](HugePiece& piece) {
       shm::Message gone;
       gone.kind = shm::MessageKind::kMemfdGone;
       gone.memfd_id = 1;
       piece.impostor.say(gone);
       piece.impostor.destination.reactor.run_once(0);
     }},
    {"a region that is shorter takes its place", Code::kInternal,
     [](HugePiece& piece) {
       RemoteRegion shorter = piece.impostor.region_in(9, kNbytes, piece.pool.data);
       shorter.spans = {{0, 4096}};
       REQUIRE_OK(piece.impostor.destination.transport->attach(piece.impostor.peer, shorter));
     }},
    {"the socket ends", Code::kRailFailed, [](HugePiece& piece) { piece.impostor.channel.reset(); }},
};

TEST(a_piece_ends_between_slices_and_lands_nothing_afterwards) {
  for (const Ending& how : kEnds) {
    HugePiece piece(kCases[1]);
    how.end(piece);
    piece.impostor.destination.reactor.run_once(0);
    const std::uint64_t landed = piece.landed_nbytes();
    CHECK_EQ(piece.impostor.destination.await(1).code, how.code);
    for (int polls = 0; polls < 4; ++polls) piece.impostor.destination.step();
    if (piece.landed_nbytes() != landed) FAIL(how.what);
    const auto& all = piece.impostor.destination.completions;
    CHECK_EQ(
        std::count_if(all.begin(), all.end(),
                      [](const Completion& c) { return c.kind == CompletionKind::kWork && c.work == 1; }),
        1);
  }
}

std::shared_ptr<Budget> budget_of(std::uint64_t mapped, std::uint64_t descriptors) {
  Budget::Amounts limits;
  limits.fill(UINT64_MAX);
  limits[static_cast<std::size_t>(Resource::kMapped)] = mapped;
  limits[static_cast<std::size_t>(Resource::kDescriptors)] = descriptors;
  return std::make_shared<Budget>(limits);
}

TEST(a_peer_passes_as_many_descriptors_as_its_budget_has) {
  const auto budget = budget_of(UINT64_MAX, 3);
  Impostor impostor(budget);
  impostor.hello();
  const auto pool = make_pool();
  for (std::uint64_t id = 1; id <= 3; ++id) impostor.say(impostor.memfd(kRegionNbytes, id), pool->fd());
  while (budget->used(Resource::kDescriptors) != 3) impostor.destination.step();
  shm::Message gone;
  gone.kind = shm::MessageKind::kMemfdGone;
  gone.memfd_id = 2;
  impostor.say(gone);  // makes room for one
  impostor.say(impostor.memfd(kRegionNbytes, 4), pool->fd());
  impostor.say(impostor.memfd(kRegionNbytes, 5), pool->fd());
  CHECK_HAS(impostor.down_words(), "3 descriptors here, and holds 3");
  CHECK_EQ(budget->used(Resource::kDescriptors), 0u);
}

TEST(a_peer_has_as_much_mapped_as_its_budget_has) {
  const auto budget = budget_of(2 * kRegionNbytes, UINT64_MAX);
  Impostor impostor(budget);
  impostor.hello();
  const auto pool = make_pool();
  for (std::uint64_t id = 1; id <= 4; ++id) impostor.say(impostor.memfd(kRegionNbytes, id), pool->fd());
  while (budget->used(Resource::kDescriptors) != 4) impostor.destination.step();
  const auto attach = [&](std::uint64_t id) {
    return impostor.destination.transport->attach(impostor.peer,
                                                  impostor.region_in(id, kRegionNbytes, nullptr, id));
  };
  REQUIRE_OK(attach(1));
  REQUIRE_OK(attach(2));
  const Status refused = attach(3);
  CHECK_REFUSED(refused, Code::kUnsupported, "mapped bytes");
  impostor.destination.transport->detach(impostor.peer, 1);
  REQUIRE_OK(attach(4));
  CHECK_EQ(budget->used(Resource::kMapped), 2 * kRegionNbytes);
  impostor.destination.transport->disconnect(impostor.peer);
  CHECK_EQ(budget->used(Resource::kMapped), 0u);
}

TEST(a_peer_that_reads_nothing_loses_its_rail_before_it_keeps_many_pools) {
  constexpr RegionId kMost = 200;
  Impostor impostor;
  impostor.hello();
  for (RegionId id = 100;
       id < 100 + kMost && impostor.destination.event(CompletionKind::kRailDown) == nullptr; ++id) {
    const auto pool = make_pool();
    REQUIRE_OK(testing::register_memory(*impostor.destination.transport,
                                        pool_region(id, pool->data(), kRegionNbytes)));
    impostor.destination.transport->deregister_memory(id);
    impostor.destination.step();
    impostor.bystander.step();
  }
  REQUIRE(impostor.destination.event(CompletionKind::kRailDown) != nullptr);
  CHECK_EQ(impostor.destination.event(CompletionKind::kRailDown)->peer, impostor.peer);
  CHECK_HAS(impostor.down_words(), "does not read its socket");
}

// Descriptors of this kind that are open, by what they point to.
std::size_t num_open(const std::string& kind) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    count += target.find(kind) != std::string::npos;
  }
  return count;
}

TEST(a_forked_child_keeps_no_rail_and_nothing_of_a_peer) {
  Impostor impostor;
  impostor.hello();
  const Ones pool(false);
  impostor.say(impostor.memfd(kNbytes), pool.fd.get());
  REQUIRE_OK(impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kNbytes)));
  while (impostor.destination.transport->num_mappings() != 2) impostor.destination.step();
  REQUIRE_EQ(num_open("memfd:ones"), 2u);  // the test's own, and the one that was passed
  REQUIRE(num_open("socket:") >= 4);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const bool clean = num_open("memfd:ones") == 1 && num_open("socket:") == 0;
    ::_exit(clean ? 0 : 1);
  }
  int status = -1;
  REQUIRE_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
