// UCX's libucp, opened at run time.
#pragma once

#include <cstdio>
#include <string>

#include "kvxfer/status.h"
#include "transports/ucx/abi.h"

namespace kvxfer::ucx {

// Functions of libucp by the names that it exports.
struct Library {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  abi::StatusCode (*config_read)(const char* prefix, const char* file, abi::Config** config);
  abi::StatusCode (*config_modify)(abi::Config* config, const char* name, const char* value);
  void (*config_release)(abi::Config* config);
  abi::StatusCode (*init_version)(unsigned major, unsigned minor, const abi::ContextParams* params,
                                  const abi::Config* config, abi::Context** context);
  void (*cleanup)(abi::Context* context);
  abi::StatusCode (*worker_create)(abi::Context* context, const abi::WorkerParams* params,
                                   abi::Worker** worker);
  void (*worker_destroy)(abi::Worker* worker);
  abi::StatusCode (*worker_get_address)(abi::Worker* worker, abi::Address** address, std::size_t* nbytes);
  void (*worker_release_address)(abi::Worker* worker, abi::Address* address);
  abi::StatusCode (*worker_get_efd)(abi::Worker* worker, int* fd);
  abi::StatusCode (*worker_arm)(abi::Worker* worker);
  unsigned (*worker_progress)(abi::Worker* worker);
  abi::StatusCode (*ep_create)(abi::Worker* worker, const abi::EndpointParams* params,
                               abi::EndpointHandle** endpoint);
  abi::StatusPointer (*ep_close_nbx)(abi::EndpointHandle* endpoint, const abi::RequestParams* params);
  void (*ep_print_info)(abi::EndpointHandle* endpoint, std::FILE* stream);
  abi::StatusCode (*mem_map)(abi::Context* context, const abi::MemoryMapParams* params,
                             abi::MemoryHandle** memory);
  abi::StatusCode (*mem_unmap)(abi::Context* context, abi::MemoryHandle* memory);
  abi::StatusCode (*rkey_pack)(abi::Context* context, abi::MemoryHandle* memory, void** key,
                               std::size_t* nbytes);
  void (*rkey_buffer_release)(void* key);
  abi::StatusCode (*ep_rkey_unpack)(abi::EndpointHandle* endpoint, const void* key,
                                    abi::RemoteKey** unpacked);
  void (*rkey_destroy)(abi::RemoteKey* key);
  abi::StatusPointer (*get_nbx)(abi::EndpointHandle* endpoint, void* buffer, std::size_t nbytes,
                                std::uint64_t remote_address, abi::RemoteKey* key,
                                const abi::RequestParams* params);
  abi::StatusPointer (*put_nbx)(abi::EndpointHandle* endpoint, const void* buffer, std::size_t nbytes,
                                std::uint64_t remote_address, abi::RemoteKey* key,
                                const abi::RequestParams* params);
  abi::StatusPointer (*ep_flush_nbx)(abi::EndpointHandle* endpoint, const abi::RequestParams* params);
  abi::StatusCode (*worker_set_am_recv_handler)(abi::Worker* worker, const abi::HandlerParams* params);
  abi::StatusPointer (*am_send_nbx)(abi::EndpointHandle* endpoint, unsigned id, const void* header,
                                    std::size_t header_nbytes, const void* buffer, std::size_t count,
                                    const abi::RequestParams* params);
  abi::StatusPointer (*am_recv_data_nbx)(abi::Worker* worker, void* data, void* buffer, std::size_t count,
                                         const abi::RequestParams* params);
  abi::StatusCode (*request_check_status)(void* request);
  void (*request_free)(void* request);
  const char* (*status_string)(abi::StatusCode status);

  std::string path;     // of the file
  std::string version;  // "1.13.1"
  bool has_rdma = false;

  // Uses the copy that this process has open already, else the named file, else the system's, else the one of
  // the wheel libucx beside this package. kUnsupported: the message says why there is none. The first call
  // decides, because a process has only one.
  static Result<const Library*> load(const std::string& file = {});

  // Names the copy that load() would use, without opening it: a sentence for people.
  static std::string describe();

  // "UCX 1.13.1"
  std::string name() const { return "UCX " + version; }
};

}  // namespace kvxfer::ucx
