// The addresses that a host's name stands for; dials one after the other until one answers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/control/session.h"
#include "core/control/socket_address.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class Dialling {
 public:
  Dialling() = default;  // dials nothing: an acceptor's
  static Result<Dialling> to(const std::string& address);

  bool all_loopback() const;
  // The address that is being dialled, or that answered.
  const TcpAddress& current() const { return addresses_[at_]; }
  // When the next address gets its turn: the remaining addresses share the time, so that a host which does
  // not answer leaves some for the others.
  Time turn_ends(Time now, Time due_at) const;

  // Dials through the unix name beside one of them if a process of this user listens there; else empty.
  UniqueFd dial_beside();
  // Dials the current address, or the first one after it that is not refused at once; empty if none is
  // left.
  UniqueFd dial(bool& connecting);
  // The same for the addresses after the current one; `why` says why that one failed.
  UniqueFd dial_next(const std::string& why, bool& connecting);

  // Says in words why the addresses before the current one failed; all of them if none is left.
  const std::string& tried() const { return tried_; }

 private:
  void give_up(const std::string& why);

  std::vector<TcpAddress> addresses_;
  std::size_t at_ = 0;
  std::string tried_;
};

}  // namespace kvxfer
