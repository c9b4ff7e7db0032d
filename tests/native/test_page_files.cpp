// Pages in real files, from several threads at once, and found again by the next who opens them.
#include "store/page_files.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace kvxfer::store::of_files {
namespace {

constexpr std::size_t kNbytes = 3 * kBlockNbytes;
constexpr std::uint64_t kFilesNbytes = std::uint64_t{64} << 20;

struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvxfer-pages-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

struct Page {
  Page() : bytes(static_cast<std::byte*>(std::aligned_alloc(kBlockNbytes, kNbytes))) {}
  ~Page() { std::free(bytes); }
  Page(const Page&) = delete;
  std::span<std::byte> span() const { return {bytes, kNbytes}; }
  void fill(std::uint64_t key) const {
    check::Random(key).fill(reinterpret_cast<std::uint64_t*>(bytes), kNbytes / 8);
  }
  std::byte* bytes;
};

PageDigest digest_of(std::uint64_t key) {
  PageDigest digest{};
  std::memcpy(digest.data(), &key, sizeof key);
  return digest;
}

std::shared_ptr<PageFiles> open(const Folder& folder) {
  auto opened = PageFiles::open(
      {.directory = folder.path, .nbytes = kFilesNbytes, .num_threads = 4, .tenant_of_salt = {0}});
  REQUIRE(opened.ok());
  return opened.value();
}

// Takes ends until all of so many tickets, from 1 on, have one.
std::vector<FileTier::End> ends_of(PageFiles& files, std::size_t count) {
  std::vector<FileTier::End> found(count);
  for (std::size_t seen = 0; seen < count;) {
    pollfd wait{files.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&wait, 1, 60'000) == 1);
    std::vector<FileTier::Ended> ends;
    std::vector<SlotIndex::Gone> evicted;
    files.take(ends, evicted);
    for (const FileTier::Ended& each : ends) found[each.ticket - 1] = each.end;
    seen += ends.size();
  }
  return found;
}

TEST(pages_written_by_several_threads_are_found_by_the_next_who_opens_them) {
  constexpr std::uint64_t kThreads = 3, kPages = 40;
  const Folder folder;
  {
    const auto files = open(folder);
    std::vector<Page> pages(kThreads * kPages);
    std::atomic<std::uint64_t> num_refused = 0;
    std::vector<std::thread> writers;
    for (std::uint64_t writer = 0; writer < kThreads; ++writer) {
      writers.emplace_back([&, writer] {
        for (std::uint64_t key = writer * kPages; key < (writer + 1) * kPages; ++key) {
          pages[key].fill(key);
          num_refused += files->write(digest_of(key), 0, std::to_string(key), pages[key].span(), key % 7 == 0,
                                      key + 1) != FileTier::Answer::kBegun;
          (void)files->figures();
        }
      });
    }
    for (std::thread& writer : writers) writer.join();
    CHECK_EQ(num_refused, 0u);
    for (const FileTier::End end : ends_of(*files, kThreads * kPages)) CHECK(end == FileTier::End::kDone);
    // The directory is taken as long as it is open.
    CHECK(!PageFiles::open({.directory = folder.path, .nbytes = kFilesNbytes, .tenant_of_salt = {}}).ok());
    CHECK(files->close(60'000'000'000));
  }
  const auto files = open(folder);
  std::vector<Page> pages(kThreads * kPages);
  for (std::uint64_t key = 0; key < pages.size(); ++key) {
    if (key % 3 == 0)
      CHECK(files->drop(digest_of(key), key + 1) == FileTier::Answer::kBegun);
    else
      CHECK(files->read(digest_of(key), pages[key].span(), 0, key + 1) == FileTier::Answer::kBegun);
  }
  const std::vector<FileTier::End> ends = ends_of(*files, pages.size());
  const Page wanted;
  for (std::uint64_t key = 0; key < pages.size(); ++key) {
    CHECK(ends[key] == FileTier::End::kDone);
    wanted.fill(key);
    if (key % 3 != 0) CHECK(std::memcmp(pages[key].bytes, wanted.bytes, kNbytes) == 0);
    CHECK_EQ(files->look_up(std::vector{digest_of(key)}, false)[0], key % 3 != 0);
  }
  CHECK_EQ(files->list({}, 0u, 1000).size(), kThreads * kPages - kThreads * kPages / 3);
  CHECK_EQ(files->list({}, 1u, 1000).size(), 0u);
  CHECK(files->close(60'000'000'000));
}

}  // namespace
}  // namespace kvxfer::store::of_files
