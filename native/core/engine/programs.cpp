#include "core/engine/programs.h"

#include <new>

#include "core/copy/pack.h"

namespace kvxfer {
namespace {

constexpr std::size_t kMaxPeerPrograms = 4096;  // a pair of layouts each

// Includes what an entry of a map takes.
std::uint64_t nbytes_of(const CopyProgram& copies) {
  return 256 + sizeof(CopyProgram) + nbytes_of_counts(copies) + copies.loops.size() * sizeof(CopyLoop) +
         copies.conversions.size() * sizeof(Conversion) + copies.scales.size() * sizeof(float);
}

}  // namespace

Result<std::uint32_t> Programs::install(Peer& peer, bool write, RegionId src, RegionId dst,
                                        CopyProgram program) {
  if (Status status = check_program(program); !status.ok()) return status;
  const RegionId ours = write ? src : dst, theirs = write ? dst : src;
  const Region* local = regions_.find(ours);
  if (local == nullptr)
    return Status(Code::kUnknownRegion, "region " + std::to_string(ours) + " is not registered here");
  const PeerRegion* remote = peer_regions_.find(peer.key(), theirs);
  if (remote == nullptr)
    return Status(Code::kUnknownRegion,
                  "peer " + quoted(peer.name()) + " has no region " + std::to_string(theirs) + " (any more)");
  if (Status status = local->footprint.contains(program, write ? Side::kSrc : Side::kDst); !status.ok())
    return status;
  // The peer checks its own half; here we check only that it stays inside what the peer announced.
  const wire::Region& there = remote->region;
  if (Status status = check_inside(program, write ? Side::kDst : Side::kSrc, there.num_blocks, there.spans);
      !status.ok())
    return status;
  OfSession& session = sessions_programs_[peer.key()];
  Program entry;
  count(program);
  entry.copies = std::make_shared<CopyProgram>(std::move(program));
  entry.src = src;
  entry.dst = dst;
  entry.write = write;
  std::uint32_t id = session.next;
  if (session.free.empty()) {
    ++session.next;
  } else {
    id = session.free.back();
    session.free.pop_back();
  }
  sessions_.send(peer, wire::Program{id, src, dst, *entry.copies});
  session.ours.emplace(id, std::move(entry));
  return id;
}

const Programs::Program* Programs::find_ours(SessionKey session, std::uint32_t id) const {
  auto programs = sessions_programs_.find(session);
  if (programs == sessions_programs_.end()) return nullptr;
  auto found = programs->second.ours.find(id);
  return found == programs->second.ours.end() ? nullptr : &found->second;
}

void Programs::forget(SessionKey session, std::uint32_t id) noexcept {
  const auto programs = sessions_programs_.find(session);
  if (programs == sessions_programs_.end() || programs->second.ours.erase(id) == 0) return;
  try {
    programs->second.free.push_back(id);
  } catch (const std::bad_alloc&) {  // then another program gets its number
  }
}

Status Programs::told(Peer& peer, wire::Program& program) {
  std::map<std::uint32_t, Program>& told = sessions_programs_[peer.key()].theirs;
  // A peer that never stops telling programs does not use them. Programs whose regions are gone leave only
  // now: the direction of a program is not known before it is used.
  if (told.size() >= kMaxPeerPrograms)
    std::erase_if(told, [&](const auto& each) {
      const Program& old = each.second;
      const auto joins = [&](RegionId ours, RegionId theirs) {
        return regions_.find(ours) != nullptr && peer_regions_.find(peer.key(), theirs) != nullptr;
      };
      return !joins(old.dst, old.src) && !joins(old.src, old.dst);
    });
  if (told.size() >= kMaxPeerPrograms) return {Code::kProtocol, "PROGRAM refused: too many programs"};
  Program entry;
  entry.charge = Charge::take(peer.budget(), Resource::kBytes, nbytes_of(program.program));
  if (!entry.charge)
    return {Code::kProtocol,
            "PROGRAM refused: it takes too much memory: " + peer.budget()->in_words(Resource::kBytes)};
  if (Status status = check_program(program.program); !status.ok())
    return {Code::kProtocol, "PROGRAM refused: " + status.message()};
  count(program.program);
  entry.copies = std::make_shared<CopyProgram>(std::move(program.program));
  entry.src = program.src_region;
  entry.dst = program.dst_region;
  told.insert_or_assign(program.id, std::move(entry));
  return {};
}

Result<Programs::Use> Programs::find(const Peer& peer, const wire::TransferSpec& spec, Side side) {
  std::map<std::uint32_t, Program>& told = sessions_programs_[peer.key()].theirs;
  auto found = told.find(spec.program);
  if (found == told.end())
    return Status(Code::kInvalidArgument, "program " + std::to_string(spec.program) + " was never announced");
  Program& program = found->second;
  const bool is_src = side == Side::kSrc;
  const Region* local = regions_.find(is_src ? program.src : program.dst);
  if (local == nullptr) return Status(Code::kRegionGone, "the region was deregistered, or never existed");
  const PeerRegion* remote = peer_regions_.find(peer.key(), is_src ? program.dst : program.src);
  if (remote == nullptr)
    return Status(Code::kUnknownRegion, "the peer names a region of its own that it never announced");
  if (Status status = peer_regions_.check_path(peer, *local, *remote, !is_src, program.copies->converts());
      !status.ok())
    return status;
  if ((spec.flags & wire::kFlagIntegrity) != 0)
    if (Status status = check_integrity(*local); !status.ok()) return status;
  const CopyProgram& copies = *program.copies;
  if (spec.grid.first_layer >= copies.num_layers ||
      spec.grid.num_layers > copies.num_layers - spec.grid.first_layer)
    return Status(Code::kOutOfRange, "the transfer names layers beyond the program's");
  return Use{&program, local, remote};
}

Status Programs::check(const Use& use, const Move& move, Side side) const {
  const CopyProgram& copies = *use.program->copies;
  const wire::Region& remote = use.remote->region;
  const bool is_src = side == Side::kSrc;
  std::optional<Status>& checked = is_src ? use.program->for_requests : use.program->for_offers;
  if (!checked) {
    checked = use.local->footprint.contains(copies, side);
    // Bytes that are read from the peer's memory must be inside what it announced.
    if (checked->ok() && !is_src) checked = check_inside(copies, Side::kSrc, remote.num_blocks, remote.spans);
  }
  if (!checked->ok()) return *checked;
  const auto check = [&](auto&& check_side, const std::vector<std::uint32_t>& ids, Side of) {
    return of == side
               ? check_side(ids, move.grid.num_fine, copies, of, use.local->num_blocks, use.local->name)
               : check_side(ids, move.grid.num_fine, copies, of, remote.num_blocks, remote.name);
  };
  if (Status status = check(check_range, move.src_ids, Side::kSrc); !status.ok()) return status;
  // A block that is named twice spoils the destination's memory alone, so it is looked for there.
  return is_src ? check(check_range, move.dst_ids, Side::kDst) : check(check_ids, move.dst_ids, Side::kDst);
}

void Programs::forget(SessionKey session, RegionId gone, bool of_peer) {
  auto programs = sessions_programs_.find(session);
  if (programs == sessions_programs_.end()) return;
  // Both agents count regions from 1, so an id alone does not say whose region it is.
  std::erase_if(programs->second.ours, [&](const auto& entry) {
    return (entry.second.write != of_peer ? entry.second.src : entry.second.dst) == gone;
  });
  // If the peer announces that number again, with other bounds, every program must be checked anew.
  if (of_peer)
    for (auto& [id, program] : programs->second.theirs) program.for_offers.reset();
}

}  // namespace kvxfer
