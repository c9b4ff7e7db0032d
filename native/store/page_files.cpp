#include "store/page_files.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "core/system/random.h"
#include "core/system/signals_blocked.h"

namespace kvxfer::store {

struct PageFiles::State {
  explicit State(std::unique_ptr<DirectFiles> its_files, const FileTier::Options& options)
      : files(std::move(its_files)), tier(options) {}

  const std::unique_ptr<DirectFiles> files;
  std::mutex lock;
  std::condition_variable work, ended;
  FileTier tier;
  UniqueFd event;
  std::uint32_t num_threads = 0;
  bool is_closed = false;

  static std::uint64_t now() {
    return static_cast<std::uint64_t>(
        std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }

  // After a call that may have begun jobs or ended some.
  void tell() {
    if (tier.has_ends()) {
      const std::uint64_t one = 1;
      (void)!::write(event.get(), &one, sizeof one);
    }
  }

  void run() {
    using namespace std::chrono_literals;
    std::unique_lock locked(lock);
    while (!is_closed) {
      FileJob* const job = tier.next(now());
      tell();
      if (job == nullptr) {
        // A stall or a probe is due without anybody's call.
        if (tier.health() == FileTier::Health::kUp && tier.num_running() == 0)
          work.wait(locked);
        else
          work.wait_for(locked, 1s);
        continue;
      }
      if (tier.num_waiting() > 0) work.notify_one();
      locked.unlock();
      perform(*job, *files);
      locked.lock();
      tier.done(job, now());
      tell();
      ended.notify_all();
    }
    --num_threads;
    ended.notify_all();
  }
};

Result<std::shared_ptr<PageFiles>> PageFiles::open(const Options& options) {
  auto opened = DirectFiles::open(options.directory, options.nbytes);
  if (!opened.ok()) return opened.status();
  std::unique_ptr<DirectFiles> files = std::move(opened).value();
  FileTier::Options tier;
  tier.num_segments = files->shape().num_segments;
  tier.segment_nbytes = files->shape().segment_nbytes;
  tier.depth = options.num_threads;
  tier.stalled_ns = options.stalled_ns;
  tier.retry_ns = options.retry_ns;
  std::array<std::byte, sizeof tier.seed> random{};
  if (const Status status = fill_random(random); !status.ok()) return status;
  std::memcpy(&tier.seed, random.data(), sizeof tier.seed);

  auto made = std::shared_ptr<PageFiles>(new PageFiles);
  made->state_ = std::make_shared<State>(std::move(files), tier);
  State& state = *made->state_;
  state.event = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state.event) return Status::from_errno("eventfd", errno);
  for (std::uint32_t salt = 0; salt < options.tenant_of_salt.size(); ++salt)
    state.tier.index().set_tenant(salt, options.tenant_of_salt[salt]);
  const Status found =
      state.files->read_all_heads([&state](std::uint32_t segment, std::span<const std::byte> bytes) {
        state.tier.found_heads(segment, bytes);
      });
  if (!found.ok()) return found;
  for (const Place& stale : state.tier.found_all()) {
    const SlotHeadBytes none{};
    if (const int error = state.files->write_head(stale.segment, head_offset(stale.slot), none))
      return Status::from_errno("write to " + options.directory, error);
  }
  state.num_threads = options.num_threads;
  const SignalsBlocked blocked;
  for (std::uint32_t i = 0; i < options.num_threads; ++i)
    made->threads_.emplace_back([state = made->state_] { state->run(); });
  return made;
}

PageFiles::~PageFiles() {
  if (state_ == nullptr) return;
  {
    const std::lock_guard locked(state_->lock);
    state_->is_closed = true;
  }
  state_->work.notify_all();
  for (std::thread& thread : threads_) thread.detach();
}

bool PageFiles::close(std::uint64_t within_ns) {
  std::unique_lock locked(state_->lock);
  state_->tier.close(State::now());
  state_->tell();
  const bool idle = state_->ended.wait_for(locked, std::chrono::nanoseconds(within_ns),
                                           [this] { return state_->tier.num_running() == 0; });
  state_->is_closed = true;
  state_->work.notify_all();
  state_->ended.wait_for(locked, std::chrono::nanoseconds(within_ns),
                         [this] { return state_->num_threads == 0; });
  if (idle) state_->files->unlock();
  return idle;
}

const DirectFiles& PageFiles::files() const noexcept { return *state_->files; }
int PageFiles::event_fd() const noexcept { return state_->event.get(); }

FileTier::Answer PageFiles::write(const PageDigest& digest, std::uint32_t salt, std::string_view key,
                                  std::span<std::byte> page, bool durable, std::uint64_t ticket) {
  const std::lock_guard locked(state_->lock);
  const FileTier::Answer answer = state_->tier.write(digest, salt, key, page, durable, ticket, State::now());
  state_->tell();
  state_->work.notify_one();
  return answer;
}

FileTier::Answer PageFiles::read(const PageDigest& digest, std::span<std::byte> page, std::uint64_t worth_ns,
                                 std::uint64_t ticket) {
  const std::lock_guard locked(state_->lock);
  const FileTier::Answer answer = state_->tier.read(digest, page, worth_ns, ticket, State::now());
  state_->tell();
  state_->work.notify_one();
  return answer;
}

FileTier::Answer PageFiles::drop(const PageDigest& digest, std::uint64_t ticket) {
  const std::lock_guard locked(state_->lock);
  const FileTier::Answer answer = state_->tier.drop(digest, ticket, State::now());
  state_->tell();
  state_->work.notify_one();
  return answer;
}

FileTier::Answer PageFiles::sync(const PageDigest& digest, std::uint64_t ticket) {
  const std::lock_guard locked(state_->lock);
  const FileTier::Answer answer = state_->tier.sync(digest, ticket, State::now());
  state_->tell();
  state_->work.notify_one();
  return answer;
}

std::vector<bool> PageFiles::look_up(std::span<const PageDigest> digests, bool counts) {
  std::vector<bool> there(digests.size());
  std::vector<SlotIndex::Ref> refs(digests.size());
  const std::lock_guard locked(state_->lock);
  state_->tier.index().find(digests, refs);
  for (std::size_t i = 0; i < digests.size(); ++i) {
    there[i] = state_->tier.health() != FileTier::Health::kOut && refs[i] != SlotIndex::kNone;
    if (!counts) continue;
    state_->tier.count_look_up(there[i]);
    if (there[i]) state_->tier.index().touch(refs[i]);
  }
  return there;
}

std::vector<PageFiles::Listed> PageFiles::list(Place from, std::optional<std::uint32_t> tenant,
                                               std::size_t most) const {
  std::vector<Listed> found;
  {
    const std::lock_guard locked(state_->lock);
    const SlotIndex& index = state_->tier.index();
    while (found.size() < most) {
      const std::optional<SlotIndex::Ref> ref = index.first_from(from, tenant);
      if (!ref) break;
      found.push_back({index[*ref].place, {}});
      found.back().head.digest = index[*ref].digest;
      from = {index[*ref].place.segment, index[*ref].place.slot + 1};
    }
  }
  std::erase_if(found, [this](Listed& each) {
    SlotHeadBytes bytes{};
    const std::uint64_t offset = head_offset(each.place.slot);
    if (state_->files->read_head(each.place.segment, offset, bytes) != 0) return true;
    const std::optional<SlotHead> head = decode_slot(bytes);
    const bool is_it = head && head->digest == each.head.digest;  // else it has gone meanwhile
    if (is_it) each.head = *head;
    return !is_it;
  });
  return found;
}

void PageFiles::set_tenant(std::uint32_t salt, std::uint32_t tenant) {
  const std::lock_guard locked(state_->lock);
  state_->tier.index().set_tenant(salt, tenant);
}

void PageFiles::set_bound(std::uint32_t tenant, std::uint64_t most_nbytes) {
  const std::lock_guard locked(state_->lock);
  state_->tier.index().set_bound(tenant, most_nbytes);
}

std::uint64_t PageFiles::tenant_nbytes(std::uint32_t tenant) const {
  const std::lock_guard locked(state_->lock);
  return state_->tier.index().tenant_nbytes(tenant);
}

std::uint64_t PageFiles::read_ns(std::uint64_t nbytes) const {
  const std::lock_guard locked(state_->lock);
  return state_->tier.read_ns(nbytes);
}

PageFiles::Figures PageFiles::figures() {
  const std::lock_guard locked(state_->lock);
  FileTier& tier = state_->tier;
  tier.tick(State::now());
  state_->tell();
  const DirectFiles::Shape& shape = state_->files->shape();
  return {
      .counts = tier.counts(),
      .health = tier.health(),
      .why = tier.why(),
      .nbytes = shape.segment_nbytes * shape.num_segments,
      .used_nbytes = tier.index().used_nbytes(),
      .num_pages = tier.index().num_pages(),
      .num_resting = tier.index().num_resting(),
      .num_running = tier.num_running(),
      .num_waiting = tier.num_waiting(),
      .read_p50_ns = tier.read_ns_of(0.5),
      .read_p99_ns = tier.read_ns_of(0.99),
  };
}

void PageFiles::take(std::vector<FileTier::Ended>& ends, std::vector<SlotIndex::Gone>& evicted) {
  const std::lock_guard locked(state_->lock);
  std::uint64_t count = 0;
  (void)!::read(state_->event.get(), &count, sizeof count);
  state_->tier.take_ends(ends);
  state_->tier.take_evicted(evicted);
}

}  // namespace kvxfer::store
