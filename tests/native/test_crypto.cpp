// SHA-256, HMAC-SHA256 and SipHash-128 against the vectors that were published with them.
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "core/control/sha256.h"
#include "core/control/siphash.h"

namespace {

using kvxfer::equal_in_constant_time;
using kvxfer::hmac_sha256;
using kvxfer::sha256;
using kvxfer::siphash128;

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    out += "0123456789abcdef"[std::to_integer<unsigned>(b >> 4)];
    out += "0123456789abcdef"[std::to_integer<unsigned>(b & std::byte{15})];
  }
  return out;
}

// The bytes first, first + 1, ...
std::string ascending(int first, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += static_cast<char>(first + i);
  return out;
}

std::string sha256_hex(std::string_view text) { return hex(sha256({bytes_of(text)})); }

// FIPS 180-4's examples and its million of "a".
TEST(sha256_gives_the_published_digests) {
  CHECK_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(sha256_hex("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                      "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
           "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(sha256_hex(std::string(1000000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256_is_the_same_however_the_bytes_are_cut) {
  check::Random random(check::seed());
  // Around the block's length the padding takes one block more.
  for (int nbytes = 0; nbytes <= 3 * 64 + 1; ++nbytes) {
    const std::string text = ascending(nbytes, nbytes);
    kvxfer::Sha256 hash;
    std::string_view left = text;
    while (!left.empty()) {
      const std::size_t take = random.between(1, left.size());
      hash.update(bytes_of(left.substr(0, take)));
      left.remove_prefix(take);
    }
    CHECK_EQ(hex(hash.finish()), sha256_hex(text));
  }
}

// RFC 4231, test cases 1, 2, 3, 4, 6 and 7 (5 is of a truncated digest).
TEST(hmac_sha256_gives_the_digests_of_rfc_4231) {
  const struct {
    std::string key, text;
    const char* digest;
  } cases[] = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {ascending(1, 25), std::string(50, '\xcd'),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. "
       "The key needs to be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const auto& c : cases) {
    CHECK_EQ(hex(hmac_sha256(bytes_of(c.key), {bytes_of(c.text)})), c.digest);
    const std::string_view text = c.text;
    CHECK_EQ(hex(hmac_sha256(bytes_of(c.key), {bytes_of(text.substr(0, 3)), {}, bytes_of(text.substr(3))})),
             c.digest);
  }
}

// The reference implementation's vectors_sip128: key 00 01 .. 0f, messages of 0 to 63 bytes 00 01 ...
TEST(siphash128_gives_the_reference_vectors) {
  const char* const macs[64] = {
      "a3817f04ba25a8e66df67214c7550293", "da87c1d86b99af44347659119b22fc45",
      "8177228da4a45dc7fca38bdef60affe4", "9c70b60c5267a94e5f33b6b02985ed51",
      "f88164c12d9c8faf7d0f6e7c7bcd5579", "1368875980776f8854527a07690e9627",
      "14eeca338b208613485ea0308fd7a15e", "a1f1ebbed8dbc153c0b84aa61ff08239",
      "3b62a9ba6258f5610f83e264f31497b4", "264499060ad9baabc47f8b02bb6d71ed",
      "00110dc378146956c95447d3f3d0fbba", "0151c568386b6677a2b4dc6f81e5dc18",
      "d626b266905ef35882634df68532c125", "9869e247e9c08b10d029934fc4b952f7",
      "31fcefac66d7de9c7ec7485fe4494902", "5493e99933b0a8117e08ec0f97cfc3d9",
      "6ee2a4ca67b054bbfd3315bf85230577", "473d06e8738db89854c066c47ae47740",
      "a426e5e423bf4885294da481feaef723", "78017731cf65fab074d5208952512eb1",
      "9e25fc833f2290733e9344a5e83839eb", "568e495abe525a218a2214cd3e071d12",
      "4a29b54552d16b9a469c10528eff0aae", "c9d184ddd5a9f5e0cf8ce29a9abf691c",
      "2db479ae78bd50d8882a8a178a6132ad", "8ece5f042d5e447b5051b9eacb8d8f6f",
      "9c0b53b4b3c307e87eaee08678141f66", "abf248af69a6eae4bfd3eb2f129eeb94",
      "0664da1668574b88b935f3027358aef4", "aa4b9dc4bf337de90cd4fd3c467c6ab7",
      "ea5c7f471faf6bde2b1ad7d4686d2287", "2939b0183223fafc1723de4f52c43d35",
      "7c3956ca5eeafc3e363e9d556546eb68", "77c6077146f01c32b6b69d5f4ea9ffcf",
      "37a6986cb8847edf0925f0f1309b54de", "a705f0e69da9a8f907241a2e923c8cc8",
      "3dc47d1f29c448461e9e76ed904f6711", "0d62bf01e6fc0e1a0d3c4751c5d3692b",
      "8c03468bca7c669ee4fd5e084bbee7b5", "528a5bb93baf2c9c4473cce5d0d22bd9",
      "df6a301e95c95dad97ae0cc8c6913bd8", "801189902c857f39e73591285e70b6db",
      "e617346ac9c231bb3650ae34ccca0c5b", "27d93437efb721aa401821dcec5adf89",
      "89237d9ded9c5e78d8b1c9b166cc7342", "4a6d8091bf5e7d651189fa94a250b14c",
      "0e33f96055e7ae893ffc0e3dcf492902", "e61c432b720b19d18ec8d84bdc63151b",
      "f7e5aef549f782cf379055a608269b16", "438d030fd0b7a54fa837f2ad201a6403",
      "a590d3ee4fbf04e3247e0d27f286423f", "5fe2c1a172fe93c4b15cd37caef9f538",
      "2c97325cbd06b36eb2133dd08b3a017c", "92c814227a6bca949ff0659f002ad39e",
      "dce850110bd8328cfbd50841d6911d87", "67f14984c7da791248e32bb5922583da",
      "1938f2cf72d54ee97e94166fa91d2a36", "74481e9646ed49fe0f6224301604698e",
      "57fca5de98a9d6d8006438d0583d8a1d", "9fecde1cefdc1cbed4763674d9575359",
      "e3040c00eb28f15366ca73cbd872e740", "7697009a6a831dfecca91c5993670f7a",
      "5853542321f567a005d547a4f04759bd", "5150d1772f50834a503e069a973fbd7c",
  };
  kvxfer::SipHashKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  for (int nbytes = 0; nbytes < 64; ++nbytes)
    CHECK_EQ(hex(siphash128(key, bytes_of(ascending(0, nbytes)))), macs[nbytes]);
}

TEST(equal_in_constant_time_sees_every_bit) {
  std::string a = ascending(0, 32), b = a;
  CHECK(equal_in_constant_time(bytes_of(a), bytes_of(b)));
  for (std::size_t bit = 0; bit < 8 * b.size(); ++bit) {
    b[bit / 8] = static_cast<char>(b[bit / 8] ^ (1 << bit % 8));
    CHECK(!equal_in_constant_time(bytes_of(a), bytes_of(b)));
    b[bit / 8] = a[bit / 8];
  }
  CHECK(!equal_in_constant_time(bytes_of(a), bytes_of(a).first(31)));
  CHECK(equal_in_constant_time({}, {}));
}

}  // namespace
