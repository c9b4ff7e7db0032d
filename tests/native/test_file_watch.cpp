// Changes of files are reported, however they are made; changes of other files in the folders are not.
#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/system/epoll_reactor.h"
#include "core/system/file_watch.h"
#include "memory_failure.h"

namespace {

using namespace kvxfer;
namespace fs = std::filesystem;

struct Folder {
  Folder() {
    std::string form = (fs::temp_directory_path() / "kvxfer-watch-XXXXXX").string();
    REQUIRE(::mkdtemp(form.data()) != nullptr);
    path = fs::canonical(form);
  }
  ~Folder() { fs::remove_all(path); }
  fs::path path;
};

void write(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::trunc) << text; }

struct Watched {
  explicit Watched(std::vector<std::string> paths)
      : watch(reactor, std::move(paths),
              [this](const Status& status) { ++num_announced, watching = status; }) {
    REQUIRE_OK(watch.start());
  }
  // All events are queued already: inotify queues them before the call that changes a file returns.
  int told() {
    const int before = num_announced;
    while (reactor.run()) {}
    return num_announced - before;
  }
  EpollReactor reactor;
  int num_announced = 0;
  Status watching;
  FileWatch watch;
};

struct FileChange {
  const char* name;
  std::function<void(const fs::path& folder)> run;
  bool has_descriptor;
};

// Changes in a folder with "file" and "other", and "data" -> "first", which has a "file" as well.
const FileChange kFileChanges[] = {
    {"nothing", [](const fs::path&) {}, false},
    {"read", [](const fs::path& in) { std::ifstream(in / "file").get(); }, false},
    {"another file", [](const fs::path& in) { write(in / "other", "x"), fs::remove(in / "other"); }, false},
    {"written in place", [](const fs::path& in) { write(in / "file", "x"); }, true},
    {"removed and written again",
     [](const fs::path& in) { fs::remove(in / "file"), write(in / "file", "x"); }, true},
    {"replaced", [](const fs::path& in) { write(in / "fresh", "x"), fs::rename(in / "fresh", in / "file"); },
     true},
    {"moved away", [](const fs::path& in) { fs::rename(in / "file", in / "gone"); }, true},
    {"removed", [](const fs::path& in) { fs::remove(in / "file"); }, true},
    {"made readable", [](const fs::path& in) { fs::permissions(in / "file", fs::perms::owner_read); }, true},
    {"its folder moved away", [](const fs::path& in) { fs::rename(in, in.parent_path() / "elsewhere"); },
     true},
    {"its folder removed", [](const fs::path& in) { fs::remove_all(in); }, true},
};

TEST(what_changes_a_file_is_told_and_nothing_else) {
  for (const FileChange& change : kFileChanges) {
    const Folder top;
    const fs::path in = top.path / "in";
    fs::create_directory(in);
    write(in / "file", "text"), write(in / "other", "text");
    Watched watched({(in / "file").string()});
    CHECK_EQ(watched.told(), 0);
    change.run(in);
    const bool told = watched.told() > 0;
    if (told != change.has_descriptor) std::printf("  %s\n", change.name);
    CHECK_EQ(told, change.has_descriptor);
    CHECK_OK(watched.watching);
    CHECK_EQ(watched.told(), 0);
  }
}

TEST(a_file_that_is_being_written_is_told_when_it_is_closed) {
  const Folder top;
  Watched watched({(top.path / "file").string()});
  for (int round = 0; round < 2; ++round) {  // a new file, and one that exists
    std::ofstream opened(top.path / "file", std::ios::trunc);
    CHECK_EQ(watched.told(), 0);
    opened << "half of it" << std::flush;
    CHECK_EQ(watched.told(), 0);
    opened.close();
    CHECK(watched.told() > 0);
  }
}

// As far as the path exists, and further when more of it appears.
TEST(a_path_that_is_not_there_is_watched_from_where_it_ends) {
  const Folder top;
  Watched watched({(top.path / "a" / "b" / "file").string()});
  CHECK_EQ(watched.watch.num_folders(), 1u);
  for (int round = 0; round < 3; ++round) {
    fs::create_directory(top.path / "a");
    CHECK(watched.told() > 0);
    write(top.path / "a" / "file", "of another folder");
    CHECK_EQ(watched.told(), 0);
    fs::create_directory(top.path / "a" / "b");
    CHECK(watched.told() > 0);
    write(top.path / "a" / "b" / "file", "text");
    CHECK(watched.told() > 0);
    fs::remove_all(top.path / "a");
    CHECK(watched.told() > 0);
    CHECK_EQ(watched.watch.num_folders(), 1u);
  }
}

