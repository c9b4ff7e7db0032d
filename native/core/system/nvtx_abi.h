// The interface between NVTX 3 and an injected tool, as NVIDIA's headers fix it (nvtxDetail/nvtxTypes.h,
// nvToolsExt.h): the process loads the tool's library; the tool asks for tables of places and stores its
// functions there.
//
// We declare it ourselves, because a client needs three functions of the hundred. NVIDIA's headers are a
// dozen files and a third licence in the tree, or a package at build time without which the same version
// would have no ranges. This interface cannot change: tools serve programs whose headers were compiled in
// years ago. tests/unit/test_nvtx.py compares it with NVIDIA's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::nvtx {

using Function = void (*)();
using Place = Function*;  // where a tool stores a function; null where there is none

// NvtxExportTableFunc_t and what the library exports as InitializeInjectionNvtx2; 1 when it is in use.
using GetExportTable = const void* (*)(std::uint32_t table);
using InitializeInjection = int (*)(GetExportTable);
inline constexpr const char* kPathVariable = "NVTX_INJECTION64_PATH";
inline constexpr const char* kInitializeInjection = "InitializeInjectionNvtx2";

// NvtxExportTableID, and what each table holds.
inline constexpr std::uint32_t kCallbacksTable = 1, kVersionTable = 3;
struct CallbacksTable {
  std::size_t nbytes;
  int (*get_module)(int module, Place** places, unsigned* count);  // 1 when there is one
};
struct VersionTable {
  std::size_t nbytes;
  std::uint32_t version, reserved;
  void (*set_tool_version)(std::uint32_t version);
};
inline constexpr std::uint32_t kVersion = 3;

// NvtxCallbackModule, and the places of each module; 0 is unused. Functions with a domain belong to the
// second core.
inline constexpr int kCoreModule = 1, kSecondCoreModule = 5, kLastModule = 6;
inline constexpr unsigned kNumPlaces[kLastModule + 1] = {0, 16, 9, 15, 7, 16, 7};
inline constexpr unsigned kRangeStart = 2, kRangeEnd = 3, kDomainCreate = 12;

// nvtxEventAttributes_t.
struct Attributes {
  std::uint16_t version = kVersion;
  std::uint16_t nbytes = sizeof(Attributes);
  std::uint32_t category = 0;
  std::int32_t color_type = 0;
  std::uint32_t color = 0;
  std::int32_t payload_type = 1;  // NVTX_PAYLOAD_TYPE_UNSIGNED_INT64
  std::int32_t reserved = 0;
  std::uint64_t payload = 0;
  std::int32_t message_type = 1;  // NVTX_MESSAGE_TYPE_ASCII
  const char* message = nullptr;
};
static_assert(sizeof(Attributes) == 48);

using Domain = struct DomainHandle*;
using StartRange = std::uint64_t (*)(Domain, const Attributes*);
using EndRange = void (*)(Domain, std::uint64_t range);
using CreateDomain = Domain (*)(const char* name);

}  // namespace kvxfer::nvtx
