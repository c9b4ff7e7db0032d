// native/transports/verbs/abi.h beside libibverbs' own header, where that is installed (Debian's libibverbs-dev).
#include "transports/verbs/abi.h"

#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

#include "check.h"

namespace {

namespace abi = kvxfer::verbs::abi;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(abi::ours) == sizeof(theirs))
#define SAME_PLACE(ours, member, theirs, their_member)                           \
  static_assert(offsetof(abi::ours, member) == offsetof(theirs, their_member) && \
                sizeof(abi::ours::member) == sizeof(theirs::their_member))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<int>(abi::ours) == static_cast<int>(theirs))

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(DeviceAttributes, ibv_device_attr);
SAME_PLACE(DeviceAttributes, max_mr_size, ibv_device_attr, max_mr_size);
SAME_PLACE(DeviceAttributes, max_qp_wr, ibv_device_attr, max_qp_wr);
SAME_PLACE(DeviceAttributes, max_sge, ibv_device_attr, max_sge);
SAME_PLACE(DeviceAttributes, max_sge_rd, ibv_device_attr, max_sge_rd);
SAME_PLACE(DeviceAttributes, max_cqe, ibv_device_attr, max_cqe);
SAME_PLACE(DeviceAttributes, max_qp_rd_atom, ibv_device_attr, max_qp_rd_atom);
SAME_PLACE(DeviceAttributes, max_qp_init_rd_atom, ibv_device_attr, max_qp_init_rd_atom);
SAME_PLACE(DeviceAttributes, phys_port_cnt, ibv_device_attr, phys_port_cnt);

