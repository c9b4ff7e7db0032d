// How tags ended: tags that our callers gave up, and peers' writes that ended before they were expected. A
// later write or expectation of such a tag is told at once, and does not wait for something that will not
// come.
//
// Each owner, our callers or one session, has kMaxTags and kMaxNbytes; the oldest are forgotten first. What
// is remembered for a session is charged to its budget. All sessions that have ended share one such
// allowance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/event.h"
#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

class TagMemory {
 public:
  static constexpr std::size_t kMaxTags = 4096;
  // 256 bytes a tag: an id, a context and the words. If tags are longer, fewer fit.
  static constexpr std::size_t kMaxNbytes = 1024 * 1024;
  static constexpr SessionKey kOurs = 0, kOfEnded = UINT32_MAX;  // owners that are no session

  struct Ended {
    RegionId region = 0;
    std::optional<SessionKey> peer;  // the peer that was to write, or wrote; none: any peer
    Status why;
    wire::Bytes context;  // whose request it was
  };
  using Meant = std::function<bool(const Ended&)>;

  // Replaces what the owner had under that tag. If the budget has no room, the owner's oldest tags give
  // way.
  void remember(SessionKey owner, const std::shared_ptr<Budget>& budget, const std::string& tag, Ended ended);
  // How our callers gave up that tag, or null if they did not. Valid until the next call.
  const Ended* given_up(const std::string& tag) const;
  // The tag is expected anew: that our callers gave it up earlier no longer counts.
  void forget_ours(const std::string& tag);
  // Removes and returns one remembered write of peers with that tag for which meant() is true, if there is
  // one.
  std::optional<Ended> take_written(const std::string& tag, const Meant& meant);
  void remove_session(SessionKey session);
  std::size_t size() const noexcept { return by_tag_.size(); }

 private:
  struct Tag {
    std::string tag;
    SessionKey owner;
    Ended ended;
    std::size_t nbytes;
  };
  using Tags = std::list<Tag>;  // oldest first
  struct Owned {
    Tags tags;
    std::size_t nbytes = 0;
    std::shared_ptr<Budget> budget;
  };
  using ByTag = std::map<std::pair<std::string, SessionKey>, Tags::iterator>;

  void forget(ByTag::iterator found);
  void forget_oldest(Owned& owned) {
    forget(by_tag_.find({owned.tags.front().tag, owned.tags.front().owner}));
  }

  std::map<SessionKey, Owned> owned_;
  ByTag by_tag_;
};

}  // namespace kvxfer
