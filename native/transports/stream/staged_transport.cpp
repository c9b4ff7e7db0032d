#include "transports/stream/staged_transport.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "core/copy/pack.h"
#include "core/in_room.h"
#include "gpu/region_device.h"
#include "transports/stream/packed.h"

namespace kvxfer {
namespace {

// Sends of one rail that wait for a slot. The engine posts what peers have asked for, a window at a time.
constexpr std::size_t kMaxQueued = 1024;

// Polls in which no kernel ended, between two questions whether the device still works.
constexpr std::uint32_t kPollsPerCheck = 1024;
constexpr gpu::CopyStream::Ticket kNeverTicket = UINT64_MAX;

gpu::Placement placement_at(const std::byte* base) {
  return gpu::Placement(reinterpret_cast<gpu::Address>(base));
}

}  // namespace

StagedTransport::StagedTransport(std::unique_ptr<StreamTransport> inner, std::shared_ptr<Staging> staging)
    : inner_(std::move(inner)), staging_(std::move(staging)) {}

StagedTransport::~StagedTransport() {
  for (const auto& [way, flying] : {std::pair(kOut, &gathering_), std::pair(kIn, &scattering_)})
    if (!flying->empty()) {
      const gpu::CopyStream& stream = *lane(way).stream;
      const gpu::CopyStream::Ticket last = staged_.at(flying->back()).ticket;
      while (stream.done() < last && stream.is_running()) std::this_thread::yield();
    }
  for (const auto& [id, staged] : staged_) inner_->cancel(std::span(&id, 1));  // others go on using the arena
  for (auto& [id, staged] : staged_) give_back(staged);
}

Capabilities StagedTransport::capabilities() const noexcept {
  Capabilities capabilities = inner_->capabilities();
  capabilities.memory = capabilities.memory | MemoryKind::kGpu;
  capabilities.staged = MemoryKind::kGpu;
  capabilities.max_piece_nbytes = std::min(capabilities.max_piece_nbytes, staging_->most_piece_nbytes());
  return capabilities;
}

// All rails of a session share one budget object; a rail without a session is a holder of its own.
Result<PeerId> StagedTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  SlotHolder holder = info.budget;
  if (holder == nullptr) holder = std::make_shared<bool>();
  Result<PeerId> peer = inner_->connect(std::move(socket), info);
  if (!peer.ok()) return peer;
  try {
    holders_[peer.value()] = std::move(holder);
  } catch (...) {
    inner_->disconnect(peer.value());
    throw;
  }
  return peer;
}

Result<RegionKeys> StagedTransport::register_memory(const LocalRegion& region, const Pinned& pinned) {
  if (region.kind == MemoryKind::kGpu) {
    if (Status here = gpu::check_device(region, staging_->device()); !here.ok()) return here;
    if (Status opened = staging_->open(); !opened.ok()) return opened;
  }
  return inner_->register_memory(region, pinned);
}

std::string StagedTransport::words(std::string_view what) const {
  return std::string(inner_->capabilities().name) + ", staging: " + std::string(what);
}

// ---- slots ----

bool StagedTransport::take_slot(Staged& staged) {
  std::optional<Slot> slot = lane(way_of(staged)).slots.take(staged.holder, staged.nbytes);
  if (!slot) return false;
  staged.slot = *std::move(slot);
  return true;
}

void StagedTransport::give_back(Staged& staged) noexcept {
  if (staged.slot.nbytes != 0) lane(way_of(staged)).slots.give_back(std::exchange(staged.slot, {}));
}

// ---- posts and ends ----

Code StagedTransport::post(PeerId peer, const Work& work) noexcept {
  // The inner transport answers works that no stream does, and pieces that do not exist or have no bytes.
  const bool on_gpu = (work.kind == WorkKind::kSend || work.kind == WorkKind::kReceive) &&
                      work.move->local->kind == MemoryKind::kGpu &&
                      work.piece < work.move->grid.num_pieces() &&
                      piece_nbytes(*work.move->program, work.move->grid.piece(work.piece)) != 0;
  try {
    return on_gpu ? stage(peer, work) : inner_->post(peer, work);
  } catch (const std::bad_alloc&) {  // counts as full
    return Code::kAgain;
  }
}

