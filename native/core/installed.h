// A copy program of ours in one session, installed for as long as a request may name it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/runtime.h"

namespace kvxfer {

class Installed {
 public:
  Installed(std::shared_ptr<Runtime> runtime, SessionKey session, std::uint32_t id)
      : runtime_(std::move(runtime)), session_(session), id_(id) {}
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;
  ~Installed() {
    if (runtime_->forked()) return;
    runtime_->with_open_engine([&](Engine& engine, Time) {
      engine.forget_program(session_, id_);
      return 0;
    });
  }
  SessionKey session() const noexcept { return session_; }
  std::uint32_t id() const noexcept { return id_; }

 private:
  const std::shared_ptr<Runtime> runtime_;
  const SessionKey session_;
  const std::uint32_t id_;
};

}  // namespace kvxfer
