// A library that is opened at run time, so that one build serves machines with and without it. Its functions
// go into a table of its user's. It is never closed: such a library runs threads, or has opened others, with
// state of their own.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace kvxfer {

class OpenedLibrary {
 public:
  // `handle`: of dlopen.
  explicit OpenedLibrary(void* handle) : handles_{handle} {}
  // A library in several files, all of which have to be there.
  explicit OpenedLibrary(std::initializer_list<const char*> files) {
    for (const char* const file : files) {
      handles_.push_back(::dlopen(file, RTLD_NOW | RTLD_LOCAL));
      if (handles_.back() != nullptr) continue;
      const char* const words = ::dlerror();
      why_ = words != nullptr ? words : file;
      return;
    }
  }
  const std::string& why() const noexcept { return why_; }  // it could not be opened; "" if it was

  // Null: no file of it has the symbol. `version`: that of the symbol, where it has several.
  void* symbol(const char* name, const char* version = nullptr) const noexcept {
    for (void* const handle : handles_) {
      void* found = version == nullptr ? nullptr : ::dlvsym(handle, name, version);
      if (found == nullptr) found = ::dlsym(handle, name);
      if (found != nullptr) return found;
    }
    return nullptr;
  }
  // Sets a function of a table.
  template <class Function>
  void find_if_there(Function& function, const char* name, const char* version = nullptr) const noexcept {
    function = reinterpret_cast<Function>(symbol(name, version));
  }
  template <class Function>
  void find(Function& function, const char* name, const char* version = nullptr) {
    find_if_there(function, name, version);
    if (function == nullptr && lacks_.empty()) lacks_ = name;
  }
  const std::string& lacks() const noexcept { return lacks_; }  // the first that was not found; "" for none

 private:
  std::vector<void*> handles_;
  std::string why_, lacks_;
};

}  // namespace kvxfer
