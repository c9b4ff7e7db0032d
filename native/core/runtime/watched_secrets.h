// The secrets of an agent that came from a file: read again when the file changes, or when the caller asks.
// While the file cannot be read, or holds no secret, the last good ones stay in use.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/control/secret_file.h"
#include "core/system/file_watch.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// All calls under the gate. A file that was just written on this host is read from memory. A caller, whose
// file may lie on another host, reads it without the gate and passes what it found to take().
class WatchedSecrets {
 public:
  using Changed = std::function<void(const Secrets& secrets)>;
  using Log = std::function<void(std::string text)>;

  // `had`: the secrets with which the agent began.
  WatchedSecrets(Reactor& reactor, std::string path, Secrets had, Changed changed, Log log);

  // Starts to watch if the system permits it; else logs that.
  void start();
  // How often the file has been read. A caller that reads it as well thus knows which of the two reads was
  // later.
  std::uint64_t num_reads() const noexcept { return num_reads_; }
  // Uses the secrets that are in the file now, even if it used them before: set_secrets() may have come
  // between.
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
  std::string complaint_;  // the newest one, so that it is not logged twice
  FileWatch watch_;
};

}  // namespace kvxfer
