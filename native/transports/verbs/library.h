// libibverbs, opened at run time, so that one build serves machines with and without it. A table of
// functions: tests put a device of their own (tests/native/counting_device.h) behind the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvxfer/status.h"
#include "transports/verbs/abi.h"
#include "transports/verbs/gids.h"

namespace kvxfer::verbs {

// Functions of libibverbs, under the names that it exports. Those that return int return 0 or an errno.
struct Library {
  abi::Device** (*get_device_list)(int* num_devices);
  void (*free_device_list)(abi::Device** list);
  const char* (*get_device_name)(abi::Device* device);
  abi::Context* (*open_device)(abi::Device* device);
  int (*close_device)(abi::Context* context);
  int (*query_device)(abi::Context* context, abi::DeviceAttributes* attributes);
  int (*query_port)(abi::Context* context, std::uint8_t port, abi::PortAttributes* attributes);
  int (*query_gid)(abi::Context* context, std::uint8_t port, int index, abi::Gid* gid);
  abi::ProtectionDomain* (*alloc_pd)(abi::Context* context);
  int (*dealloc_pd)(abi::ProtectionDomain* domain);
  abi::MemoryRegion* (*reg_mr)(abi::ProtectionDomain* domain, void* address, std::size_t nbytes, int access);
  // Also takes optional access; null in older libraries (rdma-core before 28).
  abi::MemoryRegion* (*reg_mr_iova2)(abi::ProtectionDomain* domain, void* address, std::size_t nbytes,
                                     std::uint64_t iova, unsigned access);
  // Takes memory by a descriptor, for instance a GPU's; null before rdma-core 34.
  abi::MemoryRegion* (*reg_dmabuf_mr)(abi::ProtectionDomain* domain, std::uint64_t offset, std::size_t nbytes,
                                      std::uint64_t iova, int fd, int access);
  int (*dereg_mr)(abi::MemoryRegion* region);
  abi::CompletionChannel* (*create_comp_channel)(abi::Context* context);
  int (*destroy_comp_channel)(abi::CompletionChannel* channel);
  abi::CompletionQueue* (*create_cq)(abi::Context* context, int num_entries, void* cq_context,
                                     abi::CompletionChannel* channel, int vector);
  int (*destroy_cq)(abi::CompletionQueue* cq);
  int (*get_cq_event)(abi::CompletionChannel* channel, abi::CompletionQueue** cq, void** cq_context);
  void (*ack_cq_events)(abi::CompletionQueue* cq, unsigned num);
  abi::QueuePair* (*create_qp)(abi::ProtectionDomain* domain, abi::QueuePairInit* init);
  int (*modify_qp)(abi::QueuePair* pair, abi::QueuePairAttributes* attributes, int mask);
  int (*destroy_qp)(abi::QueuePair* pair);
  int (*get_async_event)(abi::Context* context, abi::AsyncEvent* event);
  void (*ack_async_event)(abi::AsyncEvent* event);
  const char* (*wc_status_str)(abi::WorkStatus status);
  const char* (*event_type_str)(abi::EventKind kind);
  // Read from sysfs, because only new releases of libibverbs report it.
  GidType (*gid_type)(const char* device, std::uint8_t port, int index);

  // The library of this process, opened once. kUnsupported: the message says why there is none.
  static Result<const Library*> load();
  // For tests: load() returns this from now on; null: libibverbs again.
  static void replace(const Library* other) noexcept;

  // "" if there is a device. Else says that there is none, or why that cannot be found out, and what to do.
  static std::string why_off();
};

}  // namespace kvxfer::verbs
