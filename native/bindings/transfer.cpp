#include "bindings/transfer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

constexpr Time kSignalSlice = 100'000'000;

constexpr std::uint64_t kMaxPriority = 255;

}  // namespace

bool wait_in_slices(Runtime& runtime, const std::function<bool(Time)>& wait, double timeout_s) {
  const Time deadline = timeout_s < 0 ? kNever : Runtime::now() + to_ns(timeout_s);
  for (;;) {
    bool finished;
    {
      const WithoutGil released;
      finished = wait(std::max<Time>(0, std::min(kSignalSlice, deadline - Runtime::now())));
    }
    if (finished) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    check(runtime.check_alive());
    if (Runtime::now() >= deadline) return false;
  }
}

bool wait_for(Runtime& runtime, const std::function<bool()>& done, double timeout_s) {
  return wait_in_slices(runtime, [&](Time slice_ns) { return runtime.wait(done, slice_ns); }, timeout_s);
}

// ---- a handle -------------------------------------------------------------------------------------

std::string_view PyHandle::state() const {
  constexpr std::string_view kNames[] = {"pending", "done", "failed", "cancelled"};
  return kNames[static_cast<std::size_t>(handle->outcome())];
}

bool PyHandle::wait(double timeout_s) const {
  return wait_for(*runtime, [this] { return handle->outcome() != Outcome::kPending; }, timeout_s);
}

void PyHandle::check_layer(std::uint32_t layer) const {
  if (!handle->has_layer(layer))
    raise({Code::kOutOfRange,
           "layer " + std::to_string(layer) + " does not arrive here: the transfer does not include it"});
}

bool PyHandle::wait_layer(std::uint32_t layer, double timeout_s) const {
  check_layer(layer);
  return wait_for(
      *runtime, [&] { return handle->outcome() != Outcome::kPending || handle->layer_arrived(layer); },
      timeout_s);
}

bool PyHandle::layer_arrived(std::uint32_t layer) const {
  check_layer(layer);
  return handle->layer_arrived(layer);
}

bool PyHandle::watch_layer(std::uint32_t layer) const {
  check_layer(layer);
  return handle->watch_layer(layer);
}

void PyHandle::layers_ready(std::uint32_t layers) const {
  const WithoutGil released;
  if (!runtime->check_alive().ok()) return;
  runtime->with_engine([&](Engine& engine, Time now) { engine.layers_ready(now, handle->id(), layers); });
}

void PyHandle::cancel() const {
  const WithoutGil released;
  if (!runtime->check_alive().ok()) return;
  runtime->cancel(*handle);
}

std::shared_ptr<StreamWait> PyHandle::wait_in(std::uint64_t stream,
                                              std::optional<std::uint32_t> layer) const {
  python::check(runtime->check_alive());
  Result<std::shared_ptr<StreamWait>> made = [&] {
    const WithoutGil released;
    return runtime->wait_in(reinterpret_cast<gpu::Stream>(stream), *handle, layer);
  }();
  return take(std::move(made));
}

// ---- a route --------------------------------------------------------------------------------------

PyInstalled PyInstalled::of(const std::shared_ptr<Runtime>& runtime, SessionKey peer, std::uint32_t id) {
  return {std::shared_ptr<const Installed>(new Installed(runtime, peer, id), [](const Installed* installed) {
    const WithoutGil released;
    delete installed;
  })};
}

namespace {

bool to_bool(nb::handle flag, bool otherwise) {
  if (flag.is_none()) return otherwise;
  if (!PyBool_Check(flag.ptr())) throw nb::type_error("integrity and hold must be bool or None");
  return flag.ptr() == Py_True;
}

LeaseId to_lease(nb::handle lease) {
  if (lease.is_none()) return 0;
  return to_count(lease, "lease", 1, std::numeric_limits<LeaseId>::max(), "a LeaseToken's number");
}

}  // namespace

std::vector<std::uint32_t> PyRoute::to_ids(nb::handle blocks) const {
  BlockIds ids;
  if (ids.open(blocks.ptr())) return to_vector(ids);
  const nb::object converted = call_python([&] { return as_ids(blocks); });
  if (!ids.open(converted.ptr())) throw nb::type_error("block ids must be uint32");
  return to_vector(ids);
}

