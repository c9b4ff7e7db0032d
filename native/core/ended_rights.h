// The blocks on which rights of sessions have ended, at who granted them. What was posted before may be meant for such
// a right, and a lease that came later does not allow it (Leases::find).
//
// A right of one session is a bit for each of its blocks, for that session. One that any session could have used is
// noted once for all: beside each of its blocks stands the number that the next session was to get. Sessions are
// numbered as they come, so those below it were there when it ended, and later ones have lost nothing. Both cost the
// blocks that a right names, and hold no more than a word for each block of a region.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include "core/control/session.h"
#include "core/control/wire.h"
#include "core/event.h"
#include "core/sparse_table.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class EndedRights {
  using Own = std::map<std::pair<RegionId, wire::LeaseMode>, SparseBitSet>;
  using OfAll = SparseTable<SessionKey, 1024>;  // a page of 4 KiB

 public:
  void add(SessionKey session, RegionId region, wire::LeaseMode mode, const SparseBitSet& blocks) {
    own_[session][{region, mode}].insert(blocks);
  }
  // Makes room for rights to write of all sessions, so that their end takes no memory.
  void make_room(RegionId region, std::uint32_t num_blocks, std::span<const std::uint32_t> blocks) {
    OfAll& of_all = of_all_.try_emplace(region, num_blocks).first->second;
    for (const std::uint32_t block : blocks) of_all.at(block);
  }
  // One for which there is room has ended. `next`: the first session that was not there.
  void add_for_all(RegionId region, std::span<const std::uint32_t> blocks, SessionKey next) {
    OfAll& of_all = of_all_.at(region);
    for (const std::uint32_t block : blocks) of_all.at(block) = next;
  }
  void forget_region(RegionId region) {
    of_all_.erase(region);
    for (auto& [session, own] : own_) {
      own.erase({region, wire::LeaseMode::kRead});
      own.erase({region, wire::LeaseMode::kWrite});
    }
  }
  void forget_session(SessionKey session) { own_.erase(session); }

  // Those of one session, to one region; good until one ends.
  class OfSession {
   public:
    bool any() const noexcept { return own_ != nullptr || of_all_ != nullptr; }
    bool contains(std::uint32_t block) const noexcept {
      return (own_ != nullptr && own_->contains(block)) ||
             (of_all_ != nullptr && of_all_->get(block) > session_);
    }

   private:
    friend class EndedRights;
    SessionKey session_ = 0;
    const SparseBitSet* own_ = nullptr;
    const OfAll* of_all_ = nullptr;
  };
  OfSession of(SessionKey session, RegionId region, wire::LeaseMode mode) const {
    OfSession found;
    found.session_ = session;
    if (const auto all = own_.find(session); all != own_.end())
      if (const auto own = all->second.find({region, mode}); own != all->second.end())
        found.own_ = &own->second;
    if (const auto all = of_all_.find(region); all != of_all_.end() && mode == wire::LeaseMode::kWrite)
      found.of_all_ = &all->second;
    return found;
  }

 private:
  std::map<SessionKey, Own> own_;
  std::map<RegionId, OfAll> of_all_;  // to write
};

}  // namespace kvxfer
