// Converts the options of kvxfer/options.py to those of the core.
#pragma once

#include <memory>
#include <string>

#include "bindings/convert.h"
#include "core/runtime_options.h"

namespace kvxfer::python {

// Raises if an option is not valid. Reads certificates, and asks a GPU's driver.
RuntimeOptions to_runtime_options(const std::string& name, const nb::dict& options);

// A Python object that the core keeps alive; any thread may release it.
std::shared_ptr<const void> held(nb::object owner);
tls::CredentialFiles to_credential_files(const nb::dict& files);
// Reads files, so it lets other threads run meanwhile.
std::shared_ptr<const tls::Credentials> load_credentials(const tls::CredentialFiles& files);
std::string to_secret(nb::handle given);

}  // namespace kvxfer::python
