// Agents from their creation to the interpreter's exit.
#pragma once

#include <memory>

#include "bindings/convert.h"
#include "core/runtime.h"

namespace kvxfer::python {

// Creates an agent. If it is still open when the interpreter ends, it is closed first. The last Python object
// that drops it closes it without Python's lock, because the agent's threads may want the lock.
std::shared_ptr<Runtime> make_agent(RuntimeOptions options);

// At the interpreter's exit: closes all agents. So nothing reads or writes the interpreter's memory
// afterwards, no thread of an agent outlives static objects, and peers receive a goodbye.
void define_lifetime(nb::module_& module);

}  // namespace kvxfer::python
