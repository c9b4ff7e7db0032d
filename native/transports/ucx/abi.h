// The part of UCX's C interface that we use (ucp/api/ucp.h of releases 1.12 to 1.22), declared here so that
// one build serves machines with and without UCX. tests/native/test_ucx_abi.cpp compares it with the real
// header.
//
// Structures that we pass have a mask of their fields. UCX does not read fields outside the mask: those that
// later releases appended, and those at the end that we do not use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::ucx::abi {

struct Config;
struct Context;
struct Worker;
struct Address;
struct EndpointHandle;
struct MemoryHandle;
struct RemoteKey;

using StatusCode = std::int8_t;
inline constexpr StatusCode kOk = 0, kInProgress = 1, kNoResource = -2, kUnreachable = -6, kNoElement = -12,
                            kNoDevice = -14, kBusy = -15, kCanceled = -16, kLast = -100;
// Some calls return this in place of a pointer: null is kOk.
using StatusPointer = void*;
inline bool is_error(StatusPointer pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer) >= static_cast<std::uintptr_t>(std::intptr_t{kLast});
}
inline StatusCode error_of(StatusPointer pointer) noexcept {
  return static_cast<StatusCode>(reinterpret_cast<std::intptr_t>(pointer));
}

inline constexpr unsigned kApiMajor = 1, kApiMinor = 12;

struct ContextParams {
  static constexpr std::uint64_t kFeatures = 1, kMtWorkersShared = 1 << 5;
  static constexpr std::uint64_t kRma = 1 << 1, kWakeup = 1 << 4, kActiveMessages = 1 << 6;
  std::uint64_t field_mask = 0;
  std::uint64_t features = 0;
  std::size_t request_size = 0;
  void (*request_init)(void*) = nullptr;
  void (*request_cleanup)(void*) = nullptr;
  std::uint64_t tag_sender_mask = 0;
  int mt_workers_shared = 0;
  std::size_t estimated_num_eps = 0, estimated_num_ppn = 0;
  const char* name = nullptr;
  std::size_t node_local_id = 0;
};

struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1;
  static constexpr int kSerialized = 1;
  std::uint64_t field_mask = 0;
  int thread_mode = 0;
  unsigned long cpu_mask[16] = {};
  unsigned events = 0;
  void* user_data = nullptr;
  int event_fd = 0;
  std::uint64_t flags = 0;
  const char* name = nullptr;
  std::size_t am_alignment = 0;
  std::uint64_t client_id = 0;
};

struct EndpointParams {
  static constexpr std::uint64_t kRemoteAddress = 1, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kModeNone = 0, kModePeer = 1;
  std::uint64_t field_mask = 0;
  const Address* address = nullptr;
  int error_mode = 0;
  struct {
    void (*callback)(void* argument, EndpointHandle* endpoint, StatusCode status) = nullptr;
    void* argument = nullptr;
  } error_handler;
  void* user_data = nullptr;
  unsigned flags = 0;
  struct {
    const void* address = nullptr;
    unsigned length = 0;
  } socket_address;
  void* connection_request = nullptr;
  const char* name = nullptr;
  struct {
    const void* address = nullptr;
    unsigned length = 0;
  } local_socket_address;
};

struct MemoryMapParams {
  static constexpr std::uint64_t kAddress = 1, kLength = 1 << 1, kMemoryType = 1 << 4;
  static constexpr int kHost = 0, kCuda = 1;
  std::uint64_t field_mask = 0;
  void* address = nullptr;
  std::size_t length = 0;
  unsigned flags = 0, protection = 0;
  int memory_type = 0;
  const void* exported_memory = nullptr;
};

struct RequestParams {
  static constexpr std::uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kDatatype = 1 << 3, kFlags = 1 << 4,
                                 kMemoryHandle = 1 << 8;
  static constexpr unsigned kCloseByForce = 1, kRendezvous = 1 << 2;
  static constexpr std::uint64_t kIov = 2;
  std::uint32_t field_mask = 0;
  std::uint32_t flags = 0;
  void* request = nullptr;
  union {
    void (*sent)(void* request, StatusCode status, void* user_data) = nullptr;
    void (*received)(void* request, StatusCode status, std::size_t nbytes, void* user_data);
  } callback;
  std::uint64_t datatype = 0;
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  int memory_type = 0;
  void* received_info = nullptr;
  MemoryHandle* memory = nullptr;
  // From later releases.
  std::uint64_t remote_datatype = 0;
  const void* remote = nullptr;
  std::size_t remote_count = 0;
};

struct MessageParams {
  static constexpr std::uint64_t kIsRendezvous = 1 << 17;
  std::uint64_t attributes = 0;
  EndpointHandle* reply = nullptr;
};

struct HandlerParams {
  static constexpr std::uint64_t kId = 1, kFlags = 1 << 1, kCallback = 1 << 2, kArgument = 1 << 3;
  static constexpr std::uint32_t kWholeMessage = 1;
  std::uint64_t field_mask = 0;
  unsigned id = 0;
  std::uint32_t flags = 0;
  StatusCode (*callback)(void* argument, const void* header, std::size_t header_nbytes, void* data,
                         std::size_t nbytes, const MessageParams* params) = nullptr;
  void* argument = nullptr;
};

}  // namespace kvxfer::ucx::abi
