// Records of what has ended: the newest are kept, in order, and a descriptor announces once that there are
// some.
#include "core/record_ring.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace kvxfer::record_ring_test {
namespace {

void push(RecordRing& ring, std::uint64_t number) {
  ring.push([&](Record& record) noexcept { record.transfer = number; });
}

std::vector<std::uint64_t> take(RecordRing& ring, std::size_t most) {
  std::vector<Record> records(most);
  records.resize(ring.take(records));
  std::vector<std::uint64_t> numbers;
  for (const Record& record : records) numbers.push_back(record.transfer);
  return numbers;
}

std::vector<std::uint64_t> numbers(std::uint64_t first, std::uint64_t last) {
  std::vector<std::uint64_t> out(last - first);
  std::iota(out.begin(), out.end(), first);
  return out;
}

bool readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, 0) == 1;
}

TEST(the_newest_are_kept_and_the_others_are_counted) {
  // Capacities around the number that is copied under one lock, and records that cross the end of the memory.
  for (const std::size_t capacity : {1u, 3u, 32u, 33u, 100u}) {
    RecordRing ring;
    REQUIRE(ring.resize(capacity).ok());
    std::uint64_t next = 0;
    for (const std::size_t num : {capacity, std::size_t{1}, capacity + 2, 3 * capacity}) {
      const std::uint64_t dropped = ring.num_dropped();
      for (std::size_t i = 0; i < num; ++i) push(ring, next++);
      const std::size_t kept = std::min(num, capacity);
      CHECK_EQ(ring.num_dropped() - dropped, num - kept);
      CHECK_EQ(ring.size(), kept);
      CHECK(take(ring, kept / 2) == numbers(next - kept, next - kept + kept / 2));
      CHECK(take(ring, capacity + 5) == numbers(next - kept + kept / 2, next));
    }
  }
}

TEST(the_descriptor_is_readable_while_there_are_records) {
  RecordRing ring;
  const Result<int> fd = ring.resize(8);
  REQUIRE(fd.ok());
  CHECK(!readable(fd.value()));
  for (std::uint64_t i = 0; i < 3; ++i) push(ring, i);
  CHECK(readable(fd.value()));
  CHECK_EQ(take(ring, 2).size(), 2u);
  CHECK(readable(fd.value()));
  CHECK_EQ(take(ring, 2).size(), 1u);
  CHECK(!readable(fd.value()));
  CHECK_EQ(take(ring, 2).size(), 0u);
  push(ring, 3);
  CHECK(readable(fd.value()));
}

TEST(a_change_is_told_once_until_who_watches_has_looked) {
  RecordRing ring;
  ring.note_change();  // without a reader
  const Result<int> fd = ring.resize(4);
  CHECK(!readable(fd.value()));
  for (const bool with_record : {false, true}) {
    ring.note_change();
    ring.note_change();
    if (with_record) push(ring, 1);
    CHECK(readable(fd.value()));
    CHECK_EQ(take(ring, 0).size(), 0u);
    CHECK_EQ(readable(fd.value()), with_record);
    CHECK_EQ(take(ring, 4).size(), with_record ? 1u : 0u);
    CHECK(!readable(fd.value()));
  }
  push(ring, 2);
  ring.note_change();
  CHECK_EQ(take(ring, 4).size(), 1u);
  CHECK(!readable(fd.value()));
  CHECK_EQ(ring.num_changes(), 6u);
}

TEST(another_capacity_keeps_the_newest_and_the_descriptor) {
  RecordRing ring;
  const Result<int> fd = ring.resize(4);
  for (std::uint64_t i = 0; i < 6; ++i) push(ring, i);  // 2 to 5, across the end
  for (const std::size_t capacity : {9u, 3u, 0u}) {
    const Result<int> again = ring.resize(capacity);
    REQUIRE(again.ok());
    CHECK_EQ(again.value(), fd.value());
  }
  CHECK_EQ(ring.num_dropped(), 3u);
  CHECK(readable(fd.value()));
  CHECK(take(ring, 8) == numbers(3, 6));
  CHECK(!readable(fd.value()));
  CHECK_EQ(ring.resize(RecordRing::kMostCapacity + 1).status().code(), Code::kInvalidArgument);
}

TEST(a_ring_that_nobody_asked_for_keeps_nothing) {
  RecordRing ring;
  push(ring, 1);
  CHECK_EQ(take(ring, 1).size(), 0u);
  CHECK_EQ(ring.num_dropped(), 0u);
}

TEST(texts_are_cut_and_names_of_rails_are_whole) {
  Record record{};
  record.set_message(std::string(500, 'm'));
  CHECK_EQ(record.message_nbytes, sizeof record.message);
  const std::vector<std::byte> context(256, std::byte{'c'});
  record.set_context(context);
  CHECK_EQ(record.context_nbytes, sizeof record.context);
  struct Case {
    std::vector<std::string> names;
    std::string text;
  };
  const Case cases[] = {{{}, ""},
                        {{"shm"}, "shm"},
                        {{"shm", "tcp"}, "shm,tcp"},
                        {{"eleven chars", "eleven char"}, "eleven chars,eleven char"},
                        {{"eleven chars", "twelve chars", "tcp"}, "eleven chars"},
                        {{std::string(25, 'x')}, ""}};
  for (const auto& [names, text] : cases) {
    record.set_rails(std::span<const std::string>(names));
    CHECK_EQ(std::string(record.rails, record.rails_nbytes), text);
  }
}

// Each record is taken once and in order, by any thread; those that are not taken are counted.
TEST(threads_take_while_another_pushes) {
  constexpr std::uint64_t kNum = 20'000;
  RecordRing ring;
  REQUIRE(ring.resize(64).ok());
  std::atomic<bool> over{false};
  std::array<std::vector<std::uint64_t>, 2> taken;
  std::vector<std::thread> takers;
  for (auto& mine : taken)
    takers.emplace_back([&ring, &over, &mine] {
      for (bool last = false; !last;) {
        last = over;
        for (std::vector<std::uint64_t> some; !(some = take(ring, 40)).empty();)
          mine.insert(mine.end(), some.begin(), some.end());
      }
    });
  for (std::uint64_t i = 0; i < kNum; ++i) push(ring, i);
  over = true;
  for (std::thread& taker : takers) taker.join();
  std::vector<bool> seen(kNum);
  for (const auto& mine : taken) {
    CHECK(std::is_sorted(mine.begin(), mine.end()));
    for (const std::uint64_t number : mine) {
      CHECK(!seen[number]);
      seen[number] = true;
    }
  }
  CHECK_EQ(taken[0].size() + taken[1].size() + ring.num_dropped(), kNum);
}

}  // namespace
}  // namespace kvxfer::record_ring_test
