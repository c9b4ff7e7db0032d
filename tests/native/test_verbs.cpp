// Verbs rails on counting devices: their requests to a device, how they end, and what peers may send.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "conformance_ends.h"
#include "count_steps.h"
#include "one_sided_ends.h"
#include "transports/verbs/faults.h"
#include "verbs_ends.h"

namespace kvxfer::verbs_test {
namespace {

using block_programs::says;
using counting_device::Counts;
using counting_device::Fabric;
using counting_device::Limits;
using testing::fetch_work;
using testing::with_fence;
using verbs::Message;
using verbs::MessageKind;
using verbs::abi::EventKind;
using verbs::abi::WorkStatus;
using verbs_ends::connect_both;
using verbs_ends::End;
using verbs_ends::kPage;
using verbs_ends::Liar;
using verbs_ends::on;
using verbs_ends::Rails;
using verbs_ends::Region;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
constexpr bool kIsPlain = false;
#else
constexpr bool kIsPlain = true;
#endif

// ---- what is asked of the device ----------------------------------------------------------------

TEST(a_page_takes_a_request_and_chains_few_doorbells_and_completions) {
  for (const std::uint64_t page : {4096u, 16384u, 65536u}) {
    const std::uint32_t num = page == 4096 ? 4096 : 1024;
    Rails rails(num, {}, {}, page);
    rails.fabric.forget_counts();
    rails.finish(rails.works(rails.shuffled(num, 1), rails.shuffled(num, 2),
                             static_cast<std::uint32_t>(512 * 1024 / page)));
    const Counts counts = rails.fabric.counts();
    const auto num_pieces = static_cast<std::uint64_t>(num * page / (512 * 1024));
    CHECK(counts.requests <= num + num_pieces);  // each piece has a fence word
    CHECK_EQ(counts.nbytes, num * page + 8 * num_pieces);
    CHECK(counts.doorbells * 32 <= num + 32 * num_pieces);  // some pages may be adjacent
    CHECK_EQ(counts.signalled, counts.doorbells);
    CHECK(counts.longest_chain <= verbs::kMostChained);
    CHECK(counts.largest_chain_nbytes <= 2 * 1024 * 1024 + 8 * verbs::kMostChained);  // and fence words
    std::printf("  %llu pages of %llu: %llu requests, %llu doorbells\n", static_cast<unsigned long long>(num),
                static_cast<unsigned long long>(page), static_cast<unsigned long long>(counts.requests),
                static_cast<unsigned long long>(counts.doorbells));
  }
}

TEST(pages_that_follow_each_other_at_both_ends_are_one_request) {
  Rails rails(1024);
  std::vector<std::uint32_t> ids(1024);
  std::iota(ids.begin(), ids.end(), 0u);
  rails.fabric.forget_counts();
  rails.finish(rails.works(ids, ids, 128));
  CHECK_EQ(rails.fabric.counts().requests,
           2 * 1024u / 128);  // for each piece one, and one for its fence word
}

TEST(pages_that_follow_each_other_at_the_source_are_scattered_by_one_request) {
  for (const int max_sge_rd : {0, 4, 1}) {
    Limits limits;
    limits.max_sge_rd = max_sge_rd;
    Rails rails(1024, {}, limits);
    std::vector<std::uint32_t> src(1024), dst(1024);
    for (std::uint32_t i = 0; i < 1024; ++i) {
      src[i] = i;
      dst[i] = i % 2 == 0 ? i / 2 : 512 + i / 2;  // never adjacent
    }
    rails.fabric.forget_counts();
    rails.finish(rails.works(src, dst, 128));
    const Counts counts = rails.fabric.counts();
    const std::uint64_t num_pieces = 1024 / 128;  // each has a fence word
    CHECK_EQ(counts.requests,
             num_pieces + 1024 / static_cast<unsigned>(max_sge_rd == 0 ? limits.max_sge : max_sge_rd));
    CHECK_EQ(counts.entries, num_pieces + 1024);
  }
}

TEST(a_page_larger_than_a_request_takes_several) {
  Rails rails(8, {}, {}, 3 * 1024 * 1024 + 12);
  rails.fabric.forget_counts();
  rails.finish(rails.some_works(8, 1));
  CHECK_EQ(rails.fabric.counts().nbytes, 8 * (rails.page_nbytes + 8));  // and fence words
  CHECK(rails.fabric.counts().largest_chain_nbytes <= 2 * 1024 * 1024);
}

TEST(options_bound_what_is_under_way) {
  verbs::Options options;
  options.num_pairs = 2;
  options.num_requests = 16;
  options.num_chained = 4;
  options.num_entries = 2;
  Rails rails(1024, options);
  rails.fabric.hold(true);
  rails.post(rails.some_works(1024, 64));
  for (int i = 0; i < 20; ++i) rails.step();
  CHECK_EQ(rails.fabric.num_under_way(), 2u * 16);
  CHECK_EQ(rails.fabric.counts().longest_chain, 4u);
  rails.fabric.hold(false);
  REQUIRE(rails.run_until([&] { return rails.dst.completion_of(16) != nullptr; }));
}

TEST(a_poll_posts_no_more_than_its_share_however_short_runs_are) {
  verbs::Options options;
  options.num_requests = 4096;
  options.num_entries = 1;
  Rails rails(65536, options, {}, 24);
  rails.fabric.hold(true);
  rails.fabric.forget_counts();
  rails.post(rails.some_works(65536, 21845));
  Completion none[1];
  rails.dst.transport->poll(none);
  const std::uint64_t once = rails.fabric.counts().requests;
  CHECK(once <= 1280);
  CHECK(once >= 640);
  CHECK(rails.dst.transport->busy());
  rails.fabric.hold(false);
}

TEST(a_region_of_many_registrations_is_read_across_their_ends) {
  Limits limits;
  limits.max_mr_nbytes = FenceTable::kNbytes;
  Rails rails(500, {}, limits, 5000);  // not a multiple of what a registration holds
  rails.finish(rails.some_works(500, 33));
}

// A device that ends requests at once and does nothing else, so that only our instructions count.
std::vector<std::uint64_t>& posted_ids() {
  static std::vector<std::uint64_t> ids;
  return ids;
}
int post_nowhere(verbs::abi::QueuePair*, verbs::abi::SendRequest* requests, verbs::abi::SendRequest**) {
  while (requests->next != nullptr) requests = requests->next;
  posted_ids().push_back(requests->id);
  return 0;
}
int complete_all(verbs::abi::CompletionQueue*, int num, verbs::abi::WorkCompletion* completions) {
  int taken = 0;
  for (; taken < num && static_cast<std::size_t>(taken) < posted_ids().size(); ++taken) {
    completions[taken] = {};
    completions[taken].id = posted_ids()[static_cast<std::size_t>(taken)];
  }
  posted_ids().erase(posted_ids().begin(), posted_ids().begin() + taken);
  return taken;
}

TEST(a_page_takes_few_instructions) {
  if (!kIsPlain) {
    std::printf("  skipped: counted where the compiler adds nothing\n");
    return;
  }
  Rails rails(4096);
  verbs::abi::Context& context = *rails.dst_device->context();
  posted_ids().reserve(4096);
  const auto steps_of = [&](std::uint32_t num_pages) {
    const std::vector<Work> works = rails.some_works(num_pages, 128);
    const auto move_all = [&] {
      context.operations.post_send = post_nowhere;
      context.operations.poll_cq = complete_all;
      static_cast<void>(testing::post_all(*rails.dst.transport, rails.peer, works));
      Completion completions[16];
      for (std::size_t num = 0; num < works.size();) num += rails.dst.transport->poll(completions);
    };
    return check::count_steps(move_all);
  };
  steps_of(128);
  const auto few = steps_of(256), many = steps_of(768);
  if (!few || !many) {
    std::printf("  skipped: this process may not be traced\n");
    return;
  }
  const std::uint64_t of_page = (*many - *few) / 512;
  std::printf("  %llu instructions a page of 4 KiB\n", static_cast<unsigned long long>(of_page));
  CHECK(of_page <= 450);
}

// ---- what ends ----------------------------------------------------------------------------------

struct Failure {
  WorkStatus status;
  const char* words[2];  // the library's, and the advice
};

TEST(an_error_of_a_request_costs_the_rail_to_that_peer_alone) {
  const Failure failures[] = {
      {WorkStatus::kRetriesExceeded, {"retry counter exceeded", "does not answer"}},
      {WorkStatus::kRnrRetriesExceeded, {"status 13", "takes no requests"}},
      {WorkStatus::kRemoteAccess, {"remote access error", "refused the key"}},
      {WorkStatus::kRemoteInvalidRequest, {"status 9", "permits no READs"}},
      {WorkStatus::kRemoteOperation, {"status 11", "kernel log of the peer's host"}},
      {WorkStatus::kLocalProtection, {"local protection error", "at this end"}},
      {WorkStatus::kLocalOperation, {"status 2", "at this end"}},
      {WorkStatus::kFatal, {"status 19", "the device at this end has failed"}},
      {WorkStatus::kFlushed, {"Flushed", "failed before"}},
  };
  for (const Failure& failure : failures) {
    Rails rails(1024);
    rails.fabric.fail(failure.status, 200);
    const std::vector<Work> works = rails.some_works(1024, 32);
    rails.post(works);
    REQUIRE(rails.run_until([&] { return rails.ended(works); }));
    std::size_t num_failed = 0;
    for (const Work& work : works) {
      if (rails.code_of(work) == Code::kOk) continue;
      ++num_failed;
      CHECK_EQ(rails.code_of(work), Code::kRailFailed);
    }
    CHECK(num_failed > 0);
    const Status down(Code::kRailFailed, rails.down_words(rails.peer));
    for (const char* words : failure.words) CHECK(says(down, words));
    for (const char* words : {"verbs: the rail to b is down", "nic1 port 1", "READ of layer 0, 32 blocks"})
      CHECK(says(down, words));
    // Nothing of the rail is left, and it may be dialled again.
    rails.other_is_undisturbed();
    rails.dst.transport->disconnect(rails.peer);
    REQUIRE(rails.run_until([&] { return rails.src.event(CompletionKind::kRailDown) != nullptr; }));
    rails.src.transport->disconnect(rails.back);
    CHECK_EQ(rails.fabric.num_pairs(), 8u);
    rails.meet(rails.src, rails.from, rails.peer, rails.back);
    rails.finish(rails.some_works(1024, 32));
  }
}

TEST(a_piece_is_never_done_whose_request_failed) {
  for (std::uint64_t after = 0; after < 40; ++after) {
    verbs::Options options;
    options.num_pairs = 1;
    Rails rails(80, options);
    rails.fabric.fail(WorkStatus::kRemoteAccess, after);
    std::vector<std::uint32_t> apart(40);
    for (std::uint32_t i = 0; i < 40; ++i) apart[i] = 2 * i;
    const std::vector<Work> works = rails.works(apart, apart, 4);
    rails.post(works);
    REQUIRE(rails.run_until([&] { return rails.ended(works); }));
    // Each piece has four requests and its fence word, which may come behind requests of later pieces.
    for (std::size_t piece = 0; piece < works.size(); ++piece)
      if (rails.code_of(works[piece]) == Code::kOk)
        CHECK(5 * (piece + 1) <= after);
      else
        CHECK_EQ(rails.code_of(works[piece]), Code::kRailFailed);
  }
}

TEST(memory_that_its_owner_deregistered_is_not_read) {
  Rails rails(1024);
  rails.src.transport->deregister_memory(1);
  const std::vector<Work> works = rails.some_works(64, 16);
  rails.post(works);
  REQUIRE(rails.run_until([&] { return rails.ended(works); }));
  for (const Work& work : works) CHECK_EQ(rails.code_of(work), Code::kRailFailed);
  CHECK(says({Code::kRailFailed, rails.down_words(rails.peer)}, "the peer deregistered that memory"));
  for (const std::byte each : rails.to.memory) REQUIRE(each == std::byte{0});
  REQUIRE(rails.run_until([&] { return rails.src.event(CompletionKind::kRailDown) != nullptr; }));
  rails.other_is_undisturbed();
}

TEST(a_doorbell_that_the_device_refuses_costs_the_rail) {
  for (const std::uint64_t from : {0u, 1u, 30u}) {
    Rails rails(1024);
    rails.fabric.refuse(from, ENOMEM);
    const std::vector<Work> works = rails.some_works(1024, 32);
    rails.post(works);
    REQUIRE(rails.run_until([&] { return rails.ended(works); }));
    CHECK(says({Code::kRailFailed, rails.down_words(rails.peer)}, "ibv_post_send"));
    rails.other_is_undisturbed();
  }
}

TEST(what_is_not_posted_is_cancelled_at_once) {
  verbs::Options options;
  options.num_pairs = 1;
  options.num_requests = 16;
  Rails rails(1024, options);
  rails.fabric.hold(true);
  const std::vector<Work> works = rails.some_works(1024, 32);
  rails.post(works);
  rails.step();
  std::vector<WorkId> all;
  for (const Work& work : works) all.push_back(work.id);
  rails.dst.transport->cancel(all);
  rails.step();
  rails.step();
  rails.step();
  rails.step();
  rails.step();
  rails.step();
  rails.step();
  rails.step();
  CHECK(rails.dst.completion_of(works.front().id) == nullptr);  // some of its requests are under way
  for (std::size_t i = 1; i < works.size(); ++i) {
    REQUIRE(rails.dst.completion_of(works[i].id) != nullptr);
    CHECK_EQ(rails.code_of(works[i]), Code::kCancelled);
  }
  rails.fabric.hold(false);
  REQUIRE(rails.run_until([&] { return rails.ended(works); }));
  CHECK_EQ(rails.code_of(works.front()), Code::kCancelled);
  CHECK(!rails.is_down(rails.peer));
  rails.fabric.forget_counts();
  rails.finish(rails.some_works(1024, 32));
  CHECK(rails.fabric.counts().requests <= 1024 + 1024 / 32);  // no more was posted of the cancelled one
}

TEST(a_cancel_behind_a_queue_that_does_not_move_ends_by_a_reset) {
  for (const bool flushes : {true, false}) {
    Rails rails(1024);
    rails.fabric.hold(true);
    const std::vector<Work> works = rails.some_works(512, 64);
    rails.post(works);
    for (int i = 0; i < 10; ++i) rails.step();
    rails.fabric.hold_flushes(!flushes);
    rails.dst.cancel(works.front().id);
    rails.step();
    CHECK(rails.dst.completion_of(works.front().id) == nullptr);
    // It sleeps in between; its own timer wakes it.
    REQUIRE(rails.run_until([&] {
      if (!rails.dst.transport->busy()) rails.dst.transport->arm();
      return rails.ended(works);
    }));
    CHECK_EQ(rails.code_of(works.front()), Code::kCancelled);
    for (std::size_t i = 1; i < works.size(); ++i) CHECK_EQ(rails.code_of(works[i]), Code::kRailFailed);
    CHECK(says({Code::kRailFailed, rails.down_words(rails.peer)},
               "cancelled READs or WRITEs did not end in time"));
    const std::vector<std::byte> at_fence = rails.to.memory;
    rails.fabric.hold_flushes(false);
    rails.fabric.hold(false);
    for (int i = 0; i < 20; ++i) rails.step();
    CHECK(at_fence == rails.to.memory);
    rails.other_is_undisturbed();
  }
}

TEST(a_disconnect_waits_for_flushes_or_destroys_queue_pairs) {
  for (const bool flushes : {true, false}) {
    Rails rails(1024);
    rails.fabric.hold(true);
    const std::vector<Work> works = rails.some_works(512, 64);
    rails.post(works);
    for (int i = 0; i < 10; ++i) rails.step();
    const std::size_t num_pairs = rails.fabric.num_pairs();
    rails.fabric.hold_flushes(true);
    rails.dst.transport->disconnect(rails.peer);
    for (int i = 0; i < 3; ++i) rails.step();
    CHECK(!rails.ended(works));  // some have requests that are not flushed yet
    if (flushes) rails.fabric.hold_flushes(false);
    REQUIRE(rails.run_until([&] { return rails.ended(works); }));
    for (const Work& work : works) CHECK_EQ(rails.code_of(work), Code::kCancelled);
    CHECK(!rails.is_down(rails.peer));
    CHECK(rails.fabric.num_pairs() <= num_pairs - 4);
    rails.fabric.hold_flushes(false);
    rails.fabric.hold(false);
    rails.other_is_undisturbed();
  }
}

TEST(a_rail_may_end_with_requests_under_way) {
  Rails rails(1024);
  rails.fabric.hold(true);
  rails.post(rails.some_works(512, 64));
  for (int i = 0; i < 10; ++i) rails.step();
  rails.dst.transport.reset();
  const std::vector<std::byte> at_end = rails.to.memory;
  rails.fabric.hold(false);
  for (int i = 0; i < 10; ++i) {
    rails.src.step();
    rails.other.step();
  }
  CHECK(at_end == rails.to.memory);
  CHECK(rails.src.event(CompletionKind::kRailDown) != nullptr);
}

TEST(a_fence_word_that_moved_on_ends_the_lease) {
  Rails rails(2048);
  const auto ask = [&](std::uint32_t slot, std::uint64_t generation) {
    const Work work = with_fence(rails.some_works(1, 1).front(), slot, generation);
    rails.post({work});
    REQUIRE(rails.run_until([&] { return rails.ended({work}); }));
    return *rails.dst.completion_of(work.id);
  };
  for (const std::uint32_t slot : {0u, 9u, FenceTable::kNumSlots - 1}) {
    CHECK_EQ(ask(slot, rails.src.fences->generation(slot)).code, Code::kOk);
    const std::uint64_t before = rails.src.fences->generation(slot);
    rails.src.fences->bump(slot);
    const Completion ended = ask(slot, before);
    CHECK_EQ(ended.code, Code::kLeaseEnded);
    CHECK(says({ended.code, ended.detail}, "b ended the right to read"));
  }
  CHECK_EQ(ask(FenceTable::kNumSlots, 0).code, Code::kInternal);
  // Many pieces at a time.
  std::vector<Work> many = rails.some_works(2000, 1);
  for (Work& work : many) work = with_fence(work, 1, rails.src.fences->generation(1));
  rails.post(many);
  REQUIRE(rails.run_until([&] { return rails.ended(many); }));
  for (const Work& work : many) CHECK_EQ(rails.code_of(work), Code::kOk);
}

TEST(a_port_that_goes_down_costs_its_rails_and_comes_back) {
  Rails rails(64);
  rails.fabric.set_port(1, false);
  REQUIRE(rails.run_until([&] { return rails.is_down(rails.peer) && rails.is_down(rails.other_peer); }));
  CHECK(says({Code::kRailFailed, rails.down_words(rails.peer)}, "nic1 port 1 announced: port error"));
  rails.dst.transport->disconnect(rails.peer);
  rails.dst.transport->disconnect(rails.other_peer);
  const auto refused = rails.dst.transport->connect(testing::socket_pair().first, {true, 0, "src"});
  CHECK_EQ(refused.status().code(), Code::kRailFailed);
  CHECK(says(refused.status(), "port error"));
  rails.fabric.set_port(1, true);
  rails.step();
  REQUIRE(rails.run_until([&] { return rails.src.event(CompletionKind::kRailDown) != nullptr; }));
  rails.src.transport->disconnect(rails.back);
  rails.meet(rails.src, rails.from, rails.peer, rails.back);
  rails.finish(rails.some_works(64, 16));
}

TEST(works_that_no_nic_can_do_are_refused_in_words) {
  Rails rails(64);
  const auto ending = [&](std::function<void(Move&, Work&)> change) {
    Work work = rails.some_works(4, 4).front();
    auto move = std::make_shared<Move>(*work.move);
    change(*move, work);
    work.move = move;
    rails.post({work});
    REQUIRE(rails.run_until([&] { return rails.ended({work}); }));
    const Completion& completion = *rails.dst.completion_of(work.id);
    return Status(completion.code, completion.detail);
  };
  const Status unknown = ending([](Move& move, Work&) { move.remote_region = 77; });
  CHECK_EQ(unknown.code(), Code::kRegionGone);
  const Status unregistered =
      ending([&](Move& move, Work&) { move.local = kvxfer::unregistered(move.local->base); });
  CHECK_EQ(unregistered.code(), Code::kUnsupported);
  CHECK(says(unregistered, "not registered with nic1 port 1"));
  const Status beyond = ending([](Move& move, Work&) { move.src_ids.back() = 64; });
  CHECK_EQ(beyond.code(), Code::kInternal);
  CHECK(says(beyond, "ends outside the region of b"));
  const Status beyond_here = ending([](Move& move, Work&) { move.dst_ids.back() = 64; });
  CHECK_EQ(beyond_here.code(), Code::kInternal);
  CHECK(says(beyond_here, "outside the region here"));
  const Status converting = ending([](Move& move, Work&) {
    auto program = std::make_shared<CopyProgram>(*move.program);
    program->conversions.resize(1);
    move.program = program;
  });
  CHECK_EQ(converting.code(), Code::kUnsupported);
  const Status sent = ending([](Move&, Work& work) { work.kind = WorkKind::kReceive; });
  CHECK_EQ(sent.code(), Code::kUnsupported);
  rails.finish(rails.some_works(64, 16));
}

// ---- memory -------------------------------------------------------------------------------------

TEST(too_little_lockable_memory_is_said_with_what_raises_the_limit) {
  Rails rails(16);
  rails.fabric.limit_registered(4 * 1024 * 1024);
  std::vector<std::byte> memory(8 * 1024 * 1024);
  LocalRegion region;
  region.id = 5;
  region.base = memory.data();
  region.spans = {{0, 1024 * 1024}, {2 * 1024 * 1024, 6 * 1024 * 1024}};
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  const rlimit low{std::min<rlim_t>(8 * 1024 * 1024, before.rlim_max), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  const std::size_t num_regions = rails.fabric.num_regions();
  const Status refused = rails.dst.transport->prepare(region).status();
  ::setrlimit(RLIMIT_MEMLOCK, &before);
  CHECK_EQ(refused.code(), Code::kExhausted);
  for (const char* words :
       {"nic1 port 1", "6 MiB", "8 MiB", "RLIMIT_MEMLOCK", "ulimit -l unlimited", "memlock=-1"})
    CHECK(says(refused, words));
  CHECK_EQ(rails.fabric.num_regions(), num_regions);  // nothing of the first span is left
  rails.fabric.limit_registered(UINT64_MAX);
  const auto prepared = rails.dst.transport->prepare(region);
  REQUIRE_OK(prepared);
  REQUIRE_OK(rails.dst.transport->register_memory(region, prepared.value()));
  rails.dst.transport->deregister_memory(5);
}

TEST(spans_that_touch_are_registered_as_one_and_empty_ones_not_at_all) {
  Rails rails(16);
  std::vector<std::byte> memory(64 * 1024);
  LocalRegion region;
  region.id = 5;
  region.base = memory.data();
  region.spans = {{0, 4096}, {4096, 4096}, {10000, 0}, {16384, 4096}};
  const std::size_t before = rails.fabric.num_regions();
  REQUIRE_OK(testing::register_memory(*rails.dst.transport, region));
  CHECK_EQ(rails.fabric.num_regions() - before, 2u * 2);  // two keys for each device
  rails.dst.transport->deregister_memory(5);
  CHECK_EQ(rails.fabric.num_regions(), before);
}

TEST(memory_that_may_only_be_read_is_a_source_and_no_destination) {
  Rails rails(64);
  rails.fabric.refuse_writable(true);
  Region read_only(rails.dst, 101, 64 * kPage);
  rails.fabric.refuse_writable(false);
  REQUIRE_OK(rails.src.transport->attach(rails.back, read_only.remote()));
  Work work = rails.some_works(4, 4).front();
  auto move = std::make_shared<Move>(*work.move);
  move->local = std::make_shared<const LocalRegion>(read_only.local);
  work.move = move;
  rails.post({work});
  REQUIRE(rails.run_until([&] { return rails.ended({work}); }));
  CHECK_EQ(rails.code_of(work), Code::kUnsupported);
  CHECK(says({Code::kUnsupported, rails.dst.completion_of(work.id)->detail}, "read-only"));
}

TEST(keys_are_a_peers_and_checked) {
  Rails rails(16);
  struct Head {
    char magic[4];
    std::uint32_t num;
  };
  struct Span {
    std::uint64_t offset, nbytes, address;
    std::uint32_t key, reserved;
  };
  const auto keys_of = [](Head head, const std::vector<Span>& spans) {
    RegionKeys keys(sizeof head + spans.size() * sizeof(Span));
    std::memcpy(keys.data(), &head, sizeof head);
    if (!spans.empty()) std::memcpy(keys.data() + sizeof head, spans.data(), spans.size() * sizeof(Span));
    return keys;
  };
  const Head one{{'k', 'v', 'v', '1'}, 1}, two{{'k', 'v', 'v', '1'}, 2},
      many{{'k', 'v', 'v', '1'}, UINT32_MAX};
  const Span good{0, 4096, 65536, 1, 0};
  RemoteRegion region = rails.from.remote();
  region.id = 9;
  const RegionKeys bad[] = {
      {},
      RegionKeys(7),
      keys_of({{'n', 'o', 'p', 'e'}, 1}, {good}),
      keys_of(two, {good}),
      keys_of(many, {good}),
      keys_of(one, {good, good}),
      keys_of(two, {good, good}),  // the same bytes twice
      keys_of(two, {{8192, 4096, 0, 1, 0}, good}),
      keys_of(one, {{0, 0, 0, 1, 0}}),
      keys_of(one, {{UINT64_MAX - 5, 4096, 0, 1, 0}}),
      keys_of(one, {{0, 4096, UINT64_MAX - 5, 1, 0}}),
  };
  for (const RegionKeys& keys : bad) {
    region.keys = keys;
    CHECK_EQ(rails.dst.transport->attach(rails.peer, region).code(), Code::kUnsupported);
  }
  region.keys = keys_of(two, {good, {4096, 4096, 0, 2, 0}});
  CHECK_OK(rails.dst.transport->attach(rails.peer, region));
  CHECK_EQ(rails.dst.transport->attach(rails.peer + 55, region).code(), Code::kRailFailed);
}

// ---- peers that lie -----------------------------------------------------------------------------

TEST(a_hello_that_is_wrong_ends_the_rail_in_words) {
  Fabric fabric;
  const std::pair<const char*, std::function<void(Message&)>> lies[] = {
      {"number of its queue pairs", [](Message& hello) { hello.num_pairs = 0; }},
      {"number of its queue pairs", [](Message& hello) { hello.num_pairs = 17; }},
      {"MTU", [](Message& hello) { hello.mtu = 0; }},
      {"MTU", [](Message& hello) { hello.mtu = 200; }},
      {"link layer", [](Message& hello) { hello.link = verbs::abi::LinkLayer(7); }},
      {"different networks", [](Message& hello) { hello.link = verbs::abi::LinkLayer::kInfiniBand; }},
      {"24 bits", [](Message& hello) { hello.pairs[3].reserved = 255; }},
      {"order of its classes", [](Message& hello) { hello.pairs[0].first_priority = 1; }},
      {"order of its classes",
       [](Message& hello) { hello.pairs[1].first_priority = 9, hello.pairs[2].first_priority = 8; }},
      {"fence table has 8 bytes", [](Message& hello) { hello.fence_nbytes = 8; }},
      {"fence words", [](Message& hello) { hello.fence_address += 4; }},
      {"fence words", [](Message& hello) { hello.fence_address = UINT64_MAX - 7; }},
      {"version", [](Message& hello) { hello.reserved_too = 1; }},
      {"version", [](Message& hello) { hello.magic[0] = 'x'; }},
      {"unknown kind", [](Message& hello) { hello.kind = MessageKind(9); }},
      {"begin with a hello", [](Message& hello) { hello.kind = MessageKind::kReady; }},
  };
  for (const auto& [words, lie] : lies) {
    Liar liar;
    lie(liar.hello);
    liar.say(liar.hello);
    const Status down(Code::kRailFailed, liar.down_words());
    CHECK(says(down, "mallory"));
    // Whether it is a hello is checked before the kind.
    CHECK(says(down, std::string_view(words) == "unknown kind" ? "hello" : words));
    CHECK(liar.victim.event(CompletionKind::kRailUp) == nullptr);
    CHECK_EQ(fabric.num_pairs(), 0u);
    liar.victim.transport->disconnect(liar.peer);
    CHECK_EQ(liar.victim.transport->busy(), false);
  }
}

TEST(a_device_name_of_a_peer_is_shown_without_what_no_name_has) {
  Message hello;
  hello.device.fill('a');
  hello.device[1] = '\n';
  CHECK_EQ(hello.device_name().substr(0, 4), "a?aa");
  CHECK_EQ(hello.device_name().size(), hello.device.size());
  hello.device.fill('\0');
  CHECK_EQ(hello.device_name(), "a device without a name");
}

TEST(a_rail_is_up_once_its_peer_is_ready_and_no_sooner) {
  Fabric fabric;
  Liar liar;
  liar.say(liar.hello, 100);
  for (int i = 0; i < 10; ++i) liar.victim.step();
  Message rest = liar.hello;
  REQUIRE(::send(liar.socket.get(), reinterpret_cast<const char*>(&rest) + 100, sizeof rest - 100,
                 MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof rest - 100));
  const Message ready = liar.hear_ready();
  CHECK(liar.victim.event(CompletionKind::kRailUp) == nullptr);
  const Work work = fetch_work(1, testing::block_move(1, nullptr, 4096, {0}, {0}, 1), 0);
  CHECK_EQ(liar.victim.transport->post(liar.peer, work), Code::kAgain);
  liar.say(ready);
  liar.victim.await(CompletionKind::kRailUp);
  liar.say(ready);
  CHECK(says({Code::kRailFailed, liar.down_words()}, "twice"));
}

TEST(a_peer_that_names_another_queue_pair_is_not_read_from) {
  Fabric fabric;
  Liar liar;
  liar.hello.pairs[0].number = 0xabcdef;
  liar.say(liar.hello);
  Message ready;
  ready.kind = MessageKind::kReady;
  liar.say(ready);
  CHECK(says({Code::kRailFailed, liar.down_words()}, "first READ over a new connection"));
  CHECK(says({Code::kRailFailed, liar.down_words()}, "retry counter exceeded"));
  CHECK(liar.victim.event(CompletionKind::kRailUp) == nullptr);
}

// A path that carries nothing does not cost a transfer: the port's other addresses are tried.
TEST(a_rail_that_carries_nothing_is_not_up_and_takes_another_address_next) {
  Fabric fabric;
  End a(on("nic0")), b(on("nic1"));
  const auto meet = [&] {
    a.completions.clear();
    b.completions.clear();
    auto [left, right] = testing::socket_pair();
    const auto b_at_a = a.transport->connect(std::move(left), {true, 0, "b"});
    const auto a_at_b = b.transport->connect(std::move(right), {false, 0, "a"});
    REQUIRE_OK(b_at_a);
    REQUIRE_OK(a_at_b);
    const auto ended = [&](End& end) {
      return end.event(CompletionKind::kRailUp) != nullptr || end.event(CompletionKind::kRailDown) != nullptr;
    };
    REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); }, [&] { return ended(a) && ended(b); }));
    const bool is_up = a.event(CompletionKind::kRailUp) != nullptr;
    CHECK_EQ(b.event(CompletionKind::kRailUp) != nullptr, is_up);
    if (!is_up)
      CHECK(says({Code::kRailFailed, a.event(CompletionKind::kRailDown)->detail}, "the rail to b is down"));
    a.transport->disconnect(b_at_a.value());
    b.transport->disconnect(a_at_b.value());
    REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); }, [&] { return fabric.num_pairs() == 0; }));
    return is_up;
  };
  fabric.lose(2);  // the address that is tried first
  CHECK(!meet());
  CHECK(meet());
  // When all have failed, addresses that worked are forgotten as well: the first one may work again.
  CHECK(!meet());
  // If all are lost, they are tried again, beginning with the first.
  for (int round = 0; round < 2; ++round)
    for (const int index : {1, 0, 2}) {
      fabric.lose(index);
      CHECK(!meet());
    }
  fabric.announce(0, EventKind::kGidChange);
  fabric.announce(1, EventKind::kGidChange);
  int rounds = 0;
  REQUIRE(a.reactor.run_until([&] { b.step(), a.step(); }, [&] { return ++rounds > 8; }));
  fabric.lose(1);
  CHECK(meet());
}

