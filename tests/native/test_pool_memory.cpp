#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <string>

#include "check.h"
#include "core/system/memfd.h"
#include "core/system/pool_memory.h"

namespace {

using namespace kvxfer;

std::shared_ptr<PoolMemory> make_pool(std::size_t nbytes, bool huge_pages = true) {
  Result<std::shared_ptr<PoolMemory>> pool =
      PoolMemory::create({.nbytes = nbytes, .name = "test", .huge_pages = huge_pages, .numa_node = -1});
  REQUIRE_OK(pool);
  return pool.value();
}

bool dies_by_sigsegv(const std::byte* address, bool write) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would turn it into an exit
    volatile auto* byte = const_cast<std::byte*>(address);
    if (write)
      *byte = std::byte{1};
    else
      static_cast<void>(static_cast<std::byte>(*byte));
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

bool has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST(one_byte_outside_a_pool_is_a_crash_and_not_corruption) {
  for (const std::size_t nbytes : {std::size_t{4096}, std::size_t{6} << 20}) {
    const auto pool = make_pool(nbytes, false);
    CHECK(dies_by_sigsegv(pool->data() - 1, true));
    CHECK(dies_by_sigsegv(pool->data() + pool->nbytes(), true));
    CHECK(dies_by_sigsegv(pool->data() - 1, false));
    CHECK(!dies_by_sigsegv(pool->data(), true));
    CHECK(!dies_by_sigsegv(pool->data() + pool->nbytes() - 1, true));
  }
}

TEST(a_pool_is_zero_writable_and_says_its_page_kind) {
  const auto pool = make_pool(8u << 20);
  CHECK_EQ(pool->nbytes(), 8u << 20);
  for (std::size_t at = 0; at < pool->nbytes(); at += 4096) REQUIRE(pool->data()[at] == std::byte{0});
  pool->data()[pool->nbytes() - 1] = std::byte{7};
  const std::string_view kind = pool->page_kind();
  CHECK(kind == "hugetlb" || kind == "transparent-huge" || kind == "base");
  CHECK(make_pool(8u << 20, false)->page_kind() == "base");
}

// Whether this machine gives huge pages to shared memory on request; reserved ones are better.
bool collapses() {
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string enabled;
  if (!std::getline(setting, enabled) || enabled.find("[never]") != std::string::npos) return false;
  const UniqueFd fd(static_cast<int>(::syscall(SYS_memfd_create, "probe", 0u)));
  constexpr std::size_t kHuge = 2u << 20;
  if (!fd || ::ftruncate(fd.get(), kHuge) != 0) return false;
  void* reserved = ::mmap(nullptr, 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto address = (reinterpret_cast<std::uintptr_t>(reserved) + kHuge - 1) / kHuge * kHuge;
  auto* const data = reinterpret_cast<std::byte*>(address);
  bool given = false;
  if (::mmap(data, kHuge, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(), 0) != MAP_FAILED) {
    *data = std::byte{1};
    given = ::madvise(data, kHuge, 25 /* MADV_COLLAPSE */) == 0;
  }
  ::munmap(reserved, 2 * kHuge);
  return given;
}

TEST(a_pool_lies_in_huge_pages_where_the_kernel_has_any) {
  if (!collapses()) {
    std::printf("  skipped: this kernel has no huge pages for shared memory, or they are switched off\n");
    return;
  }
  const std::string_view kind = make_pool(8u << 20)->page_kind();
  CHECK(kind == "hugetlb" || kind == "transparent-huge");
}

bool is_filled(int fd) {
  struct stat file{};
  return ::fstat(fd, &file) == 0 && file.st_blocks * 512 >= file.st_size;
}

TEST(a_pool_is_filled_when_it_is_made) {
  for (const std::size_t nbytes : {4096u, 3u << 20, (4u << 20) + 4096})
    for (const bool huge : {false, true}) CHECK(is_filled(make_pool(nbytes, huge)->fd()));
}

TEST(a_pool_cannot_change_its_size_and_has_no_second_writer) {
  const auto pool = make_pool(1u << 20);
  const std::vector<std::string> seals = pool->seals();
  CHECK(has(seals, "shrink"));
  CHECK(has(seals, "grow"));
  CHECK(has(seals, "seal"));
  CHECK(::ftruncate(pool->fd(), 4096) != 0);
  CHECK(::ftruncate(pool->fd(), 2 << 20) != 0);
  if (has(seals, "future-write")) {
    CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, pool->fd(), 0) == MAP_FAILED);
    const std::byte one{1};
    CHECK(::pwrite(pool->fd(), &one, 1, 0) != 1);
    const std::string path = "/proc/self/fd/" + std::to_string(pool->fd());
    const UniqueFd again(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0) == MAP_FAILED);
    CHECK(is_sealed_against_holes(pool->fd()));
    CHECK(::fallocate(pool->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0);
    CHECK(::madvise(pool->data(), 4096, MADV_REMOVE) != 0);
  }
  pool->data()[5] = std::byte{9};  // the owner still writes, and a reader sees it
  void* reader = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, pool->fd(), 0);
  REQUIRE(reader != MAP_FAILED);
  CHECK(static_cast<const std::byte*>(reader)[5] == std::byte{9});
  CHECK(::mprotect(reader, 4096, PROT_READ | PROT_WRITE) != 0 || !has(seals, "future-write"));
  ::munmap(reader, 4096);
}

