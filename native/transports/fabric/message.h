// Messages between the two ends of a rail over a fabric, over its socket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "transports/common/side_channel.h"

namespace kvxfer::fabric {

enum class MessageKind : std::uint32_t {
  kHello = 1,  // first, once: the beginning of an introduction
  kMore = 2,   // more of the introduction
  kReady = 3,  // the sender's endpoint is connected to the receiver's; whether it wants pieces to be sent
  kGone = 4,   // the sender has deregistered a region
  kLetGo = 5,  // the answer to kGone: the sender no longer reads that region
  kDropped = 6,  // a piece that the receiver awaits will not come
};

struct Message {
  static constexpr std::size_t kPartNbytes = 496;

  std::array<char, 4> magic{'k', 'v', 'f', '1'};
  MessageKind kind = MessageKind::kHello;
  RegionId region = 0;  // kGone, kLetGo
  TransferId transfer = 0;  // kDropped
  std::uint32_t piece = 0;  // likewise
  std::uint32_t flag = 0;  // kReady: send pieces; kDropped: the source's rail cannot send it
  std::uint32_t whole_nbytes = 0;  // kHello: of the introduction
  std::uint32_t part_nbytes = 0;  // kHello, kMore
  std::array<std::byte, kPartNbytes> part{};

  static Message about(MessageKind kind, RegionId region = 0) noexcept {
    Message message;
    message.kind = kind;
    message.region = region;
    return message;
  }

  bool is_of_this_version() const noexcept { return magic == Message().magic; }
  bool is_hello() const noexcept { return kind == MessageKind::kHello; }
  Status check(bool has_fd) const;
};
static_assert(sizeof(Message) == 536);

// An end's name and library, and what its peer needs to read from it.
struct Introduction {
  static constexpr std::size_t kMostNbytes = 64 * 1024;

  std::string library;  // its name and version, for people
  std::string terms;  // in which both ends must agree, in words
  std::vector<std::byte> address;
  RegionKeys fences;  // of its fence words, in the form of a region's keys

  std::vector<Message> encode() const;
  static Result<Introduction> decode(std::span<const std::byte> whole);
};

}  // namespace kvxfer::fabric
