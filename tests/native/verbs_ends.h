// Verbs rails on counting devices (counting_device.h), for tests.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance_ends.h"
#include "counting_device.h"
#include "one_sided_ends.h"
#include "transports/verbs/verbs_transport.h"

namespace verbs_ends {

using namespace kvxfer;
using counting_device::Fabric;

// A rail on the first port of a device; "": on the first device.
inline std::unique_ptr<VerbsTransport> make_rail(Reactor& reactor, const FenceTable& fences,
                                                 const std::string& device, verbs::Options options = {},
                                                 std::shared_ptr<verbs::Device>* device_made = nullptr) {
  options.devices = device;
  const Result<const verbs::Library*> library = verbs::Library::load();
  REQUIRE_OK(library);
  auto devices = verbs::Device::open_all(*library.value(), options);
  REQUIRE_OK(devices);
  if (device_made != nullptr) *device_made = devices.value().front();
  auto made = VerbsTransport::create(reactor, fences, std::move(devices.value().front()));
  REQUIRE_OK(made);
  return std::move(made).value();
}

using counting_device::Limits;
using End = testing::End<VerbsTransport>;
using testing::fetch_work;

inline constexpr std::uint64_t kPage = 4096;

// `device`: set if the test wants to know it.
inline End::Make on(const std::string& name, const verbs::Options& options = {},
                    std::shared_ptr<verbs::Device>* device = nullptr) {
  return [=](Reactor& reactor, const FenceTable& fences) {
    return make_rail(reactor, fences, name, options, device);
  };
}

// Lets two ends begin to connect: b's number at a, and a's at b.
inline std::pair<PeerId, PeerId> dial_both(End& a, End& b) {
  a.completions.clear();
  b.completions.clear();
  auto [left, right] = testing::socket_pair();
  const Result<PeerId> b_at_a = a.transport->connect(std::move(left), {true, 0, "b"});
  const Result<PeerId> a_at_b = b.transport->connect(std::move(right), {false, 0, "a"});
  REQUIRE_OK(b_at_a);
  REQUIRE_OK(a_at_b);
  return {b_at_a.value(), a_at_b.value()};
}

// As connect_ends, of rails that come up once both ends have heard twice of each other: b's number at a, and a's at b.
inline std::pair<PeerId, PeerId> connect_both(End& a, End& b) {
  const std::pair<PeerId, PeerId> numbers = dial_both(a, b);
  const auto step = [&] {
    b.step();
    a.step();
  };
  REQUIRE(a.reactor.run_until(step, [&] {
    return a.event(CompletionKind::kRailUp) != nullptr && b.event(CompletionKind::kRailUp) != nullptr;
  }));
  return numbers;
}

// Registered memory at one end of a rail.
struct Region {
  Region(End& end, RegionId id, std::size_t nbytes) : memory(nbytes), owner(end) {
    local.id = id;
    local.base = memory.data();
    local.spans = {{0, nbytes}};
    auto registered = testing::register_memory(*end.transport, local);
    REQUIRE_OK(registered);
    keys = std::move(registered).value();
  }
  ~Region() {
    if (owner.transport != nullptr) owner.transport->deregister_memory(local.id);
  }
  RemoteRegion remote() const {
    return {local.id, reinterpret_cast<std::uintptr_t>(local.base), local.spans, keys};
  }

