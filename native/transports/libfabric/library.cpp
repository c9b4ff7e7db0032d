#include "transports/libfabric/library.h"

#include <unistd.h>

#include "kvxfer/opened_library.h"
#include "transports/common/found_library.h"

namespace kvxfer::libfabric {
namespace {

constexpr const char* kSystemFile = "libfabric.so.1";
constexpr const char* kPrefix = "libfabric.so.";
constexpr const char* kFileOfAws = "/opt/amazon/efa/lib/libfabric.so.1";  // AWS's installer's

using OneLibrary = found_library::OnePerProcess<Library>;

Result<Library> load_library(const std::string& file) {
  const found_library::Opened opened = found_library::open(kPrefix, file, {kSystemFile, kFileOfAws});
  if (opened.handle == nullptr)
    return Status(Code::kUnsupported,
                  "libfabric cannot be opened (" + opened.why +
                      "): install it, libfabric on Red Hat's systems, libfabric1 on Debian's, AWS's "
                      "EFA installer, or name its file as option libfabric.library");
  OpenedLibrary library(opened.handle);
  Library table{};
  library.find(table.get_version, "fi_version");
  library.find(table.get_info, "fi_getinfo");
  library.find(table.free_info, "fi_freeinfo");
  library.find(table.copy_info, "fi_dupinfo");
  library.find(table.open_fabric, "fi_fabric");
  library.find(table.error_string, "fi_strerror");
  if (!library.lacks().empty())
    return Status(Code::kUnsupported, "this libfabric has no " + library.lacks() +
                                          ": install 1.17 or newer, or name its file as option "
                                          "libfabric.library");
  const std::uint32_t version = table.get_version();
  table.version = std::to_string(version >> 16) + "." + std::to_string(version & 0xFFFF);
  table.path = found_library::path_of(reinterpret_cast<const void*>(table.get_version));
  if (version < abi::kApi)
    return Status(Code::kUnsupported, table.path + " is libfabric " + table.version +
                                          ": 1.17 or newer is needed; install it, or name its file "
                                          "as option libfabric.library");
  if (!file.empty() && !opened.before.empty() && opened.before != file)
    return OneLibrary::other_is_open(opened.before, file);
  return table;
}

}  // namespace

Result<const Library*> Library::load(const std::string& file) {
  static OneLibrary one;
  return one.load(file, load_library);
}

std::string Library::describe() {
  if (const std::string file = found_library::opened(kPrefix); !file.empty()) return file + " is loaded";
  std::string file = found_library::of_system(kSystemFile);
  if (file.empty() && ::access(kFileOfAws, R_OK) == 0) file = kFileOfAws;
  return file.empty() ? "no libfabric was found: install libfabric or libfabric1, or name its file as option "
                        "libfabric.library"
                      : "agents load " + file;
}

}  // namespace kvxfer::libfabric
