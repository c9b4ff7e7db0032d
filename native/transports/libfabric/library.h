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

  // One that this process has open already, else the file that is named, else the system's. In words why there is none
  // (kUnsupported). The first call decides: a process has one.
  static Result<const Library*> load(const std::string& file = {});

  // Which one that would be, without opening it: a sentence for people.
  static std::string describe();

  // "libfabric 1.17"
  std::string name() const { return "libfabric " + version; }
};

}  // namespace kvxfer::libfabric
