#include "core/commands/trigger.h"

#include <new>

#include "core/everlasting.h"
#include "core/in_room.h"
#include "gpu/kept_memory.h"

namespace kvxfer {
namespace {

// A word has its cache line for itself: a thread that looks at one is not disturbed by stores to another.
constexpr std::size_t kWordNbytes = 64, kWordPageNbytes = 4096;

// Words of one kind of memory, which is never given back: a stream may store to a word at any time.
class WordPool {
 public:
  // Adds the words of a page.
  void grow(void* page) {
    pages_.push_back(page);
    // So that words can be given back without memory.
    for (auto* words : {&free_, &awaited_}) words->reserve(pages_.size() * (kWordPageNbytes / kWordNbytes));
    for (std::size_t at = kWordPageNbytes; at != 0; at -= kWordNbytes)
      free_.push_back(new (static_cast<std::byte*>(page) + at - kWordNbytes) Trigger::Word(0));
  }
  Trigger::Word* take() {
    // A word that still expected a store is free once that store has come.
    if (free_.empty())
      std::erase_if(awaited_, [&](Trigger::Word* word) {
        if (std::atomic_ref(*word).load(std::memory_order_acquire) == 0) return false;
        free_.push_back(word);
        return true;
      });
    if (free_.empty()) return nullptr;
    Trigger::Word* word = free_.back();
    free_.pop_back();
    std::atomic_ref(*word).store(0, std::memory_order_relaxed);
    return word;
  }
  void give_back(Trigger::Word* word) noexcept { add_in_room(free_, word); }
  void await(Trigger::Word* word) noexcept { add_in_room(awaited_, word); }

 private:
  std::vector<Trigger::Word*> free_, awaited_;
  std::vector<void*> pages_;
};

struct Pools {
  std::mutex mutex;
  WordPool process, pinned;
};

Pools& pools() {
  static Everlasting<Pools> all;
  return all.get();
}

}  // namespace

std::shared_ptr<Trigger> Trigger::create() {
  const std::lock_guard lock(pools().mutex);
  Word* word = pools().process.take();
  if (word == nullptr) {
    pools().process.grow(operator new(kWordPageNbytes, std::align_val_t{kWordNbytes}));
    word = pools().process.take();
  }
  return std::shared_ptr<Trigger>(new Trigger(word, Home::kProcess));
}

Result<std::shared_ptr<Trigger>> Trigger::create_pinned(const gpu::Driver& driver, int device) {
  const std::lock_guard lock(pools().mutex);
  Word* word = pools().pinned.take();
  if (word == nullptr) {
    const Result<void*> page = gpu::allocate_kept(driver, device, kWordPageNbytes, "the words of triggers");
    if (!page.ok()) return page.status();
    pools().pinned.grow(page.value());
    word = pools().pinned.take();
  }
  return std::shared_ptr<Trigger>(new Trigger(word, Home::kPinned));
}

Result<std::shared_ptr<Trigger>> Trigger::create_over(Word* word, std::shared_ptr<const void> keepalive) {
  if (reinterpret_cast<std::uintptr_t>(word) % alignof(Word) != 0)
    return Status(Code::kInvalidArgument, "a trigger's word must be aligned to 4 bytes");
  std::shared_ptr<Trigger> made(new Trigger(word, Home::kForeign, std::move(keepalive)));
  made->shared_ = true;
  return made;
}

Trigger::~Trigger() {
  if (home_ == Home::kForeign) return;
  const std::lock_guard lock(pools().mutex);
  WordPool& pool = home_ == Home::kPinned ? pools().pinned : pools().process;
  if (!shared_)
    pool.give_back(word_);
  else if (once_)
    pool.await(word_);
}

void Trigger::fire(Word value) {
  std::atomic_ref word(*word_);
  Word seen = word.load(std::memory_order_relaxed);
  while (seen < value && !word.compare_exchange_weak(seen, value, std::memory_order_release)) {}
  ring();
}

Trigger::Word* Trigger::share() {
  once_ = false;
  if (!shared_.exchange(true)) ring();
  return word_;
}

Trigger::Word* Trigger::share_once() {
  once_ = true;
  if (!shared_.exchange(true)) ring();
  return word_;
}

void Trigger::add_bell(const void* id, Bell bell) {
  const std::lock_guard lock(mutex_);
  bells_.emplace_back(id, std::move(bell));
}

void Trigger::forget_bell(const void* id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(bells_, [id](const auto& entry) { return entry.first == id; });
}

void Trigger::ring() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, bell] : bells_) bell();
}

}  // namespace kvxfer
