#include "raw_agent/descriptor_list.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/control/wire.h"

namespace kvxfer::raw_agent {
namespace {

__extension__ using Wide = unsigned __int128;

// A grid while its list is prepared. It divides by a block's length without a division.
struct Finder {
  std::uint64_t address, nbytes, device, reciprocal;
  std::uint32_t num, number;

  Finder(std::uint64_t first, const Descriptor& like, std::uint32_t num_blocks, std::uint32_t own_number)
      : address(first),
        nbytes(like.nbytes),
        device(like.device),
        reciprocal(UINT64_MAX / like.nbytes),
        num(num_blocks),
        number(own_number) {}

  // Finds which block a descriptor is. False: it is none.
  bool find(const Descriptor& descriptor, std::uint32_t& block) const noexcept {
    if (descriptor.nbytes != nbytes || descriptor.device != device || descriptor.address < address)
      return false;
    const std::uint64_t distance = descriptor.address - address;
    auto quotient = static_cast<std::uint64_t>(static_cast<Wide>(distance) * reciprocal >> 64);
    std::uint64_t rest = distance - quotient * nbytes;
    while (rest >= nbytes) {  // twice at most
      ++quotient;
      rest -= nbytes;
    }
    block = static_cast<std::uint32_t>(quotient);
    return rest == 0 && quotient < num;
  }
};

// Where a section lies: addresses compare within one memory only.
std::pair<MemoryKind, std::uint64_t> memory_of(const Section& section) {
  return {section.kind, static_cast<std::uint64_t>(section.device)};
}

bool comes_before(const Section& a, const Section& b) {
  return std::tuple(memory_of(a), a.address) < std::tuple(memory_of(b), b.address);
}

void erase(std::vector<Section>& sections, std::vector<RegionId> regions) {
  std::sort(regions.begin(), regions.end());
  std::erase_if(sections, [&](const Section& each) {
    return std::binary_search(regions.begin(), regions.end(), each.region);
  });
}

std::string in_words(const Descriptor& descriptor) {
  char words[96];
  std::snprintf(words, sizeof words, "%llu bytes at 0x%llx of device %llu",
                static_cast<unsigned long long>(descriptor.nbytes),
                static_cast<unsigned long long>(descriptor.address),
                static_cast<unsigned long long>(descriptor.device));
  return words;
}

}  // namespace

SectionMap::SectionMap(std::vector<Section> sections) : sections_(std::move(sections)) {
  std::sort(sections_.begin(), sections_.end(), comes_before);
  index();
}

void SectionMap::take(const SectionMap& newer) {
  std::vector<RegionId> regions;
  for (const Section& each : newer.sections_) regions.push_back(each.region);
  erase(sections_, regions);
  const auto middle = static_cast<std::ptrdiff_t>(sections_.size());
  sections_.insert(sections_.end(), newer.sections_.begin(), newer.sections_.end());
  std::inplace_merge(sections_.begin(), sections_.begin() + middle, sections_.end(), comes_before);
  index();
}

void SectionMap::remove(std::span<const RegionId> regions) {
  erase(sections_, {regions.begin(), regions.end()});
  index();
}

void SectionMap::index() {
  farthest_.resize(sections_.size());
  for (std::uint32_t i = 0; i < sections_.size(); ++i) {
    farthest_[i] = i;
    if (i == 0 || memory_of(sections_[i - 1]) != memory_of(sections_[i])) continue;
    const Section& before = sections_[farthest_[i - 1]];
    if (before.address + before.nbytes > sections_[i].address + sections_[i].nbytes)
      farthest_[i] = farthest_[i - 1];
  }
}

const Section* SectionMap::find(const Descriptor& descriptor, MemoryKind kind) const noexcept {
  const std::pair memory{kind, kind == MemoryKind::kHost ? 0 : descriptor.device};
  const auto after =
      std::upper_bound(sections_.begin(), sections_.end(), std::tuple(memory, descriptor.address),
                       [](const auto& place, const Section& each) {
                         return place < std::tuple(memory_of(each), each.address);
                       });
  if (after == sections_.begin()) return nullptr;
  // The nearest section mostly holds it. Where registrations overlap, one that begins earlier may; then the
  // one that ends last does.
  const auto nearest = static_cast<std::size_t>(after - sections_.begin()) - 1;
  for (const std::size_t i : {nearest, std::size_t{farthest_[nearest]}}) {
    const Section& each = sections_[i];
    const std::uint64_t distance = descriptor.address - each.address;
    if (memory_of(each) == memory && distance <= each.nbytes && descriptor.nbytes <= each.nbytes - distance)
      return &each;
  }
  return nullptr;
}

namespace {

// A list while it is prepared: descriptors are added in order.
class Preparing {
 public:
  Preparing(const SectionMap& sections, MemoryKind kind, std::string agent)
      : sections_(sections), kind_(kind) {
    list_.agent = std::move(agent);
  }

