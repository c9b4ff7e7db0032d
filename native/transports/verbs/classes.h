// Classes of transfers' priorities, each with queue pairs of its own to every peer: what verbs.classes says, and how
// their packets travel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/priority_classes.h"
#include "kvxfer/status.h"
#include "transports/verbs/abi.h"

namespace kvxfer::verbs {

// As many as a hello names.
inline constexpr std::uint32_t kMostPairs = 16;

// How packets of a queue pair travel.
struct PairPath {
  std::uint8_t traffic_class = 0, service_level = 0;
  abi::Rate rate = abi::Rate::kPort;
};

struct PairClass {
  std::uint8_t first = 0;  // of its priorities: up to the next class
  std::uint32_t num_pairs = 4;
  std::uint8_t traffic_class = 0, service_level = 0;
  std::uint32_t rate_gbps = 0;  // of all its pairs to one peer; 0: as fast as the port

  // Of each of its pairs.
  PairPath path() const noexcept;
};

// Reads "0-63: pairs=2 traffic_class=104; 64-255: pairs=2 traffic_class=26 rate_gbps=100". What a class does not name is
// as in `rest`; of "" there is that one class. kInvalidArgument: what is wrong with it.
Result<std::vector<PairClass>> parse_classes(std::string_view text, const PairClass& rest);

PriorityClasses priorities_of(const std::vector<PairClass>& classes) noexcept;

// The highest that devices know up to so many tenths of Gb/s; none where that is less than the least.
std::optional<abi::Rate> rate_below(std::uint32_t tenths_of_gbps) noexcept;

// For people: "priorities 0 to 63: 2 queue pairs, traffic class 104".
std::string in_words(const std::vector<PairClass>& classes);

}  // namespace kvxfer::verbs
