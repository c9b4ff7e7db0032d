// Certificates: names in them, patterns of permitted peers, and one encrypted connection over a socket that
// accepts a few bytes at a time.
#include "core/tls/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "conformance_ends.h"
#include "core/tls/identity.h"
#include "core/tls/kernel_channel.h"
#include "core/tls/page_channel.h"
#include "kvxfer/transport.h"

namespace kvxfer::tls {
namespace {

// A certificate of kvxfer://acme/test, signed by itself, valid from 2020 to 2120, for tests only.
constexpr const char* kKey =
    "-----BEGIN PRIVATE KEY-----\n"
    "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpJiQ/OQibKwY7KtO\n"
    "e2ihhFqkA0CQk43KxvlA87kNuyChRANCAATryW+DSjogfnS6dq6vR+1fW/G99MWl\n"
    "oCYu6JApq28AnRa8dRyKKhL8oxow58Kd0HnWWFnCQQ7nuZBlj6TGhAgJ\n"
    "-----END PRIVATE KEY-----\n";
constexpr const char* kCertificate =
    "-----BEGIN CERTIFICATE-----\n"
    "MIIBQjCB6aADAgECAgEBMAoGCCqGSM49BAMCMBAxDjAMBgNVBAMMBXRlc3RzMCAX\n"
    "DTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAQMQ4wDAYDVQQDDAV0ZXN0\n"
    "czBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABOvJb4NKOiB+dLp2rq9H7V9b8b30\n"
    "xaWgJi7okCmrbwCdFrx1HIoqEvyjGjDnwp3QedZYWcJBDue5kGWPpMaECAmjMjAw\n"
    "MA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0RBBYwFIYSa3Z4ZmVyOi8vYWNtZS90ZXN0\n"
    "MAoGCCqGSM49BAMCA0gAMEUCIQDyWTauUfAP9I5za/NxG1F+7AcxodcwQ///Xexu\n"
    "MnhWugIgWIWpL7krZerm/12UWkKl9QYbT/TizV2G8LewVMgWI+8=\n"
    "-----END CERTIFICATE-----\n";

TEST(names_of_agents_are_whole_or_none) {
  struct Row { std::string_view uri, tenant, engine, agent; };
  const Row sound[] = {
      {"kvxfer://acme/prefill/a", "acme", "prefill", "a"},
      {"kvxfer://acme/prefill", "acme", "prefill", ""},
      {"kvxfer://acme/prefill/tp0/pp1", "acme", "prefill", "tp0/pp1"},
      {"kvxfer://a-b._~/c:d@e+f/0", "a-b._~", "c:d@e+f", "0"},
  };
  for (const Row& row : sound) {
    const std::optional<Identity> identity = Identity::parse(row.uri);
    REQUIRE(identity.has_value());
    CHECK_EQ(identity->tenant, row.tenant);
    CHECK_EQ(identity->engine, row.engine);
    CHECK_EQ(identity->name, row.agent);
  }
  using namespace std::string_view_literals;
  const std::string_view wrong[] = {"",
                                    "acme/prefill/a",
                                    "https://acme/prefill/a",
                                    "kvxfer://",
                                    "kvxfer://acme",
                                    "kvxfer://acme/",
                                    "kvxfer:///prefill/a",
                                    "kvxfer://acme//a",
                                    "kvxfer://acme/prefill/",
                                    "kvxfer://acme/*/a",
                                    "kvxfer://acme/prefill/a\0b"sv,
                                    "kvxfer://acme/pre fill/a",
                                    "kvxfer://acme/pr\xc3\xa9/a",
                                    "KVXFER://acme/prefill/a",
                                    "kvxfer://acme/%2a/a"};
  for (const std::string_view uri : wrong) CHECK(!Identity::parse(uri).has_value());
  CHECK(!Identity::parse("kvxfer://acme/" + std::string(600, 'x')).has_value());
}

TEST(patterns_match_part_by_part) {
  struct Row {
    const char *pattern, *identity;
    bool is_match;
  };
  const Row rows[] = {
      {"acme/prefill/a", "acme/prefill/a", true},
      {"acme/prefill/a", "acme/prefill/ab", false},
      {"acme/*/*", "acme/prefill/a", true},
      {"*/*/*", "acme/prefill/a", true},
      {"*/*/*", "", false},
      {"acme/*/*", "acmeprefill/a/b", false},
      {"acme/*/*", "other/acme/x", false},
      {"*/prefill/*", "acme/x/prefill/y", false},
      {"acme/pre*l/*", "acme/prefill/a", true},
      {"acme/pre*l/*", "acme/prefilled/a", false},
      {"acme/*/tp*", "acme/prefill/tp0/pp1", true},
      {"acme/*/tp*/pp1", "acme/prefill/tp0/pp1", true},
      {"acme/a*b*c/*", "acme/a-b-b-c/x", true},
      {"acme/a*b*c/*", "acme/a-c-b/x", false},
      {"acme/**/*", "acme/x/y", true},
      {"acme/prefill/*", "acme/prefil/x", false},
  };
  for (const Row& row : rows) {
    const Result<Pattern> pattern = Pattern::parse(row.pattern);
    REQUIRE(pattern.ok());
    CHECK_EQ(pattern.value().matches(row.identity), row.is_match);
  }
  for (const char* text : {"", "acme", "acme/*", "acme//*", "/a/b", "a b/*/*", "acme/?/*"})
    CHECK(!Pattern::parse(text).ok());
}

// Files in a temporary folder.
class Files {
 public:
  Files() {
    std::array<char, 32> name{"/tmp/kvxfer-tls-XXXXXX"};
    folder_ = ::mkdtemp(name.data());
    std::ofstream(folder_ + "/key.pem") << kKey;
    std::ofstream(folder_ + "/certificate.pem") << kCertificate;
  }
  ~Files() {
    for (const char* name : {"/key.pem", "/certificate.pem", ""}) std::remove((folder_ + name).c_str());
  }
  CredentialFiles named(KernelUse kernel = KernelUse::kNever) const {
    return {folder_ + "/certificate.pem", folder_ + "/key.pem", folder_ + "/certificate.pem", "", {}, kernel};
  }

