// Peers that speak the protocol correctly and send false values, beside an agent that must lose nothing.
#include <array>
#include <atomic>
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
    RuntimeOptions options = options_of("alone");
    options.meter_gate = exact;
    Agent agent(std::move(options));
    volatile std::uint64_t sum = 0;
    const auto spin = [&](std::uint64_t rounds) {
      return agent.runtime->with_engine([&](Engine&, Time) {
        for (std::uint64_t i = 0; i < rounds; ++i) sum = sum + i;
        return 0;
      });
    };
    const auto num_long = [&] {  // holds of more than 16 ms
      const Gate::Histogram holds = agent.runtime->holds();
      return holds.back();
    };
    // Where it is not exact a thread is known by what it held before.
    for (std::uint64_t rounds = 10'000; agent.runtime->longest_hold_ns() < 1'000'000; rounds *= 2)
      spin(rounds);
    agent.runtime->forget_holds();
    CHECK_EQ(num_long(), 0u);
    agent.runtime->with_engine([](Engine&, Time) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return 0;
    });
    const Time slept = agent.runtime->longest_hold_ns();
    CHECK(slept > 0);
    CHECK(slept < 16'000'000);
    CHECK_EQ(num_long(), 0u);
    for (std::uint64_t rounds = 1'000'000; agent.runtime->longest_hold_ns() < 50'000'000; rounds *= 2)
      spin(rounds);
    CHECK(num_long() > 0);
    agent.runtime->forget_holds();
    CHECK(agent.runtime->longest_hold_ns() < 50'000'000);
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
  for (const Lie& lie : lies) {
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
    const Time held = victim.longest_hold_ns();
    CHECK(held < kMostHold);
    if (!served || held >= kMostHold)
      std::printf("  %s: the gate was held for %.1f ms\n", lie.what, static_cast<double>(held) / 1e6);
  }
  CHECK(scene.friend_is_there());
}

}  // namespace
}  // namespace hostile
