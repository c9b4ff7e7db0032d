#include "raw_agent/ways.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/control/wire.h"

namespace kvxfer::raw_agent {
namespace {

// Up to so many grid pairs get a transfer each, even if only a few of their blocks are named.
constexpr std::size_t kFewPairs = 8;
// The most runs, and bytes, of a program that names each run: one piece.
constexpr std::size_t kMostRuns = 2048;
constexpr std::uint64_t kMostRunNbytes = std::uint64_t{4} << 20;

struct GridPair {
  std::uint32_t src, dst;
  bool operator==(const GridPair&) const = default;
  auto operator<=>(const GridPair&) const = default;
};

// Consecutive entries that name one pair of grids.
struct Row {
  GridPair grids;
  std::size_t first, num;
};

// A grid's bytes in its region: [first, last).
struct Extent { std::uint64_t first, last; };

// True if grids overlap. They cannot be layers of one program then, since a program moves no byte of a block
// twice.
bool meet(std::vector<Extent>& extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.first < b.first; });
  return std::adjacent_find(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
           return b.first < a.last;
         }) != extents.end();
}

CopyLoop loop_of(const Grid& src, const Grid& dst, std::uint32_t layer) {
  CopyLoop loop{};
  loop.first_layer = layer;
  loop.num_layers = 1;
  loop.src_offset = src.offset;
  loop.dst_offset = dst.offset;
  loop.src_unit_stride = loop.dst_unit_stride = src.nbytes;
  loop.counts[0] = loop.counts[1] = 1;
  loop.nbytes = src.nbytes;
  return loop;
}

class WayFinder {
 public:
  WayFinder(const PreparedList& src, const std::uint32_t* src_entries, const PreparedList& dst,
            const std::uint32_t* dst_entries, std::size_t num)
      : src_(src), dst_(dst), src_entries_(src_entries), dst_entries_(dst_entries), num_(num) {}

  Result<std::vector<Way>> find() {
    if (Status checked = make_rows(); !checked.ok()) return checked;
    if (num_ == 0) return std::move(ways_);
    if (!add_layers()) {
      const std::map<GridPair, std::vector<std::size_t>> groups = group();
      const bool is_large = std::any_of(groups.begin(), groups.end(), [this](const auto& each) {
        return src_.grids[each.first.src].nbytes > kMostLoopNbytes;
      });
      if (!is_large && (groups.size() <= kFewPairs || num_ / groups.size() >= kFewPairs))
        for (const auto& [grids, rows] : groups) add_group(grids, rows);
      else
        add_runs();
    }
    return std::move(ways_);
  }

 private:
  std::uint32_t src_entry(std::size_t i) const noexcept {
    return src_entries_ == nullptr ? static_cast<std::uint32_t>(i) : src_entries_[i];
  }
  std::uint32_t dst_entry(std::size_t i) const noexcept {
    return dst_entries_ == nullptr ? static_cast<std::uint32_t>(i) : dst_entries_[i];
  }
  std::uint32_t src_id(std::size_t i) const noexcept { return src_.ids[src_entry(i)]; }
  std::uint32_t dst_id(std::size_t i) const noexcept { return dst_.ids[dst_entry(i)]; }

  Status make_rows() {
    for (std::size_t i = 0; i < num_; ++i) {
      const std::uint32_t from = src_entry(i), to = dst_entry(i);
      if (from >= src_.size() || to >= dst_.size())
        return {Code::kOutOfRange,
                "index " + std::to_string(i) + " is " + std::to_string(from >= src_.size() ? from : to) +
                    ", but the list has " + std::to_string(from >= src_.size() ? src_.size() : dst_.size()) +
                    " descriptors"};
      const GridPair grids{src_.grid_of(from), dst_.grid_of(to)};
      if (!rows_.empty() && rows_.back().grids == grids) {
        ++rows_.back().num;
        continue;
      }
      const std::uint64_t from_nbytes = src_.grids[grids.src].nbytes,
                          to_nbytes = dst_.grids[grids.dst].nbytes;
      if (from_nbytes != to_nbytes)
        return {Code::kLengthMismatch, "pair " + std::to_string(i) + " joins " + std::to_string(from_nbytes) +
                                           " bytes and " + std::to_string(to_nbytes)};
      rows_.push_back({grids, i, 1});
    }
    return {};
  }

