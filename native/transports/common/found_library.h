// A library that is opened at run time: which of its copies a process has or would open.
#pragma once

#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "kvxfer/status.h"

namespace kvxfer::found_library {

// With the slash; "" of a name alone.
std::string folder_of(const std::string& path);
// Of the file that has it; "" where that is not known.
std::string path_of(const void* symbol);
// Of one that this process has open, by the beginning of its file's name ("libucp.so."); "" where there is none. Another
// package's copy counts. That of a wheel with a hash in its name does not.
std::string opened(std::string_view prefix);
// Where the dynamic linker looks on most systems; "" where it would find none.
std::string of_system(const std::string& name);
// What this process's environment has with this prefix ("UCX_"), in words and brackets; "" for nothing: what a person sees
// to when a library says that it has nothing to offer.
std::string environment(std::string_view prefix);

struct Opened {
  void* handle = nullptr;  // never closed: such a library opens others, with threads and state of their own
  std::string before;  // the file of one that was open already, and is taken
  std::string why;  // none could be
};
// One that the process has open already, else `file`, else the first of `files` that can be. A process has one: two would
// each replace the same functions of the C library, or the same device's state.
Opened open(std::string_view prefix, const std::string& file, std::initializer_list<std::string> files);

// The one of a process, with its functions. Library has a `path`.
template <class Library>
class OnePerProcess {
 public:
  struct Loaded {
    Library library{};
    Status status;
  };
  // The first call decides, where it finds one.
  Result<const Library*> load(const std::string& file, Loaded (*its_load)(const std::string& file)) {
    const std::lock_guard lock(mutex_);
    if (!loaded_ || (!loaded_->status.ok() && file != first_file_)) {
      first_file_ = file;
      loaded_.emplace(its_load(file));
    } else if (loaded_->status.ok() && !file.empty() && file != first_file_ &&
               file != loaded_->library.path) {
      return other_is_open(loaded_->library.path, file);
    }
    if (!loaded_->status.ok()) return loaded_->status;
    return &loaded_->library;
  }
  static Status other_is_open(const std::string& path, const std::string& file) {
    return {Code::kUnsupported, "this process has " + path + " open already, and not " + file +
                                    ": one process has one. Name that file, or see to it that nothing else "
                                    "opens one first"};
  }

 private:
  std::mutex mutex_;
  std::optional<Loaded> loaded_;
  std::string first_file_;
};

}  // namespace kvxfer::found_library
