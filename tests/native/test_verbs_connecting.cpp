// Verbs rails that come up, or do not. Connecting queue pairs takes as long as the network needs, and delays
// nothing else. A rail is up once packets of its size have arrived. A refusal names its reason.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "verbs_ends.h"

namespace kvxfer::verbs_connecting_test {
namespace {

using block_programs::says;
using counting_device::Fabric;
using counting_device::Limits;
using verbs_ends::connect_both;
using verbs_ends::End;
using verbs_ends::Liar;
using verbs_ends::on;
using verbs_ends::Rails;

// A destination with two sources at work, and peers on a third device, whose address does not answer.
struct Scene {
  Scene() { rails.fabric.stall(2); }
  ~Scene() { rails.fabric.let_go(); }
  static Limits three_devices() {
    Limits limits;
    limits.num_devices = 3;
    return limits;
  }
  PeerId dial(const std::string& name = "lost", std::shared_ptr<Budget> budget = nullptr) {
    auto [left, right] = testing::socket_pair();
    const auto there = rails.dst.transport->connect(std::move(left), {true, 0, name, std::move(budget)});
    const auto back = lost.transport->connect(std::move(right), {false, 0, "dst"});
    REQUIRE_OK(there);
    REQUIRE_OK(back);
    return there.value();
  }
  void step() {
    rails.step();
    if (lost.transport != nullptr) lost.step();
  }
  template <class Done>
  void until(Done&& done) {
    REQUIRE(rails.dst.reactor.run_until([this] { step(); }, done));
  }
  void until_stalled(std::size_t num) {
    until([&] { return rails.fabric.num_stalled() == num; });
  }
  bool is_told_of(PeerId peer) const {
    return std::any_of(
        rails.dst.completions.begin(), rails.dst.completions.end(),
        [&](const Completion& each) { return each.kind != CompletionKind::kWork && each.peer == peer; });
  }
  void others_are_undisturbed() {
    rails.finish(rails.some_works(64, 16));
    rails.other_is_undisturbed();
  }

  Rails rails{256, {}, three_devices()};
  End lost{on("nic2")};
};

TEST(an_address_that_nobody_answers_for_costs_its_peer_alone) {
  Scene scene;
  Fabric& fabric = scene.rails.fabric;
  Budget::Amounts limits{};
  limits[0] = 1 << 20;
  const auto budget = std::make_shared<Budget>(limits);
  const PeerId lost = scene.dial("lost", budget);
  scene.until_stalled(1);
  scene.others_are_undisturbed();
  End fresh(on("nic0"));
  connect_both(scene.rails.dst, fresh);
  CHECK(!scene.is_told_of(lost));
  CHECK_EQ(scene.rails.dst.transport->path_to(lost), "");
  // A thread still holds its queue pairs; nothing waits for them.
  const std::size_t num_pairs = fabric.num_pairs();
  scene.rails.dst.transport->disconnect(lost);
  scene.until([&] { return scene.lost.event(CompletionKind::kRailDown) != nullptr; });
  scene.others_are_undisturbed();
  CHECK(fabric.num_pairs() >= num_pairs - 4);  // those of the other end are gone
  CHECK(budget->used(Resource::kBytes) > 0);
  CHECK_EQ(fabric.num_stalled(), 1u);
  fabric.let_go();
  scene.until([&] { return budget->used(Resource::kBytes) == 0; });
  CHECK_EQ(fabric.num_pairs(), num_pairs - 8);
  scene.others_are_undisturbed();
  CHECK(!scene.is_told_of(lost));
}

TEST(a_set_up_that_took_long_ends_as_any_other) {
  for (const int error : {0, EHOSTUNREACH, ETIMEDOUT}) {
    Scene scene;
    const PeerId lost = scene.dial();
    scene.until_stalled(1);
    for (int i = 0; i < 10; ++i) scene.step();  // the other end has announced that it is ready
    scene.rails.fabric.let_go(error);
    scene.until([&] { return scene.is_told_of(lost); });
    CHECK_EQ(scene.rails.is_down(lost), error != 0);
    if (error != 0) {
      const Status down(Code::kRailFailed, scene.rails.down_words(lost));
      for (const char* words : {"its nic2 port 1: nic1 port 1: there is no path from GID 2, ", "to RTR"})
        CHECK(says(down, words));
      CHECK(says(down, std::strerror(error)));
      // The other end is told.
      scene.until([&] { return scene.lost.event(CompletionKind::kRailDown) != nullptr; });
      const Status told(Code::kRailFailed, scene.lost.event(CompletionKind::kRailDown)->detail);
      for (const char* words :
           {"the rail to dst is down: it closed its end: its nic2", "there is no path from GID 2, "})
        CHECK(says(told, words));
      CHECK(says(told, std::strerror(error)));
    } else {
      scene.until([&] { return scene.lost.event(CompletionKind::kRailUp) != nullptr; });
      CHECK(scene.rails.dst.transport->path_to(lost).ends_with("(nic2 port 1), by READ"));
    }
    scene.others_are_undisturbed();
  }
}

TEST(a_rail_may_end_while_its_queue_pairs_are_being_connected) {
  Scene scene;
  scene.dial();
  scene.dial("another");
  scene.dial();  // waits for the first dial of the same name
  scene.until_stalled(2);
  const std::size_t num_pairs = scene.rails.fabric.num_pairs();
  {
    const std::jthread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      scene.rails.fabric.let_go(ETIMEDOUT);
    });
    scene.rails.dst.transport.reset();
  }
  CHECK_EQ(scene.rails.fabric.num_pairs(), num_pairs - 5 * 4);
}

