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

void raise(const Status& status) {
  const nb::tuple args = nb::make_tuple(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(native_error, args.ptr());
  throw nb::python_error();
}

std::vector<CopyLoop> to_loops(nb::handle records) {
  Py_buffer view;
  if (PyObject_GetBuffer(records.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
    throw nb::python_error();
  const bool fits = view.ndim == 1 && view.itemsize == static_cast<Py_ssize_t>(sizeof(CopyLoop));
  std::vector<CopyLoop> loops;
  if (fits) {
    loops.resize(static_cast<std::size_t>(view.len) / sizeof(CopyLoop));
    if (!loops.empty()) std::memcpy(loops.data(), view.buf, static_cast<std::size_t>(view.len));
  }
  PyBuffer_Release(&view);
  if (!fits) raise({Code::kInvalidArgument, "loops are not a one-dimensional array of plan.LOOP_DTYPE"});
  return loops;
}

}  // namespace kvxfer::python
