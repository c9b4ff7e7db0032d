// The certificates of an agent: read again where one of their files changes. While they cannot be used, as between a
// certificate and its key, those that were read last go on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/system/file_watch.h"
#include "core/tls/credentials.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Everything under the gate: a file that was just written on this host is read from memory.
class WatchedCredentials {
 public:
  // Takes what was read, or says why not.
  using Changed = std::function<Status(std::shared_ptr<const tls::Credentials> credentials)>;
  using Log = std::function<void(std::string text)>;

  WatchedCredentials(Reactor& reactor, tls::CredentialFiles files, Changed changed, Log log);

  // Watches, where the system lets it, and logs where it does not.
  void start();

 private:
  void on_change(const Status& watching);

  const tls::CredentialFiles files_;
  const Changed changed_;
  const Log log_;
  std::string complaint_;  // the newest: the same is not said twice
  FileWatch watch_;
};

}  // namespace kvxfer