  void reserve(std::size_t num) { list_.ids.reserve(num); }
  PreparedList take() { return std::move(list_); }
  bool holds(const Descriptor& descriptor) const { return sections_.find(descriptor, kind_) != nullptr; }
  Status is_not_held(const std::string& name, const Descriptor& descriptor) const {
    return {Code::kUnknownRegion,
            name + ", " + in_words(descriptor) + ", is not inside memory that " +
                (list_.agent.empty() ? "is registered here" : "the metadata of " + list_.agent + " names")};
  }

  // name(): what the descriptor is called in errors.
  template <class Name>
  Status add(const Descriptor& descriptor, Name&& name) {
    std::uint32_t id = 0;
    if (finders_.empty() || !finders_[last_].find(descriptor, id)) {
      if (descriptor.nbytes == 0) return {Code::kInvalidArgument, name() + " has no bytes"};
      if (!find(descriptor, id)) return is_not_held(name(), descriptor);
    }
    if (list_.ids.size() == UINT32_MAX)  // transfers number them by 32 bits
      return {Code::kInvalidArgument, "a list has at most 4294967295 descriptors"};
    list_.ids.push_back(id);
    if (!list_.grid_numbers.empty()) list_.grid_numbers.push_back(last_);
    return {};
  }

 private:
  // The descriptor's grid, which becomes the last one, and its block there. False: no section holds it.
  bool find(const Descriptor& descriptor, std::uint32_t& id) {
    const Section* const section = sections_.find(descriptor, kind_);
    if (section == nullptr) return false;
    const std::uint64_t distance = descriptor.address - section->address;
    const std::uint64_t rest = distance % descriptor.nbytes, block = distance / descriptor.nbytes;
    const std::uint64_t window = block / wire::kMaxUnits * wire::kMaxUnits;
    const auto number = static_cast<std::uint32_t>(finders_.size());
    const auto [found, is_new] = known_.try_emplace({section, descriptor.nbytes, rest, window}, number);
    if (is_new) {
      const std::uint64_t first = rest + window * descriptor.nbytes;
      const auto num = static_cast<std::uint32_t>(
          std::min<std::uint64_t>((section->nbytes - first) / descriptor.nbytes, wire::kMaxUnits));
      finders_.emplace_back(section->address + first, descriptor, num, number);
      list_.grids.push_back(
          {section->region, section->offset + first, descriptor.nbytes, num, section->nbytes});
      list_.addresses.push_back(section->address + first);
    }
    if (found->second != last_ && list_.grid_numbers.empty()) {
      list_.grid_numbers.reserve(list_.ids.capacity());
      list_.grid_numbers.assign(list_.ids.size(), last_);
    }
    last_ = found->second;
    id = static_cast<std::uint32_t>(block - window);
    return true;
  }

  const SectionMap& sections_;
  const MemoryKind kind_;
  PreparedList list_;
  std::vector<Finder> finders_;
  std::map<std::tuple<const Section*, std::uint64_t, std::uint64_t, std::uint64_t>, std::uint32_t> known_;
  std::uint32_t last_ = 0;
};

}  // namespace

Result<PreparedList> prepare(const SectionMap& sections, std::span<const Descriptor> descriptors,
                             MemoryKind kind, std::string agent) {
  Preparing list(sections, kind, std::move(agent));
  list.reserve(descriptors.size());
  for (std::size_t i = 0; i < descriptors.size(); ++i)
    if (Status added = list.add(descriptors[i], [&] { return "descriptor " + std::to_string(i); });
        !added.ok())
      return added;
  return list.take();
}

Result<PreparedList> prepare(const SectionMap& sections, std::span<const Strided> rows, MemoryKind kind,
                             std::string agent) {
  Preparing list(sections, kind, std::move(agent));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Strided& row = rows[i];
    const auto block = [&](std::uint64_t number) {
      return Descriptor{row.address + number * row.stride, row.nbytes, row.device};
    };
    const auto name = [&](std::uint64_t number) {
      return "block " + std::to_string(number) + " of strided descriptor " + std::to_string(i);
    };
    const std::uint64_t last = row.count - 1;
    if (row.count == 0)
      return Status(Code::kInvalidArgument, "strided descriptor " + std::to_string(i) + " has no blocks");
    if (row.stride == 0 && row.count > wire::kMaxBlocks)
      return Status(Code::kInvalidArgument, name(last) +
                                                " is the same as its first: a transfer has at most " +
                                                std::to_string(wire::kMaxBlocks) + " blocks");
    // The farthest first: most rows that leave registered memory end here.
    if (row.stride != 0 && last > (UINT64_MAX - row.address) / row.stride)
      return Status(Code::kUnknownRegion, name(last) + " has no address");
    if (!list.holds(block(last))) return list.is_not_held(name(last), block(last));
    for (std::uint64_t number = 0; number < row.count; ++number)
      if (Status added = list.add(block(number), [&] { return name(number); }); !added.ok()) return added;
  }
  return list.take();
}

}  // namespace kvxfer::raw_agent
