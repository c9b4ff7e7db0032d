// The part of libfabric's C interface that we use (rdma/fabric.h and other headers, releases from 1.17 on),
// declared here so that one build serves machines with and without libfabric.
// tests/native/test_libfabric_abi.cpp compares it with the real headers.
//
// Most functions are no symbols of a library: they are pointers in the tables of its objects. A table or
// structure is declared up to its last member that we use; later releases append to both.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kvxfer::libfabric::abi {

constexpr std::uint32_t version(std::uint32_t major, std::uint32_t minor) { return major << 16 | minor; }
inline constexpr std::uint32_t kApi = version(1, 17);

using PeerAddress = std::uint64_t;  // fi_addr_t

inline constexpr std::uint64_t kRma = 1 << 2, kRead = 1 << 8, kWrite = 1 << 9, kReceive = 1 << 10,
                               kTransmit = 1 << 11, kRemoteRead = 1 << 12, kRemoteWrite = 1 << 13,
                               kMore = 1 << 18, kDelivered = 1 << 28, kGpuMemory = std::uint64_t{1} << 47;
inline constexpr std::uint64_t kContext = std::uint64_t{1} << 59, kContext2 = std::uint64_t{1} << 52;
inline constexpr int kKeysLocal = 1 << 2, kKeysVirtual = 1 << 4, kKeysAllocated = 1 << 5,
                     kKeysProvided = 1 << 6, kKeysOfEndpoint = 1 << 9, kKeysGpu = 1 << 10;
inline constexpr int kReliableDatagrams = 3;  // enum fi_ep_type
inline constexpr int kThreadSafe = 1;
inline constexpr int kProgressManual = 2;
inline constexpr int kTable = 2;  // enum fi_av_type
inline constexpr int kFormatContext = 1;
inline constexpr int kWaitNone = 0, kWaitSet = 2, kWaitDescriptor = 3;
inline constexpr int kHostMemory = 0, kCudaMemory = 1;
inline constexpr std::uint32_t kSocketAddress = 1, kSocketAddressIpv4 = 2, kSocketAddressIpv6 = 3;
inline constexpr int kAvailableLater = 259;  // FI_EAVAIL: an error can be read
// fi_control's commands.
inline constexpr int kGetWait = 5, kEnable = 6;

struct Object;
struct ObjectOps {
  std::size_t size;
  int (*close)(Object* object);
  int (*bind)(Object* object, Object* other, std::uint64_t flags);
  int (*control)(Object* object, int command, void* argument);
};
struct Object {
  std::size_t kind;
  void* context;
  ObjectOps* ops;
};

struct Domain;
struct Endpoint;
struct Queue;
struct AddressTable;
struct MemoryRegion;
struct Info;

struct WaitParams {
  int wait_object = 0;
  std::uint64_t flags = 0;
};
struct WaitSet;
struct WaitOps {
  std::size_t size;
  int (*wait)(WaitSet* set, int timeout_ms);
};
struct WaitSet {
  Object object;
  WaitOps* ops;
};

struct FabricOps {
  std::size_t size;
  int (*domain)(struct Fabric* fabric, Info* info, Domain** made, void* context);
  void (*passive_endpoint)();
  void (*event_queue)();
  int (*wait_set)(struct Fabric* fabric, WaitParams* params, WaitSet** made);
  int (*try_wait)(struct Fabric* fabric, Object** objects, int count);
};
struct Fabric {
  Object object;
  FabricOps* ops;
  std::uint32_t api;
};

struct AddressTableParams {
  int type = 0;
  int num_receive_bits = 0;
  std::size_t count = 0, per_node = 0;
  const char* name = nullptr;
  void* address = nullptr;
  std::uint64_t flags = 0;
};
struct AddressTableOps {
  std::size_t size;
  int (*insert)(AddressTable* table, const void* address, std::size_t count, PeerAddress* made,
                std::uint64_t flags, void* context);
};
struct AddressTable {
  Object object;
  AddressTableOps* ops;
};

