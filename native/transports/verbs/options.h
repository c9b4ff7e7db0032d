// What a caller may set for verbs rails. The defaults suit InfiniBand, RoCE v2 and routed RoCE.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transports/verbs/classes.h"

namespace kvxfer::verbs {

// Work requests of one doorbell.
inline constexpr std::uint32_t kMostChained = 64;
// Entries of one request's scatter list, if the device takes so many.
inline constexpr std::uint32_t kMostEntries = 32;

struct Options {
  std::string devices;  // names, with commas; empty: all whose port is active
  // With 16 READs of 4 KiB under way on each pair, at 5 us, four pairs carry 50 GB/s.
  std::uint32_t num_pairs = 4;
  // Requests of one queue pair that are posted and not completed. Four chains, so that the device has work
  // while a completion is on its way.
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
  // The device sends a packet again after 4.096 us << 14, which is 67 ms; it may wait up to four times as
  // long.
  std::uint8_t timeout = 14;
  // 7 would mean for ever in Soft-RoCE.
  std::uint8_t num_retries = 6;
  bool relaxed_ordering = true;
  // Pages come to this end by WRITE. Peers that have the same option may write into this agent's regions.
  bool writes = false;
  std::vector<PairClass> classes;  // empty: one class, of num_pairs, service_level and traffic_class

  PairClass only_class() const { return {0, num_pairs, traffic_class, service_level, 0}; }
};

}  // namespace kvxfer::verbs
