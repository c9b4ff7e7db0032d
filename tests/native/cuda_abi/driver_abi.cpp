// gpu/driver.h and gpu/driver.cpp beside NVIDIA's own headers: compiled by tests/unit/test_abi.py, whose
// folder of headers it takes. What differs does not compile.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "gpu/driver.h"

namespace kvxfer::gpu {
namespace {

// As the calling convention passes them: pointers, numbers of one size, and structs by value.
template <class Ours, class Theirs>
constexpr bool passed_alike() {
  if constexpr (std::is_class_v<Ours> || std::is_class_v<Theirs>)
    return std::is_class_v<Ours> && std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs);
  else
    return std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
           std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

// What pointers lead to has one size, too.
template <class Ours, class Theirs>
constexpr bool leads_alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using From = std::remove_pointer_t<Ours>;
    using To = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_void_v<From> || std::is_void_v<To> || std::is_function_v<From>)
      return true;
    else if constexpr (requires {
                         sizeof(From);
                         sizeof(To);
                       })
      return sizeof(From) == sizeof(To);
    else
      return true;  // handles, of which nobody knows more
  }
  return true;
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class OurResult, class... Ours, class TheirResult, class... Theirs>
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs))
      return false;
    else
      return passed_alike<OurResult, TheirResult>() &&
             ((passed_alike<Ours, Theirs>() && leads_alike<Ours, Theirs>()) && ...);
  }();
};

