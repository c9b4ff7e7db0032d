// Handles the frames of peers: each goes to the part that it concerns, and a breach of the protocol ends its
// session.
#include <type_traits>

#include "core/engine.h"

namespace kvxfer {

void Engine::on_frame(Time now, SessionKey key, wire::ByteSpan frame) {
  serve(now, key, [&] { receive(key, frame); });
}

void Engine::receive(SessionKey key, wire::ByteSpan frame) {
  Peer* peer = sessions_.find(key);
  if (peer == nullptr) return;
  Result<std::optional<wire::Message>> received = sessions_.receive(*peer, frame);
  if (!received.ok()) {
    sessions_.flush(*peer);
    return lose(key, received.status());
  }
  if (sessions_.has_opened(*peer)) opened(*peer);
  if (sessions_.heard_heartbeat(*peer)) {
    leases_.renew(key);
    peer->session().renew_within(renewal_ns(key));
  }
  if (sessions_.heard_acknowledgement(*peer)) {
    sessions_.answered(*peer);
    leases_.acknowledged(*peer);
    peer->session().renew_within(renewal_ns(key));
  }
  if ((peer = sessions_.find(key)) == nullptr) return;
  if (std::optional<wire::Message>& message = received.value()) dispatch(*peer, *message);
  if ((peer = sessions_.find(key)) != nullptr) sessions_.flush(*peer);
}

// A read checks its lease by the newest heartbeat that was acknowledged, so that one is no older than in a
// busy session, however long the read waits.
Time Engine::renewal_ns(SessionKey key) const {
  const auto first = destinations_.all().after({key, 0});
  return first != destinations_.all().end() && first->first.first == key ? 0 : leases_.renewal_ns(key);
}

// May the peer begin a transfer with that number?
bool Engine::begins(const Peer& peer, TransferId transfer) const {
  const TransferKey key{peer.key(), transfer};
  return peer.numbers(transfer) && !sources_.all().contains(key) && !destinations_.all().contains(key);
}

// Frames of the session itself (handshake, heartbeats) never come here.
void Engine::dispatch(Peer& peer, wire::Message& message) {
  const auto too_early = [](const char* name) -> Status {
    return {Code::kProtocol, std::string(name) + " before this agent announced its regions"};
  };
  const auto begin = [&](auto& part, auto& frame, const char* name) -> Status {
    if (sessions_.is_held(peer)) return too_early(name);
    if (begins(peer, frame.spec.transfer)) return part.on(peer, frame);
    return {Code::kProtocol, std::string(name) + ": transfer " + std::to_string(frame.spec.transfer) +
                                 " has a number that the peer may not begin"};
  };
  const Status breach = std::visit(
      [&](auto& frame) -> Status {
        using T = std::decay_t<decltype(frame)>;
        if constexpr (std::is_same_v<T, wire::RegionsEnd>) {
          // Only now does the acceptor surely know the session: a rail's RAIL_HELLO runs on a
          // socket of its own and would overtake our PROOF.
          const bool is_first = sessions_.regions_told(peer);
          if (sessions_.is_held(peer)) return {};
          if (is_first && peer.role() == SessionRole::kInitiator)
            sessions_.await_rails(peer, context_.host.session_open(peer.key()));
          check_up(peer);
        } else if constexpr (std::is_same_v<T, wire::Region>) {
          const RegionId id = frame.id;
          Status added = peer_regions_.add(peer, frame);
          if (added.ok()) destinations_.path_came(peer.key(), id);
          return added;
        } else if constexpr (std::is_same_v<T, wire::RegionGone>) {
          return region_gone(peer, frame.id);
        } else if constexpr (std::is_same_v<T, wire::RailDown>) {
          rail_given_up(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Program>) {
          return programs_.told(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Lease>) {
          // LEASE_ENDED needs no note: transfers under the lease are told themselves.
          leases_.told(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Offer>) {
          return begin(destinations_, frame, "OFFER");
        } else if constexpr (std::is_same_v<T, wire::Request>) {
          return begin(sources_, frame, "REQUEST");
        } else if constexpr (std::is_same_v<T, wire::Accept>) {
          return destinations_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Credit>) {
          return sources_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::LayersReady> || std::is_same_v<T, wire::Checksums>) {
          destinations_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Done>) {
          sources_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::AgentMessage>) {
          return sessions_.is_held(peer) ? too_early("MESSAGE") : messages_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::MessagesTaken>) {
          return messages_.on(peer, frame);
        } else if constexpr (std::is_same_v<T, wire::Fail>) {
          // Both ends see that nothing is left to bring it. The end whose rail broke knows why,
          // and says so here.
          if (frame.code == Code::kNoPath) end_pathless(peer);
          const Status why(frame.code, "the peer ended it: " + frame.text);
          sources_.on(peer, frame, why);
          // The transfer's time may be over at the peer first; this end knows what made it late.
          const std::string pace = frame.code == Code::kDeadline ? limits_.in_words(peer.key()) : "";
          destinations_.fail({peer.key(), frame.transfer}, TransferEvent::kFail,
                             {frame.code, why.message() + pace}, false);
        }
        return {};
      },
      message);
  if (breach.ok()) return;
  ++context_.stats.frames_refused;
  end_session(context_.now, peer.key(), breach.code(), breach.message());
}

// If that attempt is over here too, nothing is to be done: the two frames may cross, and may cross a redial.
void Engine::rail_given_up(Peer& peer, const wire::RailDown& down) {
  const Rail* const rail = rails_.at(peer.key(), down.rail.index);
  if (rail == nullptr || rail->info().name != down.rail) return;
  const RailId id = rail->id();
  context_.host.drop_rail(id);
  rail_down(context_.now, id, "the peer's end of it is down");
}

Status Engine::region_gone(Peer& peer, RegionId gone) {
  const PeerRegion* remote = peer_regions_.find(peer.key(), gone);
  if (remote == nullptr) return {};
  const Status why{Code::kRegionGone, "the peer deregistered its region " + quoted(remote->region.name)};
  for (const TransferKey& key : destinations_.all().of_remote(peer.key(), gone))
    destinations_.fail(key, TransferEvent::kFail, why, false);
  peer_regions_.remove(peer.key(), gone);
  programs_.forget(peer.key(), gone, true);
  return sessions_.tell_caller(peer, EventKind::kRegionGone, gone);
}

}  // namespace kvxfer