TEST(ends_with_unlike_numbers_of_queue_pairs_use_the_fewer) {
  Fabric fabric;
  verbs::Options few, many;
  few.num_pairs = 2;
  many.num_pairs = 7;
  End a(on("nic0", few)), b(on("nic1", many));
  connect_both(a, b);
  CHECK_EQ(fabric.num_pairs(), 4u);
}

TEST(queue_pairs_are_charged_to_their_session_until_they_are_gone) {
  Fabric fabric;
  End a(on("nic0")), b(on("nic1"));
  Budget::Amounts limits{};
  limits[0] = 1;
  const auto poor = std::make_shared<Budget>(limits);
  limits[0] = 1 << 20;
  const auto rich = std::make_shared<Budget>(limits);
  const auto connect = [&](const std::shared_ptr<Budget>& budget) {
    return a.transport->connect(testing::socket_pair().first, {true, 0, "b", budget});
  };
  const auto refused = connect(poor);
  CHECK_EQ(refused.status().code(), Code::kExhausted);
  CHECK(says(refused.status(), "no queue pairs are made for it: it may hold 1 bytes here"));
  CHECK_EQ(poor->used(Resource::kBytes), 0u);
  CHECK_EQ(fabric.num_pairs(), 0u);
  const auto taken = connect(rich);
  REQUIRE_OK(taken);
  const std::uint64_t held = rich->used(Resource::kBytes);
  CHECK(held > 256 * 1024);
  a.transport->disconnect(taken.value());
  REQUIRE(a.reactor.run_until([&] { a.step(); }, [&] { return fabric.num_pairs() == 0; }));
  CHECK_EQ(rich->used(Resource::kBytes), 0u);
}