#define KVXFER_SAME(member, symbol) \
  static_assert(SameCall<decltype(Driver::member), decltype(&::symbol)>::value, #symbol)
#define KVXFER_SAME_AS(member, type) static_assert(SameCall<decltype(Driver::member), type>::value, #type)

// One for each find() of driver.cpp, in its order.
KVXFER_SAME(init, cuInit);
KVXFER_SAME(error_name, cuGetErrorName);
KVXFER_SAME(error_string, cuGetErrorString);
KVXFER_SAME(device_get, cuDeviceGet);
KVXFER_SAME(primary_context_retain, cuDevicePrimaryCtxRetain);
KVXFER_SAME(primary_context_release, cuDevicePrimaryCtxRelease_v2);
KVXFER_SAME(context_push, cuCtxPushCurrent_v2);
KVXFER_SAME(context_pop, cuCtxPopCurrent_v2);
KVXFER_SAME(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
KVXFER_SAME(stream_create, cuStreamCreateWithPriority);
KVXFER_SAME(stream_destroy, cuStreamDestroy_v2);
KVXFER_SAME(stream_query, cuStreamQuery);
KVXFER_SAME(stream_synchronize, cuStreamSynchronize);
KVXFER_SAME(stream_wait_event, cuStreamWaitEvent);
KVXFER_SAME(context_synchronize, cuCtxSynchronize);
KVXFER_SAME(stream_write, cuStreamWriteValue32_v2);
KVXFER_SAME(stream_wait, cuStreamWaitValue32_v2);
KVXFER_SAME(device_attribute, cuDeviceGetAttribute);
KVXFER_SAME(stream_is_capturing, cuStreamIsCapturing);
KVXFER_SAME(stream_context, cuStreamGetCtx);
KVXFER_SAME(context_device, cuCtxGetDevice);
KVXFER_SAME(event_query, cuEventQuery);
KVXFER_SAME(priority_range, cuCtxGetStreamPriorityRange);
KVXFER_SAME(memory_allocate, cuMemAlloc_v2);
KVXFER_SAME(memory_free, cuMemFree_v2);
KVXFER_SAME(address_range, cuMemGetAddressRange_v2);
KVXFER_SAME(ipc_export, cuIpcGetMemHandle);
KVXFER_SAME(ipc_open, cuIpcOpenMemHandle_v2);
KVXFER_SAME(ipc_close, cuIpcCloseMemHandle);
KVXFER_SAME(allocation_create, cuMemCreate);
KVXFER_SAME(allocation_granularity, cuMemGetAllocationGranularity);
KVXFER_SAME(allocation_retain, cuMemRetainAllocationHandle);
KVXFER_SAME(allocation_release, cuMemRelease);
KVXFER_SAME(allocation_properties, cuMemGetAllocationPropertiesFromHandle);
KVXFER_SAME(allocation_export, cuMemExportToShareableHandle);
KVXFER_SAME(allocation_import, cuMemImportFromShareableHandle);
KVXFER_SAME(address_reserve, cuMemAddressReserve);
KVXFER_SAME(address_free, cuMemAddressFree);
KVXFER_SAME(map, cuMemMap);
KVXFER_SAME(unmap, cuMemUnmap);
KVXFER_SAME(set_access, cuMemSetAccess);
KVXFER_SAME(host_allocate, cuMemHostAlloc);
KVXFER_SAME(host_free, cuMemFreeHost);
KVXFER_SAME(host_to_device, cuMemcpyHtoDAsync_v2);
KVXFER_SAME(copy_2d, cuMemcpy2DAsync_v2);
KVXFER_SAME(memory_set, cuMemsetD8Async);
KVXFER_SAME(function_set, cuFuncSetAttribute);
KVXFER_SAME(launch, cuLaunchKernel);
// By cuGetProcAddress_v2, as of a version.
KVXFER_SAME_AS(copy_batch, PFN_cuMemcpyBatchAsync_v12080);
KVXFER_SAME_AS(stream_write_64, PFN_cuStreamWriteValue64_v11070);
KVXFER_SAME_AS(range_handle, PFN_cuMemGetHandleForAddressRange_v11070);
KVXFER_SAME_AS(flush_remote_writes, PFN_cuFlushGPUDirectRDMAWrites_v11030);
static_assert(SameCall<Driver::FindVersion, PFN_cuGetProcAddress_v12000>::value);

// ---- structs ----

#define KVXFER_AT(Ours, our_field, Theirs, their_field)                       \
  static_assert(offsetof(Ours, our_field) == offsetof(Theirs, their_field) && \
                sizeof(Ours::our_field) == sizeof(Theirs::their_field))

static_assert(sizeof(Location) == sizeof(CUmemLocation));
KVXFER_AT(Location, type, CUmemLocation, type);
KVXFER_AT(Location, id, CUmemLocation, id);
static_assert(Location().type == CU_MEM_LOCATION_TYPE_DEVICE);

static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
KVXFER_AT(AllocationProperties, type, CUmemAllocationProp, type);
KVXFER_AT(AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes);
KVXFER_AT(AllocationProperties, location, CUmemAllocationProp, location);
KVXFER_AT(AllocationProperties, reserved_for_windows, CUmemAllocationProp, win32HandleMetaData);
KVXFER_AT(AllocationProperties, compression, CUmemAllocationProp, allocFlags.compressionType);
KVXFER_AT(AllocationProperties, rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
KVXFER_AT(AllocationProperties, usage, CUmemAllocationProp, allocFlags.usage);
static_assert(AllocationProperties().type == CU_MEM_ALLOCATION_TYPE_PINNED);

static_assert(sizeof(Access) == sizeof(CUmemAccessDesc));
KVXFER_AT(Access, location, CUmemAccessDesc, location);
KVXFER_AT(Access, flags, CUmemAccessDesc, flags);
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle) && sizeof(IpcHandle) >= sizeof(CUmemFabricHandle));

static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
KVXFER_AT(CopyAttributes, src_access_order, CUmemcpyAttributes, srcAccessOrder);
KVXFER_AT(CopyAttributes, src_hint, CUmemcpyAttributes, srcLocHint);
KVXFER_AT(CopyAttributes, dst_hint, CUmemcpyAttributes, dstLocHint);
KVXFER_AT(CopyAttributes, flags, CUmemcpyAttributes, flags);
static_assert(CopyAttributes().src_access_order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
static_assert(CopyAttributes().flags == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
static_assert(CopyAttributes().src_hint.type == CU_MEM_LOCATION_TYPE_INVALID);

static_assert(sizeof(Copy2D) == sizeof(CUDA_MEMCPY2D));
KVXFER_AT(Copy2D, src_x_nbytes, CUDA_MEMCPY2D, srcXInBytes);
KVXFER_AT(Copy2D, src_y, CUDA_MEMCPY2D, srcY);
KVXFER_AT(Copy2D, src_type, CUDA_MEMCPY2D, srcMemoryType);
KVXFER_AT(Copy2D, src_host, CUDA_MEMCPY2D, srcHost);
KVXFER_AT(Copy2D, src, CUDA_MEMCPY2D, srcDevice);
KVXFER_AT(Copy2D, src_array, CUDA_MEMCPY2D, srcArray);
KVXFER_AT(Copy2D, src_pitch, CUDA_MEMCPY2D, srcPitch);
KVXFER_AT(Copy2D, dst_x_nbytes, CUDA_MEMCPY2D, dstXInBytes);
KVXFER_AT(Copy2D, dst_y, CUDA_MEMCPY2D, dstY);
KVXFER_AT(Copy2D, dst_type, CUDA_MEMCPY2D, dstMemoryType);
KVXFER_AT(Copy2D, dst_host, CUDA_MEMCPY2D, dstHost);
KVXFER_AT(Copy2D, dst, CUDA_MEMCPY2D, dstDevice);
KVXFER_AT(Copy2D, dst_array, CUDA_MEMCPY2D, dstArray);
KVXFER_AT(Copy2D, dst_pitch, CUDA_MEMCPY2D, dstPitch);
KVXFER_AT(Copy2D, width_nbytes, CUDA_MEMCPY2D, WidthInBytes);
KVXFER_AT(Copy2D, height, CUDA_MEMCPY2D, Height);
static_assert(Copy2D().src_type == CU_MEMORYTYPE_UNIFIED && Copy2D().dst_type == CU_MEMORYTYPE_UNIFIED);

// ---- numbers ----

static_assert(kPosixFdHandle == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kFabricHandle == CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(kReadAccess == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(kWriteAccess == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCapturedEvent == CUDA_ERROR_CAPTURED_EVENT);
static_assert(kRelaxedCaptures == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kRecommendedGranularity == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(kNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kPortable == CU_MEMHOSTALLOC_PORTABLE && kDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(kWaitForMore == CU_STREAM_WAIT_VALUE_GEQ);
static_assert(kFlushRemoteWrites == CU_STREAM_WAIT_VALUE_FLUSH);
static_assert(kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kCanFlushRemoteWrites == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES);
static_assert(kPciBus == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID && kPciDevice == CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID &&
              kPciDomain == CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
static_assert(kFlushOptions == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS &&
              kFlushByHost == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
static_assert(kWritesOrdering == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING &&
              kSeenByOwner == CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER &&
              kSeenByOwner == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
static_assert(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX == 0);
static_assert(kDmabufSupported == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
static_assert(kDmabufHandle == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);
static_assert(kMaxDynamicSharedNbytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(CU_STREAM_WRITE_VALUE_DEFAULT == 0 && CU_STREAM_CAPTURE_STATUS_NONE == 0);
static_assert(CUDA_SUCCESS == 0 && CU_GET_PROC_ADDRESS_DEFAULT == 0);

}  // namespace
}  // namespace kvxfer::gpu
