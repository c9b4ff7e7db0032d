// What is kept of one end of a transfer, or of an expectation, for a watcher outside the engine: how it
// ended, or how far it is. Plain bytes, little-endian; kvxfer/session/records.py decodes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "core/transfer_states.h"

namespace kvxfer {

enum class RecordRole : std::uint8_t { kSource = 0, kDestination = 1, kExpectation = 2 };

struct Record {
  std::uint64_t transfer;  // its number in the session; for an expectation its `handle`
  std::uint64_t handle;  // our caller's, 0 for none
  std::uint64_t region, remote_region;
  std::uint64_t nbytes;
  std::int64_t posted_ns, begun_ns, first_piece_ns, ended_ns;
  std::uint32_t session;
  std::uint32_t num_blocks, num_layers, num_pieces, pieces_done;
  std::uint16_t code;
  RecordRole role;
  Outcome outcome;
  TransferState state;
  std::uint8_t priority;
  std::uint8_t ours;
  // Bytes used of the fields below; the rest of each has no meaning.
  std::uint8_t rails_nbytes, context_nbytes, message_nbytes;
  std::uint8_t reserved[2];
  char rails[24];
  char context[128];
  char message[120];

  // Adds whole names only, with a comma between two.
  template <class Name>
  void set_rails(std::span<const Name> names) noexcept {
    rails_nbytes = 0;
    for (const std::string_view name : names) {
      const std::size_t first = rails_nbytes == 0 ? 0 : rails_nbytes + std::size_t{1};
      if (first + name.size() > sizeof rails) break;
      if (first != 0) rails[first - 1] = ',';
      std::memcpy(rails + first, name.data(), name.size());
      rails_nbytes = static_cast<std::uint8_t>(first + name.size());
    }
  }
  void set_context(std::span<const std::byte> bytes) noexcept {
    context_nbytes = put(context, bytes.data(), bytes.size());
  }
  void set_message(std::string_view text) noexcept {
    message_nbytes = put(message, text.data(), text.size());
  }

 private:
  template <std::size_t kRoom>
  static std::uint8_t put(char (&room)[kRoom], const void* text, std::size_t nbytes) noexcept {
    const std::size_t kept = std::min(nbytes, kRoom);
    if (kept != 0) std::memcpy(room, text, kept);
    return static_cast<std::uint8_t>(kept);
  }
};
static_assert(sizeof(Record) == 376 && std::is_trivially_copyable_v<Record>);

}  // namespace kvxfer
