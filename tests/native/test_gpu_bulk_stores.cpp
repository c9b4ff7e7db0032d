// Pages that kernels store in bulk (kvxfer::PageStores), over emulated bulk copies that arrive as late as
// they may.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_threads.h"
#include "offered_memory.h"

#include "gpu/examples/store_in_bulk.cu"
#include "gpu/examples/store_pages.cu"

namespace kvxfer {
namespace {

using namespace offered_memory;

constexpr unsigned kForever = ~0u - 1;
constexpr std::size_t kStage = kStoreStageNbytes;

// A page that a kernel stores: source, destination, number of bytes.
struct Page {
  bool from_shared;
  std::size_t from_at, to_at, nbytes;
};

// Pages of any length, one after the other, and at any alignment at the destination. Pages from shared memory
// (`shared_nbytes`) lie one after the other there, too.
std::vector<Page> any_pages(check::Random& random, std::size_t num_pages, std::size_t shared_nbytes,
                            std::size_t from_nbytes) {
  constexpr std::size_t kAlignments[] = {1, 4, 16, 16, 16, 16, 64};
  std::vector<Page> pages;
  std::size_t to_at = 0, shared_at = 0;
  for (std::size_t k = 0; k < num_pages; ++k) {
    const std::size_t alignment = kAlignments[random.below(std::size(kAlignments))];
    const auto aligned = [&](std::size_t at) { return (at + alignment - 1) / alignment * alignment; };
    Page page{random.chance(50), 0, aligned(to_at + random.below(3)), random.below(3 * kStage)};
    if (random.chance(70)) page.nbytes = page.nbytes / 16 * 16;
    if (random.chance(10)) page.nbytes = random.below(20);
    if (page.from_shared) {
      page.from_at = aligned(shared_at);
      page.nbytes = std::min(page.nbytes, shared_nbytes - std::min(shared_nbytes, page.from_at));
      shared_at = page.from_at + page.nbytes;
    } else {
      page.from_at = random.below(from_nbytes - page.nbytes - 64) / alignment * alignment;
    }
    to_at = page.to_at + page.nbytes;
    pages.push_back(page);
  }
  return pages;
}

// A thread's share of a copy within its own CTA.
void fill(unsigned char* to, const unsigned char* from, std::size_t nbytes, const Threads& threads) {
  for (std::size_t k = threads.index; k < nbytes; k += threads.count) to[k] = from[k];
}

unsigned char* behind(void* ring, std::size_t ring_nbytes) {
  return static_cast<unsigned char*>(ring) + ring_nbytes;
}

template <class Stores>
void check_any_pages(check::Random& random, bool with_ring) {
  constexpr std::size_t kShared = 5 * kStage, kFrom = 8 * kStage, kRing = sizeof(typename Stores::Ring);
  struct alignas(64) Line { unsigned char bytes[64]; };
  std::vector<Line> from_lines(kFrom / sizeof(Line));
  auto* const from = reinterpret_cast<unsigned char*>(from_lines.data());
  random.fill(from, kFrom);
  const std::vector<Page> pages = any_pages(random, random.between(1, 12), kShared, kFrom);
  const std::size_t to_nbytes = pages.back().to_at + pages.back().nbytes + 64;
  std::vector<Line> to_lines(to_nbytes / sizeof(Line) + 1);
  auto* const to = reinterpret_cast<unsigned char*>(to_lines.data());

  std::vector<unsigned char> expected(to_nbytes, 0);
  for (const Page& page : pages) std::memcpy(&expected[page.to_at], from + page.from_at, page.nbytes);

  unsigned word = 0;
  bool seen = false;
  std::jthread reader(
      [&] { seen = wait_for(&word, 1, kForever) && std::equal(expected.begin(), expected.end(), to); });
  cuda_threads::launch(1, static_cast<unsigned>(random.between(1, 5)), kRing + kShared, [&] {
    Stores stores(with_ring ? static_cast<typename Stores::Ring*>(shared_memory()) : nullptr);
    unsigned char* const computed = behind(shared_memory(), kRing);
    for (const Page& page : pages) {
      if (!page.from_shared) {
        stores.store(to + page.to_at, from + page.from_at, page.nbytes);
      } else {
        fill(computed + page.from_at, from + page.from_at, page.nbytes, this_cta());
        stores.store(to + page.to_at, computed + page.from_at, page.nbytes);
      }
    }
    stores.arrive(&word);
  });
  reader.join();
  CHECK(seen);
}

TEST(pages_of_all_lengths_from_anywhere_are_there_when_they_are_told_and_no_other_bytes) {
  check::Random random(check::seed());
  for (int round = 0; round < 12; ++round) {
    const bool with_ring = random.chance(75);
    check_any_pages<PageStores<>>(random, with_ring);
    check_any_pages<PageStores<2>>(random, with_ring);
    check_any_pages<PageStores<3>>(random, with_ring);
  }
}

TEST(where_there_are_no_bulk_copies_it_is_the_same_source_and_the_same_bytes) {
  check::Random random(check::seed());
  for (int round = 0; round < 12; ++round)
    check_any_pages<PageStores<kStoreStages, false>>(random, random.chance(50));
}

// Pages that are computed one after the other and stored. There is room for kButLast + 1 of them, so each is
// computed where an earlier page has been read; the ring goes round many times.
template <class Stores, int kButLast>
void check_waits(std::size_t page_nbytes, bool computed_in_shared) {
  constexpr unsigned kPages = 24, kThreads = 4, kRoom = kButLast + 1;
  const std::size_t num_vectors = page_nbytes / sizeof(uint4);
  std::vector<uint4> there(kPages * num_vectors), on_device(kRoom * num_vectors);
  const auto byte_of = [](unsigned page, std::size_t k) {
    return static_cast<unsigned char>(page * 3 + k % 97);
  };
  unsigned word = 0;
  cuda_threads::launch(1, kThreads, sizeof(typename Stores::Ring) + kRoom * page_nbytes, [&] {
    Stores stores(static_cast<typename Stores::Ring*>(shared_memory()));
    const Threads threads = this_cta();
    auto* const room = computed_in_shared ? behind(shared_memory(), sizeof(typename Stores::Ring))
                                          : reinterpret_cast<unsigned char*>(on_device.data());
    for (unsigned page = 0; page < kPages; ++page) {
      unsigned char* const bytes = room + page % kRoom * page_nbytes;
      stores.template wait_until_read<kButLast>();
      for (std::size_t k = threads.index; k < page_nbytes; k += kThreads) bytes[k] = byte_of(page, k);
      stores.store(&there[page * num_vectors], bytes, page_nbytes);
      if (page % 8 != 7) continue;
      stores.finish();
      if (threads.index == threads.count - 1) fire(&word, page + 1);
    }
  });
  CHECK_EQ(word, kPages);
  for (unsigned page = 0; page < kPages; ++page) {
    const auto* const bytes = reinterpret_cast<unsigned char*>(&there[page * num_vectors]);
    std::size_t num_wrong = 0;
    for (std::size_t k = 0; k < page_nbytes; ++k) num_wrong += bytes[k] != byte_of(page, k);
    CHECK_EQ(num_wrong, 0u);
  }
}

TEST(where_a_page_lay_the_next_is_computed_when_it_has_been_read) {
  for (const bool computed_in_shared : {true, false})
    for (const std::size_t nbytes : {std::size_t{256}, kStage, 3 * kStage - 48}) {
      check_waits<PageStores<>, 0>(nbytes, computed_in_shared);
      check_waits<PageStores<>, 1>(nbytes, computed_in_shared);
      check_waits<PageStores<>, 3>(nbytes, computed_in_shared);
      check_waits<PageStores<2>, 1>(nbytes, computed_in_shared);
      check_waits<PageStores<kStoreStages, false>, 1>(nbytes, computed_in_shared);
    }
}

TEST(a_page_that_is_empty_or_on_no_boundary_counts_among_the_last) {
  constexpr std::size_t kPage = kStage;
  std::vector<uint4> there(3 * kPage / sizeof(uint4));
  auto* const bytes = reinterpret_cast<unsigned char*>(there.data());
  for (const std::size_t at : {std::size_t{0}, std::size_t{1}}) {
    std::fill(bytes, bytes + 3 * kPage, 0);
    cuda_threads::launch(1, 2, 2 * kPage, [&] {
      PageStores<> stores;
      const Threads threads = this_cta();
      auto* const page = static_cast<unsigned char*>(shared_memory());
      auto* const next = page + kPage;
      for (std::size_t k = threads.index; k < kPage; k += threads.count) page[k] = next[k] = 7;
      stores.store(bytes, page, kPage);
      stores.store(bytes + kPage + at, next, at == 0 ? 0 : kPage);
      stores.wait_until_read<1>();
      for (std::size_t k = threads.index; k < kPage; k += threads.count) page[k] = 8;
      stores.finish();
    });
    CHECK_EQ(std::count(bytes, bytes + kPage, 7), static_cast<long>(kPage));
    CHECK_EQ(std::count(bytes + kPage, bytes + 3 * kPage, 7), static_cast<long>(at * kPage));
  }
}

TEST(what_is_stored_behind_an_arrival_is_told_by_the_next) {
  constexpr unsigned kRounds = 8;
  constexpr std::size_t kPage = 3 * kStage + 7;  // threads store the last bytes themselves
  constexpr std::size_t kRoom = (kPage + 15) / 16;
  std::vector<uint4> ours(kRounds * kRoom), theirs(ours.size());
  check::Random(check::seed()).fill(reinterpret_cast<unsigned*>(ours.data()), ours.size() * 4);
  unsigned word = 0;
  bool seen[kRounds] = {};
  std::jthread reader([&] {
    for (unsigned round = 0; round < kRounds; ++round)
      seen[round] = wait_for(&word, round + 1, kForever) &&
                    std::memcmp(&theirs[round * kRoom], &ours[round * kRoom], kPage) == 0;
  });
  cuda_threads::launch(1, 3, sizeof(StoreRing<>), [&] {
    PageStores<> stores(static_cast<StoreRing<>*>(shared_memory()));
    for (unsigned round = 0; round < kRounds; ++round) {
      stores.store(&theirs[round * kRoom], &ours[round * kRoom], kPage);
      if (round % 2 == 0) {
        stores.arrive(&word);
      } else {
        stores.finish();
        if (threadIdx.x == 1) fire(&word, round + 1);  // any thread may
        __syncthreads();  // before another arrival
      }
    }
  });
  reader.join();
  CHECK_EQ(word, kRounds);
  for (const bool round : seen) CHECK(round);
}

TEST(warps_store_by_themselves_and_the_others_go_their_own_way) {
  constexpr unsigned kStoring = 2;  // and one that reads
  constexpr std::size_t kPage = kStage + 64, kOwn = (sizeof(StoreRing<2>) + kPage + 127) / 128 * 128;
  constexpr unsigned kPages[kStoring] = {2, 5}, kAll = 7;
  std::vector<uint4> ours(kAll * kPage / sizeof(uint4)), theirs(ours.size());
  check::Random(check::seed()).fill(reinterpret_cast<unsigned*>(ours.data()), ours.size() * 4);
  unsigned word = 0, num_seeing = 0;
  cuda_threads::launch(1, (kStoring + 1) * cuda_threads::kWarp, kStoring * kOwn, [&] {
    const unsigned warp = threadIdx.x / cuda_threads::kWarp;
    if (warp == kStoring) {  // reaches no barrier before the pages have arrived
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!wait_for(&word, kStoring, 0) && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (wait_for(&word, kStoring, 0) &&
          std::memcmp(theirs.data(), ours.data(), ours.size() * sizeof(uint4)) == 0)
        atomicAdd(&num_seeing, 1);
      return;
    }
    const Threads threads{threadIdx.x % cuda_threads::kWarp, cuda_threads::kWarp, 1 + warp};
    unsigned char* const own = static_cast<unsigned char*>(shared_memory()) + warp * kOwn;
    unsigned char* const computed = behind(own, sizeof(StoreRing<2>));
    PageStores<2> stores(reinterpret_cast<StoreRing<2>*>(own), threads);
    for (unsigned page = 0; page < kPages[warp]; ++page) {
      const std::size_t at = (warp * kPages[0] + page) * kPage;
      auto* const from = reinterpret_cast<unsigned char*>(ours.data()) + at;
      auto* const to = reinterpret_cast<unsigned char*>(theirs.data()) + at;
      if (page % 2 == 0) {
        stores.store(to, from, kPage);
      } else {
        stores.wait_until_read();
        fill(computed, from, kPage, threads);
        stores.store(to, computed, kPage);
      }
    }
    stores.arrive(&word);
  });
  CHECK_EQ(word, kStoring);
  CHECK_EQ(num_seeing, cuda_threads::kWarp);
}

// Another process's pages, and a word there that announces them.
class Theirs {
 public:
  Theirs() : theirs_(shareable()), mapped_(map(exported(theirs_))) { REQUIRE_OK(mapped_); }
  ~Theirs() { emulated::release(theirs_); }
  Theirs(const Theirs&) = delete;
  Theirs& operator=(const Theirs&) = delete;

