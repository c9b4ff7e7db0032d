// Messages that agents' callers send each other beside copies. In each direction of a session each message
// arrives once, in order; a sender that finds no room is told when there is some.
#pragma once

#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "simulation.h"

namespace simulation {

class MessageBook {
 public:
  explicit MessageBook(check::Random& random) : random_(random) {}

  std::size_t num_received() const { return num_received_; }
  std::size_t num_waits() const { return num_waits_; }  // for room

  // Sends some messages to one of the node's peers.
  void send_some(Node& node) {
    const std::vector<SessionKey> peers = node.engine().open_peers();
    if (peers.empty()) return;
    const SessionKey to = peers[random_.below(peers.size())];
    for (std::uint64_t i = random_.below(random_.chance(20) ? 300 : 10); i != 0; --i)
      if (!send(node, to, random_.chance(5) ? wire::kMaxMessage : random_.below(2'000))) return;
  }
  bool send(Node& node, SessionKey to, std::uint64_t nbytes) {
    std::uint64_t& number = sent_[key(node, to)];
    wire::Bytes payload(std::max<std::uint64_t>(nbytes, sizeof number));
    std::memcpy(payload.data(), &number, sizeof number);
    const Status status = node.send_message(to, std::move(payload));
    if (status.ok()) {
      ++number;
      return true;
    }
    if (status.code() == Code::kExhausted) {
      num_waits_ += waits_.insert(key(node, to)).second;
    } else {
      CHECK(status.code() != Code::kOk && node.session_with(node.engine().peer(to)->name) != to);
    }
    return false;
  }
  void on_event(Node& node, const Event& event) {
    if (event.kind == EventKind::kRoom || event.kind == EventKind::kPeerLost)
      waits_.erase(key(node, event.peer));
    if (event.kind != EventKind::kMessage) return;
    std::uint64_t number = 0;
    REQUIRE(event.payload.size() >= sizeof number);
    std::memcpy(&number, event.payload.data(), sizeof number);
    CHECK_EQ(number, received_[key(node, event.peer)]++);
    ++num_received_;
    if (node.session_with(node.engine().peer(event.peer)->name) == 0)
      FAIL("a message came of a peer that callers have not heard of");
  }
  // Checks that no sender still waits for room. All agents must have read, and the network delivered.
  void check_nobody_waits(Node& node) {
    for (const auto& [place, life, session] : waits_)
      if (place == node.place() && life == node.life())
        FAIL("an agent waits for room in session " + std::to_string(session) + " for ever");
  }

 private:
  using Key = std::tuple<int, std::uint64_t, SessionKey>;  // an agent, its life, its session
  static Key key(const Node& node, SessionKey session) { return {node.place(), node.life(), session}; }

  check::Random& random_;
  std::map<Key, std::uint64_t> sent_, received_;
  std::set<Key> waits_;
  std::size_t num_received_ = 0, num_waits_ = 0;
};

}  // namespace simulation
