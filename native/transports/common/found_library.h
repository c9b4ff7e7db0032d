// Finds and opens a library at run time, and says which of its copies this process has open or would open.
#pragma once

#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "kvxfer/status.h"

namespace kvxfer::found_library {

// With the slash; "" for a name without a folder.
std::string folder_of(const std::string& path);
// The file that a symbol comes from; "" where that is not known.
std::string path_of(const void* symbol);
// The file of a library that this process has open, found by the beginning of its name ("libucp.so."); ""
// where there is none. A copy that another package opened counts. A wheel's copy with a hash in its name does
// not.
std::string opened(std::string_view prefix);
// The file that the dynamic linker would find on most systems; "" where it would find none.
std::string of_system(const std::string& name);
// The environment variables with this prefix ("UCX_"), in words and brackets; "" for none. An error names
// them when a library has nothing to offer, since a person can change them.
std::string environment(std::string_view prefix);

struct Opened {
  void* handle = nullptr;  // never closed: such a library opens others, with threads and state of their own
  std::string before;  // the file of a copy that was open already, and is used
  std::string why;  // why none could be opened
};
// Uses the copy that the process has open already; else opens `file`; else the first of `files` that can be
// opened. A process has one copy: two would each replace the same functions of the C library, or the same
// device's state.
Opened open(std::string_view prefix, const std::string& file, std::initializer_list<std::string> files);

// The one copy that a process uses, with its functions. Library has a `path`.
template <class Library>
class OnePerProcess {
 public:
  // The first call that finds a library decides which one the process uses.
  Result<const Library*> load(const std::string& file, Result<Library> (*its_load)(const std::string& file)) {
    const std::lock_guard lock(mutex_);
    if (!loaded_ || (!loaded_->ok() && file != first_file_)) {
      first_file_ = file;
      loaded_.emplace(its_load(file));
    } else if (loaded_->ok() && !file.empty() && file != first_file_ && file != loaded_->value().path) {
      return other_is_open(loaded_->value().path, file);
    }
    if (!loaded_->ok()) return loaded_->status();
    return &loaded_->value();
  }
  static Status other_is_open(const std::string& path, const std::string& file) {
    return {Code::kUnsupported, "this process has " + path + " open already, and not " + file +
                                    ": one process has one. Name that file, or see to it that nothing else "
                                    "opens one first"};
  }

 private:
  std::mutex mutex_;
  std::optional<Result<Library>> loaded_;
  std::string first_file_;
};

}  // namespace kvxfer::found_library
