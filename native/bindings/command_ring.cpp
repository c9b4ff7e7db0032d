#include "bindings/command_ring.h"

#include <nanobind/stl/string.h>

#include <utility>

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

}  // namespace

std::uint32_t PyCommandRing::prepare(const PyRoute& route, std::uint32_t first_layer, nb::handle src_blocks,
                                     nb::handle dst_blocks, nb::handle notify, nb::handle timeout,
                                     nb::handle context, nb::handle terms) const {
  PreparedWrite write;
  write.request = route.request(src_blocks, dst_blocks, 0, notify, timeout, context, Terms(terms));
  write.first_layer = first_layer;
  python::check(runtime->check_alive());
  return take(reader->prepare(std::move(write)));
}

nb::list PyCommandRing::take_failures() const {
  nb::list out;
  for (const CommandReader::Failure& failure : reader->take_failures())
    out.append(nb::make_tuple(failure.index, failure.prepared, failure.pair, failure.num_pairs, failure.layer,
                              static_cast<int>(failure.status.code()), failure.status.message()));
  return out;
}

bool PyCommandRing::wait(std::uint64_t num_ended, double timeout_s) const {
  return wait_for(*runtime, [&] { return reader->counts().ended >= num_ended; }, timeout_s);
}

void PyCommandRing::close() const {
  const WithoutGil released;
  runtime->close_command_ring(*reader);
}

void define_command_ring(nb::module_& module) {
  nb::class_<PyCommandRing>(module, "CommandRing")
      .def_prop_ro("id", [](const PyCommandRing& r) { return r.reader->id(); })
      .def_prop_ro("address", [](const PyCommandRing& r) { return r.reader->address(); })
      .def_prop_ro("num_commands", [](const PyCommandRing& r) { return r.reader->num_commands(); })
      .def_prop_ro(
          "closed",
          [](const PyCommandRing& r) { return r.reader->closed() || !r.runtime->check_alive().ok(); })
      .def_prop_ro("counts",
                   [](const PyCommandRing& r) {
                     const CommandReader::Counts counts = r.reader->counts();
                     return nb::make_tuple(counts.taken, counts.ended, counts.failed);
                   })
      .def("prepare", &PyCommandRing::prepare, "route"_a, "first_layer"_a, "src_blocks"_a, "dst_blocks"_a,
           "notify"_a, "timeout_s"_a.none(), "context"_a.none(), "terms"_a)
      .def(
          "forget", [](const PyCommandRing& r, std::uint32_t prepared) { check(r.reader->forget(prepared)); },
          "prepared"_a)
      .def(
          "start",
          [](const PyCommandRing& r, std::uint32_t prepared, std::uint32_t pair, std::uint32_t layer,
             std::uint32_t num_pairs) { return take(r.reader->start(prepared, pair, layer, num_pairs)); },
          "prepared"_a, "pair"_a, "layer"_a, "num_pairs"_a)
      .def("take_failures", &PyCommandRing::take_failures)
      .def("wait", &PyCommandRing::wait, "num_ended"_a, "timeout_s"_a)
      .def("close", &PyCommandRing::close);
}

}  // namespace kvxfer::python
