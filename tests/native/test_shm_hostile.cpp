// An shm rail whose peer breaks the rules: descriptors that are not pools, memory that does not exist or goes
// away.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "core/system/memfd.h"
#include "shm_ends.h"

namespace {

using namespace shm_ends;

struct Breach {
  const char* what;
  void (*say)(Impostor&);
  std::string words;
};
const Breach kBreaches[] = {
    {"a memfd without seals",
     [](Impostor& impostor) {
       impostor.hello();
       const UniqueFd unsealed(::memfd_create("bogus", MFD_CLOEXEC | MFD_ALLOW_SEALING));
       REQUIRE(::ftruncate(unsealed.get(), 8192) == 0);
       impostor.say(impostor.memfd(8192), unsealed.get());
     },
     "F_SEAL_SHRINK"},
    {"a descriptor that is no memfd",
     [](Impostor& impostor) {
       impostor.hello();
       const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
       impostor.say(impostor.memfd(8192), file.get());
     },
     "F_SEAL_SHRINK"},
    {"a memfd of another size than announced",
     [](Impostor& impostor) {
       impostor.hello();
       impostor.say(impostor.memfd(kRegionNbytes * 2), make_pool()->fd());
     },
     std::to_string(kRegionNbytes)},
    {"a memfd before the hello",
     [](Impostor& impostor) { impostor.say(impostor.memfd(kRegionNbytes), make_pool()->fd()); }, "hello"},
    {"a memfd that is sent twice",
     [](Impostor& impostor) {
       impostor.hello();
       const auto pool = make_pool();
       for (int twice = 0; twice < 2; ++twice) impostor.say(impostor.memfd(kRegionNbytes), pool->fd());
     },
     "twice"},
    {"a message without its descriptor",
     [](Impostor& impostor) {
       impostor.hello();
       impostor.say(impostor.memfd(4096));
     },
     "descriptor"},
    {"a message of another kind",
     [](Impostor& impostor) {
       shm::Message noise;
       noise.magic = {'n', 'o', 'p', 'e'};
       impostor.say(noise, impostor.fences->fill().value());
     },
     "version"},
};

TEST(a_peer_that_breaks_a_rule_loses_its_rail_is_told_why_and_leaves_no_descriptor) {
  for (const Breach& breach : kBreaches) {
    std::printf("  %s\n", breach.what);
    const std::size_t fds_before = num_open_fds();
    {
      Impostor impostor;
      breach.say(impostor);
      const std::string down = impostor.down_words();
      CHECK_HAS(down, breach.words);
      impostor.destination.transport->disconnect(impostor.peer);
      Status end;
      for (int i = 0; i < 100 && end.ok(); ++i) end = impostor.channel->receive().status();
      CHECK_HAS(end.message(), "it closed its end: ");
    }
    CHECK_EQ(num_open_fds(), fds_before);
  }
}

TEST(a_peer_whose_probe_cannot_be_read_keeps_pools_and_loses_foreign_memory) {
  Impostor impostor;
  impostor.hello();  // probe address 0
  std::vector<std::byte> memory(4096);
  const LocalRegion local = foreign_region(1, memory.data(), memory.size());
  Shm other;
  const Status refused = impostor.destination.transport->attach(impostor.peer, register_at(other, local));
  CHECK_REFUSED(refused, Code::kUnsupported, "process_vm_readv");
  CHECK_HAS(refused.message(), "pool");
}

// ---- memory that goes, or was never there ----

constexpr std::uint64_t kFileNbytes = Memfd::kNbytes;

struct File : Memfd {
  explicit File(std::uint64_t filled_nbytes = kFileNbytes) : Memfd("impostor") {
    if (filled_nbytes != 0) REQUIRE(::fallocate(fd.get(), 0, 0, static_cast<off_t>(filled_nbytes)) == 0);
  }
  std::uint64_t filled_nbytes() const {
    struct stat file{};
    REQUIRE(::fstat(fd.get(), &file) == 0);
    return static_cast<std::uint64_t>(file.st_blocks) * 512;
  }
  bool punch() const {
    return ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kFileNbytes) == 0;
  }
};

// Fetches the whole file in blocks of 64 KiB, as one piece.
Completion fetch_file(Impostor& impostor, std::vector<std::byte>& to) {
  constexpr std::uint64_t kPageNbytes = 64 * 1024;
  std::vector<std::uint32_t> ids(kFileNbytes / kPageNbytes);
  for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
  to.assign(kFileNbytes, std::byte{0xee});
  const auto move = block_move(9, to.data(), kPageNbytes, ids, ids, static_cast<std::uint32_t>(ids.size()));
  const Work work = fetch_work(1, move, 0);
  REQUIRE_EQ(impostor.destination.transport->post(impostor.peer, work), Code::kOk);
  return impostor.destination.await(1);
}

TEST(a_memfd_with_holes_is_refused_before_a_read_fills_them) {
  File sparse(kFileNbytes / 2);
  sparse.seal();
  Impostor impostor;
  impostor.hello();
  impostor.say(impostor.memfd(kFileNbytes), sparse.fd.get());
  CHECK_HAS(impostor.down_words(), "not filled");
  CHECK_EQ(sparse.filled_nbytes(), kFileNbytes / 2);
}

