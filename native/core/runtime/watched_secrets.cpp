#include "core/runtime/watched_secrets.h"

#include <utility>

namespace kvxfer {

WatchedSecrets::WatchedSecrets(Reactor& reactor, std::string path, Secrets had, Changed changed, Log log)
    : path_(std::move(path)),
      last_(std::move(had)),
      changed_(std::move(changed)),
      log_(std::move(log)),
      watch_(reactor, {path_}, [this](const Status& watching) { on_change(watching); }) {}

void WatchedSecrets::start() {
  if (const Status status = watch_.start(); !status.ok())
    log_("the secret's file (" + path_ +
         ") is not watched for changes; only reload_secret() reads it again: " + status.message());
  else
    on_change(status);  // reports a change between the caller's look and the start of the watch
}

void WatchedSecrets::on_change(const Status& watching) {
  Status status = read();
  if (status.ok() && !watching.ok())
    status = {watching.code(), "the secret's file (" + path_ +
                                   ") may change unnoticed; reload_secret() reads it: " + watching.message()};
  if (status.ok())
    complaint_.clear();
  else
    complain(status.message());
}

Status WatchedSecrets::read() {
  ++num_reads_;
  Result<Secrets> found = read_secret_file(path_);
  if (!found.ok()) return found.status();
  if (found.value() != last_) take(std::move(found).value());
  return {};
}

void WatchedSecrets::take(Secrets secrets) {
  ++num_reads_;
  if (secrets != last_)
    log_("the secret's file (" + path_ + ") has changed: new sessions use " +
         (secrets.second.empty() ? "its secret now" : "one of its two secrets now"));
  last_ = std::move(secrets);
  changed_(last_);
}

void WatchedSecrets::complain(const std::string& text) {
  if (text == complaint_) return;
  complaint_ = text;
  log_(text + "; the agent keeps its previous secrets");
}

}  // namespace kvxfer