TEST(a_peer_that_dies_meanwhile_is_told_to_have_gone_at_once) {
  Scene scene;
  const PeerId lost = scene.dial();
  scene.until_stalled(1);
  const std::size_t num_pairs = scene.rails.fabric.num_pairs();
  scene.lost.transport.reset();
  scene.until([&] { return scene.rails.is_down(lost); });
  CHECK_HAS(scene.rails.down_words(lost), "it closed its end");
  for (const bool is_disconnected : {false, true}) {
    if (is_disconnected) scene.rails.dst.transport->disconnect(lost);
    scene.others_are_undisturbed();
    CHECK_EQ(scene.rails.fabric.num_pairs(), num_pairs - 4);
  }
  scene.rails.fabric.let_go();
  scene.until([&] { return scene.rails.fabric.num_pairs() == num_pairs - 8; });
  scene.others_are_undisturbed();
}

TEST(a_peer_that_comes_back_again_and_again_has_one_thread) {
  Scene scene;
  std::vector<PeerId> lost;
  for (std::size_t i = 0; i < 2 * Connector::kMostThreads; ++i) lost.push_back(scene.dial());
  scene.until_stalled(1);
  End fresh(on("nic0"));
  connect_both(scene.rails.dst, fresh);
  CHECK_EQ(scene.rails.fabric.num_stalled(), 1u);
  // Dials that wait end at once.
  for (const PeerId peer : lost) scene.rails.dst.transport->disconnect(peer);
  scene.until([&] { return scene.rails.fabric.num_pairs() == 6 * 4 + 4; });
  scene.others_are_undisturbed();
}

TEST(set_ups_beyond_the_threads_wait_and_none_is_lost) {
  Scene scene;
  std::vector<PeerId> peers;
  for (std::size_t i = 0; i < Connector::kMostThreads + 2; ++i)
    peers.push_back(scene.dial("lost-" + std::to_string(i)));
  scene.until_stalled(Connector::kMostThreads);
  scene.others_are_undisturbed();
  CHECK_EQ(scene.rails.fabric.num_stalled(), Connector::kMostThreads);
  scene.rails.dst.transport->disconnect(peers[0]);  // its dial has a thread
  scene.rails.dst.transport->disconnect(peers.back());  // its dial has none
  scene.rails.fabric.let_go();
  scene.until([&] {
    return std::all_of(peers.begin() + 1, peers.end() - 1,
                       [&](PeerId peer) { return scene.is_told_of(peer); });
  });
  for (const PeerId peer : peers) CHECK(!scene.rails.is_down(peer));
  CHECK(!scene.is_told_of(peers[0]) && !scene.is_told_of(peers.back()));
  scene.others_are_undisturbed();
}

