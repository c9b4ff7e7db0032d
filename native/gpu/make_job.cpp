#include "gpu/make_job.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <string>
#include <utility>

#include "gpu/placing.h"

namespace kvxfer::gpu {
namespace {

// Divisors are exact below 2^31.
constexpr std::uint64_t kMostNumbers = (std::uint64_t{1} << 31) - 1;

constexpr std::uint32_t kVectorsPerSlice = kWarp * kVectorsPerLane;

struct Atoms {
  std::uint32_t src_nbytes, dst_nbytes;
  std::uint64_t per_run;
  std::uint32_t last_src_nbytes;  // of a run
  std::uint32_t per_slice;
};

// As many as a warp's lanes take in one round; fewer if a run then divides into whole slices.
std::uint32_t vectors_per_slice(std::uint64_t per_run) noexcept {
  for (std::uint32_t num = kVectorsPerSlice; num >= kVectorsPerSlice / 2; num -= kWarp)
    if (per_run % num == 0) return num;
  return kVectorsPerSlice;
}

Atoms vectors(const CopyLoop& loop, std::uint32_t nbytes) noexcept {
  const std::uint64_t per_run = loop.nbytes / nbytes;
  return {nbytes, nbytes, per_run, nbytes, vectors_per_slice(per_run)};
}

// Divides a run into copies of equal length, as far as whole cache lines allow.
Atoms bulk_copies(const CopyLoop& loop) noexcept {
  constexpr std::uint64_t kLineNbytes = 128;
  if (loop.nbytes <= kStageNbytes) {
    const auto nbytes = static_cast<std::uint32_t>(loop.nbytes);
    return {nbytes, nbytes, 1, nbytes, std::min(kWarp, kStageNbytes / nbytes)};
  }
  const std::uint64_t least = (loop.nbytes + kStageNbytes - 1) / kStageNbytes;
  const std::uint64_t nbytes =
      ((loop.nbytes + least - 1) / least + kLineNbytes - 1) / kLineNbytes * kLineNbytes;
  const std::uint64_t per_run = (loop.nbytes + nbytes - 1) / nbytes;
  return {static_cast<std::uint32_t>(nbytes), static_cast<std::uint32_t>(nbytes), per_run,
          static_cast<std::uint32_t>(loop.nbytes - (per_run - 1) * nbytes), 1};
}

// Whole runs if they are short: as many as there are lanes, or fewer if they then fill all rounds.
std::uint32_t converted_per_slice(std::uint64_t per_run) noexcept {
  if (per_run > kMostConvertedPerSlice) return kMostConvertedPerSlice;
  const auto run = static_cast<std::uint32_t>(per_run);
  const std::uint32_t most = std::min(kMostRunsPerSlice, kMostConvertedPerSlice / run);
  for (std::uint32_t num = most; num > most / 2; --num)
    if (num * run % kAtomsPerRound == 0) return num * run;
  return most * run;
}

Atoms converted(const CopyLoop& loop, const Conversion& conversion) noexcept {
  const auto src = static_cast<std::uint32_t>(itemsize(conversion.src_dtype));
  const auto dst = static_cast<std::uint32_t>(itemsize(conversion.dst_dtype));
  const std::uint64_t per_run = (loop.nbytes + kAtomElements * src - 1) / (kAtomElements * src);
  return {kAtomElements * src, kAtomElements * dst, per_run,
          static_cast<std::uint32_t>(loop.nbytes - (per_run - 1) * kAtomElements * src),
          converted_per_slice(per_run)};
}

// True if the runs of a granule become consecutive when the loop's axes are exchanged.
bool has_granules_across(const Conversion& conversion) noexcept {
  return conversion.finds_scales() && conversion.dst_strides[0] == 0 && conversion.dst_strides[1] != 0;
}

struct Turned {
  CopyLoop loop;
  Conversion conversion;
};

Turned turned(CopyLoop loop, Conversion conversion) noexcept {
  std::swap(loop.counts[0], loop.counts[1]);
  for (auto* strides : {&loop.src_strides, &loop.dst_strides}) std::swap((*strides)[0], (*strides)[1]);
  for (auto* strides : {&conversion.src_strides, &conversion.dst_strides})
    std::swap((*strides)[0], (*strides)[1]);
  return {loop, conversion};
}

std::uint64_t runs_per_granule(const CopyLoop& loop, const Conversion& conversion) noexcept {
  return std::uint64_t{conversion.dst_strides[0] != 0 ? 1 : loop.counts[0]} *
         (conversion.dst_strides[1] != 0 ? 1 : loop.counts[1]);
}

// A warp takes granules that it has room for, several at once if they are small. A CTA takes each larger
// granule: a warp would take long, and what it read in the first pass would no longer be in the caches in the
// second.
Team choose_granules(ConvertLoop& convert, Atoms& atoms, std::uint64_t runs) noexcept {
  constexpr std::uint32_t kParts = kMostConvertWarps;  // so that every warp has a part
  convert.runs_per_granule = divisor(static_cast<std::uint32_t>(runs));
  const std::uint64_t per_granule = runs * atoms.per_run;
  if (runs <= kMostRunsPerSlice && per_granule <= kMostConvertedPerSlice) {
    const auto of_granule = static_cast<std::uint32_t>(per_granule);
    atoms.per_slice = of_granule * std::min(kMostRunsPerSlice / static_cast<std::uint32_t>(runs),
                                            kMostConvertedPerSlice / of_granule);
    convert.lanes_per_granule = std::min(kWarp, of_granule & -of_granule);
    return Team::kOneWarp;
  }
  atoms.per_slice = static_cast<std::uint32_t>(per_granule);
  const std::uint64_t of_part =
      std::min({std::uint64_t{kMostConvertedPerSlice}, (per_granule + kParts - 1) / kParts + kWarp - 1,
                std::uint64_t{kMostRunsPerSlice - 1} * atoms.per_run + 1});
  convert.atoms_per_part = static_cast<std::uint32_t>(of_part / kWarp * kWarp);
  convert.lanes_per_granule = kWarp;
  return Team::kWholeCta;
}

// Fills launches of one kernel, one after the other.
class Filler {
 public:
  explicit Filler(Kernel kernel, Team team = Team::kOneWarp) : kernel_(kernel), team_(team) {}

