// What became of tags: of those that our callers gave up, and of peers' writes that ended before anybody expected
// them. Who comes later for such a tag is told at once, and does not wait for what will not come.
//
// Each owner, our callers or one session, has kMaxTags and kMaxNbytes; the oldest are forgotten first. What a session
// makes us remember is charged to its budget; sessions that have ended have as much together.
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
  // 256 bytes a tag: an id, a context and the words. Tags may be longer, then they are fewer.
  static constexpr std::size_t kMaxNbytes = 1024 * 1024;
  static constexpr SessionKey kOurs = 0, kOfEnded = UINT32_MAX;  // owners that are no session

  struct Ended {
    RegionId region = 0;
    std::optional<SessionKey> peer;  // who was to write, or wrote; none: anybody
    Status why;
    wire::Bytes context;  // whose request it was
  };
  using Meant = std::function<bool(const Ended&)>;

  // In place of what the owner had under that tag. Without room in the budget the owner's oldest give way.
  void remember(SessionKey owner, const std::shared_ptr<Budget>& budget, const std::string& tag, Ended ended);
  // Of a tag that our callers gave up, or null. Good until the next call.
  const Ended* given_up(const std::string& tag) const;
  // It is expected anew: what our callers did with it counts no more.
  void forget_ours(const std::string& tag);
  // Takes out what is meant of peers' writes of that tag: one of them, if there are any.
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
  using Tags = std::list<Tag>;  // the oldest first
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
