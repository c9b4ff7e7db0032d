#include "gpu/driver.h"

#include <dlfcn.h>

namespace kvxfer::gpu {
namespace {

struct Loaded {
  Driver driver{};
  Status status;
};

Loaded load_library() {
  Loaded out;
  // Never closed: the driver runs its own threads.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    out.status = Status(Code::kUnsupported, std::string("no CUDA driver: ") +
                                                (why != nullptr ? why : "libcuda.so.1 cannot be opened"));
    return out;
  }
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr && out.status.ok())
      out.status =
          Status(Code::kUnsupported, std::string("this CUDA driver is too old: it has no ") + symbol);
  };
  Driver& driver = out.driver;
  find(driver.init, "cuInit");
  find(driver.error_name, "cuGetErrorName");
  find(driver.error_string, "cuGetErrorString");
  find(driver.device_get, "cuDeviceGet");
  find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(driver.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  find(driver.context_push, "cuCtxPushCurrent_v2");
  find(driver.context_pop, "cuCtxPopCurrent_v2");
  find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver.stream_create, "cuStreamCreateWithPriority");
  find(driver.stream_destroy, "cuStreamDestroy_v2");
  find(driver.stream_query, "cuStreamQuery");
  find(driver.stream_synchronize, "cuStreamSynchronize");
  find(driver.stream_wait_event, "cuStreamWaitEvent");
  find(driver.context_synchronize, "cuCtxSynchronize");
  find(driver.stream_write, "cuStreamWriteValue32_v2");
  find(driver.stream_wait, "cuStreamWaitValue32_v2");
  find(driver.device_attribute, "cuDeviceGetAttribute");
  find(driver.stream_is_capturing, "cuStreamIsCapturing");
  find(driver.stream_context, "cuStreamGetCtx");
  find(driver.context_device, "cuCtxGetDevice");
  find(driver.event_query, "cuEventQuery");
  find(driver.priority_range, "cuCtxGetStreamPriorityRange");
  find(driver.memory_allocate, "cuMemAlloc_v2");
  find(driver.memory_free, "cuMemFree_v2");
  find(driver.address_range, "cuMemGetAddressRange_v2");
  find(driver.ipc_export, "cuIpcGetMemHandle");
  find(driver.ipc_open, "cuIpcOpenMemHandle_v2");
  find(driver.ipc_close, "cuIpcCloseMemHandle");
  find(driver.allocation_create, "cuMemCreate");
  find(driver.allocation_granularity, "cuMemGetAllocationGranularity");
  find(driver.allocation_retain, "cuMemRetainAllocationHandle");
  find(driver.allocation_release, "cuMemRelease");
  find(driver.allocation_properties, "cuMemGetAllocationPropertiesFromHandle");
  find(driver.allocation_export, "cuMemExportToShareableHandle");
  find(driver.allocation_import, "cuMemImportFromShareableHandle");
  find(driver.address_reserve, "cuMemAddressReserve");
  find(driver.address_free, "cuMemAddressFree");
  find(driver.map, "cuMemMap");
  find(driver.unmap, "cuMemUnmap");
  find(driver.set_access, "cuMemSetAccess");
  find(driver.host_allocate, "cuMemHostAlloc");
  find(driver.host_free, "cuMemFreeHost");
  find(driver.host_to_device, "cuMemcpyHtoDAsync_v2");
  find(driver.copy_2d, "cuMemcpy2DAsync_v2");
  find(driver.memory_set, "cuMemsetD8Async");
  find(driver.function_set, "cuFuncSetAttribute");
  find(driver.launch, "cuLaunchKernel");
  if (!out.status.ok()) return out;
  // Functions that an older driver may lack, looked up by version: in CUDA 13 the same name is another
  // function.
  const auto find_version = reinterpret_cast<Driver::FindVersion>(dlsym(library, "cuGetProcAddress_v2"));
  const auto find_if_there = [&](auto& function, const char* symbol, int version) {
    void* found = nullptr;
    if (find_version == nullptr || find_version(symbol, &found, version, 0, nullptr) != 0) return;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find_if_there(driver.copy_batch, "cuMemcpyBatchAsync", 12080);
  find_if_there(driver.stream_write_64, "cuStreamWriteValue64", 11070);
  find_if_there(driver.range_handle, "cuMemGetHandleForAddressRange", 11070);
  find_if_there(driver.flush_remote_writes, "cuFlushGPUDirectRDMAWrites", 11030);
  if (const int error = driver.init(0); error != 0) {
    const Status status = driver.status(error, "cuInit");
    out.status = Status(Code::kUnsupported, "the CUDA driver does not start: " + status.message());
  }
  return out;
}

}  // namespace

Result<const Driver*> Driver::load() {
  static const Loaded loaded = load_library();
  if (!loaded.status.ok()) return loaded.status;
  return &loaded.driver;
}

Status Driver::status(int error, std::string_view what) const {
  if (error == 0) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  error_name(error, &name);
  error_string(error, &text);
  std::string message(what);
  message += ": ";
  message += name != nullptr ? name : "error " + std::to_string(error);
  if (text != nullptr) message.append(" (").append(text).append(")");
  return Status(Code::kSystem, std::move(message));
}

Result<PrimaryContext> PrimaryContext::retain(const Driver& driver, int device_index) {
  Device device = 0;
  if (const int error = driver.device_get(&device, device_index); error != 0)
    return driver.status(error, "cuDeviceGet of GPU " + std::to_string(device_index));
  Context context = nullptr;
  if (const int error = driver.primary_context_retain(&context, device); error != 0)
    return driver.status(error, "cuDevicePrimaryCtxRetain");
  return PrimaryContext(driver, device, context);
}

}  // namespace kvxfer::gpu
