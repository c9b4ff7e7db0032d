// Two ends of a one-sided rail under test, driven by hand: for each a transport, its fences, and what its
// poll reported.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "block_programs.h"
#include "check.h"
#include "test_reactor.h"
#include "transport_calls.h"

namespace kvxfer::testing {

template <class T>
struct End {
  using Make = std::function<std::unique_ptr<T>(Reactor&, const FenceTable&)>;

  explicit End(const Make& make) : fences(make_fences()), transport(make(reactor, *fences)) {}
  End() : End([](Reactor& on, const FenceTable& table) { return std::make_unique<T>(on, table); }) {}

  static std::unique_ptr<FenceTable> make_fences() {
    Result<std::unique_ptr<FenceTable>> table = FenceTable::create();
    REQUIRE_OK(table);
    return std::move(table).value();
  }

  void cancel(WorkId work) { transport->cancel(std::span(&work, 1)); }
  void step() {
    reactor.run_once(0);
    Completion out[4];
    const std::size_t count = transport->poll(out);
    for (std::size_t i = 0; i < count; ++i) completions.push_back(std::move(out[i]));
  }
  const Completion* completion_of(WorkId work) const {
    for (const Completion& c : completions)
      if (c.kind == CompletionKind::kWork && c.work == work) return &c;
    return nullptr;
  }
  const Completion* event(CompletionKind kind) const {
    for (const Completion& c : completions)
      if (c.kind == kind) return &c;
    return nullptr;
  }
  // Returns how a work ended; fails the test if it never does.
  Completion await(WorkId work) {
    REQUIRE(reactor.run_until([this] { step(); }, [&] { return completion_of(work) != nullptr; }));
    return *completion_of(work);
  }
  Completion await(CompletionKind kind) {
    REQUIRE(reactor.run_until([this] { step(); }, [&] { return event(kind) != nullptr; }));
    return *event(kind);
  }

  TestReactor reactor;
  std::unique_ptr<FenceTable> fences;
  std::unique_ptr<T> transport;
  std::vector<Completion> completions;
};

inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Connects two ends and waits until the rail is up at both. Returns a's number for b, and b's for a. `budget`
// is that of b's session at a.
template <class T>
std::pair<PeerId, PeerId> connect_ends(End<T>& a, End<T>& b, std::shared_ptr<Budget> budget = nullptr) {
  auto [left, right] = socket_pair();
  const Result<PeerId> b_at_a = a.transport->connect(std::move(left), {true, 0, "b", std::move(budget)});
  const Result<PeerId> a_at_b = b.transport->connect(std::move(right), {false, 0, "a"});
  REQUIRE_OK(b_at_a);
  REQUIRE_OK(a_at_b);
  a.await(CompletionKind::kRailUp);
  b.await(CompletionKind::kRailUp);
  return {b_at_a.value(), a_at_b.value()};
}

// A move of one layer of whole blocks: block i of `src_ids` to block i of `dst_ids`.
inline std::shared_ptr<const Move> block_move(RegionId src_region, std::byte* dst, std::uint64_t block_nbytes,
                                              std::vector<std::uint32_t> src_ids,
                                              std::vector<std::uint32_t> dst_ids,
                                              std::uint32_t pairs_per_piece) {
  auto move = std::make_shared<Move>();
  move->program = std::make_shared<CopyProgram>(block_programs::pages_of(block_nbytes));
  move->grid = {0, 1, static_cast<std::uint32_t>(src_ids.size()), pairs_per_piece};
  move->src_ids = std::move(src_ids);
  move->dst_ids = std::move(dst_ids);
  move->local = unregistered(dst);
  move->remote_region = src_region;
  return move;
}

inline Work fetch_work(WorkId id, std::shared_ptr<const Move> move, std::uint32_t piece) {
  Work work;
  work.id = id;
  work.kind = WorkKind::kFetch;
  work.piece = piece;
  work.move = std::move(move);
  return work;
}

// The same work under another right.
inline Work with_fence(Work work, std::uint32_t slot, std::uint64_t generation) {
  auto move = std::make_shared<Move>(*work.move);
  move->fence = {slot, generation};
  work.move = std::move(move);
  return work;
}

}  // namespace kvxfer::testing