TEST(links_on_the_way_are_followed_and_watched) {
  const Folder top;
  const fs::path mount = top.path / "mount";
  fs::create_directories(mount / "..1");
  write(mount / "..1" / "file", "1");
  fs::create_directory_symlink("..1", mount / "..data");
  fs::create_symlink("..data/file", mount / "file");
  fs::create_directory_symlink("./mount/../mount", top.path / "link");
  Watched watched({(top.path / "link" / "file").string()});
  CHECK_EQ(watched.watch.num_folders(), 3u);  // of "link", of "file" and "..data", of the file itself
  for (int round = 2; round < 300; ++round) {
    const fs::path fresh = mount / (".." + std::to_string(round));
    fs::create_directory(fresh);
    write(fresh / "file", "x");
    CHECK_EQ(watched.told(), 0);
    fs::create_directory_symlink(fresh.filename(), mount / "..tmp");
    fs::rename(mount / "..tmp", mount / "..data");
    CHECK(watched.told() > 0);
    fs::remove_all(mount / (".." + std::to_string(round - 1)));
    CHECK_EQ(watched.told(), 0);
    CHECK_EQ(watched.watch.num_folders(), 3u);
  }
  write(mount / "..299" / "file", "in place");
  CHECK(watched.told() > 0);
  fs::rename(top.path / "link", top.path / "former");
  CHECK(watched.told() > 0);
  CHECK_OK(watched.watching);
}

TEST(links_in_a_ring_lead_nowhere_and_end) {
  const Folder top;
  fs::create_symlink("b", top.path / "a");
  fs::create_symlink("a", top.path / "b");
  Watched watched({(top.path / "a").string()});
  CHECK_EQ(watched.watch.num_folders(), 1u);
  fs::remove(top.path / "b");
  CHECK(watched.told() > 0);
  write(top.path / "b", "text");
  CHECK(watched.told() > 0);
}

TEST(several_files_are_one_watch) {
  const Folder top;
  fs::create_directory(top.path / "in");
  Watched watched(
      {(top.path / "one").string(), (top.path / "two").string(), (top.path / "in" / "three").string()});
  CHECK_EQ(watched.watch.num_folders(), 2u);
  for (const char* const name : {"one", "two", "in/three"}) {
    write(top.path / name, "x");
    CHECK(watched.told() > 0);
  }
}

int allocations_left = 0;

// The change is reported all the same, and the right folders are watched afterwards.
TEST(a_change_for_which_there_was_no_memory_is_told_when_there_is) {
  for (int num_allocations = 0;; ++num_allocations) {
    const Folder top;
    fs::create_directory(top.path / "1"), fs::create_directory(top.path / "2");
    fs::create_directory_symlink("1", top.path / "link");
    Watched watched({(top.path / "link" / "file").string()});
    fs::create_directory_symlink("2", top.path / "fresh");
    fs::rename(top.path / "fresh", top.path / "link");
    allocations_left = num_allocations;
    memory_failure::fails = [](std::size_t) noexcept { return allocations_left-- <= 0; };
    watched.reactor.run();
    memory_failure::fails = nullptr;
    const bool had_enough = allocations_left >= 0;
    if (!had_enough) CHECK_EQ(watched.num_announced, 0);
    watched.told();
    CHECK_EQ(watched.num_announced, 1);
    CHECK_OK(watched.watching);
    CHECK_EQ(watched.watch.num_folders(), 2u);
    write(top.path / "2" / "file", "x");
    CHECK(watched.told() > 0);
    if (had_enough) return;
    REQUIRE(num_allocations < 1000);
  }
}

int count_descriptors() {
  int count = 0;
  DIR* const listed = ::opendir("/proc/self/fd");
  while (::readdir(listed) != nullptr) ++count;
  ::closedir(listed);
  return count;
}

TEST(a_watch_that_ends_leaves_nothing) {
  const Folder top;
  const int before = count_descriptors();
  for (int i = 0; i < 300; ++i) Watched({(top.path / "file").string()});
  CHECK_EQ(count_descriptors(), before);
}

}  // namespace
