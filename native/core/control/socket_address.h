// Opening stream sockets: listening and dialling, TCP and abstract unix names.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// A resolved "tcp://host:port".
struct TcpAddress {
  std::vector<std::byte> storage;  // a sockaddr
  int family = 0;
  bool loopback = false;
  std::string text;                // numeric, as an address that can be connected to

  // Resolves the host, which may block on a name server. Returns at least one address, in the order in
  // which they are to be tried. kInvalidArgument, kUnreachable.
  static Result<std::vector<TcpAddress>> resolve(const std::string& address);
};

Result<UniqueFd> listen_tcp(const TcpAddress& address);
Result<std::string> listening_address(int fd);
Result<UniqueFd> listen_unix(const std::string& abstract_name);
// Non-blocking; `connecting` says whether the result is still to come.
Result<UniqueFd> dial_tcp(const TcpAddress& address, bool& connecting);
Result<UniqueFd> dial_unix(const std::string& abstract_name);
// The abstract unix name beside a TCP address: a process of this host and network namespace that listens on
// one also listens on the other. For a small frame a unix socket costs a third of a loopback one.
std::string name_beside(const std::string& tcp_address);
// Dials that name if a process of this user listens there; else empty.
UniqueFd dial_beside(const TcpAddress& address);
// The user of the process that connected to us, or that we connected to. Nothing if the socket is no unix
// socket.
std::optional<uid_t> peer_user(int fd);
// Empty: no connection waits (`error` is 0 then), or accepting failed.
UniqueFd accept_from(int listener, int& error);
std::string peer_in_words(int fd);   // "127.0.0.1:4711", "a process of this host"

}  // namespace kvxfer
