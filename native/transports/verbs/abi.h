// The part of libibverbs' binary interface that this transport uses, declared under our own names, so that a
// build needs nothing of libibverbs. It has been stable since the symbols of version IBVERBS_1.1;
// tests/native/test_verbs_abi.cpp compares it with the library's own header where that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::verbs::abi {

struct Device;  // struct ibv_device
struct Context;
struct CompletionQueue;
struct QueuePair;

union Gid {
  std::uint8_t raw[16];
  struct {
    std::uint64_t subnet_prefix, interface_id;  // big-endian
  } global;
};

enum class PortState : int { kActive = 4 };
enum class LinkLayer : std::uint8_t { kUnspecified = 0, kInfiniBand = 1, kEthernet = 2 };
enum class Mtu : int { k256 = 1, k512, k1024, k2048, k4096 };

enum class Rate : std::uint8_t {  // ibv_rate, of Gb/s; the device takes the nearest that it has
  kPort = 0,  // IBV_RATE_MAX
  k2_5 = 2,
  k5 = 5,
  k10 = 3,
  k14 = 11,
  k20 = 6,
  k25 = 15,
  k28 = 19,
  k30 = 4,
  k40 = 7,
  k50 = 20,
  k56 = 12,
  k60 = 8,
  k80 = 9,
  k100 = 16,
  k112 = 13,
  k120 = 10,
  k168 = 14,
  k200 = 17,
  k300 = 18,
  k400 = 21,
  k600 = 22,
  k800 = 23,
  k1200 = 24,
};

struct DeviceAttributes {  // ibv_device_attr
  char fw_ver[64];
  std::uint64_t node_guid, sys_image_guid;
  std::uint64_t max_mr_size, page_size_cap;
  std::uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd;
  int max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  int atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp;
  int max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
  int max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  std::uint16_t max_pkeys;
  std::uint8_t local_ca_ack_delay, phys_port_cnt;
};

// ibv_port_attr. The exported ibv_query_port fills only its beginning, up to port_cap_flags2; the caller
// zeroes it first.
struct PortAttributes {
  PortState state;
  Mtu max_mtu, active_mtu;
  int gid_tbl_len;
  std::uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  std::uint16_t pkey_tbl_len, lid, sm_lid;
  std::uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed,
      phys_state;
  LinkLayer link_layer;
  std::uint8_t flags;
  std::uint16_t port_cap_flags2;
};

struct ProtectionDomain {  // ibv_pd
  Context* context;
  std::uint32_t handle;
};

enum Access : unsigned {
  kLocalWrite = 1,
  kRemoteWrite = 1 << 1,
  kRemoteRead = 1 << 2,
  kRelaxedOrdering = 1 << 20,  // optional: ibv_reg_mr_iova2 drops it where the device does not take it
};

struct MemoryRegion {  // ibv_mr
  Context* context;
  ProtectionDomain* domain;
  void* address;
  std::size_t length;
  std::uint32_t handle, lkey, rkey;
};

struct CompletionChannel {  // ibv_comp_channel
  Context* context;
  int fd;
  int refcnt;
};

struct CompletionQueue {  // ibv_cq, as far as it is read
  Context* context;
  CompletionChannel* channel;
  void* cq_context;
  std::uint32_t handle;
  int cqe;
};

enum class QueuePairState : int {
  kReset = 0,
  kInit,
  kReadyToReceive,
  kReadyToSend,
  kSqDrained,
  kSqError,
  kError
};
inline constexpr int kReliableConnection = 2;  // IBV_QPT_RC

struct QueuePair {  // ibv_qp, as far as it is read
  Context* context;
  void* qp_context;
  ProtectionDomain* domain;
  CompletionQueue *send_cq, *recv_cq;
  void* srq;
  std::uint32_t handle, qp_num;
  QueuePairState state;
  int qp_type;
};

