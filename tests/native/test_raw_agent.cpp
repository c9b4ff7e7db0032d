// The raw agent: lists of addresses become copy programs, and move what they name.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "core/control/socket_address.h"
#include "raw_agent/agent.h"
#include "raw_agent/ways.h"

namespace raw_agent_test {
namespace {

using namespace kvxfer;
using namespace kvxfer::raw_agent;

constexpr Time kBound = 60'000'000'000;

struct End {
  explicit End(const std::string& name, const std::string& transport = "shm", Time timeout_ns = kBound,
               bool exchanges = true) {
    RuntimeOptions options;
    options.name = name;
    options.listen = "tcp://127.0.0.1:0";
    options.user_secret = "the secret of a test";
    options.transports = {transport, "tcp"};
    Result<std::shared_ptr<Runtime>> made = Runtime::create(std::move(options));
    if (!made.ok()) FAIL(made.status().message());
    agent = Agent::create(std::move(made).value(),
                          {.advertise = "", .timeout_ns = timeout_ns, .exchanges = exchanges});
  }
  // Of random bytes.
  Descriptor add(std::size_t nbytes, unsigned seed) {
    memory.emplace_back(nbytes);
    std::mt19937 random(seed);
    for (std::byte& each : memory.back()) each = std::byte(random());
    return {reinterpret_cast<std::uint64_t>(memory.back().data()), nbytes, 0};
  }
  std::unique_ptr<Agent> agent;
  std::deque<std::vector<std::byte>> memory;
};

wire::Bytes bytes_of(const std::string& text) {
  const auto* const first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::shared_ptr<const PreparedList> prepared(Agent& agent, const std::string& of,
                                             const std::vector<Descriptor>& list) {
  auto made = agent.prepare(of, list, MemoryKind::kHost);
  if (!made.ok()) {
    FAIL(made.status().message());
    return nullptr;
  }
  return made.value();
}

Status move(Agent& agent, Operation operation, const PreparedList& local, const PreparedList& remote,
            const std::string& notify = "") {
  auto made = agent.make(operation, local, {}, true, remote, {}, true);
  if (!made.ok()) return made.status();
  Status status = agent.post(*made.value(), bytes_of(notify));
  for (const Time until = Runtime::now() + kBound; status.code() == Code::kAgain && Runtime::now() < until;)
    status = agent.check(*made.value());
  CHECK(agent.release(*made.value()).ok());
  return status;
}

const std::byte* at(const Descriptor& descriptor) {
  return reinterpret_cast<const std::byte*>(descriptor.address);
}

// Two agents with registered memory, of which `near` knows `far`.
struct Two {
  Two(std::vector<std::size_t> of_near, std::vector<std::size_t> of_far, const std::string& transport = "shm")
      : near("near", transport), far(std::make_unique<End>("far", transport)) {
    for (const std::size_t nbytes : of_near) ours.push_back(near.add(nbytes, next_seed++));
    for (const std::size_t nbytes : of_far) theirs.push_back(far->add(nbytes, next_seed++));
    CHECK(near.agent->register_memory(ours, MemoryKind::kHost).ok());
    CHECK(far->agent->register_memory(theirs, MemoryKind::kHost).ok());
    const auto added = near.agent->add_remote(far->agent->metadata());
    CHECK(added.ok() && added.value() == "far");
  }
  std::shared_ptr<const PreparedList> local(const std::vector<Descriptor>& list) {
    return prepared(*near.agent, "", list);
  }
  std::shared_ptr<const PreparedList> remote(const std::vector<Descriptor>& list) {
    return prepared(*near.agent, "far", list);
  }

  unsigned next_seed = 1;
  End near;
  std::unique_ptr<End> far;
  std::vector<Descriptor> ours, theirs;
};

TEST(regular_lists_are_few_transfers) {
  std::vector<Section> tensors;
  for (std::uint64_t t = 0; t < 4; ++t)
    tensors.push_back({0x100000 * (t + 1), 64 * 4096, 1, 0x100000 * t, MemoryKind::kHost, 0});
  const SectionMap sections(tensors);
  std::vector<Descriptor> list;
  for (std::uint64_t t = 0; t < 4; ++t)
    for (std::uint64_t block = 0; block < 64; ++block)
      list.push_back({0x100000 * (t + 1) + block * 4096, 4096, 0});
  const auto whole = prepare(sections, std::span<const Descriptor>(list), MemoryKind::kHost, "");
  CHECK(whole.ok());
  CHECK_EQ(whole.value().grids.size(), 4u);
  // Some blocks of every tensor, so the tensors become layers.
  std::vector<std::uint32_t> entries;
  for (std::uint32_t t = 0; t < 4; ++t)
    for (const std::uint32_t block : {5u, 9u, 60u}) entries.push_back(t * 64 + block);
  auto ways = find_ways(whole.value(), entries.data(), whole.value(), entries.data(), entries.size());
  CHECK(ways.ok());
  CHECK_EQ(ways.value().size(), 1u);
  CHECK_EQ(ways.value()[0].program.num_layers, 4u);
  CHECK_EQ(ways.value()[0].src_ids.size(), 3u);
  // Different blocks of each tensor: one transfer for each pair of tensors.
  entries.back() = 3 * 64 + 61;
  ways = find_ways(whole.value(), entries.data(), whole.value(), entries.data(), entries.size());
  CHECK(ways.ok());
  CHECK_EQ(ways.value().size(), 4u);
  // No region holds this address.
  list[7].address += 0x80000;
  const auto outside = prepare(sections, std::span<const Descriptor>(list), MemoryKind::kHost, "");
  CHECK_EQ(outside.status().code(), Code::kUnknownRegion);
}

TEST(lists_move) {
  for (const std::string transport : {"shm", "tcp"}) {
    const std::vector<std::size_t> three(3, 32 * 1024);
    Two two(three, three, transport);
    const auto &ours = two.ours, &theirs = two.theirs;
    for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
      for (unsigned seed = 0; seed < 20; ++seed) {
        std::mt19937 random(seed);
        std::vector<Descriptor> from, to;
        // Equal blocks, or blocks of any length anywhere; none occurs twice at the destination.
        const bool is_regular = seed % 2 == 0;
        for (unsigned t = 0; t < 3; ++t)
          for (std::uint64_t block = 0; block < 8; ++block) {
            const std::uint64_t offset = is_regular ? 0 : random() % 64,
                                nbytes = is_regular ? 4096 : 1 + random() % 4000;
            const std::uint64_t other = random() % 8;
            from.push_back({ours[t].address + block * 4096 + offset, nbytes, 0});
            to.push_back({theirs[t].address + (is_regular ? block : other) * 4096 + offset, nbytes, 0});
            if (operation == Operation::kWrite) to.back().address = theirs[t].address + block * 4096 + offset;
          }
        std::shuffle(from.begin(), from.end(), random);
        std::shuffle(to.begin(), to.end(), random);
        if (!is_regular) {  // of one length each
          for (std::size_t i = 0; i < from.size(); ++i)
            from[i].nbytes = to[i].nbytes = std::min(from[i].nbytes, to[i].nbytes);
        }
        const auto local = two.local(from), remote = two.remote(to);
        if (local == nullptr || remote == nullptr) return;
        std::vector<std::vector<std::byte>> wanted;
        for (std::size_t i = 0; i < from.size(); ++i) {
          const Descriptor& source = operation == Operation::kRead ? to[i] : from[i];
          wanted.emplace_back(at(source), at(source) + source.nbytes);
        }
        const Status status =
            move(*two.near.agent, operation, *local, *remote, "seed " + std::to_string(seed));
        if (!status.ok()) FAIL(status.message());
        for (std::size_t i = 0; i < from.size(); ++i) {
          const Descriptor& destination = operation == Operation::kRead ? from[i] : to[i];
          CHECK(std::memcmp(at(destination), wanted[i].data(), destination.nbytes) == 0);
        }
        std::vector<std::pair<std::string, wire::Bytes>> told;
        for (const Time until = Runtime::now() + kBound; told.empty() && Runtime::now() < until;)
          told = two.far->agent->take_notifications();
        CHECK_EQ(told.size(), 1u);
        if (!told.empty()) CHECK_EQ(told[0].first, "near");
      }
    }
  }
}

// Blocks that are read twice, that overlap, or that need several loops: no program moves a byte of a block
// twice.
TEST(what_overlaps_at_the_source_moves) {
  Two two({8192}, {65536, 65536});
  const auto &ours = two.ours, &theirs = two.theirs;
  const auto expect = [&](const std::vector<Descriptor>& from, const std::vector<Descriptor>& to) {
    const auto local = two.local(from), remote = two.remote(to);
    if (local == nullptr || remote == nullptr) return;
    const Status status = move(*two.near.agent, Operation::kWrite, *local, *remote);
    if (!status.ok()) FAIL(status.message());
    for (std::size_t i = 0; i < from.size(); ++i)
      CHECK(std::memcmp(at(from[i]), at(to[i]), from[i].nbytes) == 0);
  };
  const std::uint64_t source = ours[0].address;
  // One block to two tensors; blocks that are a few bytes apart; one block to many irregular places.
  expect({{source, 4096, 0}, {source, 4096, 0}},
         {{theirs[0].address, 4096, 0}, {theirs[1].address, 4096, 0}});
  expect({{source, 4096, 0}, {source + 8, 4096, 0}},
         {{theirs[0].address, 4096, 0}, {theirs[1].address, 4096, 0}});
  std::vector<Descriptor> from, to;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const std::uint64_t nbytes = 1000 + i;
    from.push_back({source + i, nbytes, 0});
    to.push_back({theirs[i % 2].address + i / 2 * 1500, nbytes, 0});
  }
  expect(from, to);
}

TEST(what_is_larger_than_a_loop_is_several) {
  constexpr std::uint64_t kGib = std::uint64_t{1} << 30;
  const SectionMap sections({{kGib, 8 * kGib, 1, 0, MemoryKind::kHost, 0}});
  const std::vector<Descriptor> list = {{kGib, 3 * kGib + 5, 0}};
  const auto whole = prepare(sections, std::span<const Descriptor>(list), MemoryKind::kHost, "");
  CHECK(whole.ok());
  const auto ways = find_ways(whole.value(), nullptr, whole.value(), nullptr, 1);
  CHECK(ways.ok());
  std::uint64_t nbytes = 0;
  for (const Way& way : ways.value())
    for (const CopyLoop& loop : way.program.loops) {
      CHECK_EQ(loop.src_offset, nbytes);
      CHECK(loop.nbytes <= kGib);
      nbytes += loop.nbytes;
    }
  CHECK_EQ(nbytes, list[0].nbytes);
}

TEST(rights_end_with_the_registration) {
  Two two({8192}, {8192, 4096});
  End &near = two.near, &far = *two.far;
  const auto &ours = two.ours, &theirs = two.theirs;
  CHECK(near.agent->connect("far").ok());
  const auto local = two.local(ours), remote = two.remote({theirs[0]});
  CHECK(move(*near.agent, Operation::kRead, *local, *remote).ok());
  const Descriptor never{theirs[0].address, 1, 0};
  CHECK_EQ(far.agent->deregister_memory({&never, 1}, MemoryKind::kHost).code(), Code::kUnknownRegion);
  // A part of memory that was registered together: the rest becomes another region, with new metadata.
  CHECK(far.agent->deregister_memory({theirs.data(), 1}, MemoryKind::kHost).ok());
  CHECK(!move(*near.agent, Operation::kRead, *local, *remote).ok());
  CHECK(near.agent->add_remote(far.agent->metadata()).ok());
  const auto part = two.local({{ours[0].address, 4096, 0}}), rest = two.remote({theirs[1]});
  CHECK(move(*near.agent, Operation::kWrite, *part, *rest).ok());
  CHECK(std::memcmp(at(theirs[1]), at(ours[0]), 4096) == 0);
  far.agent->invalidate();
  CHECK(!move(*near.agent, Operation::kWrite, *part, *rest).ok());
}

// If a host stands still for a minute, as a suspended one does, rights of sessions that go on afterwards
// stay.
TEST(rights_last_as_long_as_the_session) {
  Two two({4096}, {4096}, "tcp");
  CHECK(two.near.agent->connect("far").ok());
  std::vector<LeaseView> views;
  two.far->agent->runtime().with_open_engine([&](Engine& engine, Time now) {
    LeaseId last = 0;
    return engine.append_leases(now, last, 16, views);
  });
  CHECK_EQ(views.size(), 2u);
  for (const LeaseView& view : views) CHECK(view.left_ns > Time{1} << 60);
}

TEST(a_peer_that_ends_fails_what_is_posted) {
  Two two({8192}, {8192});
  End& near = two.near;
  const auto local = two.local(two.ours), remote = two.remote(two.theirs);
  CHECK(move(*near.agent, Operation::kRead, *local, *remote).ok());
  two.far.reset();
  CHECK(!move(*near.agent, Operation::kRead, *local, *remote).ok());
  CHECK(near.agent->remove_remote("far").ok());
  CHECK_EQ(near.agent->remove_remote("far").code(), Code::kUnknownRegion);
}

TEST(within_one_agent) {
  End one("one");
  const std::vector<Descriptor> from = {one.add(4096, 1)}, to = {one.add(4096, 2)};
  CHECK(one.agent->register_memory(from, MemoryKind::kHost).ok());
  CHECK(one.agent->register_memory(to, MemoryKind::kHost).ok());
  const auto local = prepared(*one.agent, "", from), remote = prepared(*one.agent, "one", to);
  CHECK(move(*one.agent, Operation::kWrite, *local, *remote, "done").ok());
  CHECK(std::memcmp(at(from[0]), at(to[0]), 4096) == 0);
  CHECK_EQ(one.agent->take_notifications().size(), 1u);
}

TEST(metadata_may_be_anything) {
  End near("near"), far("far");
  const std::vector<Descriptor> theirs = {far.add(8192, 2)};
  CHECK(far.agent->register_memory(theirs, MemoryKind::kHost).ok());
  const wire::Bytes whole = far.agent->metadata();
  for (std::size_t num = 0; num < whole.size(); ++num)
    CHECK(!near.agent->add_remote({whole.data(), num}).ok());
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    wire::Bytes spoilt = whole;
    for (int i = 0; i < 3; ++i) spoilt[random() % spoilt.size()] = std::byte(random());
    (void)Metadata::decode(spoilt);
  }
}