  // False: the rows do not all name the same blocks.
  bool add_layers() {
    const Row& like = rows_.front();
    const Grid &src = src_.grids[like.grids.src], &dst = dst_.grids[like.grids.dst];
    std::vector<Extent> src_extents, dst_extents;
    for (const Row& row : rows_) {
      if (row.num != like.num) return false;
      const Grid &from = src_.grids[row.grids.src], &to = dst_.grids[row.grids.dst];
      if (from.region != src.region || to.region != dst.region || from.nbytes > kMostLoopNbytes) return false;
      for (std::size_t i = 0; &row != &like && i < row.num; ++i)
        if (src_id(row.first + i) != src_id(like.first + i) ||
            dst_id(row.first + i) != dst_id(like.first + i))
          return false;
      src_extents.push_back({from.offset, from.offset + from.num * from.nbytes});
      dst_extents.push_back({to.offset, to.offset + to.num * to.nbytes});
    }
    if (meet(src_extents) || meet(dst_extents)) return false;
    for (std::size_t first = 0; first < rows_.size(); first += wire::kMaxLayers) {
      const std::span<const Row> rows =
          std::span(rows_).subspan(first, std::min<std::size_t>(wire::kMaxLayers, rows_.size() - first));
      for (std::size_t at = 0; at < like.num; at += wire::kMaxBlocks) {
        Way& way = begin(src.region, dst.region);
        UnitsPerBlock& units = way.program.units[kCoarse] = {wire::kMaxUnits, wire::kMaxUnits};
        for (const Row& row : rows) {
          const Grid &from = src_.grids[row.grids.src], &to = dst_.grids[row.grids.dst];
          way.program.loops.push_back(loop_of(from, to, way.program.num_layers++));
          units = {std::min(units.src, from.num), std::min(units.dst, to.num)};
        }
        const std::size_t num = std::min<std::size_t>(wire::kMaxBlocks, like.num - at);
        for (std::size_t i = at; i < at + num; ++i) {
          way.src_ids.push_back(src_id(like.first + i));
          way.dst_ids.push_back(dst_id(like.first + i));
        }
        for (const Row& row : rows) way.nbytes += num * src_.grids[row.grids.src].nbytes;
      }
    }
    return true;
  }

  std::map<GridPair, std::vector<std::size_t>> group() const {
    std::map<GridPair, std::vector<std::size_t>> groups;
    for (std::size_t r = 0; r < rows_.size(); ++r) groups[rows_[r].grids].push_back(r);
    return groups;
  }

  void add_group(const GridPair& grids, const std::vector<std::size_t>& rows) {
    const Grid &from = src_.grids[grids.src], &to = dst_.grids[grids.dst];
    Way* way = nullptr;
    for (const std::size_t r : rows)
      for (std::size_t i = rows_[r].first; i < rows_[r].first + rows_[r].num; ++i) {
        if (way == nullptr || way->src_ids.size() == wire::kMaxBlocks) {
          way = &begin(from.region, to.region);
          way->program.num_layers = 1;
          way->program.units[kCoarse] = {from.num, to.num};
          way->program.loops = {loop_of(from, to, 0)};
        }
        way->src_ids.push_back(src_id(i));
        way->dst_ids.push_back(dst_id(i));
        way->nbytes += from.nbytes;
      }
  }

  void add_runs() {
    // A program, and how many more bytes it may name: no more than a region has, since it may move none
    // twice.
    struct Open {
      std::size_t way = 0;
      std::uint64_t most_nbytes = 0;
    };
    std::map<std::pair<RegionId, RegionId>, Open> open;
    for (const Row& row : rows_)
      for (std::size_t i = row.first; i < row.first + row.num; ++i) {
        Grid from = src_.grids[row.grids.src], to = dst_.grids[row.grids.dst];
        from.offset += src_id(i) * from.nbytes;
        to.offset += dst_id(i) * to.nbytes;
        for (std::uint64_t left = from.nbytes; left != 0;) {
          const std::uint64_t num = std::min(left, kMostLoopNbytes);
          const std::uint64_t room = std::min({from.section_nbytes, to.section_nbytes, kMostRunNbytes});
          const auto [at, is_new] = open.try_emplace({from.region, to.region});
          Open& its = at->second;
          its.most_nbytes = std::min(its.most_nbytes, room);
          if (is_new || ways_[its.way].program.loops.size() == kMostRuns ||
              ways_[its.way].nbytes + num > its.most_nbytes) {
            its = {ways_.size(), room};
            Way& way = begin(from.region, to.region);
            way.is_regular = false;
            way.program.num_layers = 1;
            way.src_ids = way.dst_ids = {0};
          }
          Way& way = ways_[its.way];
          from.nbytes = num;
          way.program.loops.push_back(loop_of(from, to, 0));
          way.program.loops.back().src_unit_stride = way.program.loops.back().dst_unit_stride = 0;
          way.nbytes += num;
          from.offset += num;
          to.offset += num;
          left -= num;
        }
      }
  }

  Way& begin(RegionId src, RegionId dst) {
    Way& way = ways_.emplace_back();
    way.src = src;
    way.dst = dst;
    return way;
  }

  const PreparedList &src_, &dst_;
  const std::uint32_t *src_entries_, *dst_entries_;
  const std::size_t num_;
  std::vector<Row> rows_;
  std::vector<Way> ways_;
};

template <class T>
void append(std::string& out, const T* data, std::size_t num) {
  out.append(reinterpret_cast<const char*>(data), num * sizeof(T));
}

}  // namespace

std::string Way::key() const {
  std::string out;
  append(out, &src, 1);
  append(out, &dst, 1);
  append(out, &program.units[kCoarse], 1);
  append(out, program.loops.data(), program.loops.size());
  return out;
}

Result<std::vector<Way>> find_ways(const PreparedList& src, const std::uint32_t* src_entries,
                                   const PreparedList& dst, const std::uint32_t* dst_entries,
                                   std::size_t num) {
  return WayFinder(src, src_entries, dst, dst_entries, num).find();
}

}  // namespace kvxfer::raw_agent
