#include "core/system/file_watch.h"

#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <deque>
#include <new>
#include <utility>

namespace kvxfer {
namespace {

// Reacts when a file is closed after writing: then it is whole. IN_MODIFY would show a part of it.
constexpr std::uint32_t kChanges = IN_CLOSE_WRITE | IN_ATTRIB | IN_CREATE | IN_DELETE | IN_MOVED_FROM |
                                   IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF;
// As many links in one path as Linux follows.
constexpr int kMaxLinks = 40;
// For a path whose folders vanish while it is followed.
constexpr int kMaxTries = 8;

void push_front(std::deque<std::string>& parts, const std::string& path) {
  std::deque<std::string> begun;
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    if (end > at) begun.push_back(path.substr(at, end - at));
    at = end + 1;
  }
  parts.insert(parts.begin(), begun.begin(), begun.end());
}

std::string joined(const std::string& folder, const std::string& name) {
  return folder == "/" ? folder + name : folder + "/" + name;
}

bool is_folder(const std::string& path) {
  struct stat found;
  return ::lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

// The process that created it writes it next, and closes it.
bool is_begun(const std::string& path) {
  struct stat found;
  return ::lstat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode) && found.st_size == 0;
}

}  // namespace

FileWatch::~FileWatch() {
  if (inotify_) reactor_.remove(inotify_.get());
}

Status FileWatch::start() {
  GuardedFd inotify(UniqueFd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)));
  if (!inotify)
    return {Code::kSystem, "files cannot be watched: inotify: " + words_of(errno) +
                               (errno == EMFILE ? " (fs.inotify.max_user_instances, or ulimit -n)" : "")};
  inotify_ = std::move(inotify);
  Status status = look();
  if (status.ok()) status = reactor_.add(inotify_.get(), EPOLLIN, *this);
  if (!status.ok()) {
    inotify_.reset();
    folders_.clear();
  }
  return status;
}

void FileWatch::on_ready(std::uint32_t) {
  try {
    owed_ = drain() || owed_;
    if (!owed_) return;
    const Status watching = look();
    changed_(watching);
    owed_ = false;
  } catch (const std::bad_alloc&) {
    owed_ = true;
    ask_again();
  }
}

// The end of a watch is an event, for which the reactor wakes once more.
void FileWatch::ask_again() noexcept {
  ::inotify_rm_watch(inotify_.get(), ::inotify_add_watch(inotify_.get(), "/", IN_MASK_ADD | IN_DELETE_SELF));
}

bool FileWatch::drain() {
  alignas(inotify_event) std::array<char, 4096> buffer;
  bool is_changed = false;
  for (;;) {
    const ssize_t nbytes = ::read(inotify_.get(), buffer.data(), buffer.size());
    if (nbytes <= 0) return is_changed;
    for (std::size_t at = 0; at < static_cast<std::size_t>(nbytes);) {
      inotify_event event;
      std::memcpy(&event, buffer.data() + at, sizeof event);
      const char* const name = buffer.data() + at + sizeof event;
      at += sizeof event + event.len;
      if (matters(event.wd, event.mask, event.len == 0 ? "" : name)) is_changed = true;
      if ((event.mask & IN_IGNORED) != 0) folders_.erase(event.wd);
    }
  }
}

bool FileWatch::matters(int number, std::uint32_t mask, const std::string& name) const {
  if ((mask & IN_Q_OVERFLOW) != 0) return true;  // some events were lost
  const auto found = folders_.find(number);
  if (found == folders_.end()) return false;  // look() ended this watch
  if ((mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_IGNORED | IN_UNMOUNT)) != 0) return true;
  const auto& [path, names] = found->second;
  if (!names.contains(name)) return false;
  return (mask & IN_CREATE) == 0 || !is_begun(joined(path, name));
}

Status FileWatch::look() {
  Folders found;
  Status status;
  for (const std::string& path : paths_) {
    Status followed = follow(path, found);
    for (int tries = 1; followed.code() == Code::kAgain && tries < kMaxTries; ++tries)
      followed = follow(path, found);
    if (!followed.ok()) status = std::move(followed);
  }
  for (const auto& [number, folder] : folders_)
    if (!found.contains(number)) ::inotify_rm_watch(inotify_.get(), number);
  folders_ = std::move(found);
  return status;
}

// Step by step, as the kernel does: each folder is real, with no link on the way to it, and is watched
// before its contents are looked at. At a missing name the path ends early: its return is a change, too.
Status FileWatch::follow(const std::string& path, Folders& found) {
  std::deque<std::string> left;
  push_front(left, path);
  std::string folder = "/";
  for (int num_links = 0; !left.empty() && num_links <= kMaxLinks;) {
    const std::string name = std::move(left.front());
    left.pop_front();
    if (name == ".") continue;
    if (name == "..") {
      folder.resize(std::max<std::size_t>(folder.rfind('/'), 1));
      continue;
    }
    const std::string at = joined(folder, name);
    if (left.empty() || !is_folder(at)) {
      if (Status status = watch(folder, name, found); !status.ok()) return status;
      std::array<char, PATH_MAX> target;
      const ssize_t nbytes = ::readlink(at.c_str(), target.data(), target.size());
      if (nbytes > 0) {
        ++num_links;
        if (target[0] == '/') folder = "/";
        push_front(left, std::string(target.data(), static_cast<std::size_t>(nbytes)));
        continue;
      }
      if (!is_folder(at)) return {};
    }
    folder = at;
  }
  return {};
}

Status FileWatch::watch(const std::string& folder, const std::string& name, Folders& found) {
  const int number = ::inotify_add_watch(inotify_.get(), folder.c_str(), kChanges | IN_ONLYDIR);
  if (number < 0 && (errno == ENOENT || errno == ENOTDIR))
    return {Code::kAgain, "folder " + folder + " comes and goes: it cannot be watched"};
  if (number < 0)
    return {Code::kSystem, "folder " + folder + " cannot be watched: inotify: " + words_of(errno) +
                               (errno == ENOSPC ? " (fs.inotify.max_user_watches)" : "")};
  Folder& watched = found[number];
  watched.path = folder;
  watched.names.insert(name);
  return {};
}

}  // namespace kvxfer
