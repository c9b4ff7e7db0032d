// An endpoint of UCX whose requests do not end in time, over a library that is made up.
#include "transports/ucx/ucx_fabric.h"

#include "check.h"

namespace {

using namespace kvxfer;
namespace abi = ucx::abi;

// What the library was last asked to do.
abi::RequestParams asked;
int request, num_freed, num_destroyed;

template <class T>
T* something() {
  return reinterpret_cast<T*>(&request);
}

// Requests end when the worker is destroyed, and not before.
ucx::Library slow_library() {
  ucx::Library library{};
  library.config_read = [](const char*, const char*, abi::Config** config) {
    *config = something<abi::Config>();
    return abi::kOk;
  };
  library.config_release = [](abi::Config*) {};
  library.init_version = [](unsigned, unsigned, const abi::ContextParams*, const abi::Config*,
                            abi::Context** context) {
    *context = something<abi::Context>();
    return abi::kOk;
  };
  library.cleanup = [](abi::Context*) {};
  library.worker_create = [](abi::Context*, const abi::WorkerParams*, abi::Worker** worker) {
    *worker = something<abi::Worker>();
    return abi::kOk;
  };
  library.worker_get_efd = [](abi::Worker*, int* fd) {
    *fd = -1;
    return abi::kOk;
  };
  library.worker_set_am_recv_handler = [](abi::Worker*, const abi::HandlerParams*) { return abi::kOk; };
  library.worker_progress = [](abi::Worker*) { return 0u; };
  library.ep_create = [](abi::Worker*, const abi::EndpointParams*, abi::EndpointHandle** endpoint) {
    *endpoint = something<abi::EndpointHandle>();
    return abi::kOk;
  };
  library.ep_close_nbx = [](abi::EndpointHandle*, const abi::RequestParams*) -> abi::StatusPointer {
    return nullptr;
  };
  library.get_nbx = [](abi::EndpointHandle*, void*, std::size_t, std::uint64_t, abi::RemoteKey*,
                       const abi::RequestParams* params) -> abi::StatusPointer {
    asked = *params;
    return &request;
  };
  library.request_free = [](void*) { ++num_freed; };
  library.status_string = [](abi::StatusCode) { return "cancelled"; };
  library.worker_destroy = [](abi::Worker*) {
    ++num_destroyed;
    asked.callback.sent(&request, abi::kCanceled, asked.user_data);
  };
  return library;
}

TEST(a_request_that_ends_with_its_worker_ends_once_and_in_words) {
  const ucx::Library library = slow_library();
  auto fabric = ucx::UcxFabric::create(library, {});
  REQUIRE(fabric.ok());
  auto opened = fabric.value()->open({});
  REQUIRE(opened.ok());
  std::unique_ptr<fabric::Endpoint> endpoint = std::move(opened).value();
  const std::byte address[1]{};
  REQUIRE(endpoint->connect(address).ok());
  fabric::Flight flight;
  fabric::Request next;
  std::byte here{};
  next.add({0, 0, reinterpret_cast<std::uintptr_t>(&here), 0, 1});
  REQUIRE(endpoint->post(next, flight, false) == fabric::Endpoint::Posted::kUnderWay);
  endpoint->close();
  CHECK_EQ(flight.num_under_way, 1u);
  endpoint.reset();
  CHECK_EQ(num_destroyed, 1);
  CHECK_EQ(num_freed, 1);
  CHECK_EQ(flight.num_under_way, 0u);
  CHECK(flight.code == Code::kRailFailed);
  CHECK_EQ(flight.why, std::string("cancelled"));
}

}  // namespace