 private:
  std::string folder_;
};

// Null, with a printed line, if this machine has no OpenSSL 3.
std::shared_ptr<const Credentials> credentials(KernelUse kernel = KernelUse::kNever) {
  if (!Library::load().ok()) {
    std::printf("not run: %s\n", Library::load().status().message().c_str());
    return nullptr;
  }
  const Files files;
  Result<std::shared_ptr<const Credentials>> loaded = Credentials::load(files.named(kernel));
  REQUIRE(loaded.ok());
  return loaded.value();
}

std::array<UniqueFd, 2> not_blocking(std::pair<UniqueFd, UniqueFd> sockets) {
  for (const UniqueFd* each : {&sockets.first, &sockets.second})
    REQUIRE(::fcntl(each->get(), F_SETFL, O_NONBLOCK) == 0);
  return {std::move(sockets.first), std::move(sockets.second)};
}
std::array<UniqueFd, 2> unix_pair() { return not_blocking(conformance::unix_sockets()); }
std::array<UniqueFd, 2> tcp_pair() { return not_blocking(conformance::tcp_sockets()); }

// Both ends of one connection, over sockets whose buffers hold little.
struct Link {
  using Proofs = std::array<std::shared_ptr<const Credentials>, 2>;

  explicit Link(const std::shared_ptr<const Credentials>& credentials)
      : Link({credentials, credentials}, unix_pair()) {}
  Link(const Proofs& credentials, std::array<UniqueFd, 2> pair) : sockets(std::move(pair)) {
    for (std::size_t i = 0; i < 2; ++i) {
      const int nbytes = 4096;
      ::setsockopt(sockets[i].get(), SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes);
      ends[i] = Channel::create(credentials[i], i == 0);
      REQUIRE(ends[i] != nullptr);
      ends[i]->use(sockets[i].get());
    }
  }
  bool shake_hands() {
    for (int i = 0; i < 1000; ++i) {
      if (i > 20) pause();
      for (const auto& end : ends) {
        if (end->is_secure() ? end->has_unsent() && end->send({}) < 0 && errno != EAGAIN
                             : end->shake_hands() == Channel::Step::kFailed)
          return false;
      }
      if (ends[0]->is_secure() && ends[1]->is_secure()) return true;
    }
    return false;
  }

