// The suite of conformance.h over cuda_ipc, on a driver whose device is this process (emulated_driver.h).
#include "conformance.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "transports/cuda_ipc/cuda_ipc_transport.h"

namespace kvxfer {
namespace {

using conformance::Subject;

std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable& fences) {
  auto made = CudaIpcTransport::create(reactor, fences, emulated::driver(),
                                       {.device = 0, .kernels = emulated::fast_kernels(), .stream = {}});
  REQUIRE_OK(made);
  return std::move(made).value();
}

std::byte* allocate(std::size_t nbytes) {
  gpu::Address address = 0;
  REQUIRE_EQ(emulated::driver().memory_allocate(&address, nbytes), 0);
  return reinterpret_cast<std::byte*>(address);
}
std::byte* allocate_pages(std::size_t nbytes) {
  return reinterpret_cast<std::byte*>(emulated::allocate_pages(nbytes, gpu::kPosixFdHandle));
}
void release(std::byte* memory) { emulated::release(reinterpret_cast<gpu::Address>(memory)); }

Subject by_ipc_handle() {
  return {"cuda_ipc", make, conformance::unix_sockets, false, {}, allocate, release};
}
Subject by_descriptor() {
  return {"cuda_ipc of mapped pages", make, conformance::unix_sockets, false, {}, allocate_pages, release};
}
Subject faulty() {
  Subject subject = by_descriptor();
  const auto faults = Faults::parse("again=0.3,delay=0.3,reorder=0.5");
  REQUIRE_OK(faults);
  subject.name += " with faults";
  subject.faults = faults.value();
  return subject;
}

CONFORMANCE(by_descriptor)
CONFORMANCE_PROMISE(by_ipc_handle, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(by_ipc_handle, a_disconnect_is_complete_with_its_completions)
CONFORMANCE_PROMISE(faulty, every_byte_arrives_and_no_other_changes)
CONFORMANCE_PROMISE(faulty, a_cancel_is_complete_with_its_completion)
CONFORMANCE_PROMISE(faulty, a_disconnect_is_complete_with_its_completions)

}  // namespace
}  // namespace kvxfer
