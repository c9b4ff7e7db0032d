// native/transports/libfabric/abi.h beside libfabric's own headers, where those are installed (Debian's libfabric-dev).
#include "transports/libfabric/abi.h"

#if __has_include(<rdma/fi_rma.h>)

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "check.h"

namespace {

namespace abi = kvxfer::libfabric::abi;

#define SAME_PLACE(ours, member, theirs, their_member)                           \
  static_assert(offsetof(abi::ours, member) == offsetof(theirs, their_member) && \
                sizeof(abi::ours::member) == sizeof(theirs::their_member))
#define SAME_VALUE(ours, theirs) \
  static_assert(static_cast<std::uint64_t>(abi::ours) == static_cast<std::uint64_t>(theirs))

static_assert(abi::version(1, 17) == FI_VERSION(1, 17));
static_assert(sizeof(abi::PeerAddress) == sizeof(fi_addr_t));
SAME_VALUE(kRma, FI_RMA);
SAME_VALUE(kRead, FI_READ);
SAME_VALUE(kReceive, FI_RECV);
SAME_VALUE(kTransmit, FI_TRANSMIT);
SAME_VALUE(kRemoteRead, FI_REMOTE_READ);
SAME_VALUE(kWrite, FI_WRITE);
SAME_VALUE(kRemoteWrite, FI_REMOTE_WRITE);
SAME_VALUE(kDelivered, FI_DELIVERY_COMPLETE);
SAME_VALUE(kMore, FI_MORE);
SAME_VALUE(kGpuMemory, FI_HMEM);
SAME_VALUE(kContext, FI_CONTEXT);
SAME_VALUE(kContext2, FI_CONTEXT2);
SAME_VALUE(kKeysLocal, FI_MR_LOCAL);
SAME_VALUE(kKeysVirtual, FI_MR_VIRT_ADDR);
SAME_VALUE(kKeysAllocated, FI_MR_ALLOCATED);
SAME_VALUE(kKeysProvided, FI_MR_PROV_KEY);
SAME_VALUE(kKeysOfEndpoint, FI_MR_ENDPOINT);
SAME_VALUE(kKeysGpu, FI_MR_HMEM);
SAME_VALUE(kReliableDatagrams, FI_EP_RDM);
SAME_VALUE(kThreadSafe, FI_THREAD_SAFE);
SAME_VALUE(kProgressManual, FI_PROGRESS_MANUAL);
SAME_VALUE(kTable, FI_AV_TABLE);
SAME_VALUE(kFormatContext, FI_CQ_FORMAT_CONTEXT);
SAME_VALUE(kWaitNone, FI_WAIT_NONE);
SAME_VALUE(kWaitSet, FI_WAIT_SET);
SAME_VALUE(kWaitDescriptor, FI_WAIT_FD);
SAME_VALUE(kHostMemory, FI_HMEM_SYSTEM);
SAME_VALUE(kCudaMemory, FI_HMEM_CUDA);
SAME_VALUE(kSocketAddress, FI_SOCKADDR);
SAME_VALUE(kSocketAddressIpv4, FI_SOCKADDR_IN);
SAME_VALUE(kSocketAddressIpv6, FI_SOCKADDR_IN6);
SAME_VALUE(kAvailableLater, FI_EAVAIL);
SAME_VALUE(kGetWait, FI_GETWAIT);
SAME_VALUE(kEnable, FI_ENABLE);

SAME_PLACE(Object, ops, fid, ops);
static_assert(sizeof(abi::Object) == sizeof(fid));
SAME_PLACE(ObjectOps, close, fi_ops, close);
SAME_PLACE(ObjectOps, bind, fi_ops, bind);
SAME_PLACE(ObjectOps, control, fi_ops, control);

SAME_PLACE(Fabric, ops, fid_fabric, ops);
SAME_PLACE(FabricOps, domain, fi_ops_fabric, domain);
SAME_PLACE(FabricOps, wait_set, fi_ops_fabric, wait_open);
SAME_PLACE(WaitParams, wait_object, fi_wait_attr, wait_obj);
static_assert(sizeof(abi::WaitParams) == sizeof(fi_wait_attr));
SAME_PLACE(WaitSet, ops, fid_wait, ops);
SAME_PLACE(WaitOps, wait, fi_ops_wait, wait);
SAME_PLACE(FabricOps, try_wait, fi_ops_fabric, trywait);
SAME_PLACE(Domain, ops, fid_domain, ops);
SAME_PLACE(Domain, regions, fid_domain, mr);
SAME_PLACE(DomainOps, address_table, fi_ops_domain, av_open);
SAME_PLACE(DomainOps, queue, fi_ops_domain, cq_open);
SAME_PLACE(DomainOps, endpoint, fi_ops_domain, endpoint);

SAME_PLACE(AddressTableParams, type, fi_av_attr, type);
SAME_PLACE(AddressTableParams, count, fi_av_attr, count);
static_assert(sizeof(abi::AddressTableParams) == sizeof(fi_av_attr));
SAME_PLACE(AddressTable, ops, fid_av, ops);
SAME_PLACE(AddressTableOps, insert, fi_ops_av, insert);

SAME_PLACE(QueueParams, size, fi_cq_attr, size);
SAME_PLACE(QueueParams, format, fi_cq_attr, format);
SAME_PLACE(QueueParams, wait_object, fi_cq_attr, wait_obj);
SAME_PLACE(QueueParams, wait_set, fi_cq_attr, wait_set);
static_assert(sizeof(abi::QueueParams) == sizeof(fi_cq_attr));
static_assert(sizeof(abi::QueueEntry) == sizeof(fi_cq_entry));
SAME_PLACE(QueueError, context, fi_cq_err_entry, op_context);
SAME_PLACE(QueueError, error, fi_cq_err_entry, err);
SAME_PLACE(QueueError, provider_error, fi_cq_err_entry, prov_errno);
SAME_PLACE(QueueError, error_data, fi_cq_err_entry, err_data);
SAME_PLACE(QueueError, error_data_nbytes, fi_cq_err_entry, err_data_size);
SAME_PLACE(Queue, ops, fid_cq, ops);
SAME_PLACE(QueueOps, read, fi_ops_cq, read);
SAME_PLACE(QueueOps, read_error, fi_ops_cq, readerr);
SAME_PLACE(QueueOps, error_string, fi_ops_cq, strerror);

SAME_PLACE(RegionParams, spans, fi_mr_attr, mr_iov);
SAME_PLACE(RegionParams, num_spans, fi_mr_attr, iov_count);
SAME_PLACE(RegionParams, access, fi_mr_attr, access);
SAME_PLACE(RegionParams, key, fi_mr_attr, requested_key);
SAME_PLACE(RegionParams, memory, fi_mr_attr, iface);
SAME_PLACE(RegionParams, device, fi_mr_attr, device);
SAME_PLACE(RegionOps, reg_params, fi_ops_mr, regattr);
SAME_PLACE(MemoryRegion, descriptor, fid_mr, mem_desc);
SAME_PLACE(MemoryRegion, key, fid_mr, key);

SAME_PLACE(RemoteSpan, address, fi_rma_iov, addr);
SAME_PLACE(RemoteSpan, nbytes, fi_rma_iov, len);
SAME_PLACE(RemoteSpan, key, fi_rma_iov, key);
static_assert(sizeof(abi::RemoteSpan) == sizeof(fi_rma_iov));
SAME_PLACE(RemoteRequest, spans, fi_msg_rma, msg_iov);
SAME_PLACE(RemoteRequest, descriptors, fi_msg_rma, desc);
SAME_PLACE(RemoteRequest, num_spans, fi_msg_rma, iov_count);
SAME_PLACE(RemoteRequest, peer, fi_msg_rma, addr);
SAME_PLACE(RemoteRequest, remote, fi_msg_rma, rma_iov);
SAME_PLACE(RemoteRequest, num_remote, fi_msg_rma, rma_iov_count);
SAME_PLACE(RemoteRequest, context, fi_msg_rma, context);
static_assert(sizeof(abi::RemoteRequest) == sizeof(fi_msg_rma));
SAME_PLACE(RemoteOps, read_message, fi_ops_rma, readmsg);
SAME_PLACE(RemoteOps, write_message, fi_ops_rma, writemsg);
SAME_PLACE(NameOps, get_name, fi_ops_cm, getname);
SAME_PLACE(Endpoint, names, fid_ep, cm);
SAME_PLACE(Endpoint, remote, fid_ep, rma);

SAME_PLACE(TransmitAttributes, size, fi_tx_attr, size);
SAME_PLACE(TransmitAttributes, num_spans, fi_tx_attr, iov_limit);
SAME_PLACE(TransmitAttributes, num_remote_spans, fi_tx_attr, rma_iov_limit);
SAME_PLACE(ReceiveAttributes, size, fi_rx_attr, size);
SAME_PLACE(EndpointAttributes, type, fi_ep_attr, type);
SAME_PLACE(EndpointAttributes, most_nbytes, fi_ep_attr, max_msg_size);
SAME_PLACE(DomainAttributes, name, fi_domain_attr, name);
SAME_PLACE(DomainAttributes, threading, fi_domain_attr, threading);
SAME_PLACE(DomainAttributes, control_progress, fi_domain_attr, control_progress);
SAME_PLACE(DomainAttributes, data_progress, fi_domain_attr, data_progress);
SAME_PLACE(DomainAttributes, key_mode, fi_domain_attr, mr_mode);
SAME_PLACE(DomainAttributes, key_nbytes, fi_domain_attr, mr_key_size);
SAME_PLACE(FabricAttributes, name, fi_fabric_attr, name);
SAME_PLACE(FabricAttributes, provider, fi_fabric_attr, prov_name);
SAME_PLACE(Info, caps, fi_info, caps);
SAME_PLACE(Info, mode, fi_info, mode);
SAME_PLACE(Info, address_format, fi_info, addr_format);
SAME_PLACE(Info, source_nbytes, fi_info, src_addrlen);
SAME_PLACE(Info, source, fi_info, src_addr);
SAME_PLACE(Info, transmit, fi_info, tx_attr);
SAME_PLACE(Info, receive, fi_info, rx_attr);
SAME_PLACE(Info, endpoint, fi_info, ep_attr);
SAME_PLACE(Info, domain, fi_info, domain_attr);
SAME_PLACE(Info, fabric, fi_info, fabric_attr);
static_assert(sizeof(abi::Context) == sizeof(fi_context2));

TEST(the_headers_are_of_a_release_that_is_taken) {
  CHECK(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= abi::kApi);
}

}  // namespace

#else

#include "check.h"

SKIP_FILE_FOR([] { return std::string("libfabric's headers are not installed (Debian's libfabric-dev)"); });

#endif