// Blocks that are allocated behind a file's end count as the file's.
TEST(a_memfd_that_feigns_to_be_filled_costs_a_slice_of_reads_and_its_rail) {
  File hollow(0);
  REQUIRE(::fallocate(hollow.fd.get(), FALLOC_FL_KEEP_SIZE, kFileNbytes, kFileNbytes) == 0);
  hollow.seal();
  const std::uint64_t before = hollow.filled_nbytes();
  REQUIRE(before >= kFileNbytes);
  Impostor impostor;
  impostor.hello();
  impostor.say(impostor.memfd(kFileNbytes), hollow.fd.get());
  REQUIRE_OK(impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kFileNbytes)));
  std::vector<std::byte> to;
  CHECK_EQ(fetch_file(impostor, to).code, Code::kRailFailed);
  CHECK_HAS(impostor.down_words(), "has holes");
  CHECK(hollow.filled_nbytes() - before <= 4 * 1024 * 1024);
}

TEST(a_memfd_with_every_seal_is_mapped_and_cannot_be_punched) {
  File whole;
  fill_pattern(whole.data, kFileNbytes);
  whole.seal();
  if (!is_sealed_against_holes(whole.fd.get())) {
    std::printf("  skipped: this kernel has no F_SEAL_FUTURE_WRITE\n");
    return;
  }
  Impostor impostor;
  impostor.hello();
  impostor.say(impostor.memfd(kFileNbytes), whole.fd.get());
  REQUIRE_OK(impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kFileNbytes)));
  REQUIRE(impostor.destination.reactor.run_until(
      [&] { impostor.destination.step(); },
      [&] { return impostor.destination.transport->num_mappings() == 2; }));
  CHECK(!whole.punch());
  CHECK(::madvise(whole.data, kFileNbytes, MADV_REMOVE) != 0);
  std::vector<std::byte> to;
  CHECK_EQ(fetch_file(impostor, to).code, Code::kOk);
  CHECK(std::memcmp(to.data(), whole.data, kFileNbytes) == 0);
}

// Sealed as agents do before Linux 5.1. In reserved huge pages, a hole would kill a process that maps it.
TEST(a_memfd_that_can_be_punched_is_not_mapped_but_read_by_the_kernel) {
  File loose;
  fill_pattern(loose.data, kFileNbytes);
  loose.seal(true);
  Impostor impostor;
  impostor.hello(true);
  impostor.say(impostor.memfd(kFileNbytes), loose.fd.get());
  REQUIRE_OK(
      impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kFileNbytes, loose.data)));
  std::vector<std::byte> to;
  CHECK_EQ(fetch_file(impostor, to).code, Code::kOk);
  CHECK(std::memcmp(to.data(), loose.data, kFileNbytes) == 0);
  CHECK_EQ(impostor.destination.transport->num_mappings(), 1u);  // the bystander's
  CHECK(loose.punch());
}

TEST(a_memfd_that_can_be_punched_is_refused_where_the_kernel_may_not_read_it) {
  File loose;
  loose.seal(true);
  Impostor impostor;
  impostor.hello();
  impostor.say(impostor.memfd(kFileNbytes), loose.fd.get());
  REQUIRE_OK(impostor.destination.transport->attach(impostor.peer, impostor.region_in(9, kFileNbytes)));
  std::vector<std::byte> to;
  const Completion refused = fetch_file(impostor, to);
  CHECK_EQ(refused.code, Code::kRailFailed);
  CHECK_HAS(refused.detail, "F_SEAL_FUTURE_WRITE");
}

TEST(the_fence_table_of_a_peer_must_be_filled_too) {
  Impostor impostor;
  const UniqueFd sparse = std::move(create_memfd("fences", FenceTable::kNbytes)).value();
  REQUIRE_OK(seal_memfd(sparse.get()));
  shm::Message hello;
  hello.nbytes = FenceTable::kNbytes;
  impostor.say(hello, sparse.get());
  CHECK_HAS(impostor.down_words(), "not filled");
}

TEST(the_fence_table_of_a_peer_is_as_long_as_every_other) {
  constexpr std::uint64_t kAll = FenceTable::kNbytes, kFewer = kAll / 4;
  const struct {
    std::uint64_t announced, nbytes;
    const char* words;
  } cases[] = {{kFewer, kFewer, "131072 bytes, not 524288"},
               {kFewer, kAll, "131072 bytes, not 524288"},
               {2 * kAll, 2 * kAll, "1048576 bytes, not 524288"},
               {kAll, kFewer, "has 131072 bytes"}};
  for (const auto& each : cases) {
    Impostor impostor;
    const UniqueFd table = std::move(create_memfd("fences", each.nbytes)).value();
    REQUIRE_OK(seal_memfd(table.get()));
    shm::Message hello;
    hello.nbytes = each.announced;
    impostor.say(hello, table.get());
    const std::string words = impostor.down_words();
    CHECK_HAS(words, each.words);
  }
}

}  // namespace
