// libfabric, opened at run time.
#pragma once

#include <string>

#include "kvxfer/status.h"
#include "transports/libfabric/abi.h"

namespace kvxfer::libfabric {

// The functions that it exports; all others are in the tables of its objects.
struct Library {
  std::uint32_t (*get_version)();
  int (*get_info)(std::uint32_t version, const char* node, const char* service, std::uint64_t flags,
                  const abi::Info* hints, abi::Info** info);
  void (*free_info)(abi::Info* info);
  abi::Info* (*copy_info)(const abi::Info* info);  // of null: an empty one
  int (*open_fabric)(abi::FabricAttributes* attributes, abi::Fabric** fabric, void* context);
  const char* (*error_string)(int error);  // above 0

  std::string path;     // of the file
  std::string version;  // "1.17"

  // Uses the copy that this process has open already, else the named file, else the system's. kUnsupported:
  // the message says why there is none. The first call decides, because a process has only one.
  static Result<const Library*> load(const std::string& file = {});

  // Names the copy that load() would use, without opening it: a sentence for people.
  static std::string describe();

  // "libfabric 1.17"
  std::string name() const { return "libfabric " + version; }
};

}  // namespace kvxfer::libfabric
