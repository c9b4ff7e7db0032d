// native/transports/ucx/abi.h beside UCX's own header, where that is installed (Debian's libucx-dev).
#include "transports/ucx/abi.h"

#if __has_include(<ucp/api/ucp.h>)

#include <sys/uio.h>
#include <ucp/api/ucp.h>

#include "abi_compare.h"
#include "check.h"

namespace {

namespace abi = kvxfer::ucx::abi;

SAME_SIZE(StatusCode, ucs_status_t);
SAME_VALUES((kOk, UCS_OK), (kInProgress, UCS_INPROGRESS), (kNoResource, UCS_ERR_NO_RESOURCE),
            (kUnreachable, UCS_ERR_UNREACHABLE), (kNoElement, UCS_ERR_NO_ELEM),
            (kNoDevice, UCS_ERR_NO_DEVICE), (kBusy, UCS_ERR_BUSY), (kCanceled, UCS_ERR_CANCELED),
            (kLast, UCS_ERR_LAST));

SAME_PLACES(ContextParams, ucp_params_t, (field_mask, field_mask), (features, features),
            (mt_workers_shared, mt_workers_shared));
SAME_VALUES((ContextParams::kFeatures, UCP_PARAM_FIELD_FEATURES),
            (ContextParams::kMtWorkersShared, UCP_PARAM_FIELD_MT_WORKERS_SHARED),
            (ContextParams::kRma, UCP_FEATURE_RMA), (ContextParams::kWakeup, UCP_FEATURE_WAKEUP));

SAME_PLACES(WorkerParams, ucp_worker_params_t, (thread_mode, thread_mode));
SAME_VALUES((WorkerParams::kThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE),
            (WorkerParams::kSerialized, UCS_THREAD_MODE_SERIALIZED));

SAME_PLACES(EndpointParams, ucp_ep_params_t, (field_mask, field_mask), (address, address),
            (error_mode, err_mode), (error_handler.callback, err_handler.cb),
            (error_handler.argument, err_handler.arg));
SAME_VALUES((EndpointParams::kRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS),
            (EndpointParams::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE),
            (EndpointParams::kErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER),
            (EndpointParams::kModeNone, UCP_ERR_HANDLING_MODE_NONE),
            (EndpointParams::kModePeer, UCP_ERR_HANDLING_MODE_PEER));

SAME_PLACES(MemoryMapParams, ucp_mem_map_params_t, (address, address), (length, length),
            (memory_type, memory_type));
SAME_VALUES((MemoryMapParams::kAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS),
            (MemoryMapParams::kLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH),
            (MemoryMapParams::kMemoryType, UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE),
            (MemoryMapParams::kHost, UCS_MEMORY_TYPE_HOST), (MemoryMapParams::kCuda, UCS_MEMORY_TYPE_CUDA));

SAME_PLACES(RequestParams, ucp_request_param_t, (field_mask, op_attr_mask), (flags, flags), (callback, cb),
            (user_data, user_data), (memory, memh));
SAME_VALUES((RequestParams::kCallback, UCP_OP_ATTR_FIELD_CALLBACK),
            (RequestParams::kUserData, UCP_OP_ATTR_FIELD_USER_DATA),
            (RequestParams::kFlags, UCP_OP_ATTR_FIELD_FLAGS),
            (RequestParams::kMemoryHandle, UCP_OP_ATTR_FIELD_MEMH),
            (RequestParams::kCloseByForce, UCP_EP_CLOSE_FLAG_FORCE));
SAME_PLACES(RequestParams, ucp_request_param_t, (datatype, datatype));
SAME_VALUES((RequestParams::kDatatype, UCP_OP_ATTR_FIELD_DATATYPE),
            (RequestParams::kRendezvous, UCP_AM_SEND_FLAG_RNDV));
static_assert(abi::RequestParams::kIov == ucp_dt_make_iov());
static_assert(offsetof(iovec, iov_base) == offsetof(ucp_dt_iov_t, buffer) &&
              offsetof(iovec, iov_len) == offsetof(ucp_dt_iov_t, length) &&
              sizeof(iovec) == sizeof(ucp_dt_iov_t));

SAME_VALUES((ContextParams::kActiveMessages, UCP_FEATURE_AM));
SAME_PLACES(MessageParams, ucp_am_recv_param_t, (attributes, recv_attr));
SAME_VALUES((MessageParams::kIsRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV));
SAME_PLACES(HandlerParams, ucp_am_handler_param_t, (id, id), (flags, flags), (callback, cb), (argument, arg));
SAME_VALUES((HandlerParams::kId, UCP_AM_HANDLER_PARAM_FIELD_ID),
            (HandlerParams::kFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS),
            (HandlerParams::kCallback, UCP_AM_HANDLER_PARAM_FIELD_CB),
            (HandlerParams::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG),
            (HandlerParams::kWholeMessage, UCP_AM_FLAG_WHOLE_MSG));

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
