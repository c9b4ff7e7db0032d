// Pieces that a source writes over libfabric's tcp: works that one end ends before the other, a library that
// refuses, memory that cannot be had, and peers that lie.
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "block_programs.h"
#include "bound_libfabric.h"
#include "conformance_ends.h"
#include "fabric_ends.h"
#include "memory_failure.h"
#include "one_sided_ends.h"

namespace kvxfer {
namespace {

using conformance::Pair;
using conformance::Subject;
using conformance::TestTransfer;
using fabric::Message;
using fabric::MessageKind;
using fabric::Way;
namespace abi = libfabric::abi;

// ---- libfabric, with a test between it and the transport where a piece is written ----

using Write = decltype(abi::RemoteOps::write_message);
Write real_write = nullptr;
std::function<ssize_t(abi::Endpoint*, const abi::RemoteRequest*, std::uint64_t)> on_write;

const libfabric::Library& watched_libfabric() {
  using bound_libfabric::own_table, bound_libfabric::state;
  static libfabric::Library library = fabric_ends::libfabric_library();
  library.open_fabric = [](abi::FabricAttributes* attributes, abi::Fabric** made, void* context) {
    const int opened = fabric_ends::libfabric_library().open_fabric(attributes, made, context);
    if (opened != 0) return opened;
    state.domain = std::exchange(own_table((*made)->ops).domain, [](abi::Fabric* fabric, abi::Info* info,
                                                                    abi::Domain** domain, void* its) {
      const int done = state.domain(fabric, info, domain, its);
      if (done != 0) return done;
      const std::lock_guard lock(state.mutex);
      state.endpoint = std::exchange(
          own_table((*domain)->ops).endpoint,
          [](abi::Domain* of, abi::Info* its_info, abi::Endpoint** endpoint, void* its_context) {
            const int begun = state.endpoint(of, its_info, endpoint, its_context);
            if (begun != 0 || its_info->endpoint->type != abi::kReliableDatagrams) return begun;
            const std::lock_guard held(state.mutex);
            real_write = std::exchange(
                own_table((*endpoint)->remote).write_message,
                [](abi::Endpoint* writer, const abi::RemoteRequest* request, std::uint64_t flags) {
                  return on_write ? on_write(writer, request, flags) : real_write(writer, request, flags);
                });
            return begun;
          });
      return done;
    });
    return opened;
  };
  return library;
}

std::unique_ptr<Transport> make(Reactor& reactor, const FenceTable& fences, bool writes,
                                std::uint32_t num_requests = 64) {
  libfabric::Options options;
  options.num_requests = num_requests;
  options.writes = writes;
  return fabric_ends::make_libfabric(reactor, fences, options, watched_libfabric());
}

Subject writes(std::uint32_t num_requests = 64) {
  on_write = nullptr;
  Subject subject{
      "libfabric by writes",
      [=](Reactor& reactor, const FenceTable& fences) { return make(reactor, fences, true, num_requests); },
      conformance::tcp_sockets,
      false,
      {}};
  return subject;
}

// Both ends write and await pieces, and neither has a request under way when the library says "later".
TEST(a_write_that_must_wait_goes_on_though_pieces_are_awaited) {
  const Subject subject = writes();
  Pair pair(subject);
  std::map<abi::Endpoint*, int> num_refused;
  on_write = [&](abi::Endpoint* writer, const abi::RemoteRequest* request, std::uint64_t flags) -> ssize_t {
    return num_refused[writer]++ < 3 ? -EAGAIN : real_write(writer, request, flags);
  };
  const conformance::Shape shape{2, 20, 3, {4, 2}, 500};
  TestTransfer forth(pair, pair.src, pair.dst, shape);
  TestTransfer back(pair, pair.dst, pair.src, shape, conformance::kRegionNbytes / 2);
  for (TestTransfer* transfer : {&forth, &back}) transfer->start(transfer->all_pieces());
  REQUIRE(pair.run_until([&] { return pair.src.all_completed() && pair.dst.all_completed(); },
                         std::chrono::seconds(10)));
  for (TestTransfer* transfer : {&forth, &back}) transfer->check_pieces();
}

int allocations_left = 0;

// A work of which this end cannot have the memory, and no memory for the words that say so.
TEST(a_work_ends_once_whichever_allocation_fails) {
  const Subject subject = writes();
  for (const bool at_source : {false, true})
    for (int num = 0; num < 12; ++num) {
      Pair pair(subject);
      TestTransfer transfer(pair, {1, 4, 2, {1, 1}, 4096});
      conformance::End& end = at_source ? pair.src : pair.dst;
      auto& its = at_source ? transfer.at_src : transfer.at_dst;
      auto move = std::make_shared<Move>(*its);
      auto unknown = std::make_shared<LocalRegion>(*move->local);
      unknown->id = 4711;  // not registered
      move->local = unknown;
      its = move;
      transfer.start(transfer.all_pieces());
      std::array<Completion, 8> out;
      for (int i = 0; i < 100; ++i) {
        (at_source ? pair.dst : pair.src).step();
        end.reactor.run_once(0);
        allocations_left = num;
        memory_failure::fails = [](std::size_t) noexcept { return allocations_left-- <= 0; };
        const std::size_t count = end.transport->poll(out);
        memory_failure::fails = nullptr;
        for (std::size_t each = 0; each < count; ++each)
          if (out[each].kind == CompletionKind::kWork)
            CHECK(end.outcomes.emplace(out[each].work, out[each]).second);
          else
            end.down = true;
      }
      if (!pair.run_until([&] { return end.all_completed(); }, std::chrono::seconds(2)))
        FAIL(std::string(at_source ? "source" : "destination") +
             ": lost where so many succeed: " + std::to_string(num));
    }
}

// ---- works that one end ends before the other ----

void end_pieces_first(const Subject& subject, bool at_source, int num_steps) {
  Pair pair(subject);
  TestTransfer transfer(pair, {2, 60, 3, {2, 2}, 1000});
  std::vector<Work> receives, sends;
  for (const std::uint32_t piece : transfer.all_pieces()) {
    Work& work = receives.emplace_back();
    work = {conformance::next_work_id(), WorkKind::kReceive, piece, transfer.at_dst};
    sends.push_back({conformance::next_work_id(), WorkKind::kSend, piece, transfer.at_src});
  }
  conformance::End &first = at_source ? pair.src : pair.dst, &second = at_source ? pair.dst : pair.src;
  std::vector<Work>&early = at_source ? sends : receives, &late = at_source ? receives : sends;
  for (const Work& work : early) REQUIRE_EQ(first.post(work), Code::kOk);
  for (int i = 0; i < num_steps; ++i) pair.step();
  std::vector<WorkId> ids;
  for (const Work& work : early) ids.push_back(work.id);
  for (int twice = 0; twice < 2; ++twice) first.transport->cancel(ids);
  pair.run_until_quiet();  // the other end has heard of it
  for (const Work& work : late) REQUIRE_EQ(second.post(work), Code::kOk);
  REQUIRE(pair.run_until([&] { return pair.src.all_completed() && pair.dst.all_completed(); }));
  for (const Work& work : early) CHECK_EQ(first.outcome(work.id), Code::kCancelled);
  for (const Work& work : late)
    CHECK_EQ(second.outcome(work.id), at_source ? Code::kLeaseEnded : Code::kCancelled);
  CHECK(pair.dst.memory.is_as_filled());
  transfer.finish(false);  // the same pieces once more
  transfer.check_bytes();
}

TEST(where_one_end_ends_pieces_first_the_other_does_and_nothing_is_written) {
  for (const int num_steps : {0, 1, 10}) {
    end_pieces_first(writes(), false, num_steps);
    end_pieces_first(writes(1), true, num_steps);
  }
}

// ---- peers that lie ----

// A rail whose peer is a plain socket, with an endpoint and memory of its own.
struct Liar {
  static constexpr std::uint64_t kPage = 4096, kPages = 64;

