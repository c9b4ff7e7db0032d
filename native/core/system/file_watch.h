// Tells when files change, by inotify on the folders that their paths lead through. It notices a file that
// is written in place, replaced by rename, removed, or put back. It also notices a link on the way that is
// swapped for another, as Kubernetes swaps `..data`. A watch has no thread: the agent's reactor wakes for
// it. Other changes in a folder wake it as well, and it ignores them.
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
  // Called on the reactor after one or more of the files may have changed. An error: some of the files can
  // no longer be watched. If it throws for lack of memory (bad_alloc), it is called again.
  using Changed = std::function<void(const Status& watching)>;

  // Absolute paths; the files need not exist.
  FileWatch(Reactor& reactor, std::vector<std::string> paths, Changed changed)
      : reactor_(reactor), paths_(std::move(paths)), changed_(std::move(changed)) {}
  ~FileWatch() override;
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

  // Call it once; later changes are reported. kSystem: the system refuses the watch, and nothing is
  // reported.
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
  bool drain();  // true if a file may have changed
  bool matters(int number, std::uint32_t mask, const std::string& name) const;
  Status look();  // follows the paths as they are now, and watches their folders
  Status follow(const std::string& path, Folders& found);
  Status watch(const std::string& folder, const std::string& name, Folders& found);

  Reactor& reactor_;
  const std::vector<std::string> paths_;
  const Changed changed_;
  GuardedFd inotify_;
  Folders folders_;
  bool owed_ = false;  // a report is due for which memory was lacking
};

}  // namespace kvxfer
