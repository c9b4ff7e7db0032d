// Messages between the two ends of a verbs rail, over its socket: where their queue pairs are, that they are
// connected, and which pieces are to be written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"
#include "transports/common/piece_tickets.h"
#include "transports/common/side_channel.h"
#include "transports/verbs/abi.h"
#include "transports/verbs/options.h"

namespace kvxfer::verbs {

enum class MessageKind : std::uint32_t {
  kHello = 1,  // first, once
  kReady = 2,  // the sender's queue pairs are connected to the receiver's
  // About pieces that come by WRITE, where both ends allow that. From the destination: it awaits a piece,
  // which this number announces (kAwait); it no longer awaits it (kGiveUp). From the source: it has ended a
  // piece without its last WRITE (kDropped).
  kAwait = 3,
  kGiveUp = 4,
  kDropped = 5,
};

// One queue pair: its number, the number of the first packet that it sends, and the first priority that it
// serves. The pairs of a class stand side by side, and the classes stand in the order of their priorities.
struct PairAddress {
  std::uint32_t number : 24 = 0;
  std::uint32_t first_priority : 8 = 0;
  std::uint32_t first_packet : 24 = 0;
  std::uint32_t reserved : 8 = 0;
};
static_assert(sizeof(PairAddress) == 8);

struct Message {
  std::array<char, 4> magic{'k', 'v', 'r', '1'};
  MessageKind kind = MessageKind::kHello;
  // ---- hello
  std::array<char, 64> device{};  // "mlx5_0 port 1", ends with zeros
  abi::Gid gid{};
  std::uint16_t lid = 0;
  abi::LinkLayer link = abi::LinkLayer::kUnspecified;
  std::uint8_t mtu = 0;  // abi::Mtu
  std::uint8_t num_reads = 0;  // of the receiver's READs that one queue pair of the sender serves at a time
  std::uint8_t num_pairs = 0;
  std::uint16_t takes_writes = 0;  // 1: the receiver may WRITE to the sender
  // The sender's fence words for this session, as the device reads them.
  std::uint64_t fence_address = 0, fence_nbytes = 0;
  std::uint32_t fence_key = 0, reserved_too = 0;
  union {
    std::array<PairAddress, kMostPairs> pairs{};
    PieceTicket ticket;  // kAwait, kGiveUp, kDropped
  };

  bool is_of_this_version() const noexcept { return magic == Message().magic && reserved_too == 0; }
  bool is_hello() const noexcept { return kind == MessageKind::kHello; }
  Status check(bool has_fd) const;
  std::string device_name() const;  // characters but letters, digits and the like become '?'
};
static_assert(sizeof(Message) == 248);

}  // namespace kvxfer::verbs