TransferRequest PyRoute::request(nb::handle src_blocks, nb::handle dst_blocks, std::uint32_t num_fine,
                                 nb::handle notify, nb::handle timeout, nb::handle context,
                                 const Terms& terms) const {
  TransferRequest request;
  request.peer = peer;
  request.program = program->id();
  request.src_ids = to_ids(src_blocks);
  request.dst_ids = to_ids(dst_blocks);
  request.num_fine = num_fine;
  request.first_layer = first_layer;
  request.num_layers = num_layers;
  request.layers_ready = num_layers;
  request.notify = to_payload(notify);
  request.priority = static_cast<std::uint8_t>(to_count(terms.priority, "priority", 0, kMaxPriority));
  request.timeout_ns = to_ns(timeout.is_none() ? timeout_s : to_seconds(timeout, "timeout_s"));
  request.context = to_context(context);
  request.integrity = to_bool(terms.integrity, integrity);
  request.lease = to_lease(terms.lease);
  return request;
}

PyHandle PyRoute::post(nb::handle src_blocks, nb::handle dst_blocks, std::uint32_t num_fine,
                       nb::handle notify, nb::handle timeout, nb::handle context, nb::handle asked) const {
  const Terms terms{asked};
  TransferRequest request = this->request(src_blocks, dst_blocks, num_fine, notify, timeout, context, terms);
  const After* after = nb::isinstance<After>(terms.hold) ? nb::inst_ptr<After>(terms.hold) : nullptr;
  if (after != nullptr || to_bool(terms.hold, false)) request.layers_ready = 0;
  python::check(runtime->check_alive());
  std::optional<Result<std::shared_ptr<Handle>>> posted = [&] {
    const WithoutGil released;
    if (after != nullptr) return std::optional(runtime->post_after(std::move(request), *after));
    return runtime->with_open_engine(
        [&](Engine& engine, Time now) { return engine.post(now, std::move(request)); });
  }();
  if (!posted) raise(runtime->check_alive());
  return {runtime, take(std::move(*posted))};
}

void define_transfer(nb::module_& module) {
  nb::class_<PyHandle>(module, "Handle")
      .def_prop_ro("id", [](const PyHandle& h) { return h.handle->id(); })
      .def_prop_ro("state", &PyHandle::state)
      .def_prop_ro("code", [](const PyHandle& h) { return static_cast<int>(h.handle->status().code()); })
      .def_prop_ro("message", [](const PyHandle& h) { return h.handle->status().message(); })
      .def_prop_ro("context", [](const PyHandle& h) { return wire::text_of(h.handle->context()); })
      .def_prop_ro("failed_blocks", [](const PyHandle& h) { return to_array(h.handle->failed_blocks()); })
      .def_prop_ro("rails", [](const PyHandle& h) { return nb::tuple(nb::cast(h.handle->rails())); })
      .def_prop_ro("posted_ns", [](const PyHandle& h) { return h.handle->posted_at(); })
      .def_prop_ro("first_piece_ns", [](const PyHandle& h) { return h.handle->first_piece_at(); })
      .def_prop_ro("ended_ns", [](const PyHandle& h) { return h.handle->ended_at(); })
      .def("wait", &PyHandle::wait, "timeout_s"_a)
      .def("wait_layer", &PyHandle::wait_layer, "layer"_a, "timeout_s"_a)
      .def("layer_arrived", &PyHandle::layer_arrived, "layer"_a)
      .def("watch_layer", &PyHandle::watch_layer, "layer"_a)
      .def("layers_ready", &PyHandle::layers_ready, "layers"_a)
      .def("cancel", &PyHandle::cancel)
      .def_prop_ro("gpu", [](const PyHandle& h) { return h.runtime->gpu(); })
      .def("wait_in", &PyHandle::wait_in, "stream"_a, "layer"_a.none());

  nb::class_<StreamWait>(module, "StreamWait")
      .def_prop_ro("outcome", [](const StreamWait& wait) { return static_cast<int>(wait.outcome()); })
      .def_prop_ro("address", [](const StreamWait& wait) {
        return reinterpret_cast<std::uint64_t>(wait.outcome_address());
      });

  nb::class_<PyInstalled>(module, "Installed");
  nb::class_<PyRoute>(module, "Route")
      .def("post", &PyRoute::post, "src_blocks"_a.none(), "dst_blocks"_a.none(), "num_fine"_a,
           "notify"_a.none(), "timeout_s"_a.none(), "context"_a.none(), "terms"_a);
}

}  // namespace kvxfer::python
