#include "core/engine/programs.h"

#include <utility>

#include "core/copy/pack.h"

namespace kvxfer {
namespace {

constexpr std::size_t kMaxPeerPrograms = 4096;  // a pair of layouts each
// What we have a peer keep is within its limits, also those of older releases: they end the session with the
// program that fills the table, and charge a program before they let go of the one that its number named.
constexpr std::size_t kMaxNumbers = kMaxPeerPrograms - 1;
constexpr std::uint64_t kMaxToldNbytes = std::uint64_t{56} * 1024 * 1024;  // of 64 MiB: peer_budget()

// Includes what an entry of a map takes.
std::uint64_t nbytes_of(const CopyProgram& copies) {
  return 256 + sizeof(CopyProgram) + nbytes_of_counts(copies) + copies.loops.size() * sizeof(CopyLoop) +
         copies.conversions.size() * sizeof(Conversion) + copies.scales.size() * sizeof(float);
}

// A peer's program, charged to its budget until the last transfer that uses it has ended.
struct Charged {
  CopyProgram copies;
  Charge charge;
};

// Named by a number whose program the peer no longer needs: nothing smaller is a program.
CopyProgram least_program() {
  CopyProgram least;
  least.num_layers = 1;
  CopyLoop& loop = least.loops.emplace_back();
  loop.num_layers = loop.counts[0] = loop.counts[1] = 1;
  loop.nbytes = 1;
  return least;
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
  number(peer, entry.copies, src, dst);
  while (session.next == 0 || session.ours.contains(session.next)) ++session.next;
  session.ours.emplace(session.next, std::move(entry));
  return session.next++;
}

std::uint32_t Programs::number(Peer& peer, const TransferEnd& transfer) {
  const bool is_source = transfer.is_source();
  return number(peer, transfer.move->program, is_source ? transfer.region : transfer.remote_region(),
                is_source ? transfer.remote_region() : transfer.region);
}

std::uint32_t Programs::number(Peer& peer, const std::shared_ptr<const CopyProgram>& copies, RegionId src,
                               RegionId dst) {
  OfSession& session = sessions_programs_[peer.key()];
  if (const auto known = session.numbered.find(copies.get()); known != session.numbered.end()) {
    session.numbers.splice(session.numbers.end(), session.numbers, known->second);
    return known->second->number;
  }
  const std::uint64_t nbytes = nbytes_of(*copies);
  make_room(peer, session, nbytes);
  Numbers& numbers = session.numbers;
  const bool is_new = numbers.size() < kMaxNumbers && (numbers.empty() || numbers.front().copies != nullptr);
  if (is_new) numbers.push_front({static_cast<std::uint32_t>(numbers.size() + 1), 0, nullptr});
  const Numbers::iterator oldest = numbers.begin();
  vacate(session, oldest->copies.get());
  sessions_.send(peer, wire::Program{oldest->number, src, dst, *copies});
  session.nbytes += nbytes - oldest->nbytes;
  oldest->nbytes = nbytes;
  session.numbered.emplace(copies.get(), oldest);
  oldest->copies = copies;
  numbers.splice(numbers.end(), numbers, oldest);
  return oldest->number;
}

// The peer keeps a program until its number names another one. So where its memory would not do, the numbers
// that were not used for longest are made to name next to nothing.
void Programs::make_room(Peer& peer, OfSession& session, std::uint64_t nbytes) {
  if (session.nbytes + nbytes <= kMaxToldNbytes) return;
  const CopyProgram least = least_program();
  const std::uint64_t least_nbytes = nbytes_of(least);
  for (auto next = session.numbers.begin(); next != session.numbers.end();) {
    const Numbers::iterator old = next++;
    if (session.nbytes + nbytes <= kMaxToldNbytes) return;
    if (old->nbytes <= least_nbytes) continue;
    vacate(session, old->copies.get());
    sessions_.send(peer, wire::Program{old->number, 0, 0, least});
    session.nbytes -= old->nbytes - least_nbytes;
    old->nbytes = least_nbytes;
  }
}

void Programs::vacate(OfSession& session, const CopyProgram* copies) noexcept {
  const auto named = session.numbered.find(copies);
  if (named == session.numbered.end()) return;
  const Numbers::iterator number = named->second;
  session.numbered.erase(named);
  number->copies = nullptr;
  session.numbers.splice(session.numbers.begin(), session.numbers, number);
}

const Programs::Program* Programs::find_ours(SessionKey session, std::uint32_t id) const {
  auto programs = sessions_programs_.find(session);
  if (programs == sessions_programs_.end()) return nullptr;
  auto found = programs->second.ours.find(id);
  return found == programs->second.ours.end() ? nullptr : &found->second;
}

void Programs::forget(SessionKey session, std::uint32_t id) noexcept {
  const auto programs = sessions_programs_.find(session);
  if (programs == sessions_programs_.end()) return;
  const auto forgotten = programs->second.ours.find(id);
  if (forgotten == programs->second.ours.end()) return;
  vacate(programs->second, forgotten->second.copies.get());
  programs->second.ours.erase(forgotten);
}

Status Programs::told(Peer& peer, wire::Program& program) {
  if (Status status = check_program(program.program); !status.ok())
    return {Code::kProtocol, "PROGRAM refused: " + status.message()};
  OfSession& session = sessions_programs_[peer.key()];
  std::map<std::uint32_t, Program>& told = session.theirs;
  told.erase(program.id);  // whatever happens, its number no longer names that program
  // Programs whose regions are gone leave only now: the direction of a program is not known before it is
  // used.
  if (told.size() >= kMaxPeerPrograms)
    std::erase_if(told, [&](const auto& each) {
      const Program& old = each.second;
      const auto joins = [&](RegionId ours, RegionId theirs) {
        return regions_.find(ours) != nullptr && peer_regions_.find(peer.key(), theirs) != nullptr;
      };
      return !joins(old.dst, old.src) && !joins(old.src, old.dst);
    });
  if (told.size() >= kMaxPeerPrograms) {
    session.unkept = {Code::kRefused, "the peer keeps " + std::to_string(kMaxPeerPrograms) +
                                          " copy programs of this session, and no more"};
    return {};
  }
  auto charged = std::make_shared<Charged>();
  charged->charge = Charge::take(peer.budget(), Resource::kBytes, nbytes_of(program.program));
  if (!charged->charge) {
    session.unkept = {Code::kRefused, "the peer has no memory left for this session's copy programs: " +
                                          peer.budget()->in_words(Resource::kBytes)};
    return {};
  }
  count(program.program);
  charged->copies = std::move(program.program);
  Program entry;
  entry.copies = {charged, &charged->copies};
  entry.src = program.src_region;
  entry.dst = program.dst_region;
  told.emplace(program.id, std::move(entry));
  return {};
}

Result<Programs::Use> Programs::find(const Peer& peer, const wire::TransferSpec& spec, Side side) {
  OfSession& session = sessions_programs_[peer.key()];
  auto found = session.theirs.find(spec.program);
  if (found == session.theirs.end()) {
    if (!session.unkept.ok()) return session.unkept;
    return Status(Code::kInvalidArgument, "program " + std::to_string(spec.program) + " was never announced");
  }
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
    const Program& program = entry.second;
    if ((program.write != of_peer ? program.src : program.dst) != gone) return false;
    vacate(programs->second, program.copies.get());
    return true;
  });
  // If the peer announces that number again, with other bounds, every program must be checked anew.
  if (of_peer)
    for (auto& [id, program] : programs->second.theirs) program.for_offers.reset();
}

}  // namespace kvxfer
