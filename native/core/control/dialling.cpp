#include "core/control/dialling.h"

#include <algorithm>
#include <utility>

namespace kvxfer {

Result<Dialling> Dialling::to(const std::string& address) {
  Result<std::vector<TcpAddress>> resolved = TcpAddress::resolve(address);
  if (!resolved.ok()) return resolved.status();
  Dialling out;
  out.addresses_ = std::move(resolved).value();
  return out;
}

bool Dialling::all_loopback() const {
  return std::ranges::all_of(addresses_, [](const TcpAddress& one) { return one.loopback; });
}

Time Dialling::turn_ends(Time now, Time due_at) const {
  const Time left = std::max<Time>(due_at - now, 0);
  return now + left / static_cast<Time>(addresses_.size() - at_);
}

UniqueFd Dialling::dial_beside() {
  for (std::size_t i = 0; i < addresses_.size(); ++i)
    if (UniqueFd fd = kvxfer::dial_beside(addresses_[i])) {
      at_ = i;
      return fd;
    }
  return {};
}

UniqueFd Dialling::dial(bool& connecting) {
  while (at_ < addresses_.size()) {
    Result<UniqueFd> fd = dial_tcp(addresses_[at_], connecting);
    if (fd.ok()) return std::move(fd).value();
    give_up(fd.status().message());
  }
  return {};
}

UniqueFd Dialling::dial_next(const std::string& why, bool& connecting) {
  give_up(why);
  return dial(connecting);
}

void Dialling::give_up(const std::string& why) {
  if (addresses_.size() == 1) {
    tried_ = why;
  } else {
    if (!tried_.empty()) tried_ += ", ";
    tried_ += addresses_[at_].text.substr(6) + " (" + why + ")";
  }
  ++at_;
}

}  // namespace kvxfer