// An agent that is not a raw agent receives no claim.
TEST(what_nobody_grants_fails_in_time) {
  End near("near", "shm", 300'000'000);
  RuntimeOptions options;
  options.name = "deaf";
  options.listen = "tcp://127.0.0.1:0";
  options.user_secret = "the secret of a test";
  options.transports = {"shm", "tcp"};
  const std::shared_ptr<Runtime> deaf = Runtime::create(std::move(options)).value();
  const std::vector<Descriptor> ours = {near.add(8192, 1)};
  CHECK(near.agent->register_memory(ours, MemoryKind::kHost).ok());
  Metadata told;
  told.name = "deaf";
  told.incarnation = deaf->identity().incarnation;
  told.address = deaf->address();
  told.sections = {{4096, 8192, 1, 0, MemoryKind::kHost, 0}};
  CHECK(near.agent->add_remote(told.encode()).ok());
  const auto local = prepared(*near.agent, "", ours),
             remote = prepared(*near.agent, "deaf", {{4096, 8192, 0}});
  CHECK_EQ(move(*near.agent, Operation::kRead, *local, *remote).code(), Code::kDeadline);
}

// Sessions prove the secret only; without the token there is no right.
TEST(a_peer_without_the_token_has_no_right) {
  End near("near"), far("far");
  const std::vector<Descriptor> ours = {near.add(8192, 1)}, theirs = {far.add(8192, 2)};
  CHECK(near.agent->register_memory(ours, MemoryKind::kHost).ok());
  CHECK(far.agent->register_memory(theirs, MemoryKind::kHost).ok());
  Metadata told = Metadata::decode(far.agent->metadata()).value();
  told.token[3] ^= std::byte{1};
  CHECK(near.agent->add_remote(told.encode()).ok());
  const auto local = prepared(*near.agent, "", ours), remote = prepared(*near.agent, "far", theirs);
  for (const Operation operation : {Operation::kRead, Operation::kWrite})
    CHECK_EQ(move(*near.agent, operation, *local, *remote).code(), Code::kNotPermitted);
}

