#include "bindings/convert.h"

namespace kvxfer::python {
namespace {

PyObject* native_error = nullptr;

}  // namespace

void define_error(nb::module_& module) {
  native_error =
      PyErr_NewExceptionWithDoc("kvxfer._native.NativeError", "args == (code, message)", nullptr, nullptr);
  module.attr("NativeError") = nb::handle(native_error);
}

bool BlockIds::open(PyObject* object) noexcept {
  close();
  view_ = {};
  if (PyObject_GetBuffer(object, &view_, PyBUF_ND | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  return view_.ndim == 1 && view_.itemsize == sizeof(std::uint32_t) && std::string_view(view_.format) == "I";
}

void raise(const Status& status) {
  const nb::tuple args = nb::make_tuple(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(native_error, args.ptr());
  throw nb::python_error();
}

wire::Bytes to_payload(nb::handle payload) {
  if (!PyBytes_Check(payload.ptr()))
    raise({Code::kInvalidArgument,
           std::string("a notification is bytes, not ") + Py_TYPE(payload.ptr())->tp_name});
  wire::Bytes bytes = to_bytes(nb::borrow<nb::bytes>(payload));
  if (bytes.size() > wire::kMaxNotify)
    raise({Code::kInvalidArgument, "a notification has at most " + std::to_string(wire::kMaxNotify) +
                                       " bytes, not " + std::to_string(bytes.size()) +
                                       ": send a name of it"});
  return bytes;
}

namespace {

template <class Record>
std::vector<Record> to_records(nb::handle records, const char* what) {
  Py_buffer view;
  if (PyObject_GetBuffer(records.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
    throw nb::python_error();
  const bool fits = view.ndim == 1 && view.itemsize == static_cast<Py_ssize_t>(sizeof(Record));
  std::vector<Record> out;
  if (fits) {
    out.resize(static_cast<std::size_t>(view.len) / sizeof(Record));
    if (!out.empty()) std::memcpy(out.data(), view.buf, static_cast<std::size_t>(view.len));
  }
  PyBuffer_Release(&view);
  if (!fits)
    raise({Code::kInvalidArgument, std::string(what) + " are not a one-dimensional array of " +
                                       std::to_string(sizeof(Record)) + "-byte records"});
  return out;
}

}  // namespace

std::vector<CopyLoop> to_loops(nb::handle loops) { return to_records<CopyLoop>(loops, "loops"); }

CopyProgram to_program(std::uint32_t num_layers, nb::handle loops, nb::handle conversions, nb::handle scales,
                       const std::array<std::uint32_t, 4>& units) {
  CopyProgram program;
  program.loops = to_loops(loops);
  program.conversions = to_records<Conversion>(conversions, "conversions");
  program.scales = to_records<float>(scales, "scales");
  program.units[kCoarse] = {units[0], units[1]};
  program.units[kFine] = {units[2], units[3]};
  program.num_layers = num_layers;
  return program;
}

}  // namespace kvxfer::python
