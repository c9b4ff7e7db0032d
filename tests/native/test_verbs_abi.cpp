// native/transports/verbs/abi.h beside libibverbs' own header, where that is installed (Debian's libibverbs-dev).
#include "transports/verbs/abi.h"

#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

#include "abi_compare.h"
#include "check.h"

namespace {

namespace abi = kvxfer::verbs::abi;

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(DeviceAttributes, ibv_device_attr);
SAME_PLACES(DeviceAttributes, ibv_device_attr, (max_mr_size, max_mr_size), (max_qp_wr, max_qp_wr),
            (max_sge, max_sge), (max_sge_rd, max_sge_rd), (max_cqe, max_cqe),
            (max_qp_rd_atom, max_qp_rd_atom), (max_qp_init_rd_atom, max_qp_init_rd_atom),
            (phys_port_cnt, phys_port_cnt));

SAME_SIZE(PortAttributes, ibv_port_attr);
SAME_PLACES(PortAttributes, ibv_port_attr, (state, state), (active_mtu, active_mtu),
            (gid_tbl_len, gid_tbl_len), (max_msg_sz, max_msg_sz), (lid, lid), (link_layer, link_layer),
            (port_cap_flags2, port_cap_flags2));

SAME_SIZE(ProtectionDomain, ibv_pd);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME_PLACES(MemoryRegion, ibv_mr, (address, addr), (length, length), (lkey, lkey), (rkey, rkey));
SAME_PLACES(CompletionChannel, ibv_comp_channel, (fd, fd));

SAME_PLACES(CompletionQueue, ibv_cq, (context, context), (channel, channel), (cq_context, cq_context),
            (cqe, cqe));

SAME_PLACES(QueuePair, ibv_qp, (context, context), (send_cq, send_cq), (qp_num, qp_num), (state, state),
            (qp_type, qp_type));
SAME_SIZE(QueuePairCapacity, ibv_qp_cap);
SAME_PLACES(QueuePairCapacity, ibv_qp_cap, (max_send_sge, max_send_sge));
SAME_SIZE(QueuePairInit, ibv_qp_init_attr);
SAME_PLACES(QueuePairInit, ibv_qp_init_attr, (send_cq, send_cq), (capacity, cap), (qp_type, qp_type),
            (sq_sig_all, sq_sig_all));

SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_PLACES(GlobalRoute, ibv_global_route, (sgid_index, sgid_index), (traffic_class, traffic_class));
SAME_SIZE(AddressHandle, ibv_ah_attr);
SAME_PLACES(AddressHandle, ibv_ah_attr, (dlid, dlid), (service_level, sl), (static_rate, static_rate),
            (is_global, is_global), (port_num, port_num));

SAME_SIZE(QueuePairAttributes, ibv_qp_attr);
SAME_PLACES(QueuePairAttributes, ibv_qp_attr, (qp_state, qp_state), (path_mtu, path_mtu), (rq_psn, rq_psn),
            (sq_psn, sq_psn), (dest_qp_num, dest_qp_num), (qp_access_flags, qp_access_flags),
            (address, ah_attr), (pkey_index, pkey_index), (max_rd_atomic, max_rd_atomic),
            (max_dest_rd_atomic, max_dest_rd_atomic), (min_rnr_timer, min_rnr_timer), (port_num, port_num),
            (timeout, timeout), (retry_cnt, retry_cnt), (rnr_retry, rnr_retry));

SAME_SIZE(ScatterEntry, ibv_sge);
SAME_PLACES(ScatterEntry, ibv_sge, (length, length), (lkey, lkey));
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACES(SendRequest, ibv_send_wr, (next, next), (entries, sg_list), (num_entries, num_sge),
            (opcode, opcode), (flags, send_flags), (remote, wr), (remote.rdma.address, wr.rdma.remote_addr),
            (remote.rdma.rkey, wr.rdma.rkey));
SAME_SIZE(WorkCompletion, ibv_wc);
SAME_PLACES(WorkCompletion, ibv_wc, (id, wr_id), (status, status), (vendor_error, vendor_err),
            (qp_num, qp_num));
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_PLACES(AsyncEvent, ibv_async_event, (kind, event_type));
SAME_SIZE(ContextOperations, ibv_context_ops);
SAME_PLACES(ContextOperations, ibv_context_ops, (poll_cq, poll_cq), (req_notify_cq, req_notify_cq),
            (post_send, post_send), (post_recv, post_recv));
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME_PLACES(ReceiveRequest, ibv_recv_wr, (next, next), (entries, sg_list), (num_entries, num_sge));
SAME_PLACES(SendRequest, ibv_send_wr, (immediate, imm_data));
SAME_PLACES(WorkCompletion, ibv_wc, (immediate, imm_data));
SAME_VALUES((kRdmaWrite, IBV_WR_RDMA_WRITE), (kRdmaWriteWithImmediate, IBV_WR_RDMA_WRITE_WITH_IMM),
            (kReceivedWithImmediate, IBV_WC_RECV_RDMA_WITH_IMM));
SAME_PLACES(Context, ibv_context, (operations, ops), (async_fd, async_fd));

SAME_VALUES(
    (PortState::kActive, IBV_PORT_ACTIVE), (LinkLayer::kInfiniBand, IBV_LINK_LAYER_INFINIBAND),
    (LinkLayer::kEthernet, IBV_LINK_LAYER_ETHERNET), (Mtu::k256, IBV_MTU_256), (Mtu::k4096, IBV_MTU_4096),
    (Rate::kPort, IBV_RATE_MAX), (Rate::k2_5, IBV_RATE_2_5_GBPS), (Rate::k5, IBV_RATE_5_GBPS),
    (Rate::k10, IBV_RATE_10_GBPS), (Rate::k14, IBV_RATE_14_GBPS), (Rate::k20, IBV_RATE_20_GBPS),
    (Rate::k25, IBV_RATE_25_GBPS), (Rate::k28, IBV_RATE_28_GBPS), (Rate::k30, IBV_RATE_30_GBPS),
    (Rate::k40, IBV_RATE_40_GBPS), (Rate::k50, IBV_RATE_50_GBPS), (Rate::k56, IBV_RATE_56_GBPS),
    (Rate::k60, IBV_RATE_60_GBPS), (Rate::k80, IBV_RATE_80_GBPS), (Rate::k100, IBV_RATE_100_GBPS),
    (Rate::k112, IBV_RATE_112_GBPS), (Rate::k120, IBV_RATE_120_GBPS), (Rate::k168, IBV_RATE_168_GBPS),
    (Rate::k200, IBV_RATE_200_GBPS), (Rate::k300, IBV_RATE_300_GBPS), (Rate::k400, IBV_RATE_400_GBPS),
    (Rate::k600, IBV_RATE_600_GBPS), (Rate::k800, IBV_RATE_800_GBPS), (Rate::k1200, IBV_RATE_1200_GBPS),
    (kLocalWrite, IBV_ACCESS_LOCAL_WRITE), (kRemoteWrite, IBV_ACCESS_REMOTE_WRITE),
    (kRemoteRead, IBV_ACCESS_REMOTE_READ), (kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING),
    (QueuePairState::kReset, IBV_QPS_RESET), (QueuePairState::kInit, IBV_QPS_INIT),
    (QueuePairState::kReadyToReceive, IBV_QPS_RTR), (QueuePairState::kReadyToSend, IBV_QPS_RTS),
    (QueuePairState::kError, IBV_QPS_ERR), (kReliableConnection, IBV_QPT_RC), (kMaskState, IBV_QP_STATE),
    (kMaskAccess, IBV_QP_ACCESS_FLAGS), (kMaskPkeyIndex, IBV_QP_PKEY_INDEX), (kMaskPort, IBV_QP_PORT),
    (kMaskAddress, IBV_QP_AV), (kMaskPathMtu, IBV_QP_PATH_MTU), (kMaskTimeout, IBV_QP_TIMEOUT),
    (kMaskRetries, IBV_QP_RETRY_CNT), (kMaskRnrRetries, IBV_QP_RNR_RETRY), (kMaskRqPsn, IBV_QP_RQ_PSN),
    (kMaskMaxReads, IBV_QP_MAX_QP_RD_ATOMIC), (kMaskMinRnrTimer, IBV_QP_MIN_RNR_TIMER),
    (kMaskSqPsn, IBV_QP_SQ_PSN), (kMaskMaxDestReads, IBV_QP_MAX_DEST_RD_ATOMIC),
    (kMaskDestQpn, IBV_QP_DEST_QPN), (kRdmaRead, IBV_WR_RDMA_READ), (kSignaled, IBV_SEND_SIGNALED),
    (WorkStatus::kLocalLength, IBV_WC_LOC_LEN_ERR), (WorkStatus::kLocalOperation, IBV_WC_LOC_QP_OP_ERR),
    (WorkStatus::kLocalProtection, IBV_WC_LOC_PROT_ERR), (WorkStatus::kFlushed, IBV_WC_WR_FLUSH_ERR),
    (WorkStatus::kBadResponse, IBV_WC_BAD_RESP_ERR), (WorkStatus::kLocalAccess, IBV_WC_LOC_ACCESS_ERR),
    (WorkStatus::kRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR),
    (WorkStatus::kRemoteAccess, IBV_WC_REM_ACCESS_ERR), (WorkStatus::kRemoteOperation, IBV_WC_REM_OP_ERR),
    (WorkStatus::kRetriesExceeded, IBV_WC_RETRY_EXC_ERR),
    (WorkStatus::kRnrRetriesExceeded, IBV_WC_RNR_RETRY_EXC_ERR),
    (WorkStatus::kRemoteInvalidRead, IBV_WC_REM_INV_RD_REQ_ERR),
    (WorkStatus::kRemoteAbort, IBV_WC_REM_ABORT_ERR), (WorkStatus::kFatal, IBV_WC_FATAL_ERR),
    (WorkStatus::kResponseTimeout, IBV_WC_RESP_TIMEOUT_ERR), (WorkStatus::kGeneral, IBV_WC_GENERAL_ERR),
    (EventKind::kCqError, IBV_EVENT_CQ_ERR), (EventKind::kQpFatal, IBV_EVENT_QP_FATAL),
    (EventKind::kQpRequestError, IBV_EVENT_QP_REQ_ERR), (EventKind::kQpAccessError, IBV_EVENT_QP_ACCESS_ERR),
    (EventKind::kDeviceFatal, IBV_EVENT_DEVICE_FATAL), (EventKind::kPortActive, IBV_EVENT_PORT_ACTIVE),
    (EventKind::kPortError, IBV_EVENT_PORT_ERR), (EventKind::kLidChange, IBV_EVENT_LID_CHANGE),
    (EventKind::kPkeyChange, IBV_EVENT_PKEY_CHANGE), (EventKind::kGidChange, IBV_EVENT_GID_CHANGE));

TEST(what_is_declared_here_lies_where_the_library_has_it) {}  // asserted above, by the compiler

}  // namespace

#else

#include "check.h"

SKIP_FILE_FOR([] { return std::string("infiniband/verbs.h is not installed (Debian's libibverbs-dev)"); });

#endif
