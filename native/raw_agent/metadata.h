// What an agent tells others about itself, by the ways that its callers have: where it listens, and the
// memory that they may use.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/control/wire.h"
#include "raw_agent/descriptor_list.h"

namespace kvxfer::raw_agent {

// Shown by a peer to get access to the memory that some metadata name. Drawn at random.
using Token = std::array<std::byte, 16>;

struct Metadata {
  std::string name;
  wire::Id128 incarnation{};
  std::string address;  // "": the metadata name only memory, of an agent that is known
  Token token{};
  std::vector<Section> sections;

  wire::Bytes encode() const;
  // `bytes` may be anything. kProtocol: encode() did not write them.
  static Result<Metadata> decode(wire::ByteSpan bytes);
};

}  // namespace kvxfer::raw_agent
