// The connection of a rail that carries pages, whose records the kernel makes and opens (kTLS): the same on the wire as
// those of a PageChannel, between the socket and the pages, without memory of this process's.
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

// What this kernel does; one without new keys (before Linux 6.14) ends a connection after kRecordsOfAKey.
struct KernelTls {
  enum class Offer : std::uint8_t { kNothing, kOneKey, kNewKeys };
  Offer offer = Offer::kNothing;
  std::string why;  // there is nothing

  // Tried once, over a connection of this host with itself; may block for a second.
  static const KernelTls& get();
};

class KernelChannel final : public Cipher {
 public:
  // Has the kernel encrypt all that the socket carries from now on; `num_sent`, `num_received`: records that went with
  // these keys before. Null: it does not, and the socket is as it was. Throws std::bad_alloc.
  static std::unique_ptr<KernelChannel> create(int socket, const TrafficKeys& sends, std::uint64_t num_sent,
                                               const TrafficKeys& receives, std::uint64_t num_received);

  ssize_t receive(std::span<const iovec> into) noexcept override;
  ssize_t send(std::span<const iovec> bytes) noexcept override;
  bool has_unread() const noexcept override { return has_unread_; }
  bool has_unsent() const noexcept override { return false; }  // the kernel sends what it took
  std::string why() const override { return why_; }

  void renew_keys_after(std::uint64_t num_records) noexcept { records_of_a_key_ = num_records; }  // of tests

 private:
  KernelChannel(int socket, const TrafficKeys& sends, const TrafficKeys& receives, std::uint64_t num_sent);
  bool renew_key() noexcept;  // false with errno
  // Bytes of a record that is no data. 1: go on; 0: the peer's end; or fail().
  ssize_t obey(RecordKind kind, std::size_t nbytes) noexcept;
  ssize_t fail(const char* why) noexcept;  // -1

  const int socket_;
  TrafficKeys sends_, receives_;
  std::uint64_t num_sent_;  // at most; how the kernel divides what it takes, it does not say
  std::uint64_t records_of_a_key_ = kRecordsOfAKey;
  std::array<std::byte, 5> said_{};  // of a record that is no data and has not come whole
  std::size_t num_said_ = 0;
  std::vector<iovec> runs_;  // of one call; never more than it has room for
  bool has_unread_ = false, is_broken_ = false;
  const char* why_ = "";
};

}  // namespace kvxfer::tls