struct QueuePairCapacity {  // ibv_qp_cap
  std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct QueuePairInit {  // ibv_qp_init_attr
  void* qp_context;
  CompletionQueue *send_cq, *recv_cq;
  void* srq;
  QueuePairCapacity capacity;
  int qp_type;
  int sq_sig_all;
};

struct GlobalRoute {  // ibv_global_route
  Gid dgid;
  std::uint32_t flow_label;
  std::uint8_t sgid_index, hop_limit, traffic_class;
};

struct AddressHandle {  // ibv_ah_attr
  GlobalRoute grh;
  std::uint16_t dlid;
  std::uint8_t service_level, src_path_bits, static_rate, is_global, port_num;
};

struct QueuePairAttributes {  // ibv_qp_attr
  QueuePairState qp_state, cur_qp_state;
  Mtu path_mtu;
  int path_mig_state;
  std::uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  QueuePairCapacity capacity;
  AddressHandle address, alternate_address;
  std::uint16_t pkey_index, alt_pkey_index;
  std::uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
      timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  std::uint32_t rate_limit;
};

enum QueuePairMask : int {  // ibv_qp_attr_mask
  kMaskState = 1 << 0,
  kMaskAccess = 1 << 3,
  kMaskPkeyIndex = 1 << 4,
  kMaskPort = 1 << 5,
  kMaskAddress = 1 << 7,
  kMaskPathMtu = 1 << 8,
  kMaskTimeout = 1 << 9,
  kMaskRetries = 1 << 10,
  kMaskRnrRetries = 1 << 11,
  kMaskRqPsn = 1 << 12,
  kMaskMaxReads = 1 << 13,
  kMaskMinRnrTimer = 1 << 15,
  kMaskSqPsn = 1 << 16,
  kMaskMaxDestReads = 1 << 17,
  kMaskDestQpn = 1 << 20,
};

struct ScatterEntry {  // ibv_sge
  std::uint64_t address;
  std::uint32_t length, lkey;
};

inline constexpr int kRdmaWrite = 0, kRdmaWriteWithImmediate = 1, kRdmaRead = 4;  // IBV_WR_RDMA_...
inline constexpr int kReceivedWithImmediate = 129;  // IBV_WC_RECV_RDMA_WITH_IMM, of completions
inline constexpr unsigned kSignaled = 1 << 1;  // IBV_SEND_SIGNALED

struct SendRequest {  // ibv_send_wr
  std::uint64_t id;
  SendRequest* next;
  ScatterEntry* entries;
  int num_entries;
  int opcode;
  unsigned flags;
  std::uint32_t immediate;
  union {
    struct {
      std::uint64_t address;
      std::uint32_t rkey;
    } rdma;
    std::uint64_t largest[4];
  } remote;
  std::uint64_t others[7];  // of other kinds of requests
};

struct ReceiveRequest {  // ibv_recv_wr
  std::uint64_t id;
  ReceiveRequest* next;
  ScatterEntry* entries;
  int num_entries;
};

enum class WorkStatus : int {  // ibv_wc_status
  kSuccess = 0,
  kLocalLength = 1,
  kLocalOperation = 2,
  kLocalProtection = 4,
  kFlushed = 5,
  kBadResponse = 7,
  kLocalAccess = 8,
  kRemoteInvalidRequest = 9,
  kRemoteAccess = 10,
  kRemoteOperation = 11,
  kRetriesExceeded = 12,
  kRnrRetriesExceeded = 13,
  kRemoteInvalidRead = 15,
  kRemoteAbort = 16,
  kFatal = 19,
  kResponseTimeout = 20,
  kGeneral = 21,
};

struct WorkCompletion {  // ibv_wc; on error only id, status, qp_num and vendor_error are valid
  std::uint64_t id;
  WorkStatus status;
  int opcode;
  std::uint32_t vendor_error, byte_len, immediate, qp_num, src_qp;
  unsigned flags;
  std::uint16_t pkey_index, slid;
  std::uint8_t service_level, dlid_path_bits;
};

enum class EventKind : int {  // ibv_event_type
  kCqError = 0,
  kQpFatal = 1,
  kQpRequestError = 2,
  kQpAccessError = 3,
  kDeviceFatal = 8,
  kPortActive = 9,
  kPortError = 10,
  kLidChange = 11,
  kPkeyChange = 12,
  kGidChange = 18,
};

struct AsyncEvent {  // ibv_async_event
  union {
    CompletionQueue* cq;
    QueuePair* qp;
    void* other;
    int port_num;
  } element;
  EventKind kind;
};

// ibv_context_ops: functions that are called through the context, and are no symbols of the library.
struct ContextOperations {
  void* before_poll_cq[11];
  int (*poll_cq)(CompletionQueue* cq, int num_entries, WorkCompletion* completions);
  int (*req_notify_cq)(CompletionQueue* cq, int solicited_only);
  void* before_post_send[12];
  int (*post_send)(QueuePair* qp, SendRequest* requests, SendRequest** refused);
  int (*post_recv)(QueuePair* qp, ReceiveRequest* requests, ReceiveRequest** refused);
  void* after_post_recv[5];
};

struct Context {  // ibv_context, as far as it is read
  Device* device;
  ContextOperations operations;
  int cmd_fd, async_fd, num_comp_vectors;
};

}  // namespace kvxfer::verbs::abi
