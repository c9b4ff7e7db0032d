#include "core/runtime/watched_credentials.h"

#include <utility>

namespace kvxfer {
namespace {

std::vector<std::string> paths_of(const tls::CredentialFiles& files) {
  std::vector<std::string> out{files.certificate, files.key, files.authorities};
  if (!files.revoked.empty()) out.push_back(files.revoked);
  return out;
}

}  // namespace

WatchedCredentials::WatchedCredentials(Reactor& reactor, tls::CredentialFiles files, Changed changed, Log log)
    : files_(std::move(files)),
      changed_(std::move(changed)),
      log_(std::move(log)),
      watch_(reactor, paths_of(files_), [this](const Status& watching) { on_change(watching); }) {}

void WatchedCredentials::start() {
  if (const Status status = watch_.start(); !status.ok())
    log_("certificates are not watched for changes; only reload_certificates() reads them again: " +
         status.message());
}

void WatchedCredentials::on_change(const Status& watching) {
  Result<std::shared_ptr<const tls::Credentials>> loaded = tls::Credentials::load(files_);
  Status status = loaded.ok() ? changed_(std::move(loaded).value()) : loaded.status();
  std::string complaint;
  if (!status.ok())
    complaint = "certificates have changed, but the previous ones stay in use: " + status.message();
  else if (!watching.ok())
    complaint = "certificates may change unnoticed; reload_certificates() reads them: " + watching.message();
  else
    log_("certificates have changed: new connections present and require the new ones");
  if (!complaint.empty() && complaint != complaint_) log_(complaint);
  complaint_ = std::move(complaint);
}

}  // namespace kvxfer
