// What transports report about themselves, and the options that callers give them.
#pragma once

#include "bindings/convert.h"
#include "core/transport_registry.h"

namespace kvxfer::python {

NamedOptions to_named_options(const nb::dict& options);

void define_transports(nb::module_& module);

}  // namespace kvxfer::python
