// Messages between the two ends of a rail over a fabric, over its socket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "transports/common/piece_tickets.h"
#include "transports/common/side_channel.h"

namespace kvxfer::fabric {

enum class MessageKind : std::uint32_t {
  kHello = 1,  // first, once: the beginning of an introduction
  kMore = 2,   // more of the introduction
  kReady = 3,  // the sender's endpoint is connected to the receiver's; the way that it prefers
  kGone = 4,   // the sender has deregistered a region
  kLetGo = 5,  // the answer to kGone: the sender no longer reads that region
  kDropped = 6,  // a piece that the receiver awaits will not come, or not in full
  // About pieces that are written. From the destination: it awaits a piece, and gives it a number (kAwait);
  // it no longer awaits it (kGiveUp). From the source: all of it is in the destination's memory (kWritten).
  kAwait = 7,
  kGiveUp = 8,
  kWritten = 9,
};

struct Message {
  static constexpr std::size_t kPartNbytes = 488;

  std::array<char, 4> magic{'k', 'v', 'f', '2'};
  MessageKind kind = MessageKind::kHello;
  RegionId region = 0;  // kGone, kLetGo
  PieceTicket ticket{};  // kDropped, kAwait, kGiveUp, kWritten; without a number where pieces are sent
  std::uint32_t flag = 0;  // kReady: a Way; kDropped of a sent piece: the source's rail cannot send it
  std::uint32_t whole_nbytes = 0;  // kHello: of the introduction
  std::uint32_t part_nbytes = 0;  // kHello, kMore
  std::uint32_t reserved = 0;
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