  std::vector<std::byte> memory;
  LocalRegion local;
  RegionKeys keys;
  End& owner;
};

// A destination with two sources, each with a region of so many pages.
struct Rails {
  explicit Rails(std::uint32_t pages = 4096, const verbs::Options& options = {}, const Limits& limits = {},
                 std::uint64_t page = kPage)
      : fabric(limits),
        num_pages(pages),
        page_nbytes(page),
        dst(on("nic1", options, &dst_device)),
        src(on("nic0", options)),
        other(on("nic0", options)),
        to(dst, 100, pages * page),
        from(src, 1, pages * page),
        from_other(other, 2, pages * page) {
    check::Random random(check::seed());
    random.fill(from.memory.data(), from.memory.size());
    random.fill(from_other.memory.data(), from_other.memory.size());
    meet(src, from, peer, back);
    meet(other, from_other, other_peer, other_back);
  }
  void meet(End& source, const Region& region, PeerId& there, PeerId& here) {
    std::tie(there, here) = connect_both(dst, source);
    REQUIRE_OK(dst.transport->attach(there, region.remote()));
  }
  // Blocks of the source to blocks of the destination, so many in a piece.
  std::vector<Work> works(const std::vector<std::uint32_t>& src_ids,
                          const std::vector<std::uint32_t>& dst_ids, std::uint32_t pairs_per_piece,
                          RegionId region = 1) {
    auto move = std::make_shared<Move>(
        *testing::block_move(region, to.memory.data(), page_nbytes, src_ids, dst_ids, pairs_per_piece));
    move->local = std::make_shared<const LocalRegion>(to.local);
    std::vector<Work> made;
    for (std::uint32_t piece = 0; piece < move->grid.num_pieces(); ++piece)
      made.push_back(fetch_work(next_work++, move, piece));
    return made;
  }
  std::vector<std::uint32_t> shuffled(std::uint32_t num, std::uint64_t seed) const {
    std::vector<std::uint32_t> ids(num_pages);
    std::iota(ids.begin(), ids.end(), 0u);
    check::Random random(check::seed() + seed);
    random.shuffle(ids);
    ids.resize(num);
    return ids;
  }
  std::vector<Work> some_works(std::uint32_t num_pages_of_it, std::uint32_t pairs_per_piece,
                               RegionId region = 1) {
    return works(shuffled(num_pages_of_it, 1), shuffled(num_pages_of_it, 2), pairs_per_piece, region);
  }
  void post(const std::vector<Work>& all, PeerId which = 0) {
    std::size_t num = 0;
    while (num < all.size()) {
      const testing::Posted posted =
          testing::post_all(*dst.transport, which == 0 ? peer : which, std::span(all).subspan(num));
      REQUIRE(posted.code == Code::kOk || posted.code == Code::kAgain);
      num += posted.accepted;
      if (num < all.size()) step();
    }
  }
  void step() {
    src.step();
    other.step();
    dst.step();
  }
  bool run_until(const std::function<bool()>& done) {
    return dst.reactor.run_until([this] { step(); }, done);
  }
  bool ended(const std::vector<Work>& all) {
    return std::all_of(all.begin(), all.end(),
                       [this](const Work& work) { return dst.completion_of(work.id) != nullptr; });
  }
  Code code_of(const Work& work) { return dst.completion_of(work.id)->code; }
  void finish(const std::vector<Work>& all, PeerId which = 0) {
    post(all, which);
    REQUIRE(run_until([&] { return ended(all); }));
    for (const Work& work : all) {
      CHECK_EQ(code_of(work), Code::kOk);
      if (code_of(work) != Code::kOk) FAIL(dst.completion_of(work.id)->detail);
    }
    const Move& move = *all.front().move;
    const Region& source = move.remote_region == 1 ? from : from_other;
    for (std::size_t i = 0; i < move.src_ids.size(); ++i)
      if (std::memcmp(source.memory.data() + move.src_ids[i] * page_nbytes,
                      to.memory.data() + move.dst_ids[i] * page_nbytes, page_nbytes) != 0)
        return FAIL("a page is not what it should be");
  }
  // Whether the other source's pages still arrive, over the same rail as before.
  void other_is_undisturbed() {
    finish(some_works(64, 16, 2), other_peer);
    CHECK(!is_down(other_peer));
  }
  bool is_down(PeerId which) {
    return std::any_of(dst.completions.begin(), dst.completions.end(), [which](const Completion& each) {
      return each.kind == CompletionKind::kRailDown && each.peer == which;
    });
  }
  std::string down_words(PeerId which) {
    REQUIRE(run_until([&] { return is_down(which); }));
    for (const Completion& each : dst.completions)
      if (each.kind == CompletionKind::kRailDown && each.peer == which) return each.detail;
    return {};
  }

  Fabric fabric;
  const std::uint32_t num_pages;
  const std::uint64_t page_nbytes;
  WorkId next_work = 1;
  std::shared_ptr<verbs::Device> dst_device;
  End dst, src, other;
  Region to, from, from_other;
  PeerId peer = 0, back = 0, other_peer = 0, other_back = 0;
};

// A rail whose peer is a plain socket.
struct Liar {
  explicit Liar(const verbs::Options& options = {}) : victim(on("nic1", options)) {
    auto [ours, theirs] = conformance::tcp_sockets();
    socket = std::move(theirs);
    const auto connected = victim.transport->connect(std::move(ours), {true, 0, "mallory"});
    REQUIRE_OK(connected);
    peer = connected.value();
    // The hello that a peer would hear.
    verbs::Message heard;
    REQUIRE(::recv(socket.get(), &heard, sizeof heard, MSG_WAITALL) == sizeof heard);
    CHECK_OK(heard.check(false));
    hello = heard;  // of a device of the same network
  }
  void say(const verbs::Message& message, std::size_t nbytes = sizeof(verbs::Message)) {
    REQUIRE(::send(socket.get(), &message, nbytes, MSG_NOSIGNAL) == static_cast<ssize_t>(nbytes));
  }
  void introduce() {
    say(hello);
    hear_ready();
  }
  // Reads the message that the victim's queue pairs are connected.
  verbs::Message hear_ready() {
    verbs::Message ready;
    REQUIRE(victim.reactor.run_until(
        [this] { victim.step(); },
        [&] { return ::recv(socket.get(), &ready, sizeof ready, MSG_DONTWAIT) == sizeof ready; }));
    CHECK(ready.kind == verbs::MessageKind::kReady);
    return ready;
  }
  std::string down_words() { return victim.await(CompletionKind::kRailDown).detail; }

  End victim;
  UniqueFd socket;
  PeerId peer = 0;
  verbs::Message hello;
};

}  // namespace verbs_ends
