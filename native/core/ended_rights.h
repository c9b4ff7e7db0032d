// The blocks on which rights of sessions have ended, kept by the agent that granted them. A transfer that
// was posted before that end may be meant for the ended right, and a later lease does not allow it
// (Leases::find).
//
// A right of one session is noted for that session, as a bit for each of its blocks. A right that any
// session could have used is noted once for all: each of its blocks gets the number that the next session
// was to have. Sessions are numbered as they come. So the sessions below that number existed when the right
// ended, and later ones have lost nothing. Either note costs as much as the right names blocks, and holds no
// more than a word for each block of a region.
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
  // Makes room for rights to write that all sessions have, so that noting their end takes no memory.
  void make_room(RegionId region, std::uint32_t num_blocks, std::span<const std::uint32_t> blocks) {
    OfAll& of_all = of_all_.try_emplace(region, num_blocks).first->second;
    for (const std::uint32_t block : blocks) of_all.at(block);
  }
  // Notes the end of a right for which there is room. `next`: the first session that did not exist yet.
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

  // The ended rights of one session, to one region; valid until another right ends.
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
