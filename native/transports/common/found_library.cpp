#include "transports/common/found_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <utility>
#include <vector>

#include "core/system/kept_signals.h"

namespace kvxfer::found_library {

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

std::string path_of(const void* symbol) {
  Dl_info info{};
  return ::dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : std::string();
}

std::string opened(std::string_view prefix) {
  std::pair<std::string_view, std::string> wanted(prefix, "");
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* argument) {
        auto& [its_prefix, found] = *static_cast<std::pair<std::string_view, std::string>*>(argument);
        const std::string_view name = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (name.substr(name.rfind('/') + 1).substr(0, its_prefix.size()) != its_prefix) return 0;
        found = name;
        return 1;
      },
      &wanted);
  return wanted.second;
}

std::string of_system(const std::string& name) {
  std::vector<std::string> folders;
  if (const char* const named = std::getenv("LD_LIBRARY_PATH")) {
    std::istringstream stream(named);
    for (std::string folder; std::getline(stream, folder, ':');) folders.push_back(folder);
  }
  for (const char* const folder :
       {"/usr/local/lib", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"})
    folders.emplace_back(folder);
  for (const std::string& folder : folders)
    if (const std::string file = folder + "/" + name; ::access(file.c_str(), R_OK) == 0) return file;
  return {};
}

std::string environment(std::string_view prefix) {
  std::string found;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (text.substr(0, prefix.size()) == prefix && found.size() < 400)
      found += (found.empty() ? "" : ", ") + std::string(text);
  }
  return found.empty() ? std::string() : " (the environment has " + found + ")";
}

Opened open(std::string_view prefix, const std::string& file, std::initializer_list<std::string> files) {
  const KeptSignals kept;
  Opened out;
  out.before = opened(prefix);
  const auto open_one = [&](const std::string& path) {
    if (out.handle != nullptr || path.empty()) return;
    out.handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (out.handle != nullptr) return;
    const char* const said = ::dlerror();
    out.why += (out.why.empty() ? "" : "; ") + std::string(said != nullptr ? said : path);
  };
  if (!out.before.empty()) {
    open_one(out.before);
  } else if (!file.empty()) {
    open_one(file);
  } else {
    for (const std::string& each : files) open_one(each);
  }
  return out;
}

}  // namespace kvxfer::found_library
