// Triggers: words that transfers wait for.
#pragma once

#include "bindings/convert.h"
#include "core/runtime.h"

namespace kvxfer::python {

struct PyTrigger { std::shared_ptr<Trigger> trigger; };

void define_trigger(nb::module_& module);

}  // namespace kvxfer::python
