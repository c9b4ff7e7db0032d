#include "transports/fabric/fabric.h"

#include <new>

namespace kvxfer::fabric {

void Flight::stop(Code its_code, std::string_view its_why) noexcept {
  is_named = true;
  is_awaited = false;
  next.clear();
  if (code != Code::kOk) return;
  code = its_code;
  try {
    why = its_why;
  } catch (const std::bad_alloc&) {  // its code says enough
  }
}

void Endpoint::completed(Flight& flight, std::string_view why) noexcept {
  --flight.num_under_way;
  --num_under_way_;
  if (why.empty()) return;
  flight.stop(Code::kRailFailed, why);
  fail(why);
}

void Endpoint::fail(std::string_view why) noexcept {
  if (!failure_.empty()) return;
  try {
    failure_ = why;
  } catch (const std::bad_alloc&) {
    failure_ = "it failed";  // short enough to need no memory
  }
}

}  // namespace kvxfer::fabric
