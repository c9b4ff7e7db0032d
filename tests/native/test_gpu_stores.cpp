// Pages that kernels store straight into another process's memory, over an emulated driver.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_threads.h"
#include "offered_memory.h"

#include "gpu/examples/store_pages.cu"

namespace kvxfer {
namespace {

using emulated::device;
using namespace offered_memory;

constexpr unsigned kForever = ~0u - 1;

TEST(any_bytes_are_stored_whatever_their_alignment_and_no_others) {
  constexpr std::size_t kRoom = 700;
  alignas(16) std::array<unsigned char, kRoom> from;
  std::iota(from.begin(), from.end(), static_cast<unsigned char>(1));
  for (const unsigned threads : {1u, 32u})
    for (const std::size_t to_at : {0u, 1u, 4u, 16u})
      for (const std::size_t from_at : {0u, 2u, 4u, 16u})
        for (const std::size_t nbytes : {0u, 1u, 15u, 16u, 63u, 64u, 500u, 612u}) {
          alignas(16) std::array<unsigned char, kRoom> to;
          to.fill(0);
          cuda_threads::launch(1, threads, 0, [&] {
            store_page(to.data() + to_at, from.data() + from_at, nbytes, threadIdx.x, blockDim.x);
          });
          CHECK(std::equal(from.begin() + from_at, from.begin() + from_at + nbytes, to.begin() + to_at));
          CHECK_EQ(std::count(to.begin(), to.begin() + to_at, 0), static_cast<long>(to_at));
          CHECK_EQ(std::count(to.begin() + to_at + nbytes, to.end(), 0),
                   static_cast<long>(kRoom - to_at - nbytes));
        }
}

TEST(kernels_of_both_ends_pass_pages_on) {
  constexpr unsigned kPages = 4, kCtas = 3, kWords = 260;  // in each page
  constexpr std::uint64_t kPageNbytes = kWords * sizeof(unsigned);
  const gpu::Address theirs = shareable();
  const auto mapped = map(exported(theirs));
  REQUIRE_OK(mapped);
  const gpu::Address here = mapped.value().address();
  constexpr std::uint64_t kWordAt = kPages * kPageNbytes;
  std::vector<unsigned> ours(kPages * kWords);
  std::iota(ours.begin(), ours.end(), 1);
  const unsigned table[kPages] = {2, 0, 3, 1};
  for (unsigned round = 1; round <= 3; ++round) {
    unsigned sum = 0;
    std::jthread reader([&] {
      cuda_threads::launch(1, 4, 0, read_pages, at<unsigned>(theirs), kPages * kWords,
                           at<unsigned>(theirs + kWordAt), round * kCtas, kForever, &sum);
    });
    cuda_threads::launch(kCtas, 8, 0, store_pages, at<char>(here), reinterpret_cast<const char*>(ours.data()),
                         static_cast<const unsigned*>(table), kPages, kPageNbytes,
                         at<unsigned>(here + kWordAt));
    reader.join();
    CHECK_EQ(sum, std::accumulate(ours.begin(), ours.end(), 0u));
    for (unsigned page = 0; page < kPages; ++page)
      CHECK_EQ(
          std::memcmp(at<char>(theirs) + page * kPageNbytes, ours.data() + table[page] * kWords, kPageNbytes),
          0);
    for (unsigned& word : ours) ++word;
  }
  emulated::release(theirs);
}

TEST(who_waits_in_vain_is_told) {
  unsigned word = 2, sum = 0;
  const unsigned page = 7;
  cuda_threads::launch(1, 2, 0, read_pages, &page, 1u, &word, 3u, 5u, &sum);
  CHECK_EQ(sum, 0u);
}

// Stores a page in bulk, and announces it by a word behind it.
void check_stored_in_bulk(gpu::Address there) {
  alignas(16) const unsigned char page[64] = {4, 5, 6};
  unsigned* const word = at<unsigned>(there + 1024);
  const unsigned before = *word;
  cuda_threads::launch(1, 4, sizeof(StoreRing<>), [&] {
    PageStores<> stores(static_cast<StoreRing<>*>(shared_memory()));
    stores.store(at<unsigned char>(there), page, sizeof page);
    stores.arrive(word);
  });
  CHECK_EQ(std::memcmp(at<unsigned char>(there), page, sizeof page), 0);
  CHECK_EQ(*word, before + 1);
}

TEST(an_owner_frees_its_memory_while_others_store_there) {
  const gpu::Address theirs = shareable();
  auto mapped = map(exported(theirs));
  REQUIRE_OK(mapped);
  emulated::release(theirs);
  const unsigned char page[64] = {1, 2, 3};
  auto* there = at<unsigned char>(mapped.value().address());
  cuda_threads::launch(1, 4, 0, [&] { store_page(there, page, sizeof page, threadIdx.x, blockDim.x); });
  CHECK_EQ(std::memcmp(there, page, sizeof page), 0);
  check_stored_in_bulk(mapped.value().address());
}

TEST(an_owner_that_died_is_stored_to_and_nothing_happens) {
  int ends[2];
  REQUIRE_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    gpu::Address address = 0;
    if (emulated::allocate(&address, kNbytes, true, gpu::kPosixFdHandle) != 0) ::_exit(1);
    auto memory = gpu::export_memory(emulated::driver(), address);
    if (!memory.ok()) ::_exit(2);
    const int fd = memory.value().fd.get();
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    ::_exit(::sendmsg(ends[1], &message, 0) == 1 ? 0 : 3);
  }
  char byte;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  REQUIRE_EQ(::recvmsg(ends[0], &message, 0), 1);
  int status = 0, fd = -1;
  REQUIRE_EQ(::waitpid(child, &status, 0), child);
  REQUIRE_EQ(status, 0);
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  gpu::ExportedMemory memory;
  memory.kind = gpu::HandleKind::kPosixFd;
  memory.nbytes = kNbytes;
  memory.fd.reset(fd);
  const auto mapped = map(memory);
  REQUIRE_OK(mapped);
  unsigned* word = at<unsigned>(mapped.value().address());
  cuda_threads::launch(2, 2, 0, [&] { arrive(word); });
  CHECK_EQ(*word, 2u);
  check_stored_in_bulk(mapped.value().address());
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(memory_that_cannot_be_mapped_is_refused_and_nothing_is_left) {
  const gpu::Address theirs = shareable();
  const int reserved = device().num_reserved, handles = device().num_handles;
  gpu::ExportedMemory larger = exported(theirs);
  larger.nbytes = 2 * kNbytes;  // than it is
  CHECK_EQ(map(larger).status().code(), Code::kSystem);
  gpu::ExportedMemory closed = exported(theirs);
  closed.fd.reset(-1);
  CHECK_EQ(map(closed).status().code(), Code::kSystem);
  device().access_error = emulated::kNotPermitted;  // the GPU does not reach it
  const auto unreached = map(exported(theirs));
  CHECK_REFUSED(unreached.status(), Code::kSystem, "cuMemSetAccess");
  device().access_error = 0;
  CHECK_EQ(device().num_reserved.load(), reserved);
  CHECK_EQ(device().num_handles.load(), handles);
  emulated::release(theirs);
}

}  // namespace
}  // namespace kvxfer
