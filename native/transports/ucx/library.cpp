#include "transports/ucx/library.h"

#include <unistd.h>

#include "kvxfer/opened_library.h"
#include "transports/common/found_library.h"

namespace kvxfer::ucx {
namespace {

constexpr const char* kSystemFile = "libucp.so.0";
// (The copies in nixl's wheel have other names.)
constexpr const char* kPrefix = "libucp.so.";

using OneLibrary = found_library::OnePerProcess<Library>;

// The file of the wheel, if Python's packages stand side by side.
std::string file_of_wheel() {
  return found_library::folder_of(found_library::path_of(reinterpret_cast<const void*>(&file_of_wheel))) +
         "../libucx/lib/libucp.so.0";
}

// UCX's modules are beside the library or in ucx/, as its builder chose.
bool has_rdma_beside(const std::string& file) {
  for (const char* const module : {"ucx/libuct_ib.so.0", "libuct_ib.so.0"})
    if (::access((found_library::folder_of(file) + module).c_str(), R_OK) == 0) return true;
  return false;
}

Result<Library> load_library(const std::string& file) {
  const found_library::Opened opened = found_library::open(kPrefix, file, {kSystemFile, file_of_wheel()});
  if (opened.handle == nullptr)
    return Status(Code::kUnsupported,
                  "UCX's libucp cannot be opened (" + opened.why +
                      "): install it, ucx on Red Hat's systems, libucx0 on Debian's, or the wheel "
                      "libucx-cu12 or libucx-cu13 (which has no RDMA), or name its file as option "
                      "ucx.library");
  OpenedLibrary library(opened.handle);
  Library table{};
  library.find(table.get_version, "ucp_get_version");
  library.find(table.config_read, "ucp_config_read");
  library.find(table.config_modify, "ucp_config_modify");
  library.find(table.config_release, "ucp_config_release");
  library.find(table.init_version, "ucp_init_version");
  library.find(table.cleanup, "ucp_cleanup");
  library.find(table.worker_create, "ucp_worker_create");
  library.find(table.worker_destroy, "ucp_worker_destroy");
  library.find(table.worker_get_address, "ucp_worker_get_address");
  library.find(table.worker_release_address, "ucp_worker_release_address");
  library.find(table.worker_get_efd, "ucp_worker_get_efd");
  library.find(table.worker_arm, "ucp_worker_arm");
  library.find(table.worker_progress, "ucp_worker_progress");
  library.find(table.ep_create, "ucp_ep_create");
  library.find(table.ep_close_nbx, "ucp_ep_close_nbx");
  library.find(table.ep_print_info, "ucp_ep_print_info");
  library.find(table.mem_map, "ucp_mem_map");
  library.find(table.mem_unmap, "ucp_mem_unmap");
  library.find(table.rkey_pack, "ucp_rkey_pack");
  library.find(table.rkey_buffer_release, "ucp_rkey_buffer_release");
  library.find(table.ep_rkey_unpack, "ucp_ep_rkey_unpack");
  library.find(table.rkey_destroy, "ucp_rkey_destroy");
  library.find(table.get_nbx, "ucp_get_nbx");
  library.find(table.put_nbx, "ucp_put_nbx");
  library.find(table.ep_flush_nbx, "ucp_ep_flush_nbx");
  library.find(table.worker_set_am_recv_handler, "ucp_worker_set_am_recv_handler");
  library.find(table.am_send_nbx, "ucp_am_send_nbx");
  library.find(table.am_recv_data_nbx, "ucp_am_recv_data_nbx");
  library.find(table.request_check_status, "ucp_request_check_status");
  library.find(table.request_free, "ucp_request_free");
  // From libucs, which libucp loads.
  library.find(table.status_string, "ucs_status_string");
  if (!library.lacks().empty())
    return Status(Code::kUnsupported, "this UCX is too old: its libucp has no " + library.lacks() +
                                          "; install 1.12 or newer, or name its file as option ucx.library");
  unsigned major = 0, minor = 0, release = 0;
  table.get_version(&major, &minor, &release);
  table.version = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
  table.path = found_library::path_of(reinterpret_cast<const void*>(table.get_version));
  if (major != abi::kApiMajor || minor < abi::kApiMinor)
    return Status(Code::kUnsupported, table.path + " is UCX " + table.version +
                                          ": 1.12 or newer is needed, of major version 1; install it, or "
                                          "name its file as option ucx.library");
  if (!file.empty() && !opened.before.empty() && opened.before != file)
    return OneLibrary::other_is_open(opened.before, file);
  table.has_rdma = has_rdma_beside(table.path);
  return table;
}

}  // namespace

Result<const Library*> Library::load(const std::string& file) {
  static OneLibrary one;
  return one.load(file, load_library);
}

std::string Library::describe() {
  std::string file = found_library::opened(kPrefix);
  const bool is_open = !file.empty();
  if (!is_open) file = found_library::of_system(kSystemFile);
  if (!is_open && file.empty() && ::access(file_of_wheel().c_str(), R_OK) == 0) file = file_of_wheel();
  if (file.empty())
    return "no libucp was found: install ucx or libucx0, or the wheel libucx-cu12, or name its file as "
           "option "
           "ucx.library";
  return (is_open ? file + " is loaded" : "agents load " + file) +
         (has_rdma_beside(file) ? ", with RDMA" : ", without RDMA: it has no libuct_ib beside it");
}

}  // namespace kvxfer::ucx
