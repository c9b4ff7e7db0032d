// Agents from their making to the interpreter's exit.
#pragma once

#include <memory>

#include "bindings/convert.h"
#include "core/runtime.h"

namespace kvxfer::python {

// An agent that is closed before the interpreter ends, if it is open then. Whatever Python object drops it last
// closes it without Python's lock, which its threads may want.
std::shared_ptr<Runtime> make_agent(RuntimeOptions options);

// At the interpreter's exit: ends all agents, so that nothing reads or writes memory of the interpreter's, no thread
// of theirs outlives static objects, and peers hear a goodbye.
void define_lifetime(nb::module_& module);

}  // namespace kvxfer::python
