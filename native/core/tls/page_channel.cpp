#include "core/tls/page_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "core/everlasting.h"

namespace kvxfer::tls {
namespace {

// Records for one system call; they are still in the cache when the kernel copies them.
constexpr std::size_t kOutNbytes = 256 * 1024;

// Records that are not data are short: short records are opened aside, and looked at before a caller gets
// them.
constexpr std::size_t kMostAside = 64;

// A call of a MiB takes 65 full records; records of one byte each would keep all other peers waiting.
constexpr std::size_t kMostPageRecordsOfACall = 256;

// As many as a few rails use at a time.
constexpr std::size_t kMostSpare = 8;

struct Spare {
  std::mutex mutex;
  std::vector<std::unique_ptr<std::byte[]>> buffers;
};

Spare& spare() {
  static Everlasting<Spare> all;
  return all.get();
}

}  // namespace

bool RecordBuffer::acquire() noexcept {
  if (bytes_ != nullptr) return true;
  {
    const std::lock_guard lock(spare().mutex);
    if (auto& buffers = spare().buffers; !buffers.empty()) {
      bytes_ = std::move(buffers.back());
      buffers.pop_back();
      return true;
    }
  }
  bytes_.reset(new (std::nothrow) std::byte[kNbytes]);
  return bytes_ != nullptr;
}

void RecordBuffer::release() noexcept {
  if (bytes_ == nullptr) return;
  const std::lock_guard lock(spare().mutex);
  auto& buffers = spare().buffers;
  try {
    if (buffers.size() < kMostSpare) buffers.push_back(std::move(bytes_));
  } catch (const std::bad_alloc&) {}
  bytes_.reset();
}

PageChannel::PageChannel(int socket, std::unique_ptr<RecordCipher> sends,
                         std::unique_ptr<RecordCipher> receives, std::span<const std::byte> unsent)
    : socket_(socket), sends_(std::move(sends)), receives_(std::move(receives)), out_end_(unsent.size()) {
  if (!unsent.empty()) {
    if (!out_.acquire() || unsent.size() > RecordBuffer::kNbytes) throw std::bad_alloc();
    std::ranges::copy(unsent, out_.get());
  }
  runs_.reserve(Runs::kMost);
}

ssize_t PageChannel::fail(const char* why) noexcept {
  why_ = why;
  errno = EPROTO;
  return -1;
}

// ---- out ----------------------------------------------------------------------------------------

bool PageChannel::transmit() noexcept {
  while (out_begin_ < out_end_) {
    const ssize_t sent =
        ::send(socket_, out_.get() + out_begin_, out_end_ - out_begin_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    out_begin_ += static_cast<std::size_t>(sent);
  }
  out_begin_ = out_end_ = 0;
  out_.release();
  return true;
}

bool PageChannel::seal(std::span<const iovec> runs, RecordKind kind) noexcept {
  const std::size_t nbytes = sends_->seal(runs, kind, out_.get() + out_end_);
  out_end_ += nbytes;
  return nbytes != 0;
}

bool PageChannel::renew_key() noexcept {
  auto told = kKeyUpdate;
  const iovec run{told.data(), told.size()};
  return seal({&run, 1}, RecordKind::kHandshake) && sends_->update();
}

ssize_t PageChannel::send(std::span<const iovec> bytes) noexcept {
  if (!transmit()) return -1;
  Runs from{bytes};
  std::size_t total = 0;
  while (!from.empty()) {
    if (!out_.acquire()) {
      errno = ENOMEM;
      return -1;
    }
    // Room for a record, and for one more that renews its key.
    while (!from.empty() && out_end_ + 2 * kMostRecordNbytes <= kOutNbytes) {
      if (sends_->num_records() >= records_of_a_key_ && !renew_key())
        return fail("TLS: its keys cannot be renewed");
      runs_.clear();
      const std::size_t nbytes = from.take(kMostPlainNbytes, runs_);
      if (!seal(runs_, RecordKind::kData))
        return fail("TLS: OpenSSL can no longer encrypt on this connection");
      total += nbytes;
    }
    if (transmit()) continue;
    if (would_block()) break;
    return -1;
  }
  return static_cast<ssize_t>(total);
}

// ---- in -----------------------------------------------------------------------------------------

ssize_t PageChannel::fill() noexcept {
  if (in_begin_ == in_end_) in_begin_ = in_end_ = 0;
  if (!in_.acquire()) {
    errno = ENOMEM;
    return -1;
  }
  if (RecordBuffer::kNbytes - in_end_ < kMostRecordNbytes) {
    std::memmove(in_.get(), in_.get() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_begin_ = 0;
  }
  ssize_t got;
  do {
    got = ::recv(socket_, in_.get() + in_end_, RecordBuffer::kNbytes - in_end_, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got > 0) in_end_ += static_cast<std::size_t>(got);
  if (in_begin_ == in_end_) in_.release();
  return got;
}

bool PageChannel::next(std::span<const std::byte>& record) noexcept {
  record = {};
  const std::span<const std::byte> have(in_.get() + in_begin_, in_end_ - in_begin_);
  if (have.size() < kRecordHeaderNbytes) return true;
  const std::size_t nbytes = kRecordHeaderNbytes + (std::to_integer<std::size_t>(have[3]) << 8 |
                                                    std::to_integer<std::size_t>(have[4]));
  if (have[0] != static_cast<std::byte>(RecordKind::kData) || nbytes < kRecordOverheadNbytes ||
      nbytes > kMostRecordNbytes)
    return false;
  if (have.size() < nbytes) return true;
  record = have.first(nbytes);
  in_begin_ += nbytes;
  return true;
}

ssize_t PageChannel::obey(RecordKind kind) noexcept {
  const std::span<const std::byte> said(plain_.get(), std::exchange(plain_end_, 0));
  if (kind == RecordKind::kHandshake && std::ranges::equal(said, kKeyUpdate)) {
    if (!receives_->update()) return fail("TLS: its keys cannot be renewed");
    return 1;
  }
  if (kind == RecordKind::kAlert && said.size() == 2 && said[1] == kCloseNotify) return 0;
  return fail("TLS: the peer ended the connection, or sent an unexpected record");
}

// The bytes that came, if the record is data; else as obey().
ssize_t PageChannel::open(std::span<const std::byte> record, Runs& into) noexcept {
  constexpr const char* kAltered = "TLS: a record is not what the peer sent (bad record mac)";
  const std::size_t nbytes = record.size() - kRecordOverheadNbytes;
  RecordKind kind{};
  if (nbytes > kMostAside) {
    const Runs before = into;
    runs_.clear();
    if (into.take(nbytes, runs_) == nbytes) {
      if (!receives_->open(record, runs_, kind)) return fail(kAltered);
      if (kind != RecordKind::kData) return fail("TLS: the peer sent an unexpected record");
      return static_cast<ssize_t>(nbytes);
    }
    into = before;
  }
  if (plain_ == nullptr) plain_.reset(new (std::nothrow) std::byte[kMostPlainNbytes]);
  if (plain_ == nullptr) {
    errno = ENOMEM;
    return -1;
  }
  const iovec aside{plain_.get(), nbytes};
  if (!receives_->open(record, {&aside, 1}, kind)) return fail(kAltered);
  if (nbytes == 0) return fail("TLS: the peer sent an empty record");
  plain_begin_ = 0;
  plain_end_ = nbytes;
  return kind == RecordKind::kData ? 1 : obey(kind);
}

ssize_t PageChannel::receive(std::span<const iovec> runs) noexcept {
  Runs into{runs};
  std::size_t total = 0, num_records = 0;
  has_unread_ = false;
  while (!into.empty()) {
    if (plain_begin_ < plain_end_) {
      const std::size_t length = std::min(plain_end_ - plain_begin_, into.runs.front().iov_len - into.at);
      std::memcpy(static_cast<std::byte*>(into.runs.front().iov_base) + into.at, plain_.get() + plain_begin_,
                  length);
      plain_begin_ += length;
      into.at += length;
      total += length;
      continue;
    }
    if (num_records == kMostPageRecordsOfACall) {
      if (total == 0) return fail("TLS: the peer renews its keys too often");
      has_unread_ = true;
      return static_cast<ssize_t>(total);
    }
    std::span<const std::byte> record;
    if (!next(record)) return fail("TLS: what the peer sent is not a record of pages");
    if (record.empty()) {
      const ssize_t got = fill();
      if (got > 0) continue;
      const bool comes_again = got == 0 || would_block();
      return total != 0 && comes_again ? static_cast<ssize_t>(total) : got;
    }
    ++num_records;
    const Runs before = into;
    const ssize_t opened = open(record, into);
    if (opened <= 0) return opened == 0 ? static_cast<ssize_t>(total) : -1;  // its end, or what is wrong
    if (into.runs.data() != before.runs.data() || into.at != before.at)
      total += static_cast<std::size_t>(opened);
  }
  return static_cast<ssize_t>(total);
}

}  // namespace kvxfer::tls