bool becomes(const std::function<bool()>& is_so) {
  const Time until = Runtime::now() + kBound;
  while (!is_so() && Runtime::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return is_so();
}

bool has_exchanged(const End& end) {
  return becomes([&] { return !end.agent->is_exchanging(); });
}

Metadata told_by(const End& end, std::uint32_t num_sections) {
  Metadata told = Metadata::decode(end.agent->metadata()).value();
  told.sections.clear();
  for (std::uint32_t i = 0; i < num_sections; ++i)  // in descending order
    told.sections.push_back(
        {std::uint64_t{64} * (num_sections - i), 16, RegionId{i + 1}, 0, MemoryKind::kHost, 0});
  return told;
}

// With the square of their number this would take hours.
TEST(a_million_sections_are_as_quick_as_they_are_long) {
  constexpr std::uint32_t kNum = 1 << 20;
  End near("near"), far("far");
  const Metadata told = told_by(far, kNum);
  for (int round = 0; round < 2; ++round) CHECK(near.agent->add_remote(told.encode()).ok());
  std::vector<Descriptor> held, longer;
  for (std::uint64_t i = 1; i <= kNum; ++i) {
    held.push_back({64 * i, 16, 0});
    longer.push_back({64 * i, 17, 0});
  }
  CHECK(near.agent->has_remote("far", held, MemoryKind::kHost));
  for (const Descriptor& each : longer) CHECK(!near.agent->has_remote("far", {&each, 1}, MemoryKind::kHost));
}

TEST(overlapping_sections_hold_what_lies_in_any) {
  // Of several regions, kinds and devices.
  const SectionMap sections({{100, 900, 1, 0, MemoryKind::kHost, 0},
                             {200, 100, 2, 0, MemoryKind::kHost, 0},
                             {250, 10, 3, 0, MemoryKind::kHost, 0},
                             {200, 5000, 4, 0, MemoryKind::kGpu, 1},
                             {260, 40, 5, 0, MemoryKind::kGpu, 0}});
  const auto region = [&](std::uint64_t address, std::uint64_t nbytes, MemoryKind kind,
                          std::uint64_t device) {
    const Section* const found = sections.find({address, nbytes, device}, kind);
    return found == nullptr ? RegionId{0} : found->region;
  };
  CHECK_EQ(region(255, 5, MemoryKind::kHost, 7), 3u);
  CHECK_EQ(region(255, 6, MemoryKind::kHost, 0), 1u);
  CHECK_EQ(region(999, 1, MemoryKind::kHost, 0), 1u);
  CHECK_EQ(region(999, 2, MemoryKind::kHost, 0), 0u);
  CHECK_EQ(region(99, 1, MemoryKind::kHost, 0), 0u);
  CHECK_EQ(region(270, 1000, MemoryKind::kGpu, 1), 4u);
  CHECK_EQ(region(270, 30, MemoryKind::kGpu, 0), 5u);
  CHECK_EQ(region(270, 31, MemoryKind::kGpu, 0), 0u);
  CHECK_EQ(region(270, 30, MemoryKind::kGpu, std::uint64_t{1} << 32), 0u);  // no narrowing
  CHECK_EQ(region(10, 1, MemoryKind::kGpu, 0), 0u);
}

TEST(an_agent_that_exchanges_no_metadata_gives_none_and_takes_none) {
  End near("near"), far("far", "shm", kBound, false);
  const std::string address = far.agent->runtime().address();
  CHECK(near.agent->ask(address, "far").ok());
  CHECK(has_exchanged(near));
  CHECK(near.agent->tell(address, near.agent->metadata()).ok());
  CHECK(has_exchanged(near));
  CHECK(!near.agent->has_remote("far", {}, MemoryKind::kHost));
  CHECK(!far.agent->has_remote("near", {}, MemoryKind::kHost));
  // Metadata that are handed on in another way can be withdrawn by their owner's caller only.
  CHECK(far.agent->add_remote(near.agent->metadata()).ok());
  CHECK(near.agent->withdraw(address).ok());
  CHECK(has_exchanged(near));
  CHECK(far.agent->has_remote("near", {}, MemoryKind::kHost));
}

TEST(what_a_peer_tells_makes_an_agent_dial_nobody) {
  End near("near"), far("far");
  auto listening = listen_tcp(TcpAddress::resolve("tcp://127.0.0.1:0").value().front());
  REQUIRE_OK(listening);
  const UniqueFd listener = std::move(listening).value();
  Metadata told = told_by(near, 1);
  told.address = listening_address(listener.get()).value();
  CHECK(near.agent->tell(far.agent->runtime().address(), told.encode()).ok());
  CHECK(has_exchanged(near));
  pollfd waits{listener.get(), POLLIN, 0};
  CHECK_EQ(::poll(&waits, 1, 0), 0);
  CHECK(far.agent->has_remote("near", {}, MemoryKind::kHost));
  CHECK_EQ(::poll(&waits, 1, 0), 0);
  // Using it dials it.
  std::thread caller([&] { (void)far.agent->connect("near"); });
  CHECK_EQ(::poll(&waits, 1, 60'000), 1);
  CHECK(far.agent->remove_remote("near").ok());
  caller.join();
}

// Of agents that come, tell and go, and whose metadata no caller uses.
TEST(what_peers_tell_is_bounded) {
  End far("far");
  const std::string address = far.agent->runtime().address();
  const auto tell = [&](const std::string& name) {
    End peer(name);
    CHECK(peer.agent->tell(address, told_by(peer, 100'000).encode()).ok());
    CHECK(has_exchanged(peer));
  };
  tell("used");
  CHECK(far.agent->has_remote("used", {}, MemoryKind::kHost));
  for (int i = 0; i < 20; ++i) tell("peer-" + std::to_string(i));
  std::size_t num_known = 0;
  for (int i = 0; i < 20; ++i)
    num_known += far.agent->has_remote("peer-" + std::to_string(i), {}, MemoryKind::kHost);
  CHECK(num_known >= 10 && num_known <= 16);  // 64 MiB of 4 MB each
  CHECK(far.agent->has_remote("peer-19", {}, MemoryKind::kHost));
  CHECK(!far.agent->has_remote("peer-0", {}, MemoryKind::kHost));
  CHECK(far.agent->has_remote("used", {}, MemoryKind::kHost));
  // One agent tells more than it may.
  End peer("grows");
  for (std::uint32_t round = 0; round < 4; ++round) {
    Metadata told = told_by(peer, 100'000);
    for (Section& each : told.sections) each.region += round * 100'000, each.address += round * 10'000'000;
    CHECK(peer.agent->tell(address, told.encode()).ok());
    CHECK(has_exchanged(peer));
  }
  const Descriptor first{64, 16, 0}, last{64 + 30'000'000, 16, 0};
  CHECK(far.agent->has_remote("grows", {&first, 1}, MemoryKind::kHost));
  CHECK(!far.agent->has_remote("grows", {&last, 1}, MemoryKind::kHost));
}

TEST(agents_introduce_themselves) {
  End near("near"), far("far");
  std::vector<Descriptor> theirs;
  for (unsigned i = 0; i < 3000; ++i) theirs.push_back(far.add(64, i));  // of more than one message
  CHECK(far.agent->register_memory(theirs, MemoryKind::kHost).ok());
  const auto comes = [](Agent& agent, const std::string& name, bool wanted) {
    return becomes([&] { return agent.has_remote(name, {}, MemoryKind::kHost) == wanted; });
  };
  CHECK(near.agent->ask(far.agent->runtime().address(), "far").ok());
  CHECK(comes(*near.agent, "far", true));
  CHECK(near.agent->has_remote("far", {&theirs.back(), 1}, MemoryKind::kHost));
  CHECK(near.agent->tell(far.agent->runtime().address(), near.agent->metadata()).ok());
  CHECK(comes(*far.agent, "near", true));
  CHECK(near.agent->withdraw(far.agent->runtime().address()).ok());
  CHECK(comes(*far.agent, "near", false));
  // A peer's statements about other agents, or other processes, are ignored.
  Metadata earlier = Metadata::decode(near.agent->metadata()).value();
  earlier.incarnation[0] ^= std::byte{1};
  CHECK(near.agent->tell(far.agent->runtime().address(), earlier.encode()).ok());
  CHECK(has_exchanged(near));
  CHECK(!far.agent->has_remote("near", {}, MemoryKind::kHost));
  Metadata other = Metadata::decode(near.agent->metadata()).value();
  other.name = "somebody";
  CHECK(near.agent->tell(far.agent->runtime().address(), other.encode()).ok());
  CHECK(near.agent->tell(far.agent->runtime().address(), near.agent->metadata()).ok());
  CHECK(comes(*far.agent, "near", true));
  CHECK(!far.agent->has_remote("somebody", {}, MemoryKind::kHost));
}

}  // namespace
}  // namespace raw_agent_test
