// The raw agent (native/raw_agent/agent.h): conversion only.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/convert.h"
#include "bindings/lifetime.h"
#include "bindings/runtime_options.h"
#include "raw_agent/agent.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

// Rows of address, length, device.
using Rows = nb::ndarray<const std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
// Rows of address, length, device, stride, count.
using StridedRows = nb::ndarray<const std::uint64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
// Arrays of another type are refused (noconvert): converting them would drop bits.
using Entries = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const raw_agent::Descriptor> to_descriptors(const Rows& rows) {
  return {reinterpret_cast<const raw_agent::Descriptor*>(rows.data()), rows.shape(0)};
}

std::span<const raw_agent::Strided> to_descriptors(const StridedRows& rows) {
  return {reinterpret_cast<const raw_agent::Strided*>(rows.data()), rows.shape(0)};
}

MemoryKind to_kind(bool is_gpu) { return is_gpu ? MemoryKind::kGpu : MemoryKind::kHost; }

// Calls f() without Python's lock.
template <class F>
auto released(F&& f) -> decltype(f()) {
  const WithoutGil without;
  return f();
}

struct PyRawRequest {
  std::shared_ptr<raw_agent::Agent> agent;
  std::shared_ptr<raw_agent::Request> request;
  bool is_released = false;

  PyRawRequest(std::shared_ptr<raw_agent::Agent> of, std::shared_ptr<raw_agent::Request> made)
      : agent(std::move(of)), request(std::move(made)) {}
  PyRawRequest(PyRawRequest&&) = default;
  ~PyRawRequest() {
    if (agent == nullptr || exiting) return;
    released([&] {
      (void)release();
      request.reset();
      agent.reset();
    });
  }
  Status release() {
    const Status status = is_released ? Status() : agent->release(*request);
    is_released = is_released || status.ok();
    return status;
  }
};

// 0: done. 1: under way.
int state_of(const Status& status) {
  if (status.code() == Code::kAgain) return 1;
  check(status);
  return 0;
}

class PyRawAgent {
 public:
  PyRawAgent(const std::string& name, const nb::dict& options, const std::string& advertise, double timeout_s,
             bool exchanges) {
    std::shared_ptr<Runtime> runtime = make_agent(to_runtime_options(name, options));
    raw_agent::Agent* const made =
        raw_agent::Agent::create(
            std::move(runtime),
            {.advertise = advertise, .timeout_ns = to_ns(timeout_s), .exchanges = exchanges})
            .release();
    agent_ = std::shared_ptr<raw_agent::Agent>(made, [](raw_agent::Agent* agent) {
      if (exiting || PyGILState_Check() == 0) {
        if (!exiting) delete agent;
        return;
      }
      released([&] { delete agent; });
    });
  }

  raw_agent::Agent& agent() const { return *agent_; }

