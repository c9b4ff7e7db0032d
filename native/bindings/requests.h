// Unpacks the typed tuples of kvxfer/session/requests.py, by which Python makes its requests. Only this file
// unpacks them, field by field in the order of their definition.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/convert.h"
#include "core/copy/coverage.h"
#include "core/lease.h"

namespace kvxfer::python {

// As the caller passed them. A route has the values for those that are None.
struct Terms {
  explicit Terms(nb::handle tuple);
  nb::handle priority, integrity, lease, hold;
};

struct Expected {
  explicit Expected(nb::handle tuple);
  wire::Bytes tag;
  RegionId region;
  std::vector<std::uint32_t> blocks;
  std::uint32_t first_layer, num_layers;
  Needed needed;
  std::optional<SessionKey> peer;
  Time timeout_ns;
  wire::Bytes context;
};

struct Grant {
  explicit Grant(nb::handle tuple);
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  std::vector<std::uint32_t> blocks;  // the terms point to these
  LeaseTerms terms{};
};

struct Program {
  explicit Program(nb::handle tuple);
  SessionKey peer;
  bool write;
  RegionId src_region, dst_region;
  CopyProgram program;
};

}  // namespace kvxfer::python