Code StagedTransport::stage(PeerId peer, const Work& work) {
  if (!inner_->is_up(peer)) return Code::kRailFailed;
  make_room();
  const auto refuse = [&](Code code, const std::string& why) {
    ready_.work(work.id, code, words(why));
    return Code::kOk;
  };
  if (!staging_->is_open()) return refuse(Code::kUnsupported, "no region of this agent lies on a GPU");
  if (!staging_->failure().ok()) return refuse(Code::kSystem, staging_->failure().message());
  Staged staged;
  staged.peer = peer;
  staged.work = work;
  staged.nbytes = piece_nbytes(*work.move->program, work.move->grid.piece(work.piece));
  staged.holder = holders_.at(peer);
  if (const std::uint64_t most = staging_->most_piece_nbytes(); staged.nbytes > most)
    return refuse(Code::kExhausted, "a piece of " + std::to_string(staged.nbytes) +
                                        " bytes is too large: in an arena of " +
                                        std::to_string(staging_->nbytes()) + " bytes one peer may use " +
                                        std::to_string(most) + ": raise staging_nbytes");
  if (work.kind == WorkKind::kSend) {
    if (to_gather_.size() >= kMaxQueued) return Code::kAgain;
    staged_.emplace(work.id, std::move(staged));
    add_in_room(to_gather_, work.id);
    return Code::kOk;
  }
  // The sender is asked for the bytes as soon as this is accepted, so the place for them must be ready.
  if (!lane(kIn).slots.may_take(staged.holder, staged.nbytes) || !lane(kIn).slots.has_gap(staged.nbytes))
    return Code::kAgain;
  staged.stage = Stage::kReceiving;
  staged.range = nvtx::Range("wire", work.piece);
  const Entry entry = staged_.emplace(work.id, std::move(staged)).first;
  Code posted = Code::kAgain;
  try {
    if (take_slot(entry->second)) posted = inner_->post_packed(peer, work, place(entry->second));
  } catch (const std::bad_alloc&) {  // counts as full
  }
  if (posted == Code::kOk) return posted;
  give_back(entry->second);
  staged_.erase(entry);
  return posted;
}

// Makes room for one more work.
void StagedTransport::make_room() {
  const std::size_t num_works = staged_.size() + 1;
  ready_.make_room(ready_.size() + num_works);
  for (auto* queue : {&to_gather_, &gathering_, &to_send_, &to_scatter_, &scattering_})
    if (queue->capacity() < num_works) queue->reserve(2 * num_works);
}

void StagedTransport::complete(Entry entry, Code code, std::string_view detail) noexcept {
  give_back(entry->second);
  ready_.work(entry->first, code, detail);
  staged_.erase(entry);
}

// Puts staging's name before the words.
void StagedTransport::fail(Entry entry, Code code, std::string_view why) noexcept {
  std::string detail;
  try {
    detail = words(why);
  } catch (const std::bad_alloc&) {  // the code is enough
  }
  complete(entry, code, detail);
}

// Ends a send of which the peer has heard nothing yet: the peer learns that the piece will not come.
void StagedTransport::end_unsent(Entry entry) {
  const WorkId id = entry->first;
  Staged& staged = entry->second;
  if (inner_->post_packed(staged.peer, staged.work, lane(kOut).base) != Code::kOk)  // nothing is read there
    return complete(entry, Code::kCancelled);
  give_back(staged);
  staged_.erase(entry);
  // This completes the send.
  inner_->cancel(std::span(&id, 1));
}

void StagedTransport::cancel(std::span<const WorkId> works) noexcept {
  bool stopped = false;
  for (const WorkId& id : works) {
    const auto found = staged_.find(id);
    if (found == staged_.end()) {
      inner_->cancel(std::span(&id, 1));
      continue;
    }
    Staged& staged = found->second;
    switch (staged.stage) {
      case Stage::kQueued:
      case Stage::kGathered:
      case Stage::kReceived:
        staged.stage = Stage::kStopped;
        stopped = true;
        break;
      case Stage::kSending:
      case Stage::kReceiving:
        staged.cancelled = true;
        inner_->cancel(std::span(&id, 1));
        break;
      case Stage::kGathering: staged.cancelled = true; break;
      case Stage::kScattering:
      case Stage::kStopped: break;
    }
  }
  if (!stopped) return;
  for (auto* queue : {&to_gather_, &to_send_, &to_scatter_})
    std::erase_if(*queue, [&](WorkId id) { return staged_.at(id).stage == Stage::kStopped; });
  for (const WorkId id : works)
    if (const auto entry = staged_.find(id); entry != staged_.end() && entry->second.stage == Stage::kStopped)
      way_of(entry->second) == kOut ? end_unsent(entry) : complete(entry, Code::kCancelled);
}

void StagedTransport::disconnect(PeerId peer) noexcept {
  for (auto next = staged_.begin(); next != staged_.end();) {
    const Entry entry = next++;
    Staged& staged = entry->second;
    if (staged.peer != peer) continue;
    staged.cancelled = staged.gone = true;
    if (staged.stage == Stage::kSending || staged.stage == Stage::kReceiving) continue;  // completes there
    if (staged.stage == Stage::kGathering || staged.stage == Stage::kScattering) continue;  // as it lands
    for (auto* queue : {&to_gather_, &to_send_, &to_scatter_}) std::erase(*queue, entry->first);
    complete(entry, Code::kCancelled, "disconnected");
  }
  holders_.erase(peer);
  inner_->disconnect(peer);  // completes the works that the inner transport has
}