  explicit Liar(bool victim_writes = true)
      : victim(
            [=](Reactor& reactor, const FenceTable& table) { return make(reactor, table, victim_writes); }),
        memory(kPages * kPage) {
    on_write = nullptr;
    auto [ours, theirs] = conformance::tcp_sockets();
    socket = std::move(theirs);
    sockaddr_in name{};
    socklen_t nbytes = sizeof name;
    REQUIRE(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &nbytes) == 0);
    const auto address = std::as_bytes(std::span(&name, 1));
    const auto connected = victim.transport->connect(std::move(ours), {true, 0, "mallory"});
    REQUIRE_OK(connected);
    peer = connected.value();
    libfabric::Options options;
    options.writes = true;
    fabric = libfabric::LibfabricFabric::create(watched_libfabric(), options).value().front();
    endpoint = fabric->open({{address.begin(), address.end()}, {}}).value();
    own = region(memory);
    // As if its fence words lay there.
    LocalRegion words = region(fences);
    words.spans = {{0, FenceTable::kNbytes}};
    registered = {fabric::Registration::create(fabric, own, true).value(),
                  fabric::Registration::create(fabric, words, false).value()};
    Message hello;
    run_until([&] { return hears(hello); });
    const auto heard = fabric::Introduction::decode(std::span(hello.part).first(hello.whole_nbytes));
    REQUIRE_OK(heard);
    REQUIRE_OK(endpoint->connect(heard.value().address));
    introduction = {"mallory's library", fabric->terms(), endpoint->address(), registered[1]->keys()};
  }
  static LocalRegion region(std::vector<std::byte>& bytes) {
    LocalRegion made;
    made.id = 1;
    made.base = bytes.data();
    made.spans = {{0, bytes.size()}};
    return made;
  }
  static Message message(MessageKind kind, PieceTicket ticket = {}) {
    Message made = Message::about(kind);
    made.ticket = ticket;
    return made;
  }
  static Message ready(std::uint32_t way) {
    Message made = message(MessageKind::kReady);
    made.flag = way;
    return made;
  }
  void say(const Message& said) { static_cast<void>(::send(socket.get(), &said, sizeof said, MSG_NOSIGNAL)); }
  bool hears(Message& heard) {
    return ::recv(socket.get(), &heard, sizeof heard, MSG_DONTWAIT) == static_cast<ssize_t>(sizeof heard);
  }
  void step() {
    victim.reactor.run_once(0);
    victim.step();
    if (!victim.transport->busy()) victim.transport->arm();
    endpoint->progress();
  }
  template <class Done>
  void run_until(Done&& done) {
    REQUIRE(victim.reactor.run_until([this] { step(); }, done));
  }
  void hear(MessageKind kind) {
    Message heard;
    run_until([&] { return hears(heard) && heard.kind == kind; });
  }
  // Until the victim's endpoint is connected; then, if the ways agree, until the rail is up.
  void introduce() {
    for (const Message& each : introduction.encode()) say(each);
    hear(MessageKind::kReady);
  }
  void come_up() {
    introduce();
    say(ready(static_cast<std::uint32_t>(Way::kWrite)));
    run_until([&] { return victim.event(CompletionKind::kRailUp) != nullptr; });
    local = region(victim_memory);
    REQUIRE_OK(testing::register_memory(*victim.transport, local));
    REQUIRE_OK(victim.transport->attach(
        peer, {2, reinterpret_cast<std::uintptr_t>(own.base), own.spans, registered[0]->keys()}));
  }
  std::vector<Work> post(WorkKind kind, TransferId transfer, std::uint32_t num) {
    std::vector<std::uint32_t> ids(num);
    for (std::uint32_t i = 0; i < num; ++i) ids[i] = i;
    auto move = std::make_shared<Move>(*testing::block_move(2, nullptr, kPage, ids, ids, 1));
    move->transfer = transfer;
    move->local = std::make_shared<const LocalRegion>(local);
    std::vector<Work> made;
    for (std::uint32_t piece = 0; piece < num; ++piece) made.push_back({next_work++, kind, piece, move});
    REQUIRE_EQ(testing::post_all(*victim.transport, peer, made).accepted, num);
    return made;
  }
  bool all_ended_once() {
    std::map<WorkId, int> num_ends;
    for (const Completion& each : victim.completions)
      if (each.kind == CompletionKind::kWork) CHECK_EQ(++num_ends[each.work], 1);
    return num_ends.size() == next_work - 1;
  }
  bool is_down_for(std::string_view words) {
    run_until([&] { return victim.event(CompletionKind::kRailDown) != nullptr; });
    return block_programs::says({Code::kRailFailed, victim.event(CompletionKind::kRailDown)->detail}, words);
  }