  // The ciphers of both ends for pages, after a first record in each direction.
  std::array<std::shared_ptr<Cipher>, 2> for_pages(std::uint64_t records_of_a_key) {
    std::array<std::shared_ptr<Cipher>, 2> out;
    for (std::size_t i = 0; i < 2; ++i) {
      std::array<std::byte, 7> word{};
      const iovec bytes{word.data(), word.size()}, first{word.data(), 3}, rest{word.data(), 4};
      REQUIRE(ends[i]->send({&bytes, 1}) == 7);
      pause();
      REQUIRE(ends[1 - i]->receive({&first, 1}) == 3);
      REQUIRE(ends[1 - i]->receive({&rest, 1}) == 4);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      out[i] = Channel::for_pages(std::move(ends[i]));
      REQUIRE(out[i] != nullptr);
      if (auto* const own = dynamic_cast<PageChannel*>(out[i].get()))
        own->renew_keys_after(records_of_a_key);
      else
        dynamic_cast<KernelChannel&>(*out[i]).renew_keys_after(records_of_a_key);
    }
    return out;
  }

  // These, or those of both ends for frames.
  std::array<std::shared_ptr<Cipher>, 2> ciphers(bool carries_pages,
                                                 std::uint64_t records_of_a_key = kRecordsOfAKey) {
    if (carries_pages) return for_pages(records_of_a_key);
    return {std::move(ends[0]), std::move(ends[1])};
  }
  // The last that an end says: bytes of the test's, on its socket.
  void say_at_last(std::size_t end, const std::string& said) const {
    REQUIRE(::send(sockets[end].get(), said.data(), said.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(said.size()));
    ::shutdown(sockets[end].get(), SHUT_WR);
  }

  // Waits until bytes have arrived at one end; over TCP that is a moment after they were sent.
  void pause() const {
    std::array<pollfd, 2> watched{{{sockets[0].get(), POLLIN, 0}, {sockets[1].get(), POLLIN, 0}}};
    ::poll(watched.data(), watched.size(), 100);
  }

  std::array<UniqueFd, 2> sockets;
  std::array<std::unique_ptr<Channel>, 2> ends;
};

// `nbytes` of `memory` from `at` on, in runs of random length.
std::vector<iovec> runs(std::vector<std::byte>& memory, std::size_t at, std::size_t nbytes,
                        check::Random& random) {
  std::vector<iovec> out;
  while (nbytes != 0) {
    const std::size_t longest = random.next() % 4 == 0 ? 70'000 : 600;
    const std::size_t run = std::min<std::size_t>(nbytes, 1 + random.next() % longest);
    out.push_back({memory.data() + at, run});
    at += run;
    nbytes -= run;
  }
  return out;
}

// Carries bytes in both directions at the same time, and then the end of the stream.
void carry(Link& link, const std::array<std::shared_ptr<Cipher>, 2>& ends, check::Random& random) {
  constexpr std::size_t kNbytes = 3'000'000;
  std::array<std::vector<std::byte>, 2> out, in;
  std::array<std::size_t, 2> sent{}, got{};
  for (std::size_t i = 0; i < 2; ++i) {
    out[i].resize(kNbytes);
    in[i].resize(kNbytes);
    for (std::byte& each : out[i]) each = static_cast<std::byte>(random.next());
  }
  for (std::size_t turn = 0; got[0] < kNbytes || got[1] < kNbytes; ++turn) {
    REQUIRE(turn < 1'000'000);
    const std::size_t i = random.next() % 2;
    if (random.next() % 2 == 0) {
      const std::size_t most = std::min<std::size_t>(kNbytes - sent[i], 1 + random.next() % 200'000);
      const std::vector<iovec> bytes = runs(out[i], sent[i], most, random);
      const ssize_t count = ends[i]->send(bytes);
      REQUIRE(count >= 0 || errno == EAGAIN);
      if (count > 0) sent[i] += static_cast<std::size_t>(count);
    } else {
      const std::size_t most = std::min<std::size_t>(kNbytes - got[i], 1 + random.next() % 200'000);
      const std::vector<iovec> room = runs(in[i], got[i], most, random);
      const ssize_t count = most == 0 ? 0 : ends[i]->receive(room);
      REQUIRE(count >= 0 || errno == EAGAIN);
      if (count > 0) got[i] += static_cast<std::size_t>(count);
    }
  }
  CHECK(in[0] == out[1]);
  CHECK(in[1] == out[0]);
  for (int i = 0; ends[0]->has_unsent() && i < 1000; ++i) static_cast<void>(ends[0]->send({}));
  link.sockets[0].reset();
  std::byte last{};
  const iovec room{&last, 1};
  ssize_t end = -1;
  for (int i = 0; i < 100 && end < 0; ++i) {
    end = ends[1]->receive({&room, 1});
    if (end < 0) link.pause();
  }
  CHECK_EQ(end, 0);
}

TEST(every_byte_crosses_in_both_directions_at_once) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  check::Random random(check::seed());
  for (const bool carries_pages : {false, true}) {
    Link link(proof);
    REQUIRE(link.shake_hands());
    CHECK_EQ(link.ends[0]->export_key("EXPORTER-a"), link.ends[1]->export_key("EXPORTER-a"));
    CHECK(link.ends[0]->export_key("EXPORTER-a") != link.ends[0]->export_key("EXPORTER-b"));
    CHECK_EQ(link.ends[1]->identities().front().in_words(), "acme/test");
    carry(link, link.ciphers(carries_pages, 20), random);  // keys change some fifteen times
  }
}

// False, with a printed line, if this kernel has no kTLS, or there is no OpenSSL.
bool has_kernel_tls() {
  const KernelTls& kernel = KernelTls::get();
  const bool has = kernel.offer != KernelTls::Offer::kNothing;
  if (has)
    std::printf("kTLS: %s\n", kernel.offer == KernelTls::Offer::kNewKeys ? "renews keys" : "one key");
  else
    std::printf("not run: %s\n", kernel.why.c_str());
  return has && Library::load().ok();
}

TEST(the_kernels_records_are_those_of_everybody_else) {
  if (!has_kernel_tls()) return;
  const bool renews = KernelTls::get().offer == KernelTls::Offer::kNewKeys;
  const auto kernel = credentials(KernelUse::kAlways), own = credentials(KernelUse::kNever);
  check::Random random(check::seed());
  for (const Link::Proofs& proofs : {Link::Proofs{kernel, kernel}, {kernel, own}, {own, kernel}}) {
    Link link(proofs, tcp_pair());
    REQUIRE(link.shake_hands());
    const auto ends = link.for_pages(renews ? 20 : kRecordsOfAKey);
    for (std::size_t i = 0; i < 2; ++i)
      CHECK_EQ(dynamic_cast<KernelChannel*>(ends[i].get()) != nullptr, proofs[i] == kernel);
    carry(link, ends, random);
  }
}

TEST(a_kernel_without_new_keys_ends_the_connection_in_words) {
  if (!has_kernel_tls() || KernelTls::get().offer == KernelTls::Offer::kNewKeys) return;
  const auto kernel = credentials(KernelUse::kAlways), own = credentials(KernelUse::kNever);
  for (const bool it_renews : {true, false}) {
    Link link(Link::Proofs{kernel, own}, tcp_pair());
    REQUIRE(link.shake_hands());
    const auto ends = link.for_pages(2);
    std::vector<std::byte> out(500), in(500);
    const iovec bytes{out.data(), out.size()}, room{in.data(), in.size()};
    Cipher &sends = *ends[it_renews ? 0 : 1], &receives = *ends[it_renews ? 1 : 0];
    ssize_t count = 0;
    for (int i = 0; i < 100 && (count >= 0 || errno == EAGAIN); ++i) {
      count = sends.send({&bytes, 1});
      if (count < 0) break;
      link.pause();
      if (!it_renews) count = receives.receive({&room, 1});
    }
    CHECK_EQ(count, -1);
    CHECK_EQ(errno, EPROTO);
    CHECK_HAS(ends[0]->why(), "6.14");
  }
}

TEST(what_the_kernel_cannot_open_ends_the_connection_in_words) {
  if (!has_kernel_tls()) return;
  const auto kernel = credentials(KernelUse::kAlways);
  check::Random random(check::seed());
  for (int round = 0; round < 40; ++round) {
    Link link(Link::Proofs{kernel, credentials()}, tcp_pair());
    REQUIRE(link.shake_hands());
    const auto ends = link.for_pages(kRecordsOfAKey);
    // Bytes that the other end would never send, written to its socket.
    std::string said(5 + random.next() % 3000, '\0');
    random.fill(said.data(), said.size());
    if (round % 2 == 0) {  // a valid record except for its tag
      said.replace(0, 3, "\x17\x03\x03");
      said.resize(1000);
      said[3] = static_cast<char>(995 >> 8);
      said[4] = static_cast<char>(995 & 0xff);
    }
    link.say_at_last(1, said);
    link.pause();
    std::vector<std::byte> in(70'000);
    const iovec room{in.data(), in.size()};
    const ssize_t count = ends[0]->receive({&room, 1});
    CHECK(count <= 0);
    if (round % 2 == 0) CHECK_EQ(count, -1);
    if (count < 0 && errno == EPROTO) CHECK(!ends[0]->why().empty());
  }
}

TEST(what_is_altered_is_no_byte_of_the_peers) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  check::Random random(check::seed());
  for (int round = 0; round < 40; ++round) {
    Link link(proof);
    REQUIRE(link.shake_hands());
    const bool carries_pages = round % 2 == 0;
    const auto ends = link.ciphers(carries_pages);
    std::vector<std::byte> out(2000, std::byte{7}), in(2000);
    const iovec bytes{out.data(), out.size()};
    REQUIRE(ends[0]->send({&bytes, 1}) == 2000);
    // Takes a record off the socket, flips a bit, and sends it on.
    std::array<char, 4096> record{};
    const ssize_t nbytes = ::recv(link.sockets[1].get(), record.data(), record.size(), 0);
    REQUIRE(nbytes > 2000);
    record[random.next() % static_cast<std::size_t>(nbytes)] ^= static_cast<char>(1 << random.next() % 8);
    REQUIRE(::send(link.sockets[0].get(), record.data(), static_cast<std::size_t>(nbytes), MSG_NOSIGNAL) ==
            nbytes);
    ::shutdown(link.sockets[0].get(), SHUT_WR);
    const iovec room{in.data(), in.size()};
    const ssize_t count = ends[1]->receive({&room, 1});
    CHECK(count <= 0);
    if (!carries_pages) CHECK(in == std::vector<std::byte>(2000));
    if (count < 0) CHECK(!ends[1]->why().empty());
  }
}

TEST(what_is_played_again_or_left_out_ends_the_connection) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  for (const bool again : {true, false}) {
    Link link(proof);
    REQUIRE(link.shake_hands());
    const auto ends = link.for_pages(kRecordsOfAKey);
    std::vector<std::byte> out(500), in(500);
    const iovec bytes{out.data(), out.size()}, room{in.data(), in.size()};
    std::array<char, 1024> record{};
    REQUIRE(ends[0]->send({&bytes, 1}) == 500);
    const ssize_t nbytes = ::recv(link.sockets[1].get(), record.data(), record.size(), 0);
    REQUIRE(nbytes > 500);
    const auto pass_on = [&] {
      REQUIRE(::send(link.sockets[0].get(), record.data(), static_cast<std::size_t>(nbytes), MSG_NOSIGNAL) ==
              nbytes);
    };
    if (again) {
      pass_on();
      CHECK_EQ(ends[1]->receive({&room, 1}), 500);
      pass_on();
    } else {
      REQUIRE(ends[0]->send({&bytes, 1}) == 500);
    }
    CHECK_EQ(ends[1]->receive({&room, 1}), -1);
    CHECK_EQ(errno, EPROTO);
  }
}

// A reader has other connections to serve, so it reads a bounded number of tiny records at a time.
TEST(records_of_a_byte_each_take_turns) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  for (const bool carries_pages : {false, true}) {
    Link link(proof);
    REQUIRE(link.shake_hands());
    const auto ends = link.ciphers(carries_pages);
    std::size_t sent = 0, got = 0, num_turns = 0;
    const auto read_some = [&] {
      std::vector<std::byte> in(100'000);
      const iovec room{in.data(), in.size()};
      const ssize_t count = ends[1]->receive({&room, 1});
      REQUIRE(count > 0 || (count < 0 && errno == EAGAIN));
      CHECK(count <= 256);
      if (count > 0) got += static_cast<std::size_t>(count);
      num_turns += ends[1]->has_unread();
    };
    while (sent < 3000) {
      std::byte crumb{1};
      const iovec bytes{&crumb, 1};
      if (ends[0]->send({&bytes, 1}) == 1)
        ++sent;
      else
        read_some();
    }
    for (int i = 0; i < 3000 && got < sent; ++i) {
      static_cast<void>(ends[0]->send({}));
      read_some();
    }
    CHECK_EQ(got, sent);
  }
}

TEST(records_that_are_none_end_the_connection_in_words) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  check::Random random(check::seed());
  for (int round = 0; round < 200; ++round) {
    Link link(proof);
    REQUIRE(link.shake_hands());
    const auto ends = link.for_pages(kRecordsOfAKey);
    std::string said(1 + random.next() % 3000, '\0');
    random.fill(said.data(), said.size());
    if (round % 2 == 0) {  // a valid header with any length
      said[0] = 23;
      said.resize(std::max<std::size_t>(said.size(), 5));
      said[3] = static_cast<char>(random.next() % 12);
    }
    link.say_at_last(0, said);
    std::vector<std::byte> in(70'000);
    const iovec room{in.data(), in.size()};
    const ssize_t count = ends[1]->receive({&room, 1});
    CHECK(count <= 0);
    CHECK(count == 0 || !ends[1]->why().empty());
  }
}

TEST(bytes_that_are_no_tls_end_the_handshake_in_words) {
  const auto proof = credentials();
  if (proof == nullptr) return;
  check::Random random(check::seed());
  for (int round = 0; round < 200; ++round) {
    Link link(proof);
    std::string said(1 + random.next() % 300, '\0');
    random.fill(said.data(), said.size());
    if (round % 2 == 0)
      said.replace(0, std::min<std::size_t>(3, said.size()), "\x16\x03\x01",
                   std::min<std::size_t>(3, said.size()));
    const std::size_t victim = random.next() % 2;
    link.say_at_last(1 - victim, said);
    Channel::Step step = Channel::Step::kAgain;
    for (int i = 0; i < 10 && step == Channel::Step::kAgain; ++i) step = link.ends[victim]->shake_hands();
    CHECK(step == Channel::Step::kFailed);
    CHECK(!link.ends[victim]->why().empty());
  }
}

}  // namespace
}  // namespace kvxfer::tls
