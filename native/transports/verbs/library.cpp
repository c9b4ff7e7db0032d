#include "transports/verbs/library.h"

#include <atomic>
#include <fstream>
#include <string>

#include "kvxfer/opened_library.h"

namespace kvxfer::verbs {
namespace {

GidType read_gid_type(const char* device, std::uint8_t port, int index) {
  std::ifstream file("/sys/class/infiniband/" + std::string(device) + "/ports/" + std::to_string(port) +
                     "/gid_attrs/types/" + std::to_string(index));
  std::string type;
  if (!std::getline(file, type)) return GidType::kUnknown;
  if (type == "RoCE v2") return GidType::kRoceV2;
  return type == "IB/RoCE v1" ? GidType::kRoceV1 : GidType::kUnknown;
}

Result<Library> load_library() {
  OpenedLibrary library({"libibverbs.so.1"});
  if (!library.why().empty())
    return Status(Code::kUnsupported,
                  "libibverbs cannot be opened (" + library.why() +
                      "): install it with its drivers: rdma-core on Red Hat systems, libibverbs1 and "
                      "ibverbs-providers on Debian systems");
  Library table{};
  // Most symbols exist twice. Those of version 1.0 take other structures.
  const auto find = [&](auto& function, const char* symbol, const char* version = "IBVERBS_1.1") {
    library.find(function, symbol, version);
  };
  find(table.get_device_list, "ibv_get_device_list");
  find(table.free_device_list, "ibv_free_device_list");
  find(table.get_device_name, "ibv_get_device_name");
  find(table.open_device, "ibv_open_device");
  find(table.close_device, "ibv_close_device");
  find(table.query_device, "ibv_query_device");
  find(table.query_port, "ibv_query_port");
  find(table.query_gid, "ibv_query_gid");
  find(table.alloc_pd, "ibv_alloc_pd");
  find(table.dealloc_pd, "ibv_dealloc_pd");
  find(table.reg_mr, "ibv_reg_mr");
  library.find_if_there(table.reg_mr_iova2, "ibv_reg_mr_iova2", "IBVERBS_1.8");
  library.find_if_there(table.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  find(table.dereg_mr, "ibv_dereg_mr");
  find(table.create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
  find(table.destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
  find(table.create_cq, "ibv_create_cq");
  find(table.destroy_cq, "ibv_destroy_cq");
  find(table.get_cq_event, "ibv_get_cq_event");
  find(table.ack_cq_events, "ibv_ack_cq_events");
  find(table.create_qp, "ibv_create_qp");
  find(table.modify_qp, "ibv_modify_qp");
  find(table.destroy_qp, "ibv_destroy_qp");
  find(table.get_async_event, "ibv_get_async_event");
  find(table.ack_async_event, "ibv_ack_async_event");
  find(table.wc_status_str, "ibv_wc_status_str");
  find(table.event_type_str, "ibv_event_type_str");
  table.gid_type = read_gid_type;
  if (library.lacks().empty()) return table;
  return Status(Code::kUnsupported,
                "this libibverbs is too old: it has no " + library.lacks() + "; install a newer rdma-core");
}

std::atomic<const Library*> replacement{nullptr};

}  // namespace

Result<const Library*> Library::load() {
  if (const Library* const other = replacement.load()) return other;
  static const Result<Library> loaded = load_library();
  if (!loaded.ok()) return loaded.status();
  return &loaded.value();
}

void Library::replace(const Library* other) noexcept { replacement.store(other); }

std::string Library::why_off() {
  const Result<const Library*> library = load();
  if (!library.ok()) return library.status().message();
  int num_devices = 0;
  abi::Device** const list = library.value()->get_device_list(&num_devices);
  if (list != nullptr) library.value()->free_device_list(list);
  if (list != nullptr && num_devices > 0) return {};
  return "no RDMA device was found: if the machine has one, load its driver (mlx5_ib, ...) and, in a "
         "container, give it /dev/infiniband";
}

}  // namespace kvxfer::verbs
