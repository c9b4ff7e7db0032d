#include "bindings/trigger.h"

namespace kvxfer::python {
namespace {

using nb::literals::operator""_a;

// A trigger over four bytes of the caller's. They stay exported while a transfer waits for them.
PyTrigger trigger_over(nb::handle memory) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(memory.ptr(), view.get(), PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0)
    throw nb::python_error();
  struct Export {
    std::unique_ptr<Py_buffer> view;
    ~Export() { PyBuffer_Release(view.get()); }
  };
  const Py_buffer* const exported = view.get();
  std::shared_ptr<const void> held(new Export{std::move(view)}, [](const void* kept) {
    destroy_with_gil(static_cast<const Export*>(kept));
  });
  if (exported->len != sizeof(Trigger::Word))
    raise({Code::kLengthMismatch,
           "a trigger's memory is one word of 4 bytes, not " + std::to_string(exported->len) + " bytes"});
  auto* word = static_cast<Trigger::Word*>(exported->buf);
  return {take(Trigger::create_over(word, std::move(held)))};
}

}  // namespace

void define_trigger(nb::module_& module) {
  nb::class_<PyTrigger>(module, "Trigger")
      .def_prop_ro("value", [](const PyTrigger& t) { return t.trigger->value(); })
      .def(
          "fire", [](const PyTrigger& t, Trigger::Word value) { t.trigger->fire(value); }, "value"_a)
      .def("reset", [](const PyTrigger& t) { t.trigger->reset(); })
      .def("share", [](const PyTrigger& t) { return reinterpret_cast<std::uint64_t>(t.trigger->share()); });
  nb::class_<After>(module, "After")
      .def(
          "__init__",
          [](After* made, const PyTrigger& trigger, Trigger::Word first, Trigger::Word step) {
            new (made) After{trigger.trigger, first, step};
          },
          "trigger"_a, "first"_a, "step"_a);
  module.def("trigger_over", &trigger_over, "memory"_a);
}

}  // namespace kvxfer::python