  testing::End<Transport> victim;
  std::vector<std::byte> memory, fences = std::vector<std::byte>(FenceTable::kNbytes),
                                 victim_memory = std::vector<std::byte>(kPages * kPage);
  LocalRegion local, own;
  std::shared_ptr<libfabric::LibfabricFabric> fabric;
  std::vector<std::shared_ptr<const fabric::Registration>> registered;
  std::unique_ptr<fabric::Endpoint> endpoint;
  fabric::Introduction introduction;
  UniqueFd socket;
  PeerId peer = 0;
  WorkId next_work = 1;
};

// A write of no bytes needs no key, and a number that comes with it shows in the victim's queue.
TEST(a_write_that_brings_a_number_harms_nobody) {
  for (const bool victim_writes : {false, true}) {
    Liar liar(victim_writes);
    liar.introduce();
    on_write = [](abi::Endpoint* writer, const abi::RemoteRequest* request, std::uint64_t) {
      constexpr std::uint64_t kWithNumber = 1 << 17;  // FI_REMOTE_CQ_DATA
      return real_write(writer, request, kWithNumber);
    };
    fabric::Flight flight;
    flight.is_write = true;
    fabric::Request none;
    none.clear();
    liar.run_until(
        [&] { return liar.endpoint->post(none, flight, false) == fabric::Endpoint::Posted::kUnderWay; });
    liar.run_until([&] { return flight.num_under_way == 0; });
    for (int i = 0; i < 100; ++i) liar.step();
    CHECK(liar.victim.event(CompletionKind::kRailDown) == nullptr);
  }
}

TEST(a_peer_that_breaks_the_order_of_things_loses_its_rail) {
  const Message await = Liar::message(MessageKind::kAwait, {5, 0, 1});
  const auto ready = [](Way way) { return Liar::ready(static_cast<std::uint32_t>(way)); };
  const struct {
    bool victim_writes;
    std::vector<Message> said;
    const char* words;
  } kCases[] = {
      {true, {await}, "which the two ends have not agreed on"},
      {true, {Liar::message(MessageKind::kWritten, {5, 0, 1})}, "which the two ends have not agreed on"},
      {true, {Liar::message(MessageKind::kDropped, {5, 0, 1})}, "which the two ends have not agreed on"},
      {true, {ready(Way::kRead), await}, "which the two ends have not agreed on"},
      {false, {ready(Way::kWrite), await}, "which the two ends have not agreed on"},
      {true, {ready(Way::kSend)}, "asks for pieces to be sent"},
      {true, {Liar::ready(3)}, "in a way that this version does not know"},
      {true, {ready(Way::kWrite), ready(Way::kWrite)}, "said twice that it is ready"},
      {true, std::vector<Message>(), "awaits more pieces than it may"},
  };
  for (const auto& each : kCases) {
    Liar liar(each.victim_writes);
    liar.introduce();
    for (const Message& said : each.said) liar.say(said);
    if (each.said.empty()) liar.say(ready(Way::kWrite));
    for (std::uint32_t i = 0; each.said.empty() && i < 65; ++i)
      liar.say(Liar::message(MessageKind::kAwait, {5, i, i + 1}));
    CHECK(liar.is_down_for(each.words));
  }
}

// Anything about pieces, in any order, while the victim has works of both kinds.
TEST(whatever_a_peer_says_of_pieces_each_work_ends_once) {
  check::Random random(check::seed());
  Liar liar;
  liar.come_up();
  constexpr MessageKind kKinds[] = {MessageKind::kAwait, MessageKind::kGiveUp, MessageKind::kWritten,
                                    MessageKind::kDropped};
  int num_awaited = 0;
  for (int round = 0; round < 3000; ++round) {
    if (round % 40 == 0) {
      const auto kind = random.chance(50) ? WorkKind::kSend : WorkKind::kReceive;
      const auto works = liar.post(kind, 1 + random.below(4), 8);
      for (const Work& work : works)
        if (random.chance(20)) liar.victim.cancel(work.id);
    }
    const MessageKind kind = kKinds[random.below(4)];
    if (kind != MessageKind::kAwait || ++num_awaited <= 60)
      liar.say(Liar::message(kind, {1 + random.below(4), static_cast<std::uint32_t>(random.below(8)),
                                    static_cast<std::uint32_t>(random.below(liar.next_work))}));
    liar.step();
    for (Message heard; liar.hears(heard);)
      if (heard.kind == MessageKind::kWritten || heard.kind == MessageKind::kDropped)
        num_awaited = std::max(0, num_awaited - 1);
  }
  liar.socket.reset();
  liar.run_until([&] { return liar.all_ended_once(); });
  CHECK(liar.is_down_for("closed its end"));
}

TEST(a_peer_that_says_neither_yes_nor_no_loses_its_rail_and_works_end_then) {
  Liar liar;
  liar.come_up();
  std::vector<WorkId> ids;
  for (const Work& work : liar.post(WorkKind::kReceive, 1, 64)) ids.push_back(work.id);
  liar.hear(MessageKind::kAwait);
  for (int twice = 0; twice < 2; ++twice) liar.victim.transport->cancel(ids);
  liar.run_until([&] { return liar.all_ended_once(); });
  CHECK(liar.is_down_for("did not end in time"));
}

TEST(a_peer_that_asks_and_does_not_hear_loses_its_rail) {
  Liar liar;
  liar.come_up();
  for (std::uint32_t i = 1; liar.victim.event(CompletionKind::kRailDown) == nullptr && i < 100'000; ++i) {
    liar.say(Liar::message(MessageKind::kAwait, {i, 0, i}));
    liar.say(Liar::message(MessageKind::kGiveUp, {i, 0, i}));
    liar.step();
  }
  CHECK(liar.is_down_for("does not read its socket"));
}

}  // namespace
}  // namespace kvxfer

SKIP_FILE_FOR(fabric_ends::missing<kvxfer::libfabric::Library>);
