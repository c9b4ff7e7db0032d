// What kvxfer/options.py says of an agent, as the core takes it.
#pragma once

#include <memory>
#include <string>

#include "bindings/convert.h"
#include "core/runtime_options.h"

namespace kvxfer::python {

// Raises where an option is not as it should be. Reads certificates, and a GPU's driver.
RuntimeOptions to_runtime_options(const std::string& name, const nb::dict& options);

// A Python object that the core holds; any thread may let it go.
std::shared_ptr<const void> held(nb::object owner);
tls::CredentialFiles to_credential_files(const nb::dict& files);
// Reads files, and so lets others run meanwhile.
std::shared_ptr<const tls::Credentials> load_credentials(const tls::CredentialFiles& files);
std::string to_secret(nb::handle given);

}  // namespace kvxfer::python