// ---- packets ------------------------------------------------------------------------------------

TEST(a_path_that_passes_no_packet_of_its_size_is_not_up) {
  struct Case {
    std::uint32_t mtu;  // the option of one end
    std::uint64_t passed;
    bool is_up;
  };
  for (const Case& each : {Case{0, 1024, true}, Case{0, 1023, false}, Case{0, 8, false}, Case{512, 512, true},
                           Case{512, 511, false}}) {
    Fabric fabric;
    fabric.narrow(each.passed);
    verbs::Options options;
    options.mtu = each.mtu;
    End a(on("nic0", options)), b(on("nic1"));
    verbs_ends::dial_both(a, b);
    const CompletionKind ending = each.is_up ? CompletionKind::kRailUp : CompletionKind::kRailDown;
    const auto both_ended = [&] { return a.event(ending) != nullptr && b.event(ending) != nullptr; };
    REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); }, both_ended));
    if (each.is_up) continue;
    // Either end may see it first; it then tells the other.
    for (const End* end : {&a, &b})
      for (const char* words : {"first READ over a new connection", "do both ends have the same MTU"})
        CHECK_HAS(end->event(CompletionKind::kRailDown)->detail, words);
  }
}

// ---- who refuses says why -----------------------------------------------------------------------

TEST(an_end_that_makes_no_queue_pairs_tells_the_other_why) {
  Fabric fabric;
  verbs::Options wrong;
  wrong.gid_index = 9;
  End a(on("nic0", wrong)), b(on("nic1"));
  auto [left, right] = testing::socket_pair();
  const auto refused = a.transport->connect(std::move(left), {true, 0, "b"});
  REQUIRE_OK(b.transport->connect(std::move(right), {false, 0, "a"}));
  CHECK(says(refused.status(), "verbs: nic0 port 1: "));
  const Status told(Code::kRailFailed, b.await(CompletionKind::kRailDown).detail);
  for (const char* words : {"the rail to a is down: ", "nic0 port 1", "has no GID 9", "verbs.gid_index"})
    CHECK(says(told, words));
}

TEST(an_address_that_the_other_end_knows_no_way_to_is_not_tried_next) {
  Fabric fabric;
  verbs::Options fixed;
  fixed.gid_index = 0;
  End a(on("nic0", fixed)), b(on("nic1"));
  fabric.lose_way_to(2);  // b's first choice
  const auto meet = [&] {
    const auto [b_at_a, a_at_b] = verbs_ends::dial_both(a, b);
    const auto ended = [](const End& end) {
      return end.event(CompletionKind::kRailUp) != nullptr || end.event(CompletionKind::kRailDown) != nullptr;
    };
    REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); }, [&] { return ended(a) && ended(b); }));
    const bool is_up = b.event(CompletionKind::kRailUp) != nullptr;
    a.transport->disconnect(b_at_a);
    b.transport->disconnect(a_at_b);
    return is_up;
  };
  CHECK(!meet());
  CHECK(meet());
}

TEST(a_peers_words_are_bounded_and_shown_without_what_breaks_a_line) {
  Fabric fabric;
  Liar liar;
  struct {
    char magic[4] = {'k', 'v', 'w', '1'};
    char text[sizeof(verbs::Message) - 4] = {};
  } words;
  std::memset(words.text, 'a', sizeof words.text);
  std::memcpy(words.text, "why\n\x1b[31m\xc3\xa4", 11);
  for (int i = 0; i < 20; ++i)
    REQUIRE(::send(liar.socket.get(), &words, sizeof words, MSG_NOSIGNAL) ==
            static_cast<ssize_t>(sizeof words));
  for (int i = 0; i < 50; ++i) liar.victim.step();
  CHECK(liar.victim.event(CompletionKind::kRailDown) == nullptr);  // its words do not end the rail
  liar.socket.reset();
  const std::string down = liar.down_words();
  CHECK_HAS(down, "the rail to mallory is down: it closed its end: why??[31m??aaa");
  CHECK(down.size() < 600);
  CHECK(std::all_of(down.begin(), down.end(), [](char each) { return each >= ' ' && each <= '~'; }));
}

}  // namespace
}  // namespace kvxfer::verbs_connecting_test