  void close(double timeout_s) const {
    released([&] { agent_->runtime().close(to_ns(timeout_s)); });
  }
  void register_memory(const Rows& rows, bool is_gpu) const {
    check(released([&] { return agent_->register_memory(to_descriptors(rows), to_kind(is_gpu)); }));
  }
  void deregister_memory(const Rows& rows, bool is_gpu) const {
    check(released([&] { return agent_->deregister_memory(to_descriptors(rows), to_kind(is_gpu)); }));
  }
  nb::bytes metadata() const {
    return from_bytes(released([&] { return agent_->metadata(); }));
  }
  nb::bytes metadata_of(const Rows& rows, bool is_gpu, bool with_address) const {
    return from_bytes(take(
        released([&] { return agent_->metadata_of(to_descriptors(rows), to_kind(is_gpu), with_address); })));
  }
  void invalidate() const {
    released([&] { agent_->invalidate(); });
  }
  std::string add_remote(const nb::bytes& metadata) const {
    const wire::Bytes bytes = to_bytes(metadata);
    return take(released([&] { return agent_->add_remote(bytes); }));
  }
  void remove_remote(const std::string& name) const {
    check(released([&] { return agent_->remove_remote(name); }));
  }
  void connect(const std::string& name) const {
    check(released([&] { return agent_->connect(name); }));
  }
  bool is_connected(const std::string& name) const {
    return released([&] { return agent_->is_connected(name); });
  }
  bool has_remote(const std::string& name, const Rows& rows, bool is_gpu) const {
    return released([&] { return agent_->has_remote(name, to_descriptors(rows), to_kind(is_gpu)); });
  }
  template <class AnyRows>
  std::shared_ptr<raw_agent::PreparedList> prepare(const std::string& of, const AnyRows& rows,
                                                   bool is_gpu) const {
    auto prepared =
        take(released([&] { return agent_->prepare(of, to_descriptors(rows), to_kind(is_gpu)); }));
    return std::const_pointer_cast<raw_agent::PreparedList>(prepared);
  }
  PyRawRequest make(bool is_write, const raw_agent::PreparedList& local,
                    const std::optional<Entries>& local_entries, const raw_agent::PreparedList& remote,
                    const std::optional<Entries>& remote_entries) const {
    const auto entries = [](const std::optional<Entries>& given) {
      return given ? std::span<const std::uint32_t>(given->data(), given->size())
                   : std::span<const std::uint32_t>();
    };
    auto made = take(released([&] {
      return agent_->make(is_write ? raw_agent::Operation::kWrite : raw_agent::Operation::kRead, local,
                          entries(local_entries), !local_entries, remote, entries(remote_entries),
                          !remote_entries);
    }));
    return {agent_, std::move(made)};
  }
  void tell(const std::string& address, const nb::bytes& metadata) const {
    wire::Bytes bytes = to_bytes(metadata);
    check(released([&] { return agent_->tell(address, std::move(bytes)); }));
  }
  void ask(const std::string& address, const std::string& name) const {
    check(released([&] { return agent_->ask(address, name); }));
  }
  void withdraw(const std::string& address) const {
    check(released([&] { return agent_->withdraw(address); }));
  }
  void advertise(const std::string& address) const {
    released([&] { agent_->advertise(address); });
  }
  std::string address() const { return agent_->runtime().address(); }
  void notify(const std::string& remote, const nb::bytes& payload) const {
    wire::Bytes bytes = to_bytes(payload);
    check(released([&] { return agent_->notify(remote, std::move(bytes)); }));
  }
  nb::list take_notifications() const {
    const auto taken = released([&] { return agent_->take_notifications(); });
    nb::list out;
    for (const auto& [from, payload] : taken) out.append(nb::make_tuple(from, from_bytes(payload)));
    return out;
  }

 private:
  std::shared_ptr<raw_agent::Agent> agent_;
};

// Tuples of `width` fields as rows. The first three fields are address, length and device.
nb::object to_rows(const nb::list& tuples, std::size_t width) {
  const std::size_t num = nb::len(tuples);
  auto rows = std::make_unique<std::vector<std::uint64_t>>(3 * num);
  for (std::size_t i = 0; i < num; ++i) {
    PyObject* const tuple = PyList_GET_ITEM(tuples.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(width))
      throw nb::type_error(
          "a descriptor is a tuple of address, length and device; to register memory, also of metadata");
    for (std::size_t field = 0; field < 3; ++field) {
      PyObject* const item = PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(field));
      unsigned long long value;
      if (PyLong_CheckExact(item)) {
        value = PyLong_AsUnsignedLongLong(item);
      } else {  // numpy's, torch's
        const nb::object number = nb::steal(PyNumber_Index(item));
        if (!number.is_valid()) throw nb::python_error();
        value = PyLong_AsUnsignedLongLong(number.ptr());
      }
      if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)
        throw nb::python_error();
      (*rows)[3 * i + field] = value;
    }
  }
  std::vector<std::uint64_t>* const owned = rows.release();
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::uint64_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<2>>(owned->data(), {num, 3}, owner));
}

}  // namespace

