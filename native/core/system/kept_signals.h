// Keeps the process's signal handlers while a library is opened. A few libraries install handlers when they
// are loaded (libinfinipath, which Debian's libfabric brings, for SIGINT and SIGTERM too; UCX for SIGSEGV
// and similar ones).
#pragma once

#include <signal.h>

#include <array>

namespace kvxfer {

class KeptSignals {
 public:
  KeptSignals() noexcept {
    for (int number = 1; number < NSIG; ++number)
      is_known_[number] = ::sigaction(number, nullptr, &before_[number]) == 0;
  }
  ~KeptSignals() {
    for (int number = 1; number < NSIG; ++number) {
      struct sigaction now{};
      if (is_known_[number] && ::sigaction(number, nullptr, &now) == 0 &&
          now.sa_sigaction != before_[number].sa_sigaction)
        ::sigaction(number, &before_[number], nullptr);
    }
  }
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  std::array<struct sigaction, NSIG> before_{};
  std::array<bool, NSIG> is_known_{};
};

}  // namespace kvxfer