  template <class T>
  T* pages() {  // as their owner sees them
    return at<T>(theirs_);
  }
  template <class T>
  T* mapped_pages() {
    return at<T>(mapped_.value().address());
  }
  unsigned* word() { return at<unsigned>(theirs_ + kWordAt); }
  unsigned* mapped_word() { return at<unsigned>(mapped_.value().address() + kWordAt); }

 private:
  static constexpr std::uint64_t kWordAt = kNbytes - 64;

  const gpu::Address theirs_;
  const Result<gpu::PeerMemory> mapped_;
};

TEST(kernels_of_both_ends_pass_pages_on_in_bulk) {
  constexpr unsigned kPages = 5, kCtas = 3, kWords = (2 * kStage + 400) / sizeof(unsigned);  // in each page
  constexpr std::uint64_t kPageNbytes = kWords * sizeof(unsigned);
  Theirs theirs;
  std::vector<uint4> memory(kPages * kPageNbytes / sizeof(uint4));
  auto* const ours = reinterpret_cast<unsigned*>(memory.data());
  std::iota(ours, ours + kPages * kWords, 1u);
  const unsigned table[kPages] = {2, 0, 4, 3, 1};
  for (unsigned round = 1; round <= 3; ++round) {
    unsigned sum = 0;
    std::jthread reader([&] {
      cuda_threads::launch(1, 4, 0, read_pages, theirs.pages<unsigned>(), kPages * kWords, theirs.word(),
                           round * kCtas, kForever, &sum);
    });
    cuda_threads::launch(kCtas, 8, sizeof(StoreRing<>), store_pages_in_bulk, theirs.mapped_pages<char>(),
                         reinterpret_cast<const char*>(ours), static_cast<const unsigned*>(table), kPages,
                         kPageNbytes, theirs.mapped_word());
    reader.join();
    CHECK_EQ(sum, std::accumulate(ours, ours + kPages * kWords, 0u));
    for (unsigned page = 0; page < kPages; ++page)
      CHECK_EQ(
          std::memcmp(theirs.pages<char>() + page * kPageNbytes, ours + table[page] * kWords, kPageNbytes),
          0);
    for (unsigned at = 0; at < kPages * kWords; ++at) ++ours[at];
  }
}

TEST(keys_are_rotated_and_stored_page_by_page) {
  constexpr unsigned kPages = 7, kCtas = 2, kPageTokens = 3, kHeadDim = 32, kHalf = kHeadDim / 2;
  constexpr unsigned kPageSize = kPageTokens * kHeadDim;
  Theirs theirs;
  check::Random random(check::seed());
  std::vector<float> keys(kPages * kPageSize), cosines(kPages * kPageSize / 2), sines(cosines.size());
  for (float& key : keys) key = static_cast<float>(random.below(2000)) / 1000 - 1;
  for (std::size_t k = 0; k < cosines.size(); ++k) {
    const auto angle = static_cast<float>(k / kHalf) / static_cast<float>(1 + k % kHalf);
    cosines[k] = std::cos(angle);
    sines[k] = std::sin(angle);
  }
  std::vector<unsigned> table(kPages);
  std::iota(table.begin(), table.end(), 0u);
  random.shuffle(table);
  cuda_threads::launch(kCtas, 8, 2 * kPageSize * sizeof(float), rotate_and_store,
                       theirs.mapped_pages<float>(), static_cast<const float*>(keys.data()),
                       static_cast<const float*>(cosines.data()), static_cast<const float*>(sines.data()),
                       static_cast<const unsigned*>(table.data()), kPages, kPageTokens, kHeadDim,
                       theirs.mapped_word());
  REQUIRE(wait_for(theirs.word(), kCtas, 0));
  for (unsigned page = 0; page < kPages; ++page)
    for (unsigned token = 0; token < kPageTokens; ++token)
      for (unsigned pair = 0; pair < kHalf; ++pair) {
        const std::size_t key = page * kPageSize + token * kHeadDim + pair,
                          angle = key / kHeadDim * kHalf + pair;
        const float* const stored = theirs.pages<float>() + table[page] * kPageSize + token * kHeadDim + pair;
        CHECK(std::abs(stored[0] - (keys[key] * cosines[angle] - keys[key + kHalf] * sines[angle])) < 1e-5f);
        CHECK(std::abs(stored[kHalf] - (keys[key] * sines[angle] + keys[key + kHalf] * cosines[angle])) <
              1e-5f);
      }
}

}  // namespace
}  // namespace kvxfer
