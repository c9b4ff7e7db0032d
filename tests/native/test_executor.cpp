#include <cstring>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/copy/crc32c.h"
#include "core/copy/executor.h"

namespace {

using namespace kvxfer;

const std::byte* bytes_of(std::string_view text) { return reinterpret_cast<const std::byte*>(text.data()); }

std::uint32_t crc32c_by_bits(const std::vector<std::byte>& bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

TEST(crc32c_gives_the_published_values) {
  CHECK_EQ(crc32c(0, bytes_of("123456789"), 9), 0xe3069283u);
  CHECK_EQ(crc32c(0, nullptr, 0), 0u);
  // RFC 3720, B.4
  std::vector<std::byte> bytes(32, std::byte{0});
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, std::byte{0xff});
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x62a8ab43u);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x46dd794eu);
}

TEST(crc32c_of_any_length_equals_the_definition_and_continues) {
  check::Random random(check::seed());
  for (const std::size_t nbytes :
       {1u, 7u, 8u, 63u, 511u, 1535u, 1536u, 1537u, 3072u, 5000u, 20001u, 49152u, 150000u}) {
    std::vector<std::byte> bytes(nbytes);
    random.fill(bytes.data(), nbytes);
    const std::uint32_t whole = crc32c(0, bytes.data(), nbytes);
    CHECK_EQ(whole, crc32c_by_bits(bytes));
    const std::size_t cut = random.below(nbytes + 1);
    CHECK_EQ(crc32c(crc32c(0, bytes.data(), cut), bytes.data() + cut, nbytes - cut), whole);
  }
}

TEST(copy_run_moves_exactly_its_bytes_at_any_alignment) {
  check::Random random(check::seed());
  std::vector<std::byte> src(40000), dst(40000), expected(40000);
  random.fill(src.data(), src.size());
  for (int round = 0; round < 3000; ++round) {
    const std::size_t nbytes = round % 3 == 0 ? random.below(30000) : random.below(2500);
    const std::size_t from = random.below(200), to = random.below(200);
    std::memset(dst.data(), 0x5a, to + nbytes + 300);
    std::memset(expected.data(), 0x5a, to + nbytes + 300);
    std::memcpy(expected.data() + to, src.data() + from, nbytes);
    copy_run(dst.data() + to, src.data() + from, nbytes);
    copy_fence();
    REQUIRE(std::memcmp(dst.data(), expected.data(), to + nbytes + 300) == 0);
  }
}

TEST(a_kernel_is_chosen) { CHECK(!copy_kernel_name().empty()); }

}  // namespace
