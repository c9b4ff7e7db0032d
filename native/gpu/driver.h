// The CUDA driver, opened at run time, so that one build serves machines with and without it. It needs no
// CUDA headers: this file declares the driver's stable binary interface under kvxfer's own names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer::gpu {

// Handles of the driver.
using Device = int;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Function = struct FunctionHandle*;  // a CUfunction, or a CUkernel: launches take either
using Address = std::uint64_t;            // of a byte, in the address space that host and devices share

// An allocation of physical memory (CUmemGenericAllocationHandle).
using Allocation = std::uint64_t;

// CUmemAllocationProp, CUmemAccessDesc, CUipcMemHandle.
struct Location {
  int type = 1;  // a device
  int id = 0;
};
struct AllocationProperties {
  int type = 1;  // pinned: of the device alone
  int handle_types = 0;
  Location location;
  void* reserved_for_windows = nullptr;
  unsigned char compression = 0, rdma_capable = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(AllocationProperties) == 32);
struct Access {
  Location location;
  int flags = 0;
};
struct IpcHandle { std::byte bytes[64]; };
// CUmemcpyAttributes: sources are read in stream order, and by engines rather than by kernels.
struct CopyAttributes {
  int src_access_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  Location src_hint{0, 0}, dst_hint{0, 0};  // for managed memory alone
  unsigned flags = 1;                       // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
};
static_assert(sizeof(CopyAttributes) == 24);
// CUDA_MEMCPY2D of addresses that the driver knows (CU_MEMORYTYPE_UNIFIED).
struct Copy2D {
  std::size_t src_x_nbytes = 0, src_y = 0;
  int src_type = 4;
  const void* src_host = nullptr;
  Address src = 0;
  void* src_array = nullptr;
  std::size_t src_pitch = 0;
  std::size_t dst_x_nbytes = 0, dst_y = 0;
  int dst_type = 4;
  void* dst_host = nullptr;
  Address dst = 0;
  void* dst_array = nullptr;
  std::size_t dst_pitch = 0;
  std::size_t width_nbytes = 0, height = 0;
};
static_assert(sizeof(Copy2D) == 128);
inline constexpr int kPosixFdHandle = 1, kFabricHandle = 8;  // CUmemAllocationHandleType
inline constexpr int kReadAccess = 1, kWriteAccess = 3;      // CUmemAccess_flags
inline constexpr unsigned kLazyPeerAccess = 1;               // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

