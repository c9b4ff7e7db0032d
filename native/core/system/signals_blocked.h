#pragma once

#include <pthread.h>
#include <signal.h>

namespace kvxfer {

// Threads of ours take no signal that is meant for the process; those that a thread brings upon itself end it.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int fatal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      ::sigdelset(&blocked, fatal);
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace kvxfer
