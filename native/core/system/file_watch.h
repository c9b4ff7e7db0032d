// Tells when files change, by inotify on the folders that their paths lead through. A file that is written in its
// place, replaced by rename, removed, or put in its place again is seen, and so is a link on the way that is swapped
// for another, as Kubernetes swaps `..data`. A watch has no thread: the agent's reactor wakes for it. A folder that
// changes in other ways wakes it as well, and is left at that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/system/fork_guard.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class FileWatch final : private Reactor::Handler {
 public:
  // Called on the reactor after one or more of the files may have changed. An error: not all of what was watched
  // can be watched any more. Where it has no memory (bad_alloc) it is called again.
  using Changed = std::function<void(const Status& watching)>;

  // Absolute paths, of files that need not be there.
  FileWatch(Reactor& reactor, std::vector<std::string> paths, Changed changed)
      : reactor_(reactor), paths_(std::move(paths)), changed_(std::move(changed)) {}
  ~FileWatch() override;
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

  // Once; what changes from here on is told. kSystem: the system refuses it; nothing is told then.
  Status start();

  std::size_t num_folders() const noexcept { return folders_.size(); }

 private:
  // A folder in which a change of one of these names may change a file.
  struct Folder {
    std::string path;
    std::set<std::string> names;
  };
  using Folders = std::map<int, Folder>;  // by inotify's number

  void on_ready(std::uint32_t events) override;
  void ask_again() noexcept;
  bool drain();  // whether a file may have changed
  bool matters(int number, std::uint32_t mask, const std::string& name) const;
  Status look();  // at where the paths lead now, and watches that
  Status follow(const std::string& path, Folders& found);
  Status watch(const std::string& folder, const std::string& name, Folders& found);

  Reactor& reactor_;
  const std::vector<std::string> paths_;
  const Changed changed_;
  GuardedFd inotify_;
  Folders folders_;
  bool owed_ = false;  // there was no memory to tell
};

}  // namespace kvxfer
