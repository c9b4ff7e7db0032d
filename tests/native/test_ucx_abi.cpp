// native/transports/ucx/abi.h beside UCX's own header, where that is installed (Debian's libucx-dev).
#include "transports/ucx/abi.h"

#if __has_include(<ucp/api/ucp.h>)

#include <sys/uio.h>
#include <ucp/api/ucp.h>

#include "check.h"

namespace {

namespace abi = kvxfer::ucx::abi;

#define SAME_PLACE(ours, member, theirs, their_member)                           \
  static_assert(offsetof(abi::ours, member) == offsetof(theirs, their_member) && \
                sizeof(abi::ours::member) == sizeof(theirs::their_member))
#define SAME_VALUE(ours, theirs) \
  static_assert(static_cast<std::int64_t>(abi::ours) == static_cast<std::int64_t>(theirs))

static_assert(sizeof(abi::StatusCode) == sizeof(ucs_status_t));
SAME_VALUE(kOk, UCS_OK);
SAME_VALUE(kInProgress, UCS_INPROGRESS);
SAME_VALUE(kNoResource, UCS_ERR_NO_RESOURCE);
SAME_VALUE(kUnreachable, UCS_ERR_UNREACHABLE);
SAME_VALUE(kNoElement, UCS_ERR_NO_ELEM);
SAME_VALUE(kNoDevice, UCS_ERR_NO_DEVICE);
SAME_VALUE(kBusy, UCS_ERR_BUSY);
SAME_VALUE(kCanceled, UCS_ERR_CANCELED);
SAME_VALUE(kLast, UCS_ERR_LAST);

SAME_PLACE(ContextParams, field_mask, ucp_params_t, field_mask);
SAME_PLACE(ContextParams, features, ucp_params_t, features);
SAME_PLACE(ContextParams, mt_workers_shared, ucp_params_t, mt_workers_shared);
SAME_VALUE(ContextParams::kFeatures, UCP_PARAM_FIELD_FEATURES);
SAME_VALUE(ContextParams::kMtWorkersShared, UCP_PARAM_FIELD_MT_WORKERS_SHARED);
SAME_VALUE(ContextParams::kRma, UCP_FEATURE_RMA);
SAME_VALUE(ContextParams::kWakeup, UCP_FEATURE_WAKEUP);

SAME_PLACE(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
SAME_VALUE(WorkerParams::kThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME_VALUE(WorkerParams::kSerialized, UCS_THREAD_MODE_SERIALIZED);

SAME_PLACE(EndpointParams, field_mask, ucp_ep_params_t, field_mask);
SAME_PLACE(EndpointParams, address, ucp_ep_params_t, address);
SAME_PLACE(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(EndpointParams, error_handler.callback, ucp_ep_params_t, err_handler.cb);
SAME_PLACE(EndpointParams, error_handler.argument, ucp_ep_params_t, err_handler.arg);
SAME_VALUE(EndpointParams::kRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME_VALUE(EndpointParams::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME_VALUE(EndpointParams::kErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME_VALUE(EndpointParams::kModeNone, UCP_ERR_HANDLING_MODE_NONE);
SAME_VALUE(EndpointParams::kModePeer, UCP_ERR_HANDLING_MODE_PEER);

SAME_PLACE(MemoryMapParams, address, ucp_mem_map_params_t, address);
SAME_PLACE(MemoryMapParams, length, ucp_mem_map_params_t, length);
SAME_PLACE(MemoryMapParams, memory_type, ucp_mem_map_params_t, memory_type);
SAME_VALUE(MemoryMapParams::kAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME_VALUE(MemoryMapParams::kLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
SAME_VALUE(MemoryMapParams::kMemoryType, UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
SAME_VALUE(MemoryMapParams::kHost, UCS_MEMORY_TYPE_HOST);
SAME_VALUE(MemoryMapParams::kCuda, UCS_MEMORY_TYPE_CUDA);

SAME_PLACE(RequestParams, field_mask, ucp_request_param_t, op_attr_mask);
SAME_PLACE(RequestParams, flags, ucp_request_param_t, flags);
SAME_PLACE(RequestParams, callback, ucp_request_param_t, cb);
SAME_PLACE(RequestParams, user_data, ucp_request_param_t, user_data);
SAME_PLACE(RequestParams, memory, ucp_request_param_t, memh);
SAME_VALUE(RequestParams::kCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME_VALUE(RequestParams::kUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME_VALUE(RequestParams::kFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME_VALUE(RequestParams::kMemoryHandle, UCP_OP_ATTR_FIELD_MEMH);
SAME_VALUE(RequestParams::kCloseByForce, UCP_EP_CLOSE_FLAG_FORCE);
SAME_PLACE(RequestParams, datatype, ucp_request_param_t, datatype);
SAME_VALUE(RequestParams::kDatatype, UCP_OP_ATTR_FIELD_DATATYPE);
SAME_VALUE(RequestParams::kRendezvous, UCP_AM_SEND_FLAG_RNDV);
static_assert(abi::RequestParams::kIov == ucp_dt_make_iov());
static_assert(offsetof(iovec, iov_base) == offsetof(ucp_dt_iov_t, buffer) &&
              offsetof(iovec, iov_len) == offsetof(ucp_dt_iov_t, length) &&
              sizeof(iovec) == sizeof(ucp_dt_iov_t));

SAME_VALUE(ContextParams::kActiveMessages, UCP_FEATURE_AM);
SAME_PLACE(MessageParams, attributes, ucp_am_recv_param_t, recv_attr);
SAME_VALUE(MessageParams::kIsRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);
SAME_PLACE(HandlerParams, id, ucp_am_handler_param_t, id);
SAME_PLACE(HandlerParams, flags, ucp_am_handler_param_t, flags);
SAME_PLACE(HandlerParams, callback, ucp_am_handler_param_t, cb);
SAME_PLACE(HandlerParams, argument, ucp_am_handler_param_t, arg);
SAME_VALUE(HandlerParams::kId, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME_VALUE(HandlerParams::kFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME_VALUE(HandlerParams::kCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME_VALUE(HandlerParams::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME_VALUE(HandlerParams::kWholeMessage, UCP_AM_FLAG_WHOLE_MSG);

TEST(statuses_in_pointers) {
  CHECK(!abi::is_error(nullptr));
  CHECK(abi::is_error(UCS_STATUS_PTR(UCS_ERR_CANCELED)));
  CHECK_EQ(abi::error_of(UCS_STATUS_PTR(UCS_ERR_CANCELED)), abi::kCanceled);
}

}  // namespace

#else

#include "check.h"

SKIP_FILE_FOR([] { return std::string("UCX's header is not installed (Debian's libucx-dev)"); });

#endif
