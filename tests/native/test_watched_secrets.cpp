// Secrets in a file: what is read from it, what is logged about it, and that neither shows a secret.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/runtime/watched_secrets.h"
#include "core/system/epoll_reactor.h"

namespace {

using namespace kvxfer;
namespace fs = std::filesystem;

const std::string kOld = "the secret that goes", kNew = "the secret that comes";

struct Scene {
  Scene() {
    std::string form = (fs::temp_directory_path() / "kvxfer-secrets-XXXXXX").string();
    REQUIRE(::mkdtemp(form.data()) != nullptr);
    folder = fs::canonical(form);
    path = folder / "secret";
    write(kOld);
  }
  ~Scene() {
    for (const std::string& line : lines) CHECK(line.find(kOld) == line.npos && line.find(kNew) == line.npos);
    fs::remove_all(folder);
  }
  void write(const std::string& text) const {
    std::ofstream(path, std::ios::trunc | std::ios::binary) << text;
  }
  void run() {
    while (reactor.run()) {}
  }
  WatchedSecrets watch(Secrets had) {
    return {reactor, path.string(), std::move(had),
            [this](const Secrets& secrets) { taken.push_back(secrets); },
            [this](std::string line) { lines.push_back(std::move(line)); }};
  }
  fs::path folder, path;
  EpollReactor reactor;
  std::vector<Secrets> taken;
  std::vector<std::string> lines;
};

struct Content {
  std::string text;
  Secrets secrets;    // empty: refused
  const char* words;  // the words of the refusal
};
const Content kContents[] = {
    {kOld, {kOld, ""}, ""},
    {kOld + "\n", {kOld, ""}, ""},
    {kOld + "\r\n" + kNew + "\r\n\n", {kOld, kNew}, ""},
    {kNew + "\n" + kOld, {kNew, kOld}, ""},
    {std::string(16, '\0'), {std::string(16, '\0'), ""}, ""},
    {std::string(4096, 'x'), {std::string(4096, 'x'), ""}, ""},
    {std::string(4097, 'x'), {}, "more than 4096 bytes"},
    {std::string(1 << 20, '\n'), {}, "more than 4096 bytes"},
    {"", {}, "a line of 0 bytes"},
    {"\n\r\n", {}, "a line of 0 bytes"},
    {std::string(15, 'x'), {}, "a line of 15 bytes"},
    {kOld + "\n\n" + kNew, {}, "a line of 0 bytes"},
    {kOld + "\n" + kNew + "\n" + kOld, {}, "more than two lines"},
    {kOld + "\n" + kNew + "\nx", {}, "more than two lines"},
};

TEST(a_file_has_one_or_two_secrets_and_is_refused_in_words_otherwise) {
  const Scene scene;
  for (const auto& [text, secrets, words] : kContents) {
    scene.write(text);
    const Result<Secrets> found = read_secret_file(scene.path.string());
    CHECK_EQ(found.ok(), !secrets.first.empty());
    if (found.ok()) CHECK(found.value() == secrets);
    if (!found.ok()) CHECK_HAS(found.status().message(), words);
  }
}

TEST(what_is_no_file_is_refused_at_once) {
  const Scene scene;
  fs::remove(scene.path);
  CHECK_EQ(read_secret_file(scene.path.string()).status().code(), Code::kInvalidArgument);
  REQUIRE_EQ(::mkfifo(scene.path.c_str(), 0600), 0);
  CHECK_EQ(read_secret_file(scene.path.string()).status().code(), Code::kInvalidArgument);
  CHECK_EQ(read_secret_file(scene.folder.string()).status().code(), Code::kInvalidArgument);
}

TEST(a_change_is_taken_once_and_a_file_that_is_written_with_the_same_is_none) {
  Scene scene;
  WatchedSecrets watched = scene.watch({kOld, ""});
  watched.start();
  for (const Content& content : {Content{kOld, {}, ""}, Content{kNew + "\n" + kOld, {kNew, kOld}, ""},
                                 Content{kNew + "\n" + kOld + "\n", {}, ""}, Content{kNew, {kNew, ""}, ""}}) {
    scene.taken.clear(), scene.lines.clear();
    scene.write(content.text);
    scene.run();
    const std::size_t expected = content.secrets.first.empty() ? 0 : 1;
    REQUIRE_EQ(scene.taken.size(), expected);
    if (expected == 1) CHECK(scene.taken[0] == content.secrets);
    CHECK_EQ(scene.lines.size(), expected);
  }
}

TEST(what_changed_before_the_watch_began_is_taken) {
  Scene scene;
  WatchedSecrets watched = scene.watch({kNew, ""});
  watched.start();
  REQUIRE_EQ(scene.taken.size(), 1);
  CHECK((scene.taken[0] == Secrets{kOld, ""}));
}

TEST(a_file_without_secrets_is_said_once_until_it_has_some) {
  Scene scene;
  WatchedSecrets watched = scene.watch({kOld, ""});
  watched.start();
  for (int round = 0; round < 3; ++round) {
    scene.lines.clear();
    for (int i = 0; i < 5; ++i) {
      fs::remove(scene.path);
      scene.run();
      fs::create_symlink("nowhere", scene.path);
      scene.run();
    }
    REQUIRE_EQ(scene.lines.size(), 1);
    CHECK_HAS(scene.lines[0], "the agent keeps its previous secrets");
    fs::remove(scene.path);
    scene.write(round % 2 == 0 ? kNew : kOld);
    scene.run();
    CHECK_EQ(scene.lines.size(), 2);
    CHECK_EQ(scene.taken.size(), round + 1u);
  }
}

TEST(what_a_caller_read_is_taken_even_where_it_is_the_same) {
  Scene scene;
  WatchedSecrets watched = scene.watch({kOld, ""});
  watched.start();
  const std::uint64_t before = watched.num_reads();
  watched.take({kOld, ""});
  CHECK_EQ(scene.taken.size(), 1);
  CHECK(scene.lines.empty());
  CHECK(watched.num_reads() > before);
}

}  // namespace
