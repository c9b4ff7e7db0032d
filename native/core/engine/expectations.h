// The tags that our callers expect: rights to one tag's writes, until all of it has arrived.
//
// A write under one is followed by Destinations, which also ends an expectation: it takes it out here, fails the
// writers that are left, and says when each of them has drained.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/handles.h"
#include "core/engine/leases.h"
#include "core/engine/records.h"
#include "core/engine/regions.h"
#include "core/engine/sessions.h"
#include "core/engine/tag_memory.h"
#include "core/expectation.h"

namespace kvxfer {

class Expectations {
 public:
  Expectations(Context& context, Sessions& sessions, Regions& regions, Leases& leases, Handles& handles,
               Records& records, TagMemory& tag_memory)
      : context_(context),
        sessions_(sessions),
        regions_(regions),
        leases_(leases),
        handles_(handles),
        records_(records),
        tag_memory_(tag_memory) {}

  // As Engine::expect.
  Result<std::shared_ptr<Expectation>> add(wire::Bytes tag, RegionId region,
                                           std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                           std::uint32_t num_layers, const Needed& needed,
                                           std::optional<SessionKey> from, Time timeout_ns,
                                           wire::Bytes context);
  // The one that this transfer is meant for, if there is one.
  std::shared_ptr<Expectation> find(const TransferEnd& transfer) const;
  bool contains(std::uint64_t handle) const { return expectations_.contains(handle); }
  std::vector<std::uint64_t> all() const;
  std::vector<std::uint64_t> of_region(RegionId region) const;
  std::vector<std::uint64_t> from(SessionKey session) const;
  // The first behind a region's and a handle, by which it goes on; null for none.
  using Place = std::pair<RegionId, std::uint64_t>;
  const Expectation* after(Place& place) const;
  // On its timer: why it fails.
  Status late(std::uint64_t handle);

  // Our caller gives it up, by its wish or by its time: writes that come later are told so.
  void give_up(std::uint64_t handle, const Status& why);
  // What such a write is told, and how our caller named the request; nothing where it may be expected yet.
  struct GivenUp {
    Status why;
    wire::Bytes context;
  };
  std::optional<GivenUp> given_up(const TransferEnd& transfer) const;

  // ---- ends
  // Null: its right has ended.
  std::shared_ptr<Expectation> find(std::uint64_t handle) const {
    const auto found = expectations_.find(handle);
    return found == expectations_.end() ? nullptr : found->second.expectation;
  }
  // Its right ends, and its handle when so many writers have drained.
  void end(const std::shared_ptr<Expectation>& expectation, TransferState state, const Status& why,
           std::size_t num_draining);
  // A writer has. False: its right has not ended.
  bool drained(const Expectation& expectation);

  std::size_t size() const noexcept { return expectations_.size() + ending_.size(); }

 private:
  struct Expected {
    std::shared_ptr<Expectation> expectation;
    Timers::Timer timer;
  };
  struct Ending {
    std::shared_ptr<Expectation> expectation;
    TransferState state;
    Status why;
    std::size_t num_draining;
  };
  void remember_ended(const Expectation& expectation);
  void fenced(const Expectation& expectation, TransferState state, const Status& why);

  Context& context_;
  Sessions& sessions_;
  Regions& regions_;
  Leases& leases_;
  Handles& handles_;
  Records& records_;
  TagMemory& tag_memory_;
  std::unordered_map<std::uint64_t, Expected> expectations_;  // by handle
  std::unordered_map<std::uint64_t, Ending> ending_;  // by handle
  std::unordered_map<std::string, std::uint64_t> tags_;  // -> handle; all are our callers'
  std::set<std::pair<RegionId, std::uint64_t>> by_region_;  // of expectations_: handles
  std::set<std::pair<SessionKey, std::uint64_t>> by_writer_;  // those of one writer alone
};

}  // namespace kvxfer
