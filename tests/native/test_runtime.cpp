// Two agents in one process, with callers on several threads, for TSan.
#include <poll.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent_pair.h"
#include "check.h"
#include "core/control/socket_address.h"

namespace kvxfer {
namespace {

using namespace agent_pair;

constexpr std::uint32_t kBlocks = 32;

Options over(const std::string& transport) {
  return {.transports = {transport}, .layout = {kBlocks, 16 * 1024}};
}

std::shared_ptr<Handle> write(Pair<>& both, std::vector<std::uint32_t> blocks,
                              const wire::Bytes& notify = {}) {
  TransferRequest request = both.request(true, std::move(blocks));
  request.notify = notify;
  return both.src.post(std::move(request));
}

TEST(what_a_caller_leaves_undone_goes_on_without_it) {
  for (const char* const transport : {"loopback", "unix"}) {
    Pair both(over(transport));
    check::Random random(check::seed());
    for (std::uint32_t round = 0; round < 300; ++round) {
      const auto handle = write(both, {round % kBlocks});
      for (std::uint64_t n = random.below(4); n > 0; --n) both.dst.runtime->poll();
      for (std::uint64_t n = random.below(4); n > 0; --n) both.src.runtime->poll();
      if (random.chance(20)) both.dst.runtime->wait([] { return false; }, 100'000);
      REQUIRE(ends(handle));
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
  }
}

TEST(a_caller_who_sleeps_while_it_drives_is_woken_for_what_another_begins) {
  for (const char* const transport : {"loopback", "unix"}) {
    Options options = over(transport);
    options.grants = false;
    Pair both(options);
    std::atomic<bool> over{false};
    std::thread driver([&] { both.dst.runtime->wait([&] { return over.load(); }, 2 * kBound); });
    for (std::uint32_t round = 0; round < 50; ++round) {
      const wire::Bytes tag = {static_cast<std::byte>(round), std::byte{1}};
      const auto handle = write(both, {round % kBlocks}, tag);
      std::this_thread::sleep_for(
          std::chrono::milliseconds(1));  // the write is parked there, and the driver sleeps
      const auto expected = both.dst.runtime->with_engine([&](Engine& engine, Time now) {
        return engine.expect(now, tag, both.dst.region, {round % kBlocks}, 0, 1, {}, {}, 2 * kBound);
      });
      REQUIRE(expected.ok());
      CHECK(ends(expected.value()));
      CHECK(ends(handle));
    }
    over = true;
    both.dst.runtime->poll();
    driver.join();
  }
}

// A loop like asyncio's: it watches the sockets until the thread takes them back, and the ring all the time.
// Now and then it does something else, or does not watch the sockets for a while.
void loop_on(Runtime& runtime, const std::atomic<bool>& over, std::uint64_t seed,
             std::vector<wire::Bytes>& heard, std::atomic<std::size_t>& num_heard) {
  check::Random random(seed);
  bool watches = true;
  runtime.ring().add_waiters(1);
  while (!over) {
    pollfd fds[] = {{runtime.ring().fd(), POLLIN, 0}, {watches ? runtime.sockets_fd() : -1, POLLIN, 0}};
    ::poll(fds, 2, 20);
    if (random.chance(3)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
    if (fds[1].revents != 0) watches = runtime.serve() && !random.chance(3);
    while (!runtime.ring().drain(16, true).empty()) watches = true;
    while (const std::optional<Mail> taken = runtime.ring().take(MailKind::kNotification))
      heard.push_back(taken->payload);
    num_heard = heard.size();
  }
  runtime.ring().add_waiters(-1);
}

TEST(event_loops_that_serve_and_are_busy_and_look_away_lose_nothing) {
  for (const char* const transport : {"shm", "unix", "tcp"}) {
    Pair both(over(transport));
    std::atomic<bool> over{false};
    std::vector<wire::Bytes> heard, unheard, sent;
    std::atomic<std::size_t> num_heard{0}, num_unheard{0};
    std::thread near([&] { loop_on(*both.src.runtime, over, check::seed(), unheard, num_unheard); });
    std::thread far([&] { loop_on(*both.dst.runtime, over, check::seed() + 1, heard, num_heard); });
    check::Random random(check::seed() + 2);
    std::vector<std::uint32_t> all(kBlocks);
    for (std::uint32_t block = 0; block < kBlocks; ++block) all[block] = block;
    bool ended = true;
    for (std::uint32_t round = 0; round < 300 && ended; ++round) {
      sent.push_back({static_cast<std::byte>(round), static_cast<std::byte>(round >> 8)});
      // The loop handles short transfers, the thread long ones.
      const auto handle = write(both, random.chance(10) ? all : std::vector{round % kBlocks}, sent.back());
      // A caller that drives beside the loop sleeps on the same sockets; the end of its transfer wakes it.
      const auto is_over = [&] { return handle->outcome() != Outcome::kPending; };
      ended = random.chance(50) ? ends(handle) : both.src.runtime->wait(is_over, kBound);
      CHECK(ended);
      CHECK_EQ(handle->outcome(), Outcome::kDone);
    }
    for (const Time until = Runtime::now() + 2 * kBound; num_heard < sent.size() && Runtime::now() < until;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    over = true;
    near.join();
    far.join();
    CHECK(heard == sent);
    CHECK(unheard.empty());
  }
}

// The rings of quiet peers are no longer polled. Then only the announcement of a frame moves these agents.
TEST(what_many_peers_say_now_and_then_is_heard) {
  constexpr std::size_t kPeers = 20;
  struct Spoke {
    std::unique_ptr<Agent<>> agent;
    SessionKey hub = 0, here = 0;  // the peer's number for the hub, and the hub's for the peer
  };
  Agent<> hub("hub", over("shm"));
  std::vector<Spoke> peers(kPeers);
  const auto open_peers = [](Engine& engine, Time) { return engine.open_peers(); };
  for (std::size_t i = 0; i < kPeers; ++i) {
    peers[i].agent = std::make_unique<Agent<>>("peer-" + std::to_string(i), over("shm"));
    Runtime& runtime = *peers[i].agent->runtime;
    const Result<SessionKey> called = runtime.begin_connect(hub.runtime->address(), kBound);
    REQUIRE(called.ok());
    peers[i].hub = called.value();
    REQUIRE(await([&] { return num_rails(runtime, called.value()) != 0; }));
    REQUIRE(await([&] { return hub.runtime->with_engine(open_peers).size() == i + 1; }));
    peers[i].here = hub.runtime->with_engine(open_peers).back();
  }
  const auto say = [](Runtime& from, SessionKey to, std::uint32_t number) {
    const Status sent = from.with_engine([&](Engine& engine, Time now) {
      return engine.send_message(now, to,
                                 {static_cast<std::byte>(number), static_cast<std::byte>(number >> 8)});
    });
    REQUIRE(sent.ok());
  };
  const auto hears = [](Runtime& runtime, std::uint32_t number) {
    std::optional<Mail> mail;
    for (const Time until = Runtime::now() + kBound; !mail && Runtime::now() < until;) {
      mail = runtime.ring().take(MailKind::kMessage);
      if (!mail) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    REQUIRE(mail.has_value());
    if (mail->tells) runtime.message_taken(mail->peer);
    CHECK(mail->payload ==
          wire::Bytes({static_cast<std::byte>(number), static_cast<std::byte>(number >> 8)}));
  };
  check::Random random(check::seed());
  for (std::uint32_t round = 0; round < 600; ++round) {
    // All peers send, or one of them; these may have been quiet for a while, or may have sent just before.
    const bool all = random.chance(5);
    const std::size_t one = random.below(kPeers);
    if (random.chance(30)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(4000)));
    for (std::size_t i = 0; i < kPeers; ++i)
      if (all || i == one) say(*peers[i].agent->runtime, peers[i].hub, round);
    if (random.chance(20)) hub.runtime->poll();
    for (std::size_t i = 0; i < (all ? kPeers : 1); ++i) hears(*hub.runtime, round);
    if (random.chance(50)) continue;
    say(*hub.runtime, peers[one].here, round);
    hears(*peers[one].agent->runtime, round);
  }
  for (Spoke& peer : peers) peer.agent->runtime->close(kBound);
  hub.runtime->close(kBound);
}

void many_callers(const std::string& transport) {
  Options options = over(transport);
  options.heartbeat_ns = 5 * kSecond;
  Pair both(options);
  auto &src = both.src, &dst = both.dst;
  for (std::size_t i = 0; i < src.memory.size(); ++i)
    src.memory[i] = static_cast<std::byte>(i * 31 + i / 4096);

  // Each thread writes its own blocks, and waits, polls and drains beside the others.
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::uint32_t round = 0; round < 8; ++round) {
        const auto handle = write(both, {t * 8 + round});
        if (t % 2 == 0) src.runtime->poll();
        src.runtime->wait([&] { return handle->outcome() != Outcome::kPending; }, 2 * kBound);
        num_done += handle->outcome() == Outcome::kDone ? 1 : 0;
        (void)src.runtime->ring().drain(8, true);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(num_done.load(), 32);
  dst.runtime->with_engine([&](Engine& engine, Time now) {
    engine.revoke(now, both.write_lease);
    return 0;
  });
  CHECK(std::memcmp(src.memory.data(), dst.memory.data(), src.memory.size()) == 0);
}

TEST(callers_on_many_threads_share_an_agent) {
  for (const char* const transport : {"loopback", "unix", "tcp"}) many_callers(transport);
}

// Each of two sockets breaks once, during its third piece: the second one when the first is back. The first
// then carries on alone.
TEST(a_socket_that_breaks_is_dialled_again_and_used) {
  Options at_src = over("tcp"), at_dst = at_src;
  at_src.heartbeat_ns = at_dst.heartbeat_ns = 5 * kSecond;
  at_dst.faults = "down_after=3";
  Pair both(at_src, at_dst);
  const auto counted = [](Agent<>& end, std::uint64_t count) {
    const EngineStats stats = end.stats();
    return stats.rails_lost == count && stats.rails_redialled == count;
  };
  std::uint32_t num_writes = 0;
  const auto writes_until = [&](std::uint64_t lost) {
    for (bool falls = false; !falls && num_writes < kBlocks; ++num_writes) {
      const auto handle = write(both, {num_writes});
      REQUIRE(ends(handle));
      CHECK_OK(handle->status());
      falls = both.dst.stats().rails_lost == lost;
    }
    for (Agent<>* end : {&both.src, &both.dst})
      REQUIRE(end->runtime->wait([&] { return counted(*end, lost); }, kBound));
  };
  writes_until(1);
  writes_until(2);
  CHECK(num_writes < kBlocks);
  for (const auto& [end, key] : {std::pair(&both.src, both.there), std::pair(&both.dst, both.here)}) {
    const auto view =
        end->runtime->with_engine([&, key = key](Engine& engine, Time) { return engine.peer(key); });
    CHECK_EQ(view->rails.size(), 2);
    CHECK(view->notes.empty());
  }
}

TEST(a_listener_beyond_loopback_needs_a_secret) {
  RuntimeOptions options = options_of("open", over("tcp"));
  options.listen = "tcp://0.0.0.0:0";
  const auto created = Runtime::create(std::move(options));
  REQUIRE(!created.ok());
  CHECK(created.status().code() == Code::kInvalidArgument);
}

TEST(an_address_is_read_to_its_end) {
  using namespace std::string_literals;
  CHECK(TcpAddress::resolve("tcp://127.0.0.1:7301").ok());
  // A resolver would stop at a zero byte and find another host, or another port.
  for (const std::string& address : {"tcp://127.0.0.1\0.elsewhere:7301"s, "tcp://127.0.0.1:7301\0"s}) {
    const auto resolved = TcpAddress::resolve(address);
    REQUIRE(!resolved.ok());
    CHECK(resolved.status().code() == Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace kvxfer
