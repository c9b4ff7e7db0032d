// The certificates of an agent: read again when one of their files changes. While the files cannot be used,
// for example because the certificate is new and its key is not, the last good ones stay in use.
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

// All calls under the gate: a file that was just written on this host is read from memory.
class WatchedCredentials {
 public:
  // Takes what was read, or says why it cannot.
  using Changed = std::function<Status(std::shared_ptr<const tls::Credentials> credentials)>;
  using Log = std::function<void(std::string text)>;

  WatchedCredentials(Reactor& reactor, tls::CredentialFiles files, Changed changed, Log log);

  // Starts to watch if the system permits it; else logs that.
  void start();

 private:
  void on_change(const Status& watching);

  const tls::CredentialFiles files_;
  const Changed changed_;
  const Log log_;
  std::string complaint_;  // the newest one, so that it is not logged twice
  FileWatch watch_;
};

}  // namespace kvxfer
