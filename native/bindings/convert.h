// Converts Python values to native ones and back; nothing is decided here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/gil.h"
#include "core/control/wire.h"
#include "gpu/copy_way.h"
#include "kvxfer/copy_program.h"
#include "kvxfer/status.h"

namespace kvxfer::python {

namespace nb = nanobind;

// Block ids as kvxfer/memory/block_table.py makes them: contiguous uint32 in one dimension. They are read in
// place. For an nb::ndarray, numpy would first make a DLPack capsule of each: 0.4 us of a post's 3.
class BlockIds {
 public:
  BlockIds() = default;
  BlockIds(const BlockIds&) = delete;
  BlockIds& operator=(const BlockIds&) = delete;
  ~BlockIds() { close(); }

  // False, without a Python error: the object holds no such ids.
  bool open(PyObject* object) noexcept;

  const std::uint32_t* data() const noexcept { return static_cast<const std::uint32_t*>(view_.buf); }
  std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len) / sizeof(std::uint32_t); }

 private:
  void close() noexcept {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Py_buffer view_{};
};

// Raises NativeError(code, message).
[[noreturn]] void raise(const Status& status);
void define_error(nb::module_& module);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

template <class T>
T take(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

inline std::vector<std::uint32_t> to_vector(const BlockIds& ids) {
  return {ids.data(), ids.data() + ids.size()};
}

inline nb::object to_array(const std::vector<std::uint32_t>& ids) {
  auto* owned = new std::vector<std::uint32_t>(ids);
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<std::uint32_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

inline wire::Bytes to_bytes(const nb::bytes& bytes) {
  const auto* first = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {first, first + bytes.size()};
}

// The bytes of a notification or a tag; raises if the value is neither.
wire::Bytes to_tag(nb::handle tag);
wire::Bytes to_payload(nb::handle payload);
// The bytes of a message; the engine checks its length.
wire::Bytes to_message(nb::handle payload);

// The context that a request belongs to: a text, or its UTF-8. Raises if it is neither.
wire::Bytes to_context(nb::handle context);

template <class Container>
nb::bytes from_bytes(const Container& bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// A text that a caller passes. Raises kInvalidArgument, with the argument's name, for what is no text, and for
// texts with lone surrogates, which UTF-8 cannot represent.
std::string to_text(nb::handle value, std::string_view name);

std::vector<std::string> to_texts(nb::handle values, std::string_view name);

// A value as an error's sentence shows it: its repr, cut, or its type where it has no repr.
std::string shown_of(nb::handle value);

// 31 years: in effect for ever, and far below what 64 bits of nanoseconds hold.
inline constexpr double kMostSeconds = 1e9;

// A time that a caller passes: any number from 0 on, numpy's included. Numbers above kMostSeconds, infinity,
// and numbers too large for a double become kMostSeconds. Raises kInvalidArgument, with the argument's name,
// for everything else.
double to_seconds(nb::handle value, std::string_view name);

// A whole number that a caller passes, numpy's included. Raises kInvalidArgument for other values (bools are
// no numbers) and for numbers outside [low, high]. `what`: says in words what it should be, where the bounds
// would not.
std::uint64_t to_count(nb::handle value, std::string_view name, std::uint64_t low, std::uint64_t high,
                       std::string_view what = {});

// Converts checked seconds to nanoseconds. A negative number stands for no bound.
inline std::int64_t to_ns(double seconds) {
  return static_cast<std::int64_t>(std::min(seconds, kMostSeconds) * 1e9);
}

// A program as kvxfer/plan/program.py holds it: records of LOOP_DTYPE and CONVERSION_DTYPE, which have the
// same bytes as CopyLoop and Conversion; float32 scales; units (src and dst of units; of tokens).
std::vector<CopyLoop> to_loops(nb::handle loops);
CopyProgram to_program(std::uint32_t num_layers, nb::handle loops, nb::handle conversions, nb::handle scales,
                       const std::array<std::uint32_t, 4>& units);

// plan.expand, execute, pack, unpack, convert: run a program by itself, for tests and explanations.
void define_agent_core(nb::module_& module);
void define_pool_memory(nb::module_& module);
void define_page_files(nb::module_& module);
void define_raw_agent(nb::module_& module);
void define_execution(nb::module_& module);

// Measured samples of how a GPU copies, (direction, form, alignment, run_nbytes, kernel_ns, engine_ns) each.
// They may come from a file, so values that cannot have been measured raise.
gpu::Calibration to_calibration(nb::handle samples);

// GpuCopyStream, GpuProgram, gpu_atoms: the same on a GPU.
void define_gpu(nb::module_& module);
void define_gpu_pool(nb::module_& module);
void define_gpu_stores(nb::module_& module);

}  // namespace kvxfer::python

template <>
struct nanobind::detail::type_caster<kvxfer::python::BlockIds> {
  NB_TYPE_CASTER(kvxfer::python::BlockIds, const_name("numpy.typing.NDArray[numpy.uint32]"))
  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept { return value.open(source.ptr()); }
};