// ---- devices ------------------------------------------------------------------------------------

TEST(without_a_device_it_is_off_and_says_what_to_do) {
  {
    Limits limits;
    limits.num_devices = 0;
    Fabric fabric(limits);
    CHECK(verbs::Library::why_off().find("no RDMA device was found") != std::string::npos);
    const auto none = verbs::Device::open_all(*verbs::Library::load().value(), {});
    CHECK_EQ(none.status().code(), Code::kUnsupported);
  }
  Fabric fabric;
  CHECK_EQ(verbs::Library::why_off(), "");
}

TEST(devices_are_chosen_by_name_and_by_their_ports) {
  Limits limits;
  limits.num_devices = 3;
  limits.num_ports = 2;
  Fabric fabric(limits);
  const verbs::Library& library = *verbs::Library::load().value();
  const auto names_of = [&](const std::string& wished) {
    verbs::Options options;
    options.devices = wished;
    const auto devices = verbs::Device::open_all(library, options);
    std::string names;
    if (!devices.ok()) return devices.status().message();
    for (const auto& device : devices.value()) names += (names.empty() ? "" : ", ") + device->name();
    return names;
  };
  CHECK_EQ(names_of(""), "nic0 port 1, nic0 port 2, nic1 port 1, nic1 port 2, nic2 port 1, nic2 port 2");
  CHECK_EQ(names_of("nic2,nic0"), "nic0 port 1, nic0 port 2, nic2 port 1, nic2 port 2");
  CHECK(says({Code::kUnsupported, names_of("nic7")}, "not among verbs.devices"));
  fabric.set_port(1, false);
  CHECK(says({Code::kUnsupported, names_of("nic1")}, "nic1 port 1: not active"));
}

TEST(a_gid_that_is_named_is_used_and_one_that_is_not_there_refused) {
  Fabric fabric;
  for (const int index : {0, 1, 2, 9}) {
    verbs::Options options;
    options.gid_index = index;
    End end(on("nic0", options));
    const auto connected = end.transport->connect(testing::socket_pair().first, {true, 0, "b"});
    CHECK_EQ(connected.ok(), index < 3);
    if (index >= 3) CHECK(says(connected.status(), "verbs.gid_index"));
  }
}

}  // namespace
}  // namespace kvxfer::verbs_test
