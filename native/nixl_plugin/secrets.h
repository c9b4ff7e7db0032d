// The secret that a plug-in's agent proves, as kvxfer/options.py finds it for others.
#pragma once

#include "core/runtime_options.h"

namespace kvxfer::nixl {

// KVXFER_SECRET_FILE's, else KVXFER_SECRET, else this user's own on this host, which is made where there is none. An error says
// which file cannot be believed.
Status find_secret(RuntimeOptions& options);

}  // namespace kvxfer::nixl
