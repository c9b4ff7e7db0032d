#include "core/engine/tag_memory.h"

namespace kvxfer {

void TagMemory::remember(SessionKey owner, const std::shared_ptr<Budget>& budget, const std::string& tag,
                         Ended ended) {
  if (auto found = by_tag_.find({tag, owner}); found != by_tag_.end()) forget(found);
  Owned& owned = owned_[owner];
  if (owned.budget == nullptr) owned.budget = budget;
  const std::size_t nbytes = 128 + tag.size() + ended.why.message().size() + ended.context.size();
  while (owned.tags.size() == kMaxTags || owned.nbytes + nbytes > kMaxNbytes) forget_oldest(owned);
  while (owned.budget != nullptr && !owned.budget->take(Resource::kBytes, nbytes)) {
    if (owned.tags.empty()) return;
    forget_oldest(owned);
  }
  // Without memory nothing is remembered.
  try {
    Tags one;
    one.push_back({tag, owner, std::move(ended), nbytes});
    by_tag_.emplace(std::pair(tag, owner), one.begin());
    owned.tags.splice(owned.tags.end(), one);
  } catch (...) {
    if (owned.budget != nullptr) owned.budget->give_back(Resource::kBytes, nbytes);
    throw;
  }
  owned.nbytes += nbytes;
}

void TagMemory::forget(ByTag::iterator found) {
  const Tags::iterator tag = found->second;
  Owned& owned = owned_.at(tag->owner);
  owned.nbytes -= tag->nbytes;
  if (owned.budget != nullptr) owned.budget->give_back(Resource::kBytes, tag->nbytes);
  owned.tags.erase(tag);
  by_tag_.erase(found);
}

const TagMemory::Ended* TagMemory::given_up(const std::string& tag) const {
  auto found = by_tag_.find({tag, kOurs});
  return found == by_tag_.end() ? nullptr : &found->second->ended;
}

void TagMemory::forget_ours(const std::string& tag) {
  if (auto found = by_tag_.find({tag, kOurs}); found != by_tag_.end()) forget(found);
}

std::optional<TagMemory::Ended> TagMemory::take_written(const std::string& tag, const Meant& meant) {
  std::optional<Ended> taken;
  for (auto it = by_tag_.lower_bound({tag, kOurs + 1}); it != by_tag_.end() && it->first.first == tag;) {
    const auto found = it++;
    if (!meant(found->second->ended)) continue;
    taken = std::move(found->second->ended);
    forget(found);
  }
  return taken;
}

// One by one, each beginning with what takes memory: another call goes on where this one stopped.
void TagMemory::remove_session(SessionKey session) {
  if (!owned_.contains(session)) return;
  Owned& left = owned_[kOfEnded];
  Owned& owned = owned_.at(session);
  while (!owned.tags.empty()) {
    const Tags::iterator tag = owned.tags.begin();
    const auto own = by_tag_.find({tag->tag, session}), other = by_tag_.find({tag->tag, kOfEnded});
    if (other != by_tag_.end()) forget(other);
    auto node = by_tag_.extract(own);
    tag->owner = node.key().second = kOfEnded;
    by_tag_.insert(std::move(node));
    owned.nbytes -= tag->nbytes;
    left.nbytes += tag->nbytes;
    if (owned.budget != nullptr) owned.budget->give_back(Resource::kBytes, tag->nbytes);
    left.tags.splice(left.tags.end(), owned.tags, tag);
  }
  owned_.erase(session);
  while (left.tags.size() > kMaxTags || left.nbytes > kMaxNbytes) forget_oldest(left);
}

}  // namespace kvxfer
