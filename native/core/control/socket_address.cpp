#include "core/control/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace kvxfer {
namespace {

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string in_words(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) !=
      0)
    return "an address that cannot be shown";
  return address->sa_family == AF_INET6 ? "[" + std::string(host) + "]:" + port
                                        : std::string(host) + ":" + port;
}

// An abstract name begins with a byte 0. A peer tells us its name, which may be too long to fit.
Result<socklen_t> unix_address(const std::string& name, sockaddr_un& out) {
  constexpr std::size_t kMostNbytes = sizeof out.sun_path - 1;
  if (name.size() > kMostNbytes)
    return Status(Code::kInvalidArgument, "a unix socket's name has up to " + std::to_string(kMostNbytes) +
                                              " bytes, but this one has " + std::to_string(name.size()));
  std::memset(&out, 0, sizeof out);
  out.sun_family = AF_UNIX;
  std::memcpy(out.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Result<std::vector<TcpAddress>> TcpAddress::resolve(const std::string& address) {
  const auto bad = [&] {
    return Status(Code::kInvalidArgument, "'" + address + "' is not an address: write tcp://host:port");
  };
  if (!address.starts_with("tcp://")) return bad();
  const std::string rest = address.substr(6);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == rest.size()) return bad();
  // The resolver would read only up to the NUL, and dial another host than the one that was checked.
  if (rest.find('\0') != std::string::npos)
    return Status(Code::kInvalidArgument, "an address must not contain a NUL byte: write tcp://host:port");
  // The resolver keeps only the low 16 bits of a larger number, and would dial another port.
  const std::string port = rest.substr(colon + 1);
  unsigned number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size() || number > 65535)
    return Status(Code::kInvalidArgument,
                  "'" + address + "' is not an address: '" + port + "' is not a port from 0 to 65535");
  std::string host = rest.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int failure = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); failure != 0)
    return Status(failure == EAI_SERVICE ? Code::kInvalidArgument : Code::kUnreachable,
                  "cannot resolve '" + address + "': " + ::gai_strerror(failure));
  std::vector<TcpAddress> all;
  for (const addrinfo* item = found; item != nullptr; item = item->ai_next) {
    TcpAddress& one = all.emplace_back();
    const auto* bytes = reinterpret_cast<const std::byte*>(item->ai_addr);
    one.storage.assign(bytes, bytes + item->ai_addrlen);
    one.family = item->ai_family;
    one.loopback = is_loopback(item->ai_addr);
    one.text = "tcp://" + in_words(item->ai_addr, item->ai_addrlen);
  }
  ::freeaddrinfo(found);
  return all;
}

Result<UniqueFd> listen_tcp(const TcpAddress& address) {
  UniqueFd fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return Status::from_errno("socket", errno);
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(address.storage.data()),
             static_cast<socklen_t>(address.storage.size())) != 0 ||
      ::listen(fd.get(), 512) != 0)
    return Status(Code::kSystem, "cannot listen on " + address.text + ": " + words_of(errno) +
                                     "; with port 0 the kernel chooses a free one");
  return fd;
}

Result<std::string> listening_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0)
    return Status::from_errno("getsockname", errno);
  return "tcp://" + in_words(reinterpret_cast<sockaddr*>(&storage), length);
}

Result<UniqueFd> listen_unix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address;
  const Result<socklen_t> length = unix_address(name, address);
  if (!length.ok()) return length.status();
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length.value()) != 0 ||
      ::listen(fd.get(), 512) != 0)
    return Status::from_errno("listening on an abstract unix socket", errno);
  return fd;
}

Result<UniqueFd> dial_tcp(const TcpAddress& address, bool& connecting) {
  UniqueFd fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return Status::from_errno("socket", errno);
  const int one = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  connecting = false;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(address.storage.data()),
                static_cast<socklen_t>(address.storage.size())) == 0)
    return fd;
  if (errno != EINPROGRESS) return Status(Code::kUnreachable, words_of(errno));
  connecting = true;
  return fd;
}

Result<UniqueFd> dial_unix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address;
  const Result<socklen_t> length = unix_address(name, address);
  if (!length.ok()) return length.status();
  if (!fd) return Status::from_errno("socket", errno);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length.value()) == 0) return fd;
  const char* const why = errno == ECONNREFUSED ? "; the peer runs in another network namespace, or has ended"
                          : errno == EAGAIN     ? "; the peer is overloaded: its queue of callers is full"
                                                : "";
  return Status(Code::kUnreachable, "the peer's unix socket cannot be reached: " + words_of(errno) + why);
}

std::string name_beside(const std::string& tcp_address) { return "kvxfer-" + tcp_address.substr(6); }

UniqueFd dial_beside(const TcpAddress& address) {
  Result<UniqueFd> fd = dial_unix(name_beside(address.text));
  // Any process may take a free name before the agent does.
  if (!fd.ok() || peer_user(fd.value().get()) != ::geteuid()) return {};
  return std::move(fd).value();
}

std::optional<uid_t> peer_user(int fd) {
  int domain = 0;
  ucred peer{};
  socklen_t domain_length = sizeof domain, peer_length = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_length) != 0 || domain != AF_UNIX ||
      ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_length) != 0)
    return std::nullopt;
  return peer.uid;
}

UniqueFd accept_from(int listener, int& error) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  error = fd || errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
  if (fd) {
    const int one = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);  // fails on unix sockets, rightly
  }
  return fd;
}

std::string peer_in_words(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return "a peer that is gone";
  if (storage.ss_family == AF_UNIX) return "a process of this host";
  return in_words(reinterpret_cast<sockaddr*>(&storage), length);
}

}  // namespace kvxfer
