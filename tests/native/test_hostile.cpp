// Peers that speak the protocol correctly and send false values, beside an agent that must lose nothing.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hostile_peer.h"

namespace hostile {
namespace {

TEST(a_peer_that_speaks_truly_is_served_and_one_that_spoils_a_mac_loses_its_own_session) {
  Scene scene;
  Peer peer(scene.victim.runtime->address());
  REQUIRE(peer.shake_hands());
  CHECK(peer.num_heard<wire::Region>() == 1);
  const auto stream = peer.open_rail(0, "unix"), tcp = peer.open_rail(1, "tcp");
  CHECK(stream.has_value());
  CHECK(tcp.has_value());

  wire::Bytes spoiled = peer.sealed(wire::RegionsEnd{});
  spoiled.back() ^= std::byte{1};
  CHECK(peer.control.send(spoiled));
  CHECK(peer.hears_the_end());
  CHECK(scene.friend_is_served());
  CHECK(scene.friend_is_there());
}

TEST(the_meter_counts_what_a_caller_does_with_the_gate_and_not_how_long_it_waits) {
  for (const bool exact : {true, false}) {
    Gate gate(exact);
    volatile std::uint64_t sum = 0;
    const auto spin = [&](std::uint64_t rounds) {
      const std::lock_guard held(gate);
      for (std::uint64_t i = 0; i < rounds; ++i) sum = sum + i;
    };
    const auto num_long = [&] { return gate.holds().back(); };  // holds of more than 16 ms
    // Where it is not exact a thread is known by what it held before.
    for (std::uint64_t rounds = 10'000; gate.longest_hold_ns() < 1'000'000; rounds *= 2) spin(rounds);
    gate.forget_holds();
    {
      const std::lock_guard held(gate);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    CHECK(gate.longest_hold_ns() > 0);
    CHECK_EQ(num_long(), 0u);
    for (std::uint64_t rounds = 1'000'000; gate.longest_hold_ns() < 50'000'000; rounds *= 2) spin(rounds);
    CHECK(num_long() > 0);
    gate.forget_holds();
    CHECK_EQ(gate.longest_hold_ns(), 0);
    CHECK_EQ(num_long(), 0u);
  }
}

// `num` loops over single bytes of a block: few bytes describe much work.
CopyProgram bytes_of_blocks(std::uint32_t num) {
  CopyProgram program = pages_of(1);
  CopyLoop& loop = program.loops.front();
  loop.src_block_stride = loop.dst_block_stride = kBlockNbytes;
  loop.counts[0] = static_cast<std::uint32_t>(kBlockNbytes);
  loop.src_strides[0] = loop.dst_strides[0] = 1;
  program.loops.resize(num, loop);
  return program;
}

// Processor time of a fixed piece of work, in this build and on this machine as it is now.
Time reference_ns() {
  const auto now = [] { return clock_ns(CLOCK_THREAD_CPUTIME_ID); };
  std::array<Time, 3> took{};
  for (Time& each : took) {
    const Time begin = now();
    std::map<std::uint64_t, std::unique_ptr<std::array<std::uint64_t, 8>>> kept;
    for (std::uint64_t i = 0; i < 10'000; ++i)
      kept.emplace(i * 0x9E3779B97F4A7C15, std::make_unique<std::array<std::uint64_t, 8>>());
    kept.clear();
    each = now() - begin;
  }
  return std::ranges::max(took);
}

TEST(whatever_a_peer_says_the_gate_is_held_for_a_few_milliseconds_and_a_friend_is_served) {
  struct Lie {
    const char* what;
    void (*say)(Reader&);
  };
  const std::array<Lie, 7> lies = {{
      {"a program of single bytes, and reads by it again and again",
       [](Reader& reader) {
         reader.tell(bytes_of_blocks(1));
         for (int i = 0; i < 200; ++i) reader.ask();
       }},
      {"programs that move a block over and over",
       [](Reader& reader) {
         for (int i = 0; i < 16; ++i) {
           reader.tell(bytes_of_blocks(64));
           reader.ask();
         }
       }},
      {"CREDITs for rails that there are not",
       [](Reader& reader) {
         reader.tell(pages_of(kBlockNbytes));
         const TransferId id = reader.ask();
         for (std::uint16_t rail = 0; rail < 4096; ++rail)
           if (!reader.peer.say(wire::Credit{id, {rail}, 0, kBlocks})) return;
       }},
      {"CREDITs for checksums of everything",
       [](Reader& reader) {
         reader.tell(bytes_of_blocks(1));
         for (int i = 0; i < 64; ++i)
           if (!reader.peer.say(wire::Credit{reader.ask(wire::kFlagIntegrity), {wire::kNoRail}, 0, kBlocks}))
             return;
       }},
      {"regions without end",
       [](Reader& reader) {
         wire::Region region;
         region.name = "more";
         region.spans = {{0, kBlockNbytes}};
         region.num_blocks = 1;
         for (region.id = 1000; region.id < 9000; ++region.id)
           if (!reader.peer.say(region)) return;
       }},
      {"leases without end",
       [](Reader& reader) {
         wire::Lease lease;
         lease.region = Reader::kRegion;
         lease.all_blocks = true;
         lease.ttl_ns = 1'000'000'000;
         for (lease.id = 1; lease.id < 32'000; ++lease.id)
           if (!reader.peer.say(lease)) return;
       }},
      {"programs without end",
       [](Reader& reader) {
         const CopyProgram program = bytes_of_blocks(1000);
         for (int i = 0; i < 1248; ++i)
           if (!reader.tell(program)) return;
       }},
  }};
  Scene scene;
  Runtime& victim = *scene.victim.runtime;
  constexpr Time kMostReferences = 4;
  // A fault holds it for long each time, a pause of the machine does not.
  constexpr int kRounds = 5;
  for (const Lie& lie : lies) {
    bool briefly = false;
    for (int round = 0; round < kRounds && !briefly; ++round) {
      Peer peer(victim.address());
      REQUIRE(peer.shake_hands());
      Reader reader(scene, peer);
      REQUIRE(reader.tell(pages_of(kBlockNbytes)));
      reader.ask();
      REQUIRE(peer.hear<wire::Accept>().has_value());  // the victim reads her messages
      victim.forget_holds();
      std::atomic<bool> over{false};
      std::thread liar([&] {
        lie.say(reader);
        over = true;
      });
      bool served = true;
      do served = scene.friend_is_served() && served;
      while (!over);
      liar.join();
      served = scene.friend_is_served() && served;
      CHECK(served);
      const Time held = victim.longest_hold_ns(), most = kMostReferences * reference_ns();
      briefly = held < most;
      if (!served || !briefly)
        std::printf("  %s: the gate was held for %.1f ms (at most %.1f)\n", lie.what,
                    static_cast<double>(held) / 1e6, static_cast<double>(most) / 1e6);
    }
    CHECK(briefly);
  }
  CHECK(scene.friend_is_there());
}

// The friend's message comes to the victim's caller, after whatever others had said.
bool friend_is_heard(Scene& scene, const std::string& words) {
  const auto bytes = std::as_bytes(std::span(words));
  const Status sent = scene.bystander.runtime->with_engine([&](Engine& engine, Time now) {
    return engine.send_message(now, scene.there, {bytes.begin(), bytes.end()});
  });
  if (!sent.ok()) return false;
  bool heard = false;
  return await([&] {
    while (const std::optional<Mail> mail = scene.victim.runtime->ring().take(MailKind::kMessage))
      heard = heard || (mail->peer == scene.here && wire::text_of(mail->payload) == words);
    return heard;
  });
}

TEST(who_comes_under_a_name_that_is_open_says_nothing_to_callers) {
  Scene scene;
  PeerOptions namesake;
  namesake.name = "friend";
  Peer peer(scene.victim.runtime->address(), namesake);
  REQUIRE(peer.hear_until([&] { return peer.session.state() == SessionState::kOpen; }));
  CHECK(peer.say(wire::AgentMessage{wire::Bytes(5)}));
  CHECK(peer.hears_the_end());
  CHECK_HAS(peer.session.reason().message(), "MESSAGE before");
  CHECK(friend_is_heard(scene, "the friend's"));
  CHECK(!scene.victim.runtime->ring().take(MailKind::kMessage));
  CHECK(scene.friend_is_there());
}

}  // namespace
}  // namespace hostile
