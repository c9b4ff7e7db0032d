// The addresses that a host's name stands for, dialled one after the other until one answers.
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
  Dialling() = default;  // of nobody: an acceptor's
  static Result<Dialling> to(const std::string& address);

  bool all_loopback() const;
  // The address that is dialled, or was when somebody answered.
  const TcpAddress& current() const { return addresses_[at_]; }
  // When the next one's turn comes: those that are left share the time, so that a host which says
  // nothing leaves some for the others.
  Time turn_ends(Time now, Time due_at) const;

  // Through the unix name beside one of them, where a process of ours listens on it; empty otherwise.
  UniqueFd dial_beside();
  // The current one, or the first after it that is not refused at once; empty where none is left.
  UniqueFd dial(bool& connecting);
  // The same for those after the current one, of which `why` says what became of it.
  UniqueFd dial_next(const std::string& why, bool& connecting);

  // What became of those before the current one, in words; of all where none is left.
  const std::string& tried() const { return tried_; }

 private:
  void give_up(const std::string& why);

  std::vector<TcpAddress> addresses_;
  std::size_t at_ = 0;
  std::string tried_;
};

}  // namespace kvxfer
