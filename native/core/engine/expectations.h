// The tags that our callers expect: each is a right for the writes of its tag, until all of it has arrived.
//
// Destinations follows the writes under an expectation, and also ends the expectation: it removes it here,
// fails the writers that are left, and reports when each of them has drained.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
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

  // See Engine::expect.
  Result<std::shared_ptr<Expectation>> add(wire::Bytes tag, RegionId region,
                                           std::vector<std::uint32_t> blocks, std::uint32_t first_layer,
                                           std::uint32_t num_layers, const Needed& needed,
                                           std::optional<SessionKey> from, Time timeout_ns,
                                           wire::Bytes context);
  // Takes it back: it is found no more. Nobody hears of it.
  void withdraw(const Expectation& expectation) noexcept;
  // The expectation that this transfer is meant for, if there is one.
  std::shared_ptr<Expectation> find(const TransferEnd& transfer) const;
  bool contains(std::uint64_t handle) const { return expectations_.contains(handle); }
  std::vector<std::uint64_t> all() const;
  std::vector<std::uint64_t> of_region(RegionId region) const;
  std::vector<std::uint64_t> from(SessionKey session) const;
  // Walks all of them. Returns the first one after `place`, a region and a handle, and moves `place` on;
  // null at the end.
  using Place = std::pair<RegionId, std::uint64_t>;
  const Expectation* after(Place& place) const;
  // On its timer: returns why it fails.
  Status late(std::uint64_t handle);

  // Our caller gives it up, by its wish or by its time. Writes that come later hear so.
  void give_up(std::uint64_t handle, const Status& why);
  // What a later write of a given-up tag hears, and how our caller named the request; nothing if the tag
  // may still be expected.
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
  // Ends its right now, and its handle when `num_draining` writers have drained.
  void end(const std::shared_ptr<Expectation>& expectation, TransferState state, const Status& why,
           std::size_t num_draining);
  // One of its writers has drained. False: its right has not ended.
  bool drained(const Expectation& expectation);

  // Handles that could not be ended because memory was lacking: once a round.
  bool has_rest() const noexcept { return has_rest_; }
  void end_rest();

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
    bool is_recorded;
  };
  void remember_ended(const Expectation& expectation);
  void fenced(std::uint64_t handle);

  Context& context_;
  Sessions& sessions_;
  Regions& regions_;
  Leases& leases_;
  Handles& handles_;
  Records& records_;
  TagMemory& tag_memory_;
  std::unordered_map<std::uint64_t, Expected> expectations_;  // by handle
  std::unordered_map<std::uint64_t, Ending> ending_;  // by handle
  bool has_rest_ = false;  // some of these drain no more
  // All tags that our callers expect, and their handles. The bytes are those of the expectations.
  std::unordered_map<std::string_view, std::uint64_t> tags_;
  std::set<std::pair<RegionId, std::uint64_t>> by_region_;  // the handles of expectations_
  std::set<std::pair<SessionKey, std::uint64_t>> by_writer_;  // expectations of one writer alone
};

}  // namespace kvxfer