// ---- progress ----

std::size_t StagedTransport::poll(std::span<Completion> completions) noexcept {
  if (!staged_.empty()) {
    note_failure();
    land();
    send();
    gather();
    check_device();
  }
  std::size_t count = ready_.take(completions);
  const std::span<Completion> rest = completions.subspan(count);
  const std::size_t num_inner = inner_->poll(rest);
  for (std::size_t i = 0; i < num_inner; ++i) {
    if (!pass(rest[i])) continue;
    if (count != completions.size() - rest.size() + i) completions[count] = std::move(rest[i]);
    ++count;
  }
  scatter();
  return count;
}

bool StagedTransport::busy() const noexcept {
  if (!ready_.empty() || inner_->busy()) return true;
  if (staged_.empty()) return false;
  return !gathering_.empty() || !scattering_.empty() || !to_send_.empty() || !to_scatter_.empty() ||
         next_to_gather() < to_gather_.size() || (!staging_->failure().ok() && !lost_);
}

// The first work in the queue whose session may take a slot. A smaller one does not overtake it.
std::size_t StagedTransport::next_to_gather() const noexcept {
  for (std::size_t i = 0; i < to_gather_.size(); ++i) {
    const Staged& staged = staged_.at(to_gather_[i]);
    if (staged.slot.nbytes != 0) return i;
    const Slots& slots = lane(kOut).slots;
    if (!slots.may_take(staged.holder, staged.nbytes)) continue;
    return slots.has_gap(staged.nbytes) ? i : to_gather_.size();
  }
  return to_gather_.size();
}

// kExhausted: there was no memory, and nothing of the work is under way.
Status StagedTransport::submit(Staged& staged) {
  try {
    return submit_packed(staged);
  } catch (const std::bad_alloc&) {
    return Status(Code::kExhausted, {});
  }
}

Status StagedTransport::submit_packed(Staged& staged) {
  const Move& move = *staged.work.move;
  const Piece piece = move.grid.piece(staged.work.piece);
  const Way way = way_of(staged);
  if (staged.slot.nbytes == 0) take_slot(staged);
  const PackedProgram packed = way == kOut ? gathered(*move.program, piece) : scattered(*move.program, piece);
  const std::span<const std::uint32_t> ids =
      std::span(way == kOut ? move.src_ids : move.dst_ids).subspan(piece.first_pair, piece.num_pairs);
  const gpu::Placement pages = placement_at(move.local->base);
  const gpu::Placement slot = placement_at(place(staged));
  gpu::CopyStream& stream = *lane(way).stream;
  const Result<gpu::CopyStream::Ticket> ticket =
      way == kOut ? stream.submit(packed.program, packed.part, ids, packed.pairs, pages, slot,
                                  gpu::Direction::kToHost)
                  : stream.submit(packed.program, packed.part, packed.pairs, ids, slot, pages,
                                  gpu::Direction::kToDevice);
  if (!ticket.ok()) {
    if (ticket.status().code() == Code::kSystem) {
      staging_->fail(ticket.status());
      staged.ticket = kNeverTicket;  // may be partly under way, and its end will not be reported
    }
    return ticket.status();
  }
  staged.ticket = ticket.value();
  staged.range = nvtx::Range(way == kOut ? "gather" : "scatter", staged.work.piece);
  return {};
}

void StagedTransport::gather() {
  for (;;) {
    const std::size_t next = next_to_gather();
    if (next == to_gather_.size()) return;
    const WorkId id = to_gather_[next];
    const auto entry = staged_.find(id);
    Staged& staged = entry->second;
    const Status submitted = submit(staged);
    if (submitted.code() == Code::kAgain) return;
    to_gather_.erase(to_gather_.begin() + static_cast<std::ptrdiff_t>(next));
    const bool is_lost = submitted.code() == Code::kSystem;
    if (!submitted.ok() && !is_lost) {
      fail(entry, submitted.code(), submitted.message());
      continue;
    }
    staged.stage = Stage::kGathering;
    add_in_room(gathering_, id);
    if (is_lost) return note_failure();
  }
}

void StagedTransport::send() {
  while (!to_send_.empty()) {
    const auto entry = staged_.find(to_send_.front());
    Staged& staged = entry->second;
    nvtx::Range range("wire", staged.work.piece);
    const Code posted = inner_->post_packed(staged.peer, staged.work, place(staged));
    if (posted == Code::kAgain) return;
    to_send_.erase(to_send_.begin());
    if (posted != Code::kOk)
      fail(entry, Code::kRailFailed, "the rail went down while pages were gathered for it");
    else {
      staged.stage = Stage::kSending;
      staged.range = std::move(range);
    }
  }
}