// Functions of libcuda. Each returns 0, or the number of an error.
struct Driver {
  int (*init)(unsigned flags);
  int (*error_name)(int error, const char** name);
  int (*error_string)(int error, const char** text);
  int (*device_get)(Device* device, int index);
  int (*primary_context_retain)(Context* context, Device device);
  int (*primary_context_release)(Device device);
  int (*context_push)(Context context);
  int (*context_pop)(Context* context);
  int (*exchange_capture_mode)(int* mode);  // the calling thread's CUstreamCaptureMode; gets the old
  int (*stream_create)(Stream* stream, unsigned flags, int priority);
  int (*stream_destroy)(Stream stream);
  int (*stream_query)(Stream stream);
  int (*stream_synchronize)(Stream stream);
  int (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  int (*context_synchronize)();
  int (*stream_write)(Stream stream, Address address, std::uint32_t value, unsigned flags);
  int (*stream_wait)(Stream stream, Address address, std::uint32_t value, unsigned flags);
  int (*device_attribute)(int* value, int attribute, Device device);
  int (*stream_is_capturing)(Stream stream, int* status);
  int (*stream_context)(Stream stream, Context* context);
  int (*context_device)(Device* device);  // of the current context
  int (*event_query)(Event event);
  int (*priority_range)(int* least, int* greatest);
  int (*memory_allocate)(Address* address, std::size_t nbytes);
  int (*memory_free)(Address address);
  int (*address_range)(Address* base, std::size_t* nbytes, Address address);
  int (*ipc_export)(IpcHandle* handle, Address address);
  int (*ipc_open)(Address* address, IpcHandle handle, unsigned flags);
  int (*ipc_close)(Address address);
  int (*allocation_create)(Allocation* allocation, std::size_t nbytes, const AllocationProperties* properties,
                           unsigned long long flags);
  int (*allocation_granularity)(std::size_t* nbytes, const AllocationProperties* properties, int option);
  int (*allocation_retain)(Allocation* allocation, void* address);
  int (*allocation_release)(Allocation allocation);
  int (*allocation_properties)(AllocationProperties* properties, Allocation allocation);
  int (*allocation_export)(void* handle, Allocation allocation, int type, unsigned long long flags);
  int (*allocation_import)(Allocation* allocation, void* handle, int type);
  int (*address_reserve)(Address* address, std::size_t nbytes, std::size_t alignment, Address wished,
                         unsigned long long flags);
  int (*address_free)(Address address, std::size_t nbytes);
  int (*map)(Address address, std::size_t nbytes, std::size_t offset, Allocation allocation,
             unsigned long long flags);
  int (*unmap)(Address address, std::size_t nbytes);
  int (*set_access)(Address address, std::size_t nbytes, const Access* access, std::size_t count);
  int (*host_allocate)(void** memory, std::size_t nbytes, unsigned flags);
  int (*host_free)(void* memory);
  int (*host_to_device)(Address dst, const void* src, std::size_t nbytes, Stream stream);
  // cuMemcpyBatchAsync of CUDA 12.8. CUDA 13's function of that name has no `failed`. Null if the driver is
  // older.
  int (*copy_batch)(Address* dst, Address* src, std::size_t* nbytes, std::size_t count,
                    CopyAttributes* attributes, std::size_t* first_copies, std::size_t num_attributes,
                    std::size_t* failed, Stream stream);
  int (*copy_2d)(const Copy2D* copy, Stream stream);
  int (*stream_write_64)(Stream stream, Address address, std::uint64_t value, unsigned flags);  // or null
  // Gets the descriptor of a dmabuf over whole host-sized pages of one allocation. Null before CUDA 11.7.
  int (*range_handle)(void* handle, Address address, std::size_t nbytes, int type, unsigned long long flags);
  int (*flush_remote_writes)(int target, int scope);  // of the current context; null before CUDA 11.3
  int (*memory_set)(Address dst, unsigned char value, std::size_t nbytes, Stream stream);
  int (*function_set)(Function function, int attribute, int value);
  int (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_nbytes, Stream stream, void** arguments,
                void** extra);

  // cuGetProcAddress_v2, which looks up functions that the driver may lack.
  using FindVersion = int (*)(const char* symbol, void** found, int version, std::uint64_t flags,
                              int* result);

  // Returns this machine's driver, or kUnsupported with the reason. Loads it once per process.
  static Result<const Driver*> load();

  bool has_copy_engines() const noexcept { return copy_batch != nullptr && stream_write_64 != nullptr; }

  // kSystem: "what: CUDA_ERROR_... (text)". Ok for 0.
  Status status(int error, std::string_view what) const;
};

inline constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY
inline constexpr int kRecommendedGranularity = 1;  // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
inline constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
inline constexpr int kCapturedEvent = 907;  // CUDA_ERROR_CAPTURED_EVENT
inline constexpr int kRelaxedCaptures = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: not ordered after the default one
inline constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE | _DEVICEMAP
inline constexpr unsigned kDeviceMap = 2;
inline constexpr unsigned kWaitForMore = 0;  // CU_STREAM_WAIT_VALUE_GEQ
inline constexpr unsigned kFlushRemoteWrites = 1u << 30;  // CU_STREAM_WAIT_VALUE_FLUSH
inline constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
inline constexpr int kCanFlushRemoteWrites = 98;  // CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
inline constexpr int kPciBus = 33, kPciDevice = 34, kPciDomain = 50;  // CU_DEVICE_ATTRIBUTE_PCI_..._ID
inline constexpr int kFlushOptions = 117;  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
inline constexpr int kFlushByHost = 1;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
inline constexpr int kWritesOrdering = 118;  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
inline constexpr int kSeenByOwner =
    100;  // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, and the scope of that name
inline constexpr int kDmabufSupported = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
inline constexpr int kDmabufHandle = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
inline constexpr int kMaxDynamicSharedNbytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// A device's primary context. The process's other libraries use it too, so kvxfer can copy memory that they
// have allocated, and wait for their events.
class PrimaryContext {
 public:
  static Result<PrimaryContext> retain(const Driver& driver, int device_index);
  PrimaryContext(PrimaryContext&& other) noexcept
      : driver_(other.driver_), device_(other.device_), context_(std::exchange(other.context_, nullptr)) {}
  PrimaryContext& operator=(PrimaryContext&&) = delete;
  ~PrimaryContext() {
    if (context_ != nullptr) driver_->primary_context_release(device_);
  }
  Context get() const noexcept { return context_; }

 private:
  PrimaryContext(const Driver& driver, Device device, Context context)
      : driver_(&driver), device_(device), context_(context) {}
  const Driver* driver_;
  Device device_;
  Context context_;
};

// Makes a context the thread's current one while this object lives, and sets the thread's capture mode to
// relaxed. While any thread of the process captures a graph, the driver refuses calls that allocate or query,
// from every thread, and such a call ends the capture, unless the calling thread's mode is relaxed. Calls
// made here never belong to a capture, and engines do capture graphs while agents exist.
class ContextScope {
 public:
  ContextScope(const Driver& driver, Context context) : driver_(driver) {
    pushed_ = driver.context_push(context) == 0;
    exchanged_ = driver.exchange_capture_mode(&capture_mode_) == 0;
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope() {
    if (exchanged_) driver_.exchange_capture_mode(&capture_mode_);
    Context popped;
    if (pushed_) driver_.context_pop(&popped);
  }

 private:
  const Driver& driver_;
  int capture_mode_ = kRelaxedCaptures;
  bool pushed_, exchanged_;
};

}  // namespace kvxfer::gpu
