#include "gpu/driver.h"

#include "kvxfer/opened_library.h"

namespace kvxfer::gpu {
namespace {

Result<Driver> load_library() {
  OpenedLibrary library({"libcuda.so.1"});
  if (!library.why().empty()) return Status(Code::kUnsupported, "no CUDA driver: " + library.why());
  Driver driver{};
  library.find(driver.init, "cuInit");
  library.find(driver.error_name, "cuGetErrorName");
  library.find(driver.error_string, "cuGetErrorString");
  library.find(driver.device_get, "cuDeviceGet");
  library.find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  library.find(driver.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  library.find(driver.context_push, "cuCtxPushCurrent_v2");
  library.find(driver.context_pop, "cuCtxPopCurrent_v2");
  library.find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  library.find(driver.stream_create, "cuStreamCreateWithPriority");
  library.find(driver.stream_destroy, "cuStreamDestroy_v2");
  library.find(driver.stream_query, "cuStreamQuery");
  library.find(driver.stream_synchronize, "cuStreamSynchronize");
  library.find(driver.stream_wait_event, "cuStreamWaitEvent");
  library.find(driver.context_synchronize, "cuCtxSynchronize");
  library.find(driver.stream_write, "cuStreamWriteValue32_v2");
  library.find(driver.stream_wait, "cuStreamWaitValue32_v2");
  library.find(driver.device_attribute, "cuDeviceGetAttribute");
  library.find(driver.stream_is_capturing, "cuStreamIsCapturing");
  library.find(driver.stream_context, "cuStreamGetCtx");
  library.find(driver.context_device, "cuCtxGetDevice");
  library.find(driver.event_query, "cuEventQuery");
  library.find(driver.priority_range, "cuCtxGetStreamPriorityRange");
  library.find(driver.memory_allocate, "cuMemAlloc_v2");
  library.find(driver.memory_free, "cuMemFree_v2");
  library.find(driver.address_range, "cuMemGetAddressRange_v2");
  library.find(driver.ipc_export, "cuIpcGetMemHandle");
  library.find(driver.ipc_open, "cuIpcOpenMemHandle_v2");
  library.find(driver.ipc_close, "cuIpcCloseMemHandle");
  library.find(driver.allocation_create, "cuMemCreate");
  library.find(driver.allocation_granularity, "cuMemGetAllocationGranularity");
  library.find(driver.allocation_retain, "cuMemRetainAllocationHandle");
  library.find(driver.allocation_release, "cuMemRelease");
  library.find(driver.allocation_properties, "cuMemGetAllocationPropertiesFromHandle");
  library.find(driver.allocation_export, "cuMemExportToShareableHandle");
  library.find(driver.allocation_import, "cuMemImportFromShareableHandle");
  library.find(driver.address_reserve, "cuMemAddressReserve");
  library.find(driver.address_free, "cuMemAddressFree");
  library.find(driver.map, "cuMemMap");
  library.find(driver.unmap, "cuMemUnmap");
  library.find(driver.set_access, "cuMemSetAccess");
  library.find(driver.host_allocate, "cuMemHostAlloc");
  library.find(driver.host_free, "cuMemFreeHost");
  library.find(driver.host_to_device, "cuMemcpyHtoDAsync_v2");
  library.find(driver.copy_2d, "cuMemcpy2DAsync_v2");
  library.find(driver.memory_set, "cuMemsetD8Async");
  library.find(driver.function_set, "cuFuncSetAttribute");
  library.find(driver.launch, "cuLaunchKernel");
  if (!library.lacks().empty())
    return Status(Code::kUnsupported, "this CUDA driver is too old: it has no " + library.lacks());
  // Functions that an older driver may lack, looked up by version: in CUDA 13 the same name is another
  // function.
  Driver::FindVersion find_version;
  library.find_if_there(find_version, "cuGetProcAddress_v2");
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
    return Status(Code::kUnsupported, "the CUDA driver does not start: " + status.message());
  }
  return driver;
}

}  // namespace

Result<const Driver*> Driver::load() {
  static const Result<Driver> loaded = load_library();
  if (!loaded.ok()) return loaded.status();
  return &loaded.value();
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
