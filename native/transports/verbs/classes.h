// Classes of transfer priorities. Each has queue pairs of its own to every peer (option verbs.classes), and
// settings for how their packets travel.
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

// The most that a hello can name.
inline constexpr std::uint32_t kMostPairs = 16;

// How the packets of a queue pair travel.
struct PairPath {
  std::uint8_t traffic_class = 0, service_level = 0;
  abi::Rate rate = abi::Rate::kPort;
};

struct PairClass {
  std::uint8_t first = 0;  // of its priorities: up to the next class
  std::uint32_t num_pairs = 4;
  std::uint8_t traffic_class = 0, service_level = 0;
  std::uint32_t rate_gbps = 0;  // of all its pairs to one peer; 0: as fast as the port

  // The path of each of its pairs.
  PairPath path() const noexcept;
};

// Reads "0-63: pairs=2 traffic_class=104; 64-255: pairs=2 traffic_class=26 rate_gbps=100". A class takes from
// `rest` what it does not name; "" gives `rest` as the one class. kInvalidArgument: the message says what is
// wrong.
Result<std::vector<PairClass>> parse_classes(std::string_view text, const PairClass& rest);

PriorityClasses priorities_of(const std::vector<PairClass>& classes) noexcept;

// The highest device rate that does not exceed so many tenths of Gb/s; none if even the lowest does.
std::optional<abi::Rate> rate_below(std::uint32_t tenths_of_gbps) noexcept;

// For people: "priorities 0 to 63: 2 queue pairs, traffic class 104".
std::string in_words(const std::vector<PairClass>& classes);

}  // namespace kvxfer::verbs
