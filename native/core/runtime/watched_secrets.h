// The secrets of an agent that came from a file: read again where it changes, or where the caller asks. While it
// cannot be read, or holds none, those that were read last go on.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/control/secret_file.h"
#include "core/system/file_watch.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Everything under the gate. A file that was just written on this host is read from memory; a caller, whose file may
// lie on another, reads it without the gate and gives what it found to take().
class WatchedSecrets {
 public:
  using Changed = std::function<void(const Secrets& secrets)>;
  using Log = std::function<void(std::string text)>;

  // `had`: what the agent began with.
  WatchedSecrets(Reactor& reactor, std::string path, Secrets had, Changed changed, Log log);

  // Watches, where the system lets it, and logs where it does not.
  void start();
  // How often the file has been read. It tells a caller that reads it as well who was later.
  std::uint64_t num_reads() const noexcept { return num_reads_; }
  // What is in the file now, even where it was before: set_secrets() may have come between.
  void take(Secrets secrets);

 private:
  void on_change(const Status& watching);
  Status read();
  void complain(const std::string& text);

  const std::string path_;
  Secrets last_;
  const Changed changed_;
  const Log log_;
  std::uint64_t num_reads_ = 0;
  std::string complaint_;  // the newest: the same is not said twice
  FileWatch watch_;
};

}  // namespace kvxfer