TEST(find_knows_the_pool_of_an_address) {
  const auto first = make_pool(1u << 20), second = make_pool(3000);
  const auto slice = PoolMemory::find(first->data() + 100, 1000);
  REQUIRE(slice.has_value());
  CHECK_EQ(slice->fd, first->fd());
  CHECK_EQ(slice->memfd_id, first->memfd_id());
  CHECK_EQ(slice->offset, 100u);
  CHECK_EQ(slice->memfd_nbytes, 1u << 20);
  CHECK(PoolMemory::find(second->data(), 3000).has_value());
  CHECK(!PoolMemory::find(second->data(), 3001).has_value());
  CHECK(!PoolMemory::find(first->data() - 1, 1).has_value());
  CHECK(!PoolMemory::find(first->data() + 1, 1u << 20).has_value());
  CHECK(!PoolMemory::find(nullptr, 1).has_value());
  CHECK(first->memfd_id() != second->memfd_id());
}

TEST(a_slice_keeps_its_pool_and_nothing_else_does) {
  auto pool = make_pool(4096);
  std::byte* const data = pool->data();
  auto slice = PoolMemory::find(data, 4096);
  REQUIRE(slice.has_value());
  pool.reset();
  data[0] = std::byte{1};
  CHECK(PoolMemory::find(data, 1).has_value());
  slice.reset();
  CHECK(!PoolMemory::find(data, 1).has_value());
}

TEST(impossible_wishes_are_refused_in_words) {
  const auto nothing = PoolMemory::create({.nbytes = 0, .name = "n", .huge_pages = true, .numa_node = -1});
  CHECK_EQ(nothing.status().code(), Code::kInvalidArgument);
  const auto node = PoolMemory::create({.nbytes = 4096, .name = "n", .huge_pages = false, .numa_node = 900});
  CHECK(!node.ok());
  CHECK_HAS(node.status().message(), "900");
}

TEST(a_fence_word_begins_at_zero_and_moves_on) {
  auto table = FenceTable::create();
  REQUIRE_OK(table);
  FenceTable& fences = *table.value();
  CHECK_EQ(fences.generation(0), 0u);
  fences.bump(FenceTable::kNumSlots - 1);
  CHECK_EQ(fences.generation(FenceTable::kNumSlots - 1), 1u);
  const Result<int> fd = fences.fill();
  REQUIRE_OK(fd);
  CHECK(is_sealed_against_shrinking(fd.value()));
  CHECK(is_filled(fd.value()));
  void* reader = ::mmap(nullptr, FenceTable::kNbytes, PROT_READ, MAP_SHARED, fd.value(), 0);
  REQUIRE(reader != MAP_FAILED);
  fences.bump(3);
  const auto* words = static_cast<const std::uint64_t*>(reader);
  CHECK_EQ(words[3], 1u);
  CHECK_EQ(words[FenceTable::kNumSlots - 1], 1u);  // of before it was filled
  ::munmap(reader, FenceTable::kNbytes);
  if (has(seals_of(fd.value()), "future-write"))
    CHECK(::mmap(nullptr, FenceTable::kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.value(), 0) ==
          MAP_FAILED);
}

}  // namespace
