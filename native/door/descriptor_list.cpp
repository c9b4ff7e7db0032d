#include "door/descriptor_list.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/control/wire.h"

namespace kvxfer::door {
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

std::string in_words(const Descriptor& descriptor) {
  char words[96];
  std::snprintf(words, sizeof words, "%llu bytes at 0x%llx of device %llu",
                static_cast<unsigned long long>(descriptor.nbytes),
                static_cast<unsigned long long>(descriptor.address),
                static_cast<unsigned long long>(descriptor.device));
  return words;
}

}  // namespace

void SectionMap::add(const Section& section) {
  const auto at =
      std::upper_bound(sections_.begin(), sections_.end(), section.address,
                       [](std::uint64_t address, const Section& each) { return address < each.address; });
  sections_.insert(at, section);
}

void SectionMap::remove(RegionId region) {
  std::erase_if(sections_, [&](const Section& each) { return each.region == region; });
}

const Section* SectionMap::find(const Descriptor& descriptor, MemoryKind kind) const noexcept {
  auto at =
      std::upper_bound(sections_.begin(), sections_.end(), descriptor.address,
                       [](std::uint64_t address, const Section& each) { return address < each.address; });
  // The nearest section mostly holds it. Where registrations overlap, one that begins earlier may.
  while (at != sections_.begin()) {
    const Section& each = *--at;
    const std::uint64_t distance = descriptor.address - each.address;
    if (each.kind == kind &&
        (kind == MemoryKind::kHost || each.device == static_cast<int>(descriptor.device)) &&
        distance <= each.nbytes && descriptor.nbytes <= each.nbytes - distance)
      return &each;
  }
  return nullptr;
}

Result<PreparedList> prepare(const SectionMap& sections, std::span<const Descriptor> descriptors,
                             MemoryKind kind, std::string agent) {
  PreparedList list;
  list.agent = std::move(agent);
  list.ids.resize(descriptors.size());
  std::vector<Finder> finders;
  std::map<std::tuple<const Section*, std::uint64_t, std::uint64_t, std::uint64_t>, std::uint32_t> known;
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < descriptors.size(); ++i) {
    const Descriptor& descriptor = descriptors[i];
    std::uint32_t& id = list.ids[i];
    if (finders.empty() || !finders[last].find(descriptor, id)) {
      if (descriptor.nbytes == 0)
        return Status(Code::kInvalidArgument, "descriptor " + std::to_string(i) + " has no bytes");
      const Section* const section = sections.find(descriptor, kind);
      if (section == nullptr)
        return Status(
            Code::kUnknownRegion,
            "descriptor " + std::to_string(i) + ", " + in_words(descriptor) + ", is not inside memory that " +
                (list.agent.empty() ? "is registered here" : "the metadata of " + list.agent + " names"));
      const std::uint64_t distance = descriptor.address - section->address;
      const std::uint64_t rest = distance % descriptor.nbytes, block = distance / descriptor.nbytes;
      const std::uint64_t window = block / wire::kMaxUnits * wire::kMaxUnits;
      const auto number = static_cast<std::uint32_t>(finders.size());
      const auto [found, is_new] = known.try_emplace({section, descriptor.nbytes, rest, window}, number);
      if (is_new) {
        const std::uint64_t first = rest + window * descriptor.nbytes;
        const auto num = static_cast<std::uint32_t>(
            std::min<std::uint64_t>((section->nbytes - first) / descriptor.nbytes, wire::kMaxUnits));
        finders.emplace_back(section->address + first, descriptor, num, number);
        list.grids.push_back(
            {section->region, section->offset + first, descriptor.nbytes, num, section->nbytes});
        list.addresses.push_back(section->address + first);
      }
      if (found->second != last && list.grid_numbers.empty()) {
        list.grid_numbers.reserve(descriptors.size());
        list.grid_numbers.assign(i, last);
      }
      last = found->second;
      id = static_cast<std::uint32_t>(block - window);
    }
    if (!list.grid_numbers.empty()) list.grid_numbers.push_back(last);
  }
  return list;
}

}  // namespace kvxfer::door
