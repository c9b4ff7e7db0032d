// What an agent tells others of itself, by whatever way its callers have: where it listens, and which memory they may use.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/control/wire.h"
#include "door/descriptor_list.h"

namespace kvxfer::door {

// What a peer shows to be given the memory that some metadata name. Drawn at random.
using Token = std::array<std::byte, 16>;

struct Metadata {
  std::string name;
  wire::Id128 incarnation{};
  std::string address;  // "": only of memory, of an agent that is known
  Token token{};
  std::vector<Section> sections;

  wire::Bytes encode() const;
  // `bytes` may be anything. kProtocol: they are not as encode() writes them.
  static Result<Metadata> decode(wire::ByteSpan bytes);
};

}  // namespace kvxfer::door