  // `loop.slice_end` is the number of the loop's slices; this adds the slices of the loops before it.
  void add(JobLoop loop, const ConvertLoop& convert, std::vector<Launch>& full) {
    if (launch_ && (launch_->job.num_loops == kMaxLoops ||
                    std::uint64_t{launch_->job.num_slices} + loop.slice_end > kMostNumbers))
      close(full);
    if (!launch_) {
      launch_.emplace(Launch{kernel_, {}, {}});
      launch_->conversions.team = team_;
    }
    CopyJob& job = launch_->job;
    loop.slice_end += job.num_slices;
    job.num_slices = loop.slice_end;
    launch_->conversions.loops[job.num_loops] = convert;
    job.loops[job.num_loops++] = loop;
  }
  void close(std::vector<Launch>& full) {
    if (launch_) full.push_back(std::move(*launch_));
    launch_.reset();
  }

 private:
  Kernel kernel_;
  Team team_;
  std::optional<Launch> launch_;
};

// One for each kernel; for conversions, one for each team.
using Fillers = std::array<Filler, kNumKernels + 1>;

Side side_of(const HalfLoop& half, Address address, std::uint32_t atom_nbytes) noexcept {
  return {address,
          half.layer_stride,
          half.block_stride,
          half.unit_stride,
          {half.strides[0], half.strides[1]},
          divisor(half.units),
          atom_nbytes};
}

// Pairs of a grain, in the part's tables.
struct Pairs { std::uint32_t first, num; };

// Adds layers of a loop that are evenly placed to the jobs.
Status add_layers(const CopyLoop& loop, const Conversion* conversion, UnitsPerBlock units,
                  const Layers& layers, Pairs pairs, bool bulk, Fillers& fillers,
                  std::vector<Launch>& launches) {
  const HalfLoop src = half_of(loop, conversion, units, kvxfer::Side::kSrc),
                 dst = half_of(loop, conversion, units, kvxfer::Side::kDst);
  const std::uint64_t at_src = bits_of(src, layers.src, loop, layers),
                      at_dst = bits_of(dst, layers.dst, loop, layers);
  const std::uint32_t alignment = 1u << std::countr_zero(at_src | at_dst | loop.nbytes | kVectorNbytes);
  const bool in_bulk = bulk && alignment == kVectorNbytes && loop.nbytes >= kLeastBulkNbytes;
  const Kernel kernel = conversion != nullptr ? Kernel::kConvert
                        : in_bulk             ? Kernel::kCopyBulk
                                              : Kernel::kCopyVectors;
  Atoms atoms = conversion != nullptr ? converted(loop, *conversion)
                : in_bulk             ? bulk_copies(loop)
                                      : vectors(loop, alignment);
  const std::uint64_t runs = std::uint64_t{loop.counts[0]} * loop.counts[1];
  const std::uint64_t per_pair = atoms.per_run * runs;
  if (atoms.per_run > kMostNumbers || runs > kMostNumbers || per_pair > kMostNumbers)
    return {Code::kUnsupported, "a block of " + std::to_string(loop.nbytes * runs) +
                                    " bytes per layer in pieces of " + std::to_string(atoms.src_nbytes) +
                                    " bytes has more pieces than a kernel can count: align it to 16 bytes"};
  auto filler = static_cast<std::size_t>(kernel);
  ConvertLoop convert{};
  if (conversion != nullptr) {
    convert.conversion = *conversion;
    if (conversion->src_scales == ScalePlace::kRegion) convert.conversion.src_offset = layers.src_scales;
    if (conversion->dst_scales == ScalePlace::kRegion) convert.conversion.dst_offset = layers.dst_scales;
    convert.in_vectors = at_src % atoms.src_nbytes == 0 && at_dst % atoms.dst_nbytes == 0;
    if (conversion->finds_scales())
      filler +=
          static_cast<std::size_t>(choose_granules(convert, atoms, runs_per_granule(loop, *conversion)));
  }

  JobLoop share{};
  share.src = side_of(src, layers.src, atoms.src_nbytes);
  share.dst = side_of(dst, layers.dst, atoms.dst_nbytes);
  share.atoms_per_pair = divisor(static_cast<std::uint32_t>(per_pair));
  share.atoms_per_run = divisor(static_cast<std::uint32_t>(atoms.per_run));
  share.runs_per_row = divisor(loop.counts[1]);
  share.atoms_per_slice = atoms.per_slice;
  share.last_atom_nbytes = atoms.last_src_nbytes;
  share.in_one_run = atoms.per_run % atoms.per_slice == 0;
  const auto most_pairs = static_cast<std::uint32_t>(kMostNumbers / per_pair);
  for (std::uint32_t pair = 0, num = 0; pair < pairs.num; pair += num) {
    num = std::min(most_pairs, pairs.num - pair);
    share.first_pair = pairs.first + pair;
    share.num_atoms = static_cast<std::uint32_t>(num * per_pair);
    const std::uint32_t slices = (share.num_atoms + atoms.per_slice - 1) / atoms.per_slice;
    share.slices_per_layer = divisor(slices);
    const auto most_layers = static_cast<std::uint32_t>(kMostNumbers / slices);
    for (std::uint32_t layer = 0, many = 0; layer < layers.num; layer += many) {
      many = std::min(most_layers, layers.num - layer);
      share.first_layer = layers.first + layer;
      share.slice_end = many * slices;
      fillers[filler].add(share, convert, launches);
    }
  }
  return {};
}

std::uint32_t largest(std::span<const std::uint32_t> ids) noexcept {
  return *std::max_element(ids.begin(), ids.end());
}

}  // namespace

Divisor divisor(std::uint32_t value) noexcept {
  const auto log2 = static_cast<std::uint32_t>(std::bit_width(value - 1));  // rounded up
  const std::uint64_t power = std::uint64_t{1} << (31 + log2);
  return {value, static_cast<std::uint32_t>((power + value - 1) / value), 31 + log2};
}

Result<std::vector<Launch>> make_launches(const CopyProgram& program, const Part& part,
                                          std::span<const std::uint32_t> src_ids,
                                          std::span<const std::uint32_t> dst_ids, const Placement& src,
                                          const Placement& dst, bool bulk) {
  Result<JobWork> work =
      make_work(program, part, src_ids, dst_ids, src, dst, bulk, Direction::kOnDevice, Calibration());
  if (!work.ok()) return work.status();
  return std::move(work).value().launches;
}

Result<JobWork> make_work(const CopyProgram& program, const Part& part,
                          std::span<const std::uint32_t> src_ids, std::span<const std::uint32_t> dst_ids,
                          const Placement& src, const Placement& dst, bool bulk, Direction direction,
                          const Calibration& calibration) {
  JobWork work;
  std::vector<Launch>& launches = work.launches;
  const bool may_use_engines = direction != Direction::kOnDevice && calibration.uses_engines();
  Fillers fillers = {Filler(Kernel::kCopyVectors), Filler(Kernel::kCopyBulk), Filler(Kernel::kConvert),
                     Filler(Kernel::kConvert, Team::kWholeCta)};
  for (const CopyLoop& each : program.loops) {
    const std::uint32_t first = std::max(each.first_layer, part.first_layer);
    const std::uint32_t last =
        std::min(each.first_layer + each.num_layers, part.first_layer + part.num_layers);
    const std::uint32_t num_coarse = part.num_pairs - part.num_fine;
    const Pairs pairs = each.grain == kCoarse ? Pairs{0, num_coarse} : Pairs{num_coarse, part.num_fine};
    if (first >= last || pairs.num == 0 || each.counts[0] == 0 || each.counts[1] == 0 || each.nbytes == 0)
      continue;

    const Conversion* conversion = program.conversion_of(each);
    std::optional<Turned> around;
    if (conversion != nullptr && has_granules_across(*conversion)) {
      around = turned(each, *conversion);
      conversion = &around->conversion;
    }
    const CopyLoop& loop = around ? around->loop : each;
    const UnitsPerBlock units = program.units[loop.grain];
    const Placing placing{loop,
                          conversion,
                          units,
                          largest(src_ids.subspan(pairs.first, pairs.num)),
                          largest(dst_ids.subspan(pairs.first, pairs.num)),
                          src,
                          dst};
    Result<std::vector<Layers>> shares = placing.find(first - loop.first_layer, last - loop.first_layer);
    if (!shares.ok()) return shares.status();
    for (const Layers& layers : shares.value()) {
      if (may_use_engines && conversion == nullptr) {
        const EngineShare share{&each, units, layers, pairs.first, pairs.num};
        if (way_of(direction, runs_of(share, src_ids, dst_ids), calibration) == Way::kCopyEngine) {
          work.copies.push_back(share);
          continue;
        }
      }
      if (Status status = add_layers(loop, conversion, units, layers, pairs, bulk, fillers, launches);
          !status.ok())
        return status;
    }
  }
  for (Filler& filler : fillers) filler.close(launches);
  return work;
}

}  // namespace kvxfer::gpu