SAME_SIZE(PortAttributes, ibv_port_attr);
SAME_PLACE(PortAttributes, state, ibv_port_attr, state);
SAME_PLACE(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME_PLACE(PortAttributes, gid_tbl_len, ibv_port_attr, gid_tbl_len);
SAME_PLACE(PortAttributes, max_msg_sz, ibv_port_attr, max_msg_sz);
SAME_PLACE(PortAttributes, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttributes, link_layer, ibv_port_attr, link_layer);
SAME_PLACE(PortAttributes, port_cap_flags2, ibv_port_attr, port_cap_flags2);

SAME_SIZE(ProtectionDomain, ibv_pd);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME_PLACE(MemoryRegion, address, ibv_mr, addr);
SAME_PLACE(MemoryRegion, length, ibv_mr, length);
SAME_PLACE(MemoryRegion, lkey, ibv_mr, lkey);
SAME_PLACE(MemoryRegion, rkey, ibv_mr, rkey);
SAME_PLACE(CompletionChannel, fd, ibv_comp_channel, fd);

SAME_PLACE(CompletionQueue, context, ibv_cq, context);
SAME_PLACE(CompletionQueue, channel, ibv_cq, channel);
SAME_PLACE(CompletionQueue, cq_context, ibv_cq, cq_context);
SAME_PLACE(CompletionQueue, cqe, ibv_cq, cqe);

SAME_PLACE(QueuePair, context, ibv_qp, context);
SAME_PLACE(QueuePair, send_cq, ibv_qp, send_cq);
SAME_PLACE(QueuePair, qp_num, ibv_qp, qp_num);
SAME_PLACE(QueuePair, state, ibv_qp, state);
SAME_PLACE(QueuePair, qp_type, ibv_qp, qp_type);
SAME_SIZE(QueuePairCapacity, ibv_qp_cap);
SAME_PLACE(QueuePairCapacity, max_send_sge, ibv_qp_cap, max_send_sge);
SAME_SIZE(QueuePairInit, ibv_qp_init_attr);
SAME_PLACE(QueuePairInit, send_cq, ibv_qp_init_attr, send_cq);
SAME_PLACE(QueuePairInit, capacity, ibv_qp_init_attr, cap);
SAME_PLACE(QueuePairInit, qp_type, ibv_qp_init_attr, qp_type);
SAME_PLACE(QueuePairInit, sq_sig_all, ibv_qp_init_attr, sq_sig_all);

SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_PLACE(GlobalRoute, sgid_index, ibv_global_route, sgid_index);
SAME_PLACE(GlobalRoute, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(AddressHandle, ibv_ah_attr);
SAME_PLACE(AddressHandle, dlid, ibv_ah_attr, dlid);
SAME_PLACE(AddressHandle, service_level, ibv_ah_attr, sl);
SAME_PLACE(AddressHandle, static_rate, ibv_ah_attr, static_rate);
SAME_PLACE(AddressHandle, is_global, ibv_ah_attr, is_global);
SAME_PLACE(AddressHandle, port_num, ibv_ah_attr, port_num);

SAME_SIZE(QueuePairAttributes, ibv_qp_attr);
SAME_PLACE(QueuePairAttributes, qp_state, ibv_qp_attr, qp_state);
SAME_PLACE(QueuePairAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME_PLACE(QueuePairAttributes, rq_psn, ibv_qp_attr, rq_psn);
SAME_PLACE(QueuePairAttributes, sq_psn, ibv_qp_attr, sq_psn);
SAME_PLACE(QueuePairAttributes, dest_qp_num, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QueuePairAttributes, qp_access_flags, ibv_qp_attr, qp_access_flags);
SAME_PLACE(QueuePairAttributes, address, ibv_qp_attr, ah_attr);
SAME_PLACE(QueuePairAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME_PLACE(QueuePairAttributes, max_rd_atomic, ibv_qp_attr, max_rd_atomic);
SAME_PLACE(QueuePairAttributes, max_dest_rd_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME_PLACE(QueuePairAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(QueuePairAttributes, port_num, ibv_qp_attr, port_num);
SAME_PLACE(QueuePairAttributes, timeout, ibv_qp_attr, timeout);
SAME_PLACE(QueuePairAttributes, retry_cnt, ibv_qp_attr, retry_cnt);
SAME_PLACE(QueuePairAttributes, rnr_retry, ibv_qp_attr, rnr_retry);

SAME_SIZE(ScatterEntry, ibv_sge);
SAME_PLACE(ScatterEntry, length, ibv_sge, length);
SAME_PLACE(ScatterEntry, lkey, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACE(SendRequest, next, ibv_send_wr, next);
SAME_PLACE(SendRequest, entries, ibv_send_wr, sg_list);
SAME_PLACE(SendRequest, num_entries, ibv_send_wr, num_sge);
SAME_PLACE(SendRequest, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendRequest, flags, ibv_send_wr, send_flags);
SAME_PLACE(SendRequest, remote, ibv_send_wr, wr);
SAME_PLACE(SendRequest, remote.rdma.address, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendRequest, remote.rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(WorkCompletion, ibv_wc);
SAME_PLACE(WorkCompletion, id, ibv_wc, wr_id);
SAME_PLACE(WorkCompletion, status, ibv_wc, status);
SAME_PLACE(WorkCompletion, vendor_error, ibv_wc, vendor_err);
SAME_PLACE(WorkCompletion, qp_num, ibv_wc, qp_num);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_PLACE(AsyncEvent, kind, ibv_async_event, event_type);
SAME_SIZE(ContextOperations, ibv_context_ops);
SAME_PLACE(ContextOperations, poll_cq, ibv_context_ops, poll_cq);
SAME_PLACE(ContextOperations, req_notify_cq, ibv_context_ops, req_notify_cq);
SAME_PLACE(ContextOperations, post_send, ibv_context_ops, post_send);
SAME_PLACE(ContextOperations, post_recv, ibv_context_ops, post_recv);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME_PLACE(ReceiveRequest, next, ibv_recv_wr, next);
SAME_PLACE(ReceiveRequest, entries, ibv_recv_wr, sg_list);
SAME_PLACE(ReceiveRequest, num_entries, ibv_recv_wr, num_sge);
SAME_PLACE(SendRequest, immediate, ibv_send_wr, imm_data);
SAME_PLACE(WorkCompletion, immediate, ibv_wc, imm_data);
SAME_VALUE(kRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kRdmaWriteWithImmediate, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kReceivedWithImmediate, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_PLACE(Context, operations, ibv_context, ops);
SAME_PLACE(Context, async_fd, ibv_context, async_fd);

SAME_VALUE(PortState::kActive, IBV_PORT_ACTIVE);
SAME_VALUE(LinkLayer::kInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(LinkLayer::kEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(Mtu::k256, IBV_MTU_256);
SAME_VALUE(Mtu::k4096, IBV_MTU_4096);
SAME_VALUE(Rate::kPort, IBV_RATE_MAX);
SAME_VALUE(Rate::k2_5, IBV_RATE_2_5_GBPS);
SAME_VALUE(Rate::k5, IBV_RATE_5_GBPS);
SAME_VALUE(Rate::k10, IBV_RATE_10_GBPS);
SAME_VALUE(Rate::k14, IBV_RATE_14_GBPS);
SAME_VALUE(Rate::k20, IBV_RATE_20_GBPS);
SAME_VALUE(Rate::k25, IBV_RATE_25_GBPS);
SAME_VALUE(Rate::k28, IBV_RATE_28_GBPS);
SAME_VALUE(Rate::k30, IBV_RATE_30_GBPS);
SAME_VALUE(Rate::k40, IBV_RATE_40_GBPS);
SAME_VALUE(Rate::k50, IBV_RATE_50_GBPS);
SAME_VALUE(Rate::k56, IBV_RATE_56_GBPS);
SAME_VALUE(Rate::k60, IBV_RATE_60_GBPS);
SAME_VALUE(Rate::k80, IBV_RATE_80_GBPS);
SAME_VALUE(Rate::k100, IBV_RATE_100_GBPS);
SAME_VALUE(Rate::k112, IBV_RATE_112_GBPS);
SAME_VALUE(Rate::k120, IBV_RATE_120_GBPS);
SAME_VALUE(Rate::k168, IBV_RATE_168_GBPS);
SAME_VALUE(Rate::k200, IBV_RATE_200_GBPS);
SAME_VALUE(Rate::k300, IBV_RATE_300_GBPS);
SAME_VALUE(Rate::k400, IBV_RATE_400_GBPS);
SAME_VALUE(Rate::k600, IBV_RATE_600_GBPS);
SAME_VALUE(Rate::k800, IBV_RATE_800_GBPS);
SAME_VALUE(Rate::k1200, IBV_RATE_1200_GBPS);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kRemoteRead, IBV_ACCESS_REMOTE_READ);
SAME_VALUE(kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
SAME_VALUE(QueuePairState::kReset, IBV_QPS_RESET);
SAME_VALUE(QueuePairState::kInit, IBV_QPS_INIT);
SAME_VALUE(QueuePairState::kReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(QueuePairState::kReadyToSend, IBV_QPS_RTS);
SAME_VALUE(QueuePairState::kError, IBV_QPS_ERR);
SAME_VALUE(kReliableConnection, IBV_QPT_RC);
SAME_VALUE(kMaskState, IBV_QP_STATE);
SAME_VALUE(kMaskAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kMaskPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kMaskPort, IBV_QP_PORT);
SAME_VALUE(kMaskAddress, IBV_QP_AV);
SAME_VALUE(kMaskPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kMaskTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kMaskRetries, IBV_QP_RETRY_CNT);
SAME_VALUE(kMaskRnrRetries, IBV_QP_RNR_RETRY);
SAME_VALUE(kMaskRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kMaskMaxReads, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kMaskMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kMaskSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kMaskMaxDestReads, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kMaskDestQpn, IBV_QP_DEST_QPN);
SAME_VALUE(kRdmaRead, IBV_WR_RDMA_READ);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(WorkStatus::kLocalLength, IBV_WC_LOC_LEN_ERR);
SAME_VALUE(WorkStatus::kLocalOperation, IBV_WC_LOC_QP_OP_ERR);
SAME_VALUE(WorkStatus::kLocalProtection, IBV_WC_LOC_PROT_ERR);
SAME_VALUE(WorkStatus::kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(WorkStatus::kBadResponse, IBV_WC_BAD_RESP_ERR);
SAME_VALUE(WorkStatus::kLocalAccess, IBV_WC_LOC_ACCESS_ERR);
SAME_VALUE(WorkStatus::kRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR);
SAME_VALUE(WorkStatus::kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(WorkStatus::kRemoteOperation, IBV_WC_REM_OP_ERR);
SAME_VALUE(WorkStatus::kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(WorkStatus::kRnrRetriesExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(WorkStatus::kRemoteInvalidRead, IBV_WC_REM_INV_RD_REQ_ERR);
SAME_VALUE(WorkStatus::kRemoteAbort, IBV_WC_REM_ABORT_ERR);
SAME_VALUE(WorkStatus::kFatal, IBV_WC_FATAL_ERR);
SAME_VALUE(WorkStatus::kResponseTimeout, IBV_WC_RESP_TIMEOUT_ERR);
SAME_VALUE(WorkStatus::kGeneral, IBV_WC_GENERAL_ERR);
SAME_VALUE(EventKind::kCqError, IBV_EVENT_CQ_ERR);
SAME_VALUE(EventKind::kQpFatal, IBV_EVENT_QP_FATAL);
SAME_VALUE(EventKind::kQpRequestError, IBV_EVENT_QP_REQ_ERR);
SAME_VALUE(EventKind::kQpAccessError, IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(EventKind::kDeviceFatal, IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(EventKind::kPortActive, IBV_EVENT_PORT_ACTIVE);
SAME_VALUE(EventKind::kPortError, IBV_EVENT_PORT_ERR);
SAME_VALUE(EventKind::kLidChange, IBV_EVENT_LID_CHANGE);
SAME_VALUE(EventKind::kPkeyChange, IBV_EVENT_PKEY_CHANGE);
SAME_VALUE(EventKind::kGidChange, IBV_EVENT_GID_CHANGE);

TEST(what_is_declared_here_lies_where_the_library_has_it) {}  // asserted above, by the compiler

}  // namespace

#else

#include "check.h"

SKIP_FILE_FOR([] { return std::string("infiniband/verbs.h is not installed (Debian's libibverbs-dev)"); });

#endif
