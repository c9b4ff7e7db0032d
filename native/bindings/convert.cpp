#include "bindings/convert.h"

#include "core/bytes.h"

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

namespace {

wire::Bytes to_bytes_of(nb::handle payload, const char* what) {
  if (!PyBytes_Check(payload.ptr()))
    raise({Code::kInvalidArgument,
           std::string(what) + " must be bytes, not " + Py_TYPE(payload.ptr())->tp_name});
  return to_bytes(nb::borrow<nb::bytes>(payload));
}

}  // namespace

wire::Bytes to_message(nb::handle payload) { return to_bytes_of(payload, "a message"); }

wire::Bytes to_tag(nb::handle tag) {
  wire::Bytes bytes = to_bytes_of(tag, "a tag");
  if (bytes.size() > wire::kMaxNotify)
    raise({Code::kInvalidArgument, "a tag has at most " + std::to_string(wire::kMaxNotify) + " bytes, not " +
                                       std::to_string(bytes.size())});
  return bytes;
}

wire::Bytes to_payload(nb::handle payload) {
  wire::Bytes bytes = to_bytes_of(payload, "a notification");
  if (bytes.size() > wire::kMaxNotify)
    raise({Code::kInvalidArgument, "a notification has at most " + std::to_string(wire::kMaxNotify) +
                                       " bytes, not " + std::to_string(bytes.size()) +
                                       ": send an identifier of the data instead"});
  return bytes;
}

namespace {

// numpy's bools have a __float__, and a type that native code does not know.
bool is_bool(nb::handle value) {
  const std::string_view type = Py_TYPE(value.ptr())->tp_name;
  return PyBool_Check(value.ptr()) || type == "numpy.bool_" || type == "numpy.bool";
}

[[noreturn]] void refuse(std::string_view name, std::string_view what, nb::handle value) {
  PyErr_Clear();
  raise({Code::kInvalidArgument,
         std::string(name) + " must be " + std::string(what) + ", not " + shown_of(value)});
}

}  // namespace

std::string shown_of(nb::handle value) {
  std::string shown = std::string("a ") + Py_TYPE(value.ptr())->tp_name;
  const nb::object text = nb::steal(PyObject_Repr(value.ptr()));
  const nb::object bytes = text.is_valid()
                               ? nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"))
                               : nb::object();
  PyErr_Clear();  // an int of too many digits has no text, and any repr may raise
  if (bytes.is_valid()) shown = PyBytes_AS_STRING(bytes.ptr());
  constexpr std::size_t kMostShown = 100;
  if (shown.size() > kMostShown) {
    std::size_t cut = kMostShown;
    while (cut > 0 && (shown[cut] & 0xC0) == 0x80) --cut;  // not within a character of UTF-8
    shown = shown.substr(0, cut) + "...";
  }
  return shown;
}

std::string to_text(nb::handle value, std::string_view name) {
  Py_ssize_t nbytes = 0;
  const char* const text =
      PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &nbytes) : nullptr;
  if (text == nullptr) refuse(name, "text that UTF-8 can represent", value);
  return {text, static_cast<std::size_t>(nbytes)};
}

std::vector<std::string> to_texts(nb::handle values, std::string_view name) {
  std::vector<std::string> texts;
  for (const nb::handle value : values) texts.push_back(to_text(value, name));
  return texts;
}

wire::Bytes to_context(nb::handle context) {
  Py_ssize_t nbytes = 0;
  const char* text = nullptr;
  if (PyUnicode_Check(context.ptr())) {
    text = PyUnicode_AsUTF8AndSize(context.ptr(), &nbytes);
  } else if (PyBytes_Check(context.ptr())) {
    text = PyBytes_AS_STRING(context.ptr());
    nbytes = PyBytes_GET_SIZE(context.ptr());
  }
  const std::string_view words(text, static_cast<std::size_t>(nbytes));
  const auto* const first = reinterpret_cast<const std::byte*>(text);
  if (text != nullptr && words.size() <= wire::kMaxContext && wire::utf8_prefix(words) == words.size())
    return {first, first + nbytes};
  refuse("context", "up to " + std::to_string(wire::kMaxContext) + " bytes of UTF-8, as text or bytes",
         context);
}

double to_seconds(nb::handle value, std::string_view name) {
  double seconds = is_bool(value) ? -1 : PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
    PyErr_Clear();
    if (PyObject_RichCompareBool(value.ptr(), nb::int_(0).ptr(), Py_GT) == 1) seconds = kMostSeconds;
  }
  if (PyErr_Occurred() != nullptr || !(seconds >= 0)) refuse(name, "seconds", value);
  return std::min(seconds, kMostSeconds);
}

std::uint64_t to_count(nb::handle value, std::string_view name, std::uint64_t low, std::uint64_t high,
                       std::string_view what) {
  const nb::object number = nb::steal(is_bool(value) ? nullptr : PyNumber_Index(value.ptr()));
  const std::uint64_t count = number.is_valid() ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
  if (number.is_valid() && PyErr_Occurred() == nullptr && low <= count && count <= high) return count;
  if (!what.empty()) refuse(name, what, value);
  refuse(name, std::to_string(low) + " to " + std::to_string(high), value);
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
