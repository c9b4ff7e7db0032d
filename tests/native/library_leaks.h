// What LeakSanitizer is not to tell of: memory that libraries opened at run time lose themselves (libfabric 1.17 some KiB with
// each fabric and connection).
#pragma once

extern "C" __attribute__((weak, visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:libfabric.so.1\n";
}
