// The suite of conformance.h over cuda_ipc, on a driver whose device is this process (emulated_driver.h).
#include "conformance.h"
#include "emulated_driver.h"
#include "gpu_memory.h"
#include "ipc_ends.h"

namespace kvxfer {
namespace {

using conformance::Subject;

std::byte* allocate_pages(std::size_t nbytes) {
  return reinterpret_cast<std::byte*>(emulated::allocate_pages(nbytes, gpu::kPosixFdHandle));
}

Subject by_ipc_handle() {
  return {"cuda_ipc", ipc_ends::make,       conformance::unix_sockets, false,
          {},         gpu_memory::allocate, gpu_memory::release};
}
Subject by_descriptor() {
  return {"cuda_ipc of mapped pages", ipc_ends::make, conformance::unix_sockets, false, {}, allocate_pages,
          gpu_memory::release};
}
Subject faulty() { return conformance::with_faults(by_descriptor()); }

CONFORMANCE(by_descriptor)
CONFORMANCE_PROMISE(by_ipc_handle, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(by_ipc_handle, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(faulty, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(faulty, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(faulty, a_disconnect_is_complete_with_its_completions)

}  // namespace
}  // namespace kvxfer
