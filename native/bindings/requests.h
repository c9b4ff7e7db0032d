// kvxfer/session/requests.py: what Python asks for in one typed tuple. They are unpacked here alone, field by
// field in the order in which they stand there.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/convert.h"
#include "core/copy/coverage.h"
#include "core/lease.h"

namespace kvxfer::python {

// As callers passed them: a route knows what they mean where they are None.
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
  std::vector<std::uint32_t> blocks;  // to which the terms point
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