void define_raw_agent(nb::module_& m) {
  nb::class_<raw_agent::PreparedList>(m, "PreparedList")
      .def("__len__", &raw_agent::PreparedList::size)
      .def_prop_ro("num_grids", [](const raw_agent::PreparedList& list) { return list.grids.size(); });

  nb::class_<PyRawRequest>(m, "RawRequest")
      .def(
          "post",
          [](PyRawRequest& r, const nb::bytes& notify) {
            wire::Bytes bytes = to_bytes(notify);
            return state_of(released([&] { return r.agent->post(*r.request, std::move(bytes)); }));
          },
          "notify"_a)
      .def("check",
           [](PyRawRequest& r) { return state_of(released([&] { return r.agent->check(*r.request); })); })
      .def("release", [](PyRawRequest& r) { check(released([&] { return r.release(); })); })
      .def_prop_ro("nbytes", [](const PyRawRequest& r) { return r.request->nbytes(); })
      .def_prop_ro("num_descriptors", [](const PyRawRequest& r) { return r.request->num_descriptors(); })
      .def_prop_ro("num_transfers", [](const PyRawRequest& r) { return r.request->num_transfers(); })
      .def_prop_ro("posted_ns", [](const PyRawRequest& r) { return r.request->posted_at(); })
      .def_prop_ro("begun_ns", [](const PyRawRequest& r) { return r.request->begun_at(); })
      .def_prop_ro("ended_ns", [](const PyRawRequest& r) { return r.request->ended_at(); });

  nb::class_<PyRawAgent>(m, "RawAgent")
      .def(nb::init<const std::string&, const nb::dict&, const std::string&, double, bool>(), "name"_a,
           "options"_a, "advertise"_a, "timeout_s"_a, "exchanges"_a)
      .def("close", &PyRawAgent::close, "timeout_s"_a)
      .def("register", &PyRawAgent::register_memory, "rows"_a.noconvert(), "is_gpu"_a)
      .def("deregister", &PyRawAgent::deregister_memory, "rows"_a.noconvert(), "is_gpu"_a)
      .def("metadata", &PyRawAgent::metadata)
      .def("metadata_of", &PyRawAgent::metadata_of, "rows"_a.noconvert(), "is_gpu"_a, "with_address"_a)
      .def("invalidate", &PyRawAgent::invalidate)
      .def("add_remote", &PyRawAgent::add_remote, "metadata"_a)
      .def("remove_remote", &PyRawAgent::remove_remote, "name"_a)
      .def("connect", &PyRawAgent::connect, "name"_a)
      .def("is_connected", &PyRawAgent::is_connected, "name"_a)
      .def("has_remote", &PyRawAgent::has_remote, "name"_a, "rows"_a.noconvert(), "is_gpu"_a)
      .def("prepare", &PyRawAgent::prepare<Rows>, "of"_a, "rows"_a.noconvert(), "is_gpu"_a)
      .def("prepare", &PyRawAgent::prepare<StridedRows>, "of"_a, "rows"_a.noconvert(), "is_gpu"_a)
      .def("make", &PyRawAgent::make, "is_write"_a, "local"_a, "local_entries"_a.none().noconvert(),
           "remote"_a, "remote_entries"_a.none().noconvert())
      .def("tell", &PyRawAgent::tell, "address"_a, "metadata"_a)
      .def("ask", &PyRawAgent::ask, "address"_a, "name"_a)
      .def("withdraw", &PyRawAgent::withdraw, "address"_a)
      .def("advertise", &PyRawAgent::advertise, "address"_a)
      .def_prop_ro("address", &PyRawAgent::address)
      .def("notify", &PyRawAgent::notify, "remote"_a, "payload"_a)
      .def("take_notifications", &PyRawAgent::take_notifications);

  m.def("descriptor_rows", &to_rows, "tuples"_a, "width"_a);
}

}  // namespace kvxfer::python
