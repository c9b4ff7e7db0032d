// native/transports/libfabric/abi.h beside libfabric's own headers, where those are installed (Debian's libfabric-dev).
#include "transports/libfabric/abi.h"

#if __has_include(<rdma/fi_rma.h>)

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "abi_compare.h"
#include "check.h"

namespace {

namespace abi = kvxfer::libfabric::abi;

static_assert(abi::version(1, 17) == FI_VERSION(1, 17));
SAME_SIZE(PeerAddress, fi_addr_t);
SAME_VALUES((kRma, FI_RMA), (kRead, FI_READ), (kReceive, FI_RECV), (kTransmit, FI_TRANSMIT),
            (kRemoteRead, FI_REMOTE_READ), (kWrite, FI_WRITE), (kRemoteWrite, FI_REMOTE_WRITE),
            (kDelivered, FI_DELIVERY_COMPLETE), (kMore, FI_MORE), (kGpuMemory, FI_HMEM),
            (kContext, FI_CONTEXT), (kContext2, FI_CONTEXT2), (kKeysLocal, FI_MR_LOCAL),
            (kKeysVirtual, FI_MR_VIRT_ADDR), (kKeysAllocated, FI_MR_ALLOCATED),
            (kKeysProvided, FI_MR_PROV_KEY), (kKeysOfEndpoint, FI_MR_ENDPOINT), (kKeysGpu, FI_MR_HMEM),
            (kReliableDatagrams, FI_EP_RDM), (kThreadSafe, FI_THREAD_SAFE),
            (kProgressManual, FI_PROGRESS_MANUAL), (kTable, FI_AV_TABLE),
            (kFormatContext, FI_CQ_FORMAT_CONTEXT), (kWaitNone, FI_WAIT_NONE), (kWaitSet, FI_WAIT_SET),
            (kWaitDescriptor, FI_WAIT_FD), (kHostMemory, FI_HMEM_SYSTEM), (kCudaMemory, FI_HMEM_CUDA),
            (kSocketAddress, FI_SOCKADDR), (kSocketAddressIpv4, FI_SOCKADDR_IN),
            (kSocketAddressIpv6, FI_SOCKADDR_IN6), (kAvailableLater, FI_EAVAIL), (kGetWait, FI_GETWAIT),
            (kEnable, FI_ENABLE));

SAME_PLACES(Object, fid, (ops, ops));
SAME_SIZE(Object, fid);
SAME_PLACES(ObjectOps, fi_ops, (close, close), (bind, bind), (control, control));

SAME_PLACES(Fabric, fid_fabric, (ops, ops));
SAME_PLACES(FabricOps, fi_ops_fabric, (domain, domain), (wait_set, wait_open));
SAME_PLACES(WaitParams, fi_wait_attr, (wait_object, wait_obj));
SAME_SIZE(WaitParams, fi_wait_attr);
SAME_PLACES(WaitSet, fid_wait, (ops, ops));
SAME_PLACES(WaitOps, fi_ops_wait, (wait, wait));
SAME_PLACES(FabricOps, fi_ops_fabric, (try_wait, trywait));
SAME_PLACES(Domain, fid_domain, (ops, ops), (regions, mr));
SAME_PLACES(DomainOps, fi_ops_domain, (address_table, av_open), (queue, cq_open), (endpoint, endpoint));

SAME_PLACES(AddressTableParams, fi_av_attr, (type, type), (count, count));
SAME_SIZE(AddressTableParams, fi_av_attr);
SAME_PLACES(AddressTable, fid_av, (ops, ops));
SAME_PLACES(AddressTableOps, fi_ops_av, (insert, insert));

SAME_PLACES(QueueParams, fi_cq_attr, (size, size), (format, format), (wait_object, wait_obj),
            (wait_set, wait_set));
SAME_SIZE(QueueParams, fi_cq_attr);
SAME_SIZE(QueueEntry, fi_cq_entry);
SAME_PLACES(QueueError, fi_cq_err_entry, (context, op_context), (error, err), (provider_error, prov_errno),
            (error_data, err_data), (error_data_nbytes, err_data_size));
SAME_PLACES(Queue, fid_cq, (ops, ops));
SAME_PLACES(QueueOps, fi_ops_cq, (read, read), (read_error, readerr), (error_string, strerror));

SAME_PLACES(RegionParams, fi_mr_attr, (spans, mr_iov), (num_spans, iov_count), (access, access),
            (key, requested_key), (memory, iface), (device, device));
SAME_PLACES(RegionOps, fi_ops_mr, (reg_params, regattr));
SAME_PLACES(MemoryRegion, fid_mr, (descriptor, mem_desc), (key, key));

SAME_PLACES(RemoteSpan, fi_rma_iov, (address, addr), (nbytes, len), (key, key));
SAME_SIZE(RemoteSpan, fi_rma_iov);
SAME_PLACES(RemoteRequest, fi_msg_rma, (spans, msg_iov), (descriptors, desc), (num_spans, iov_count),
            (peer, addr), (remote, rma_iov), (num_remote, rma_iov_count), (context, context));
SAME_SIZE(RemoteRequest, fi_msg_rma);
SAME_PLACES(RemoteOps, fi_ops_rma, (read_message, readmsg), (write_message, writemsg));
SAME_PLACES(NameOps, fi_ops_cm, (get_name, getname));
SAME_PLACES(Endpoint, fid_ep, (names, cm), (remote, rma));

SAME_PLACES(TransmitAttributes, fi_tx_attr, (size, size), (num_spans, iov_limit),
            (num_remote_spans, rma_iov_limit));
SAME_PLACES(ReceiveAttributes, fi_rx_attr, (size, size));
SAME_PLACES(EndpointAttributes, fi_ep_attr, (type, type), (most_nbytes, max_msg_size));
SAME_PLACES(DomainAttributes, fi_domain_attr, (name, name), (threading, threading),
            (control_progress, control_progress), (data_progress, data_progress), (key_mode, mr_mode),
            (key_nbytes, mr_key_size));
SAME_PLACES(FabricAttributes, fi_fabric_attr, (name, name), (provider, prov_name));
SAME_PLACES(Info, fi_info, (caps, caps), (mode, mode), (address_format, addr_format),
            (source_nbytes, src_addrlen), (source, src_addr), (transmit, tx_attr), (receive, rx_attr),
            (endpoint, ep_attr), (domain, domain_attr), (fabric, fabric_attr));
SAME_SIZE(Context, fi_context2);

TEST(the_headers_are_of_a_release_that_is_taken) {
  CHECK(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= abi::kApi);
}

}  // namespace

#else

#include "check.h"

SKIP_FILE_FOR([] { return std::string("libfabric's headers are not installed (Debian's libfabric-dev)"); });

#endif
