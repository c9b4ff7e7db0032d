// The connection of a rail that carries pages: seals records from the caller's memory, and opens them into
// it.
#pragma once

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

// Memory for many records. When given back, other connections use it.
class RecordBuffer {
 public:
  static constexpr std::size_t kNbytes = 512 * 1024;

  ~RecordBuffer() { release(); }
  RecordBuffer() = default;
  RecordBuffer(const RecordBuffer&) = delete;
  RecordBuffer& operator=(const RecordBuffer&) = delete;
  bool acquire() noexcept;  // false: there is none
  void release() noexcept;
  std::byte* get() const noexcept { return bytes_.get(); }

 private:
  std::unique_ptr<std::byte[]> bytes_;
};

class PageChannel final : public Cipher {
 public:
  // `unsent`: ciphertext that goes out before everything else. Throws std::bad_alloc.
  PageChannel(int socket, std::unique_ptr<RecordCipher> sends, std::unique_ptr<RecordCipher> receives,
              std::span<const std::byte> unsent);

  ssize_t receive(std::span<const iovec> into) noexcept override;
  ssize_t send(std::span<const iovec> bytes) noexcept override;
  bool has_unread() const noexcept override { return has_unread_; }
  bool has_unsent() const noexcept override { return out_begin_ < out_end_; }
  std::string why() const override { return why_; }

  // For tests.
  void renew_keys_after(std::uint64_t num_records) noexcept { records_of_a_key_ = num_records; }

 private:
  bool transmit() noexcept;  // false with errno: some is left
  bool seal(std::span<const iovec> runs, RecordKind kind) noexcept;
  bool renew_key() noexcept;
  ssize_t fill() noexcept;
  // The next whole record; empty: it has not come yet. False: the bytes are not a record.
  bool next(std::span<const std::byte>& record) noexcept;
  ssize_t open(std::span<const std::byte> record, Runs& into) noexcept;
  ssize_t obey(RecordKind kind) noexcept;  // handles a record in plain_ that is not data
  ssize_t fail(const char* why) noexcept;  // -1

  const int socket_;
  const std::unique_ptr<RecordCipher> sends_, receives_;
  std::uint64_t records_of_a_key_ = kRecordsOfAKey;
  // They come from a pool while something is in them: an idle rail holds no memory for records.
  RecordBuffer out_, in_;
  // Made for the first record that is not opened directly into the caller's memory.
  std::unique_ptr<std::byte[]> plain_;
  std::size_t out_begin_ = 0, out_end_ = 0, in_begin_ = 0, in_end_ = 0;
  std::size_t plain_begin_ = 0, plain_end_ = 0;  // the part of a record for which the caller had no room
  std::vector<iovec> runs_;  // for one record; never more than it has room for
  bool has_unread_ = false;
  const char* why_ = "";
};

}  // namespace kvxfer::tls
