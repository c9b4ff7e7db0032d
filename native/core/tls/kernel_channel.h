// The connection of a rail that carries pages, if the kernel makes and opens the records (kTLS). On the wire
// they are those of a PageChannel; they go between the socket and the pages without memory of this process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tls/records.h"
#include "core/tls/runs.h"
#include "kvxfer/cipher.h"

namespace kvxfer::tls {

// What this kernel can do. A kernel without key renewal (before Linux 6.14) ends a connection after
// kRecordsOfAKey.
struct KernelTls {
  enum class Offer : std::uint8_t { kNothing, kOneKey, kNewKeys };
  Offer offer = Offer::kNothing;
  std::string why;  // why it can do nothing

  // Tried once, over a connection of this host to itself; may block for a second.
  static const KernelTls& get();
};

class KernelChannel final : public Cipher {
 public:
  // Has the kernel encrypt everything on the socket from now on. `num_sent`, `num_received`: records that
  // used these keys before. Null: the kernel does not, and the socket is unchanged. Throws std::bad_alloc.
  static std::unique_ptr<KernelChannel> create(int socket, const TrafficKeys& sends, std::uint64_t num_sent,
                                               const TrafficKeys& receives, std::uint64_t num_received);

  ssize_t receive(std::span<const iovec> into) noexcept override;
  ssize_t send(std::span<const iovec> bytes) noexcept override;
  bool has_unread() const noexcept override { return has_unread_; }
  bool has_unsent() const noexcept override { return false; }  // the kernel sends what it took
  std::string why() const override { return why_; }

  // For tests.
  void renew_keys_after(std::uint64_t num_records) noexcept { records_of_a_key_ = num_records; }

 private:
  KernelChannel(int socket, const TrafficKeys& sends, const TrafficKeys& receives, std::uint64_t num_sent);
  bool renew_key() noexcept;  // false with errno
  // Handles the bytes of a record that is not data. 1: go on; 0: the peer's end; or fail().
  ssize_t obey(RecordKind kind, std::size_t nbytes) noexcept;
  ssize_t fail(const char* why) noexcept;  // -1

  const int socket_;
  TrafficKeys sends_, receives_;
  // An upper bound: the kernel does not say into how many records it divides what it takes.
  std::uint64_t num_sent_;
  std::uint64_t records_of_a_key_ = kRecordsOfAKey;
  std::array<std::byte, 5> said_{};  // of a record that is not data and has come only in part
  std::size_t num_said_ = 0;
  std::vector<iovec> runs_;  // for one call; never more than it has room for
  bool has_unread_ = false, is_broken_ = false;
  const char* why_ = "";
};

}  // namespace kvxfer::tls
