#include "core/commands/stream_wait.h"

#include <unistd.h>

#include <list>
#include <mutex>
#include <new>

#include "core/everlasting.h"
#include "core/system/fork_guard.h"
#include "gpu/kept_memory.h"

namespace kvxfer {
namespace {

constexpr std::size_t kPlacePageNbytes = 4096;

// A word that has reached this value is not used again: up to here, greater is greater even if the
// comparison subtracts.
constexpr StreamWait::Word kLastValue = 0x7fffffff;

}  // namespace

// Pages are never given back: a stream may look at a word after its wait, its transfer and its agent are
// gone.
class StreamWait::Pool {
 public:
  Result<Place*> take(const gpu::Driver& driver, int device) {
    const std::lock_guard lock(mutex_);
    if (free_.empty())
      if (Status status = grow(driver, device); !status.ok()) return status;
    // Takes the place that rested longest, so that a late reader of an outcome still reads the old one
    // for a long time.
    Place* place = free_.front();
    free_.pop_front();
    std::atomic_ref(place->outcome).store(0, std::memory_order_relaxed);
    return place;
  }
  // In a forked child pinned memory may not be there, and a mutex that another thread had locked stays
  // locked.
  bool is_forked() const noexcept { return kvxfer::is_forked(owner_); }
  void give_back(Place* place) {
    if (place->word == kLastValue) return;
    const std::lock_guard lock(mutex_);
    try {
      free_.push_back(place);
    } catch (const std::bad_alloc&) {  // the place is not used again
    }
  }

 private:
  Status grow(const gpu::Driver& driver, int device) {
    const Result<void*> page =
        gpu::allocate_kept(driver, device, kPlacePageNbytes, "the words that streams wait for");
    if (!page.ok()) return page.status();
    for (std::size_t at = 0; at < kPlacePageNbytes; at += sizeof(Place))
      free_.push_back(new (static_cast<std::byte*>(page.value()) + at) Place);
    return {};
  }

  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::list<Place*> free_;
};

// Never destroyed, since streams may use its words at any time.
StreamWait::Pool& StreamWait::pool() {
  static Everlasting<Pool> one;
  return one.get();
}

Result<std::shared_ptr<StreamWait>> StreamWait::create(const gpu::Driver& driver, int device) {
  Result<Place*> place = pool().take(driver, device);
  if (!place.ok()) return place.status();
  return std::shared_ptr<StreamWait>(new StreamWait(place.value()));
}

StreamWait::~StreamWait() {
  if (pool().is_forked()) return;
  end(Outcome::kFailed);
  pool().give_back(place_);
}

void StreamWait::end(Outcome outcome) noexcept {
  if (ended_.exchange(true)) return;
  outcome_word().store(static_cast<Word>(outcome), std::memory_order_relaxed);
  std::atomic_ref(place_->word).store(target_, std::memory_order_release);
  range_.end();
}

}  // namespace kvxfer
