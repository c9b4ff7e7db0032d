// What a caller may choose about verbs rails, with defaults for InfiniBand, RoCE v2 and routed RoCE.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transports/verbs/classes.h"

namespace kvxfer::verbs {

// Work requests under one doorbell.
inline constexpr std::uint32_t kMostChained = 64;
// Entries of one request's scatter list, where the device has so many.
inline constexpr std::uint32_t kMostEntries = 32;

// How pages come to this end. Where it is not by READ alone, peers whose option is alike may write into its regions.
enum class Ways : std::uint8_t { kRead, kWrite, kMeasured };

struct Options {
  std::string devices;  // names, with commas; empty: all whose port is active
  // 16 reads of 4 KiB that are under way on each, at 5 us, are 50 GB/s on four.
  std::uint32_t num_pairs = 4;
  // Of one queue pair, posted and not completed: four chains, so that the device has the next ones while a completion
  // is on its way.
  std::uint32_t num_requests = 256;
  std::uint32_t num_chained = kMostChained;
  std::uint32_t num_entries = kMostEntries;
  std::uint32_t num_reads = 0;  // under way on a queue pair; 0: as many as the device can
  int gid_index = -1;           // -1: chosen
  std::uint16_t pkey_index = 0;
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
  std::uint8_t hop_limit = 64;
  std::uint32_t mtu = 0;  // bytes; 0: the port's
  // A packet is sent again after 4.096 us << 14, which is 67 ms; devices may wait up to four times as long.
  std::uint8_t timeout = 14;
  // 7 would be for ever in Soft-RoCE.
  std::uint8_t num_retries = 6;
  bool relaxed_ordering = true;
  Ways ways = Ways::kRead;
  std::vector<PairClass> classes;  // empty: one, of num_pairs, service_level and traffic_class

  PairClass only_class() const { return {0, num_pairs, traffic_class, service_level, 0}; }
};

}  // namespace kvxfer::verbs