struct QueueParams {
  std::size_t size = 0;
  std::uint64_t flags = 0;
  int format = 0, wait_object = 0, signalled_cpu = 0, wait_condition = 0;
  WaitSet* wait_set = nullptr;
};
struct QueueEntry { void* context; };
struct QueueError {
  void* context;
  std::uint64_t flags;
  std::size_t nbytes;
  void* buffer;
  std::uint64_t data, tag;
  std::size_t overflow_nbytes;
  int error, provider_error;
  void* error_data;
  std::size_t error_data_nbytes;
};
struct QueueOps {
  std::size_t size;
  ssize_t (*read)(Queue* queue, void* entries, std::size_t count);
  void (*read_from)();
  ssize_t (*read_error)(Queue* queue, QueueError* error, std::uint64_t flags);
  void (*wait)();
  void (*wait_from)();
  void (*signal)();
  const char* (*error_string)(Queue* queue, int provider_error, const void* data, char* buffer,
                              std::size_t nbytes);
};
struct Queue {
  Object object;
  QueueOps* ops;
};

struct RegionParams {
  const iovec* spans = nullptr;
  std::size_t num_spans = 0;
  std::uint64_t access = 0, offset = 0, key = 0;
  void* context = nullptr;
  std::size_t auth_nbytes = 0;
  std::uint8_t* auth = nullptr;
  int memory = kHostMemory;
  union {
    std::uint64_t reserved = 0;
    int cuda;
  } device;
};
struct RegionOps {
  std::size_t size;
  void (*reg)();
  void (*regv)();
  int (*reg_params)(Object* domain, const RegionParams* params, std::uint64_t flags, MemoryRegion** made);
};
struct MemoryRegion {
  Object object;
  void* descriptor;
  std::uint64_t key;
};

struct DomainOps {
  std::size_t size;
  int (*address_table)(Domain* domain, AddressTableParams* params, AddressTable** made, void* context);
  int (*queue)(Domain* domain, QueueParams* params, Queue** made, void* context);
  int (*endpoint)(Domain* domain, Info* info, Endpoint** made, void* context);
};
struct Domain {
  Object object;
  DomainOps* ops;
  RegionOps* regions;
};

struct RemoteSpan {
  std::uint64_t address;
  std::size_t nbytes;
  std::uint64_t key;
};
struct RemoteRequest {
  const iovec* spans = nullptr;
  void** descriptors = nullptr;
  std::size_t num_spans = 0;
  PeerAddress peer = 0;
  const RemoteSpan* remote = nullptr;
  std::size_t num_remote = 0;
  void* context = nullptr;
  std::uint64_t data = 0;
};
struct RemoteOps {
  std::size_t size;
  void (*read)();
  void (*read_spans)();
  ssize_t (*read_message)(Endpoint* endpoint, const RemoteRequest* read, std::uint64_t flags);
  void (*write)();
  void (*write_spans)();
  ssize_t (*write_message)(Endpoint* endpoint, const RemoteRequest* write, std::uint64_t flags);
};
struct NameOps {
  std::size_t size;
  void (*set_name)();
  int (*get_name)(Object* object, void* address, std::size_t* nbytes);
};
struct Endpoint {
  Object object;
  void* ops;
  NameOps* names;
  void* messages;
  RemoteOps* remote;
};

struct TransmitAttributes {
  std::uint64_t caps, mode, op_flags, message_order, completion_order;
  std::size_t inject_nbytes, size, num_spans, num_remote_spans;
};
struct ReceiveAttributes {
  std::uint64_t caps, mode, op_flags, message_order, completion_order;
  std::size_t buffered_nbytes, size;
};
struct EndpointAttributes {
  int type;
  std::uint32_t protocol, protocol_version;
  std::size_t most_nbytes;
};
struct DomainAttributes {
  Domain* domain;
  char* name;
  int threading, control_progress, data_progress, resource_management, address_table;
  int key_mode;
  std::size_t key_nbytes;
};
struct FabricAttributes {
  Fabric* fabric;
  char* name;
  char* provider;
  std::uint32_t provider_version, api;
};
struct Info {
  Info* next;
  std::uint64_t caps, mode;
  std::uint32_t address_format;
  std::size_t source_nbytes, destination_nbytes;
  void* source;
  void* destination;
  Object* handle;
  TransmitAttributes* transmit;
  ReceiveAttributes* receive;
  EndpointAttributes* endpoint;
  DomainAttributes* domain;
  FabricAttributes* fabric;
};

// Memory that a provider may use for a request that is under way (struct fi_context2).
struct Context { void* internal[8]; };

}  // namespace kvxfer::libfabric::abi
