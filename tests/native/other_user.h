// A process of another user, for tests of who may connect. Make it before any agent, while this process has
// one thread. It acts when it is given an address.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "check.h"

// Only root can become another user.
inline bool may_become_another_user() {
  if (::geteuid() == 0) return true;
  std::printf("  skipped: only root can start a process of another user\n");
  return false;
}

class OtherUser {
 public:
  static constexpr uid_t kUid = 65534;  // "nobody", by convention

  // `does` runs in the other process, with the argument of ask(), and returns what ask() returns.
  explicit OtherUser(const std::function<std::string(const std::string&)>& does) {
    int fds[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ != 0) {
      ::close(fds[1]);
      socket_ = fds[0];
      return;
    }
    ::close(fds[0]);
    if (::setresgid(kUid, kUid, kUid) != 0 || ::setresuid(kUid, kUid, kUid) != 0) ::_exit(2);
    for (;;) {
      char text[256];
      const ssize_t got = ::recv(fds[1], text, sizeof text, 0);
      if (got <= 0) ::_exit(0);
      std::string found;
      try {
        found = does(std::string(text, static_cast<std::size_t>(got)));
      } catch (const check::RequirementFailed&) {
        found = "a requirement failed there";
      }
      if (::send(fds[1], found.data(), found.size(), MSG_NOSIGNAL) < 0) ::_exit(1);
    }
  }
  OtherUser(const OtherUser&) = delete;
  OtherUser& operator=(const OtherUser&) = delete;
  ~OtherUser() {
    ::close(socket_);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  std::string ask(const std::string& tell) {
    this->tell(tell);
    return answer();
  }
  void tell(const std::string& text) {
    REQUIRE(::send(socket_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
  }
  std::string answer() {
    char text[1024];
    const ssize_t got = ::recv(socket_, text, sizeof text, 0);
    return got > 0 ? std::string(text, static_cast<std::size_t>(got)) : "it ended";
  }

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};
