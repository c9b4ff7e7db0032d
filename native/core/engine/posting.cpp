#include "core/engine/posting.h"

#include <algorithm>

#include "core/copy/pack.h"
#include "core/engine/eager.h"

namespace kvxfer {

Result<std::shared_ptr<Handle>> Posting::post(TransferRequest request) {
  Peer* peer = sessions_.find_open(request.peer);
  if (peer == nullptr) return sessions_.lost_status(request.peer);
  const Programs::Program* program = programs_.find_ours(peer->key(), request.program);
  if (program == nullptr)
    return Status(Code::kUnknownRegion, "a region of the transfer is no longer registered, here or at peer " +
                                            quoted(peer->name()));
  const bool write = program->write;
  const RegionId ours = write ? program->src : program->dst, theirs = write ? program->dst : program->src;
  const Region* local = regions_.find(ours);
  if (local == nullptr)
    return Status(Code::kUnknownRegion, "region " + std::to_string(ours) + " is not registered (any more)");
  const PeerRegion& there = *peer_regions_.find(peer->key(), theirs);
  if (Status status = peer_regions_.check_path(*peer, *local, there, !write, program->copies->converts());
      !status.ok())
    return status;
  if (request.integrity)
    if (Status status = check_integrity(*local); !status.ok()) return status;
  const std::size_t num_pairs = request.src_ids.size();
  if (num_pairs != request.dst_ids.size())
    return Status(Code::kLengthMismatch, "src_blocks names " + std::to_string(num_pairs) +
                                             " blocks, dst_blocks " + std::to_string(request.dst_ids.size()));
  if (num_pairs > wire::kMaxBlocks)
    return Status(Code::kInvalidArgument, "a transfer takes up to " + std::to_string(wire::kMaxBlocks) +
                                              " block pairs, not " + std::to_string(num_pairs) +
                                              ": post several transfers");
  if (request.notify.size() > wire::kMaxNotify)
    return Status(Code::kInvalidArgument,
                  "a notification has up to " + std::to_string(wire::kMaxNotify) + " bytes");
  if (request.context.size() > wire::kMaxContext)
    return Status(Code::kInvalidArgument,
                  "a context has up to " + std::to_string(wire::kMaxContext) + " bytes");
  const CopyProgram& copies = *program->copies;
  if (request.num_layers == 0 || request.first_layer >= copies.num_layers ||
      request.num_layers > copies.num_layers - request.first_layer ||
      request.layers_ready > request.num_layers)
    return Status(Code::kOutOfRange, "layers " + std::to_string(request.first_layer) + " + " +
                                         std::to_string(request.num_layers) +
                                         " are not all among the program's " +
                                         std::to_string(copies.num_layers));
  if (request.timeout_ns <= 0) return Status(Code::kInvalidArgument, "a transfer's timeout is more than 0 s");
  if (request.num_fine > num_pairs)
    return Status(Code::kInvalidArgument, "more single tokens are named than there are pairs");
  const auto check = [&](const std::vector<std::uint32_t>& ids, Side side, bool is_ours) {
    return check_ids(ids, request.num_fine, copies, side,
                     is_ours ? local->num_blocks : there.region.num_blocks,
                     is_ours ? local->name : there.region.name);
  };
  if (Status status = check(request.src_ids, Side::kSrc, write); !status.ok()) return status;
  if (Status status = check(request.dst_ids, Side::kDst, !write); !status.ok()) return status;

  wire::TransferSpec spec;
  spec.transfer = admission_.number(*peer);
  spec.program = request.program;
  spec.grid = {request.first_layer, request.num_layers, static_cast<std::uint32_t>(num_pairs),
               pairs_per_piece(request, copies, *local, there), request.num_fine};
  spec.priority = std::max(request.priority, limits_.least_priority(*peer));
  spec.flags = static_cast<std::uint8_t>((request.integrity ? wire::kFlagIntegrity : 0) |
                                         (request.lease != 0 ? wire::kFlagLease : 0) |
                                         (request.awaits_last_word && write ? wire::kFlagLastWord : 0));
  spec.lease = request.lease != 0 ? request.lease : leases_.newest_granted(peer->key());
  spec.timeout_ns = static_cast<std::uint64_t>(request.timeout_ns);
  spec.src_ids = std::move(request.src_ids);
  spec.dst_ids = std::move(request.dst_ids);
  spec.notify = std::move(request.notify);
  spec.context = std::move(request.context);
  const auto fill = [&](TransferEnd& transfer) {
    transfer.key = {peer->key(), spec.transfer};
    transfer.ours = true;
    transfer.handle = write ? handles_.make(0, 0, spec.context)
                            : handles_.make(request.first_layer, request.num_layers, spec.context);
    transfer.layers_ready = request.layers_ready;
    transfer.take(spec, program->copies, *local, theirs);
  };
  TransferEnd* transfer = nullptr;
  if (write) {
    auto source = std::make_unique<Source>();
    fill(*source);
    source->eager_nbytes = eager_nbytes(*peer, *source);
    transfer = &sources_.add(std::move(source));
  } else {
    auto destination = std::make_unique<Destination>();
    fill(*destination);
    transfer = &destinations_.add(std::move(destination));
  }
  std::shared_ptr<Handle> handle = transfer->handle;
  try {
    handles_.give(*transfer);
    const bool has_room = !admission_.has_backlog(peer->key()) && sessions_.takes_more(*peer) &&
                          admission_.has_room(peer->key(), true, num_pairs);
    if (!has_room || !announce(*peer, transfer->key, write)) admission_.wait(*transfer);
  } catch (...) {  // the peer has not heard of it
    handles_.take_back(*handle);
    admission_.forget(*transfer);
    if (write)
      sources_.withdraw(transfer->key);
    else
      destinations_.withdraw(transfer->key);
    throw;
  }
  sessions_.flush(*peer);
  return handle;
}

// As many pairs in a piece as fill the size that the likely rails want, but no more than the rails that it
// may fail over to can take, and within the bitmap's bound.
std::uint32_t Posting::pairs_per_piece(const TransferRequest& request, const CopyProgram& copies,
                                       const Region& local, const PeerRegion& remote) const {
  std::uint64_t wanted_nbytes = 512 * 1024, most_nbytes = UINT64_MAX;
  std::uint32_t rank = UINT32_MAX;
  const MemoryKind memory = local.memory.kind;
  const bool converts = copies.converts();
  for (const Rail* rail : remote.is_reached_from(memory, converts) ? remote.reach : rails_.of(request.peer)) {
    const Capabilities& capabilities = rail->capabilities();
    if (!remote.comes_over(*rail, memory, converts)) continue;
    const std::uint32_t its = capabilities.rank_for(local.memory);
    if (its < rank || (its == rank && capabilities.piece_nbytes < wanted_nbytes))
      wanted_nbytes = capabilities.piece_nbytes;
    rank = std::min(rank, its);
    most_nbytes = std::min(most_nbytes, capabilities.max_piece_nbytes);
  }
  wanted_nbytes = std::min(wanted_nbytes, most_nbytes);
  const std::uint64_t num_pairs = request.src_ids.size();
  const std::uint64_t unit_nbytes =
      std::max<std::uint64_t>(1, pair_nbytes(copies, request.first_layer, kCoarse));
  const std::uint64_t most_per_layer = wire::kMaxPieces / request.num_layers;
  const std::uint64_t per_piece = std::max(std::max<std::uint64_t>(1, wanted_nbytes / unit_nbytes),
                                           (num_pairs + most_per_layer - 1) / most_per_layer);
  return static_cast<std::uint32_t>(std::min(per_piece, std::max<std::uint64_t>(1, num_pairs)));
}

// All bytes of the write if they may go with its OFFER; else 0. Not if the peer can fetch them itself: that
// takes as many trips, and copies them once.
std::uint32_t Posting::eager_nbytes(const Peer& peer, const Source& source) const {
  const std::uint32_t most =
      std::min(context_.config.session.features.eager_nbytes, peer.session().peer_features().eager_nbytes);
  if (most == 0 || source.memory != MemoryKind::kHost || source.integrity) return 0;
  const auto fetches = [](const Rail* rail) {
    return rail->capabilities().one_sided && rail->capabilities().memory.has(MemoryKind::kHost);
  };
  const auto& rails = rails_.of(peer.key());
  if (std::any_of(rails.begin(), rails.end(), fetches)) return 0;
  const std::uint32_t nbytes = eager_nbytes_of(*source.move);
  return nbytes > most ? 0 : nbytes;
}

// False: it cannot be told now.
bool Posting::announce(Peer& peer, TransferKey key, bool is_source) {
  if (is_source) return sources_.offer(peer, key);
  destinations_.request(peer, key);
  return true;
}

void Posting::serve_backlog() {
  if (!admission_.has_any_backlog()) return;
  for (const SessionKey key : admission_.backlogged())
    context_.serve(key, [&] {
      Peer* const peer = sessions_.find_open(key);
      while (const auto waiting =
                 peer != nullptr && sessions_.takes_more(*peer) ? admission_.next(key) : std::nullopt) {
        if (!announce(*peer, waiting->key, waiting->is_source)) break;
        admission_.told(key);
        sessions_.flush(*peer);  // so that the next look sees what waits to be sent
      }
    });
}

}  // namespace kvxfer
