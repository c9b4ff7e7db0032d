// Copies that are submitted to a GPU, over a driver whose device is this process (emulated_driver.h): what
// arrives, in which order ends are announced, and what happens when tables run out of room or the device
// fails.
#include <chrono>
#include <cstring>
#include <thread>

#include "check.h"
#include "emulated_driver.h"
#include "emulated_kernels.h"
#include "gpu/copy_stream.h"
#include "gpu/shared_memory.h"
#include "gpu_memory.h"
#include "program_samples.h"

namespace gpu_stream_test {
namespace {

using namespace gpu_memory;
using namespace program_samples;
using emulated::device;
using emulated::driver;
using gpu::Address;
using gpu::CopyStream;

std::unique_ptr<CopyStream> make_stream(std::uint32_t tables_nbytes = 64 * 1024) {
  auto context = gpu::PrimaryContext::retain(driver(), 0);
  REQUIRE_OK(context);
  auto stream = CopyStream::create(
      driver(), context.value().get(), emulated::kernels(),
      {.num_ctas = 1, .tables_nbytes = tables_nbytes, .calibration = emulated::calibration()});
  REQUIRE_OK(stream);
  return std::move(stream).value();
}

// For copies that may take either way (emulated::by_engines); otherwise kernels copy.
constexpr gpu::Direction kAnyWay = gpu::Direction::kToHost;

gpu::Part whole(const Move& move) {
  return {move.grid.first_layer, move.grid.num_layers, move.grid.num_pairs, move.grid.num_fine};
}

Wish any_copy(check::Random& random) {
  Wish wish = any_wish(random);
  wish.conversions.reset();
  return wish;
}

std::vector<std::byte> expected_of(const Move& move, const std::byte* src, const DeviceMemory& dst) {
  std::vector<std::byte> expected(dst.data(), dst.data() + dst.size());
  for (std::uint32_t piece = 0; piece < move.grid.num_pieces(); ++piece)
    apply(move, piece, src, expected.data());
  return expected;
}

void wait_until(const CopyStream& stream, CopyStream::Ticket ticket) {
  while (stream.done() < ticket) std::this_thread::yield();
}

TEST(copies_end_in_order_and_their_bytes_are_there) {
  check::Random random(check::seed());
  auto stream = make_stream();
  CopyStream::Ticket last = 0;
  for (int round = 0; round < 20; ++round) {
    Sample sample(random, any_copy(random));
    DeviceMemory src(sample.src.end), dst(sample.dst.end);
    random.fill(dst.data(), dst.size());
    sample.fill_source(src.data());
    const auto expected = expected_of(sample.move, src.data(), dst);
    const auto ticket =
        stream->submit(*sample.move.program, whole(sample.move), sample.move.src_ids, sample.move.dst_ids,
                       gpu::Placement(src.address()), gpu::Placement(dst.address()), kAnyWay);
    REQUIRE_OK(ticket);
    CHECK(ticket.value() > last);
    last = ticket.value();
    wait_until(*stream, last);
    REQUIRE(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
    CHECK(stream->check().ok());
  }
}

// The layout is the same at both ends, and its layers can lie apart.
TEST(layers_in_memory_of_their_own_arrive_as_from_one) {
  check::Random random(check::seed());
  constexpr std::uint64_t kLayerNbytes = 1 << 16, kNbytes = 96;
  constexpr std::uint32_t kLayers = 6, kPairs = 12;
  CopyProgram program;
  program.num_layers = kLayers;
  CopyLoop loop{};
  loop.num_layers = kLayers;
  loop.src_offset = 640;
  loop.src_layer_stride = kLayerNbytes;
  loop.dst_layer_stride = kPairs * kNbytes * 4;
  loop.src_block_stride = 1024;
  loop.dst_block_stride = kNbytes * 4;
  loop.counts[0] = 2;
  loop.counts[1] = 2;
  loop.src_strides[0] = 512;
  loop.src_strides[1] = 160;
  loop.dst_strides[0] = 2 * kNbytes;
  loop.dst_strides[1] = kNbytes;
  loop.nbytes = kNbytes;
  program.loops = {loop};
  std::vector<std::uint32_t> src_ids(kPairs), dst_ids(kPairs);
  for (std::uint32_t k = 0; k < kPairs; ++k) src_ids[k] = kPairs + k, dst_ids[k] = kPairs - 1 - k;

  // The first two layers lie together, the third at the same distance, the others anywhere.
  DeviceMemory together(2 * kLayerNbytes), a(kLayerNbytes), b(kLayerNbytes), c(kLayerNbytes), d(kLayerNbytes);
  const DeviceMemory* apart[] = {&a, &b, &c, &d};
  std::vector<gpu::Extent> extents = {{0, 2 * kLayerNbytes, together.address()}};
  std::vector<std::byte> src(kLayers * kLayerNbytes);
  random.fill(src.data(), src.size());
  std::memcpy(together.data(), src.data(), 2 * kLayerNbytes);
  for (std::uint64_t k = 0; k < 4; ++k) {
    extents.push_back({(k + 2) * kLayerNbytes, kLayerNbytes, apart[k]->address()});
    std::memcpy(apart[k]->data(), src.data() + (k + 2) * kLayerNbytes, kLayerNbytes);
  }
  DeviceMemory dst(kLayers * loop.dst_layer_stride);
  Move move;
  move.program = std::make_shared<CopyProgram>(program);
  move.grid = {0, kLayers, kPairs, kPairs, 0};
  move.src_ids = src_ids;
  move.dst_ids = dst_ids;
  const auto expected = expected_of(move, src.data(), dst);

  auto stream = make_stream();
  const auto ticket = stream->submit(program, {0, kLayers, kPairs, 0}, src_ids, dst_ids,
                                     gpu::Placement(extents), gpu::Placement(dst.address()), kAnyWay);
  REQUIRE_OK(ticket);
  wait_until(*stream, ticket.value());
  CHECK(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);

  extents[3].nbytes = 1024 * (2 * kPairs - 1);  // the end of the last block is missing
  const auto refused = stream->submit(program, {0, kLayers, kPairs, 0}, src_ids, dst_ids,
                                      gpu::Placement(extents), gpu::Placement(dst.address()), kAnyWay);
  CHECK_EQ(refused.status().code(), Code::kOutOfRange);
}

TEST(a_copy_begins_after_its_event_and_tables_say_again) {
  check::Random random(check::seed());
  Sample sample(random, Wish{});
  DeviceMemory src(sample.src.end), dst(sample.dst.end);
  sample.fill_source(src.data());
  const auto expected = expected_of(sample.move, src.data(), dst);
  auto stream = make_stream(256);  // of ids: 8 pairs take 64 bytes
  gpu::EventHandle event;
  REQUIRE(stream->wait_for(&event).ok());
  const auto submit = [&] {
    return stream->submit(*sample.move.program, whole(sample.move), sample.move.src_ids, sample.move.dst_ids,
                          gpu::Placement(src.address()), gpu::Placement(dst.address()));
  };
  CopyStream::Ticket last = 0;
  int accepted = 0;
  for (;; ++accepted) {
    const auto ticket = submit();
    if (!ticket.ok()) {
      CHECK_EQ(ticket.status().code(), Code::kAgain);
      break;
    }
    last = ticket.value();
  }
  CHECK_EQ(accepted, 4);
  CHECK_EQ(stream->done(), 0);
  CHECK(stream->check().ok());
  event.fire();
  wait_until(*stream, last);
  CHECK(std::memcmp(dst.data(), expected.data(), expected.size()) == 0);
  for (int round = 0; round < 50; ++round) {  // the ring goes round
    auto ticket = submit();
    while (!ticket.ok()) {
      REQUIRE_EQ(ticket.status().code(), Code::kAgain);
      std::this_thread::yield();
      ticket = submit();
    }
    last = ticket.value();
  }
  REQUIRE(stream->synchronize().ok());
  CHECK_EQ(stream->done(), last);

  const std::vector<std::uint32_t> many(64, 0);
  const auto never = stream->submit(*sample.move.program, {0, 1, 64, 0}, many, many,
                                    gpu::Placement(src.address()), gpu::Placement(dst.address()));
  CHECK_EQ(never.status().code(), Code::kExhausted);
}

TEST(what_cannot_be_copied_is_refused_in_words) {
  check::Random random(check::seed());
  Sample sample(random, Wish{});
  DeviceMemory src(sample.src.end), dst(sample.dst.end);
  auto stream = make_stream();
  const gpu::Placement from(src.address()), to(dst.address());
  std::vector<std::uint32_t> fewer = sample.move.dst_ids;
  fewer.pop_back();
  CHECK_EQ(stream->submit(*sample.move.program, whole(sample.move), sample.move.src_ids, fewer, from, to)
               .status()
               .code(),
           Code::kLengthMismatch);
  std::vector<std::uint32_t> beyond = sample.move.src_ids;
  beyond[0] = 1u << 31;
  CHECK_EQ(stream->submit(*sample.move.program, whole(sample.move), beyond, sample.move.dst_ids, from, to)
               .status()
               .code(),
           Code::kOutOfRange);
}

TEST(a_device_that_fails_says_so_and_takes_no_more) {
  check::Random random(check::seed());
  Sample sample(random, Wish{});
  DeviceMemory src(sample.src.end), dst(sample.dst.end);
  sample.fill_source(src.data());
  auto stream = make_stream();
  const auto submit = [&] {
    return stream
        ->submit(*sample.move.program, whole(sample.move), sample.move.src_ids, sample.move.dst_ids,
                 gpu::Placement(src.address()), gpu::Placement(dst.address()), kAnyWay)
        .status();
  };
  device().launches_until_failure = 0;
  const Status failed = submit();
  device().launches_until_failure = -1;
  CHECK_EQ(failed.code(), Code::kSystem);
  CHECK_EQ(submit().code(), Code::kSystem);
  CHECK_EQ(stream->check().code(), Code::kSystem);

  device().most_nbytes = 16;
  auto context = gpu::PrimaryContext::retain(driver(), 0);
  REQUIRE_OK(context);
  const auto none = CopyStream::create(driver(), context.value().get(), emulated::kernels(), {});
  device().most_nbytes = SIZE_MAX;
  CHECK_REFUSED(none.status(), Code::kSystem, "OUT_OF_MEMORY");
}

TEST(memory_goes_to_another_mapping_and_back) {
  check::Random random(check::seed());
  constexpr std::size_t kNbytes = 1 << 20;
  const auto context = gpu::PrimaryContext::retain(driver(), 0);
  REQUIRE_OK(context);
  const auto check_shared = [&](Address address, gpu::HandleKind kind) {
    auto exported = gpu::export_memory(driver(), address + 4096);
    REQUIRE_OK(exported);
    CHECK_EQ(static_cast<int>(exported.value().kind), static_cast<int>(kind));
    CHECK_EQ(exported.value().base, address);
    CHECK_EQ(exported.value().nbytes, kNbytes);
    random.fill(reinterpret_cast<std::byte*>(address), kNbytes);
    auto mapped = gpu::PeerMemory::map(driver(), context.value().get(), 0, exported.value());
    REQUIRE_OK(mapped);
    CHECK(mapped.value().address() != address);
    CHECK(std::memcmp(reinterpret_cast<void*>(mapped.value().address()), reinterpret_cast<void*>(address),
                      kNbytes) == 0);
  };
  DeviceMemory plain(kNbytes);
  check_shared(plain.address(), gpu::HandleKind::kIpc);
  // Fabric handles are permitted, but the machine has no fabric: the next kind is used.
  const Address pages = emulated::allocate_pages(kNbytes, gpu::kPosixFdHandle | gpu::kFabricHandle);
  check_shared(pages, gpu::HandleKind::kPosixFd);
  emulated::release(pages);

  const Address unshared = emulated::allocate_pages(kNbytes, 0);
  const auto refused = gpu::export_memory(driver(), unshared);
  CHECK_REFUSED(refused.status(), Code::kUnsupported, "shareable_memory()");
  emulated::release(unshared);
  const auto freed = gpu::export_memory(driver(), unshared);
  CHECK_EQ(freed.status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace gpu_stream_test
