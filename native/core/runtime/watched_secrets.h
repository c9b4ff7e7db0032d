// The secrets of an agent that came from a file: read again where it changes, or where the caller asks. While it
// cannot be read, or holds none, those that were read last go on.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/control/secret_file.h"
#include "core/system/file_watch.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Everything under the gate. The file is small, and read where it was just written: from memory.
class WatchedSecrets {
 public:
  using Changed = std::function<void(const Secrets& secrets)>;
  using Log = std::function<void(std::string text)>;

  // `had`: what the agent began with.
  WatchedSecrets(Reactor& reactor, std::string path, Secrets had, Changed changed, Log log);

  // Watches, where the system lets it, and logs where it does not.
  void start();
  // `changed` where others are in it than were read before, or where the caller `insists`.
  Status read(bool insists);

 private:
  void on_change(const Status& watching);
  void complain(const std::string& text);

  const std::string path_;
  Secrets last_;
  const Changed changed_;
  const Log log_;
  std::string complaint_;  // the newest: the same is not said twice
  FileWatch watch_;
};

}  // namespace kvxfer
