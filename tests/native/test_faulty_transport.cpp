// FaultyTransport: what its string may contain, and the faults that the conformance suite leaves out.
#include "conformance_ends.h"

#include "transports/loopback/loopback_transport.h"
#include "transports/stream/stream_transport.h"

namespace kvxfer {
namespace {

using conformance::Pair;
using conformance::Subject;
using conformance::TestTransfer;

Subject faulty_tcp(std::string_view text) {
  const auto make = [](Reactor& reactor, const FenceTable&) -> std::unique_ptr<Transport> {
    return std::make_unique<StreamTransport>(reactor, StreamTransport::Options());
  };
  return {"tcp", make, conformance::tcp_sockets, false, Faults::parse(text).value()};
}
Subject faulty_loopback(std::string_view text) {
  const auto make = [](Reactor& reactor, const FenceTable& fences) -> std::unique_ptr<Transport> {
    return std::make_unique<LoopbackTransport>(reactor, fences);
  };
  return {"loopback", make, conformance::unix_sockets, false, Faults::parse(text).value()};
}

TEST(parse_reads_every_fault) {
  const auto faults = Faults::parse("seed=7,again=0.2,delay=0.3,reorder=0.5,fail=0.01,down_after=200");
  REQUIRE_OK(faults);
  CHECK_EQ(faults.value().seed, 7);
  CHECK_EQ(faults.value().again, 0.2);
  CHECK_EQ(faults.value().delay, 0.3);
  CHECK_EQ(faults.value().reorder, 0.5);
  CHECK_EQ(faults.value().fail, 0.01);
  CHECK_EQ(faults.value().down_after, 200);
  CHECK_OK(Faults::parse(""));
  CHECK_OK(Faults::parse("fail=1"));
}

TEST(parse_refuses_in_words) {
  for (const char* text : {"agian=0.2", "again", "again=", "again=1.5", "again=-0.1", "again=nan", "again=1",
                           "fail=0.1x", "seed=-1", "seed=1.5", "down_after=", ",", "seed=1,,fail=0"}) {
    const auto faults = Faults::parse(text);
    CHECK(!faults.ok());
    if (faults.ok()) continue;
    CHECK_EQ(faults.status().code(), Code::kInvalidArgument);
    CHECK(!faults.status().message().empty());
  }
  CHECK_EQ(Faults::parse("agian=0.2").status().message(),
           "faults: \"agian=0.2\": is not a fault; the faults are seed, again, delay, reorder, fail, "
           "mistake, down_after");
}

TEST(a_rail_goes_down_once_and_its_works_fail) {
  for (const bool stream : {false, true}) {
    const char* const text = "down_after=5,delay=0.5";
    const Subject subject = stream ? faulty_tcp(text) : faulty_loopback(text);
    Pair pair(subject);
    TestTransfer transfer(pair, {2, 10, 1, {1, 1}, 64 * 1024});
    transfer.start(transfer.all_pieces());
    REQUIRE(pair.run_until(
        [&] { return pair.dst.down && pair.dst.all_completed() && pair.src.all_completed(); }));
    REQUIRE(pair.run_until([&] { return pair.src.down; }));
    std::size_t num_failed = 0;
    for (const auto& [id, completion] : pair.dst.outcomes) {
      CHECK(completion.code == Code::kOk || completion.code == Code::kRailFailed);
      num_failed += completion.code == Code::kRailFailed;
    }
    CHECK(num_failed > 0);
    transfer.check_bytes();
    Work work;
    work.kind = WorkKind::kFetch;
    work.move = transfer.at_dst;
    CHECK_EQ(pair.dst.post(work), Code::kRailFailed);
    pair.dst.transport->disconnect(pair.dst.peer);
    pair.src.transport->disconnect(pair.src.peer);
    if (stream) continue;  // the source counts its own works, and has not got there yet
    // It happens once: the next rail stays up.
    pair.connect();
    transfer.finish(true);
    transfer.check_bytes();
  }
}

TEST(works_fail_at_their_rate) {
  const Subject subject = faulty_loopback("fail=0.25");
  Pair pair(subject);
  TestTransfer transfer(pair, {4, 250, 1, {1, 1}, 64});
  transfer.start(transfer.all_pieces());
  REQUIRE(pair.run_until([&] { return pair.dst.all_completed(); }));
  const std::size_t num_failed = transfer.missing_pieces().size();
  CHECK(num_failed > 150 && num_failed < 350);  // 250 of 1000; 7 standard deviations away
  transfer.check_bytes();
}

TEST(the_same_seed_meets_the_same_faults) {
  const auto outcomes = [](std::string_view text) {
    const Subject subject = faulty_loopback(text);
    Pair pair(subject);
    TestTransfer transfer(pair, {4, 50, 1, {1, 1}, 64});
    transfer.start(transfer.all_pieces());
    REQUIRE(pair.run_until([&] { return pair.dst.all_completed(); }));
    return transfer.missing_pieces();
  };
  CHECK(outcomes("seed=3,fail=0.3") == outcomes("seed=3,fail=0.3"));
  CHECK(outcomes("seed=3,fail=0.3") != outcomes("seed=4,fail=0.3"));
}

TEST(delayed_completions_keep_it_busy) {
  const Subject subject = faulty_loopback("delay=1");
  Pair pair(subject);
  TestTransfer transfer(pair, {1, 8, 1, {1, 1}, 64});
  transfer.start(transfer.all_pieces());
  while (!pair.dst.all_completed()) {
    REQUIRE(pair.dst.transport->busy());
    pair.step();
  }
  CHECK(!pair.dst.transport->busy());
}

}  // namespace
}  // namespace kvxfer
