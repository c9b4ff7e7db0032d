// A tool of NVTX that writes down which ranges begin and end: what NVTX_INJECTION64_PATH names in tests.
//
// Compiled against NVIDIA's headers by tests/unit/test_nvtx.py, which brings them, and against ours by the
// native tests; both are meant to be the same.
//
// kvxfer_recorded() returns what it has so far, a line for each: "+ID DOMAIN NUMBER NAME" and "-ID DOMAIN".
// With KVXFER_RECORDING set, that file holds it when the process ends.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#if defined(NVIDIA_HEADERS)
#include <nvtx3/nvToolsExt.h>
#define PLACE_OF(name) NVTX_CBID_CORE2_##name
namespace {
using GetExportTable = NvtxGetExportTableFunc_t;
using Places = NvtxFunctionTable;
using Function = NvtxFunctionPointer;
using Attributes = nvtxEventAttributes_t;
using Domain = nvtxDomainHandle_t;
using Range = nvtxRangeId_t;
constexpr auto kModule = NVTX_CB_MODULE_CORE2;
constexpr std::uint32_t kCallbacks = NVTX_ETID_CALLBACKS, kVersions = NVTX_ETID_VERSIONINFO;
constexpr unsigned kStart = PLACE_OF(DomainRangeStartEx), kEnd = PLACE_OF(DomainRangeEnd),
                   kCreate = PLACE_OF(DomainCreateA), kSize = NVTX_CBID_CORE2_SIZE;

int get_module(const void* table, Places* places, unsigned* count) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(table);
  return callbacks->struct_size >= sizeof *callbacks &&
         callbacks->GetModuleFunctionTable(kModule, places, count);
}
bool knows(const void* table) {
  const auto* versions = static_cast<const NvtxExportTableVersionInfo*>(table);
  versions->SetInjectionNvtxVersion(NVTX_VERSION);
  return versions->struct_size == sizeof *versions && versions->version == NVTX_VERSION;
}
const char* message_of(const Attributes& attributes) {
  const bool whole = attributes.size == NVTX_EVENT_ATTRIB_STRUCT_SIZE && attributes.version == NVTX_VERSION &&
                     attributes.messageType == NVTX_MESSAGE_TYPE_ASCII &&
                     attributes.payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  return whole ? attributes.message.ascii : "not an event of NVTX 3";
}
std::uint64_t number_of(const Attributes& attributes) { return attributes.payload.ullValue; }
}  // namespace
#else
#include "core/system/nvtx_abi.h"
namespace {
using kvxfer::nvtx::Attributes;
using kvxfer::nvtx::Domain;
using kvxfer::nvtx::Function;
using kvxfer::nvtx::GetExportTable;
using Places = kvxfer::nvtx::Place*;
using Range = std::uint64_t;
constexpr std::uint32_t kCallbacks = kvxfer::nvtx::kCallbacksTable, kVersions = kvxfer::nvtx::kVersionTable;
constexpr unsigned kStart = kvxfer::nvtx::kRangeStart, kEnd = kvxfer::nvtx::kRangeEnd,
                   kCreate = kvxfer::nvtx::kDomainCreate,
                   kSize = kvxfer::nvtx::kNumPlaces[kvxfer::nvtx::kSecondCoreModule];

int get_module(const void* table, Places* places, unsigned* count) {
  return static_cast<const kvxfer::nvtx::CallbacksTable*>(table)->get_module(kvxfer::nvtx::kSecondCoreModule,
                                                                             places, count);
}
bool knows(const void* table) {
  return static_cast<const kvxfer::nvtx::VersionTable*>(table)->version == kvxfer::nvtx::kVersion;
}
const char* message_of(const Attributes& attributes) { return attributes.message; }
std::uint64_t number_of(const Attributes& attributes) { return attributes.payload; }
}  // namespace
#endif

namespace {

struct Recording {
  std::mutex mutex;
  std::string lines, domain;
  Range last = 0;
};

// Never destroyed: ranges may end after everything else has.
Recording& recording() {
  static auto* one = new Recording;
  return *one;
}

void save() {
  const char* path = std::getenv("KVXFER_RECORDING");
  std::FILE* file = path != nullptr ? std::fopen(path, "w") : nullptr;
  if (file == nullptr) return;
  const std::lock_guard lock(recording().mutex);
  std::fwrite(recording().lines.data(), 1, recording().lines.size(), file);
  std::fclose(file);
}

const char* name_of(Domain domain) {
  return reinterpret_cast<std::string*>(domain) == &recording().domain ? recording().domain.c_str() : "?";
}

Domain create_domain(const char* name) {
  const std::lock_guard lock(recording().mutex);
  recording().domain = name;
  return reinterpret_cast<Domain>(&recording().domain);
}

Range start_range(Domain domain, const Attributes* attributes) {
  const std::lock_guard lock(recording().mutex);
  const Range range = ++recording().last;
  recording().lines += "+" + std::to_string(range) + " " + name_of(domain) + " " +
                       std::to_string(number_of(*attributes)) + " " + message_of(*attributes) + "\n";
  return range;
}

void end_range(Domain domain, Range range) {
  const std::lock_guard lock(recording().mutex);
  recording().lines += "-" + std::to_string(range) + " " + name_of(domain) + "\n";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(GetExportTable get_table) {
  const void* callbacks = get_table(kCallbacks);
  const void* versions = get_table(kVersions);
  Places places = nullptr;
  unsigned count = 0;
  if (callbacks == nullptr || versions == nullptr || get_table(2) != nullptr || !knows(versions) ||
      get_module(callbacks, &places, &count) != 1 || count != kSize || places[count] != nullptr)
    return 0;
  *places[kStart] = reinterpret_cast<Function>(&start_range);
  *places[kEnd] = reinterpret_cast<Function>(&end_range);
  *places[kCreate] = reinterpret_cast<Function>(&create_domain);
  std::atexit(save);
  return 1;
}

extern "C" __attribute__((visibility("default"))) const char* kvxfer_recorded() {
  static auto* told = new std::string;
  const std::lock_guard lock(recording().mutex);
  *told = recording().lines;
  return told->c_str();
}
