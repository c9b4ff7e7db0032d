// Finds the secret that a plug-in's agent proves, by the same rules as kvxfer/options.py.
#pragma once

#include "core/runtime_options.h"

namespace kvxfer::nixl {

// KVXFER_SECRET_FILE's secret, else KVXFER_SECRET, else this user's own on this host, which is created if
// there is none. An error names the file that cannot be trusted.
Status find_secret(RuntimeOptions& options);

}  // namespace kvxfer::nixl