void StagedTransport::scatter() {
  while (!to_scatter_.empty()) {
    const WorkId id = to_scatter_.front();
    const auto entry = staged_.find(id);
    const Status submitted = submit(entry->second);
    if (submitted.code() == Code::kAgain) return;
    to_scatter_.erase(to_scatter_.begin());
    const bool is_lost = submitted.code() == Code::kSystem;
    if (!submitted.ok() && !is_lost) {
      fail(entry, submitted.code(), submitted.message());
      continue;
    }
    entry->second.stage = Stage::kScattering;
    add_in_room(scattering_, id);
    if (is_lost) return note_failure();
  }
}

// Moves on the works whose kernels have ended.
void StagedTransport::land() {
  if (!gathering_.empty()) land(kOut, gathering_);
  if (!scattering_.empty()) land(kIn, scattering_);
}

void StagedTransport::land(Way way, std::vector<WorkId>& flying) {
  gpu::CopyStream& stream = *lane(way).stream;
  // A device that refuses launches may still run earlier ones. A device that has failed runs none.
  const bool runs = staging_->failure().ok() || stream.is_running();
  const gpu::CopyStream::Ticket ended = stream.done();
  while (!flying.empty()) {
    const Entry entry = staged_.find(flying.front());
    Staged& staged = entry->second;
    const bool is_done = staged.ticket <= ended;
    if (!is_done && runs) return;
    flying.erase(flying.begin());
    idle_polls_ = 0;
    if (staged.gone) {
      complete(entry, Code::kCancelled, "disconnected");
    } else if (!is_done) {
      fail(entry, Code::kSystem, staging_->failure().message());
    } else if (way == kIn) {
      complete(entry, Code::kOk);
    } else if (staged.cancelled) {
      end_unsent(entry);
    } else {
      staged.stage = Stage::kGathered;
      staged.range.end();
      add_in_room(to_send_, entry->first);
    }
  }
}

void StagedTransport::check_device() {
  if ((gathering_.empty() && scattering_.empty()) || ++idle_polls_ < kPollsPerCheck) return;
  idle_polls_ = 0;
  try {
    for (const Way way : {kOut, kIn})
      if (Status status = lane(way).stream->check(); !status.ok()) return staging_->fail(status);
  } catch (const std::bad_alloc&) {  // for the words: the next check has them, or the one after
  }
}

// When the device fails, all works that still need it end. What is in pinned memory already goes out, and
// works of host memory go on.
void StagedTransport::note_failure() {
  if (lost_ || staging_->failure().ok()) return;
  lost_ = true;
  for (auto* queue : {&to_gather_, &to_scatter_}) {
    for (const WorkId id : *queue) fail(staged_.find(id), Code::kSystem, staging_->failure().message());
    queue->clear();
  }
  for (auto& [id, staged] : staged_)
    if (staged.stage == Stage::kReceiving && !staged.cancelled) {
      staged.cancelled = staged.lost = true;
      inner_->cancel(std::span(&id, 1));
    }
}

// Handles a completion of the inner transport. True: hand it to the caller, as it is now.
bool StagedTransport::pass(Completion& completion) {
  if (completion.kind == CompletionKind::kRailDown) {
    // Works that have not begun fail with the rail. Kernels end by themselves, and find no rail then.
    std::erase_if(to_gather_, [&](WorkId id) {
      const auto entry = staged_.find(id);
      if (entry->second.peer != completion.peer) return false;
      complete(entry, Code::kRailFailed, completion.detail);
      return true;
    });
    return true;
  }
  const auto entry = completion.kind == CompletionKind::kWork ? staged_.find(completion.work) : staged_.end();
  if (entry == staged_.end()) return true;
  Staged& staged = entry->second;
  if (staged.stage == Stage::kReceiving && completion.code == Code::kOk && !staged.cancelled) {
    staged.stage = Stage::kReceived;
    staged.range.end();
    add_in_room(to_scatter_, entry->first);
    return false;
  }
  // The inner transport had received it when it was cancelled, and the completion came after that.
  if (staged.stage == Stage::kReceiving && staged.cancelled && completion.code == Code::kOk)
    completion.code = Code::kCancelled;
  if (staged.lost && completion.code == Code::kCancelled) {
    completion.code = Code::kSystem;
    try {
      completion.detail = words(staging_->failure().message());
    } catch (const std::bad_alloc&) {  // the code is enough
    }
  }
  give_back(staged);
  staged_.erase(entry);
  return true;
}

}  // namespace kvxfer
