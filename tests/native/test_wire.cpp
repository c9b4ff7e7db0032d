// The codec of control frames: exact, bounded, and reversible.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "core/bytes.h"
#include "core/control/sha256.h"
#include "memory_failure.h"
#include "wire_samples.h"

namespace wire_samples {
namespace {

// What a decoder may allocate for a body of this size. 8: an empty name takes 4 bytes in the frame, and here
// a std::string of 32 bytes. 4096: the words of an error.
std::size_t allowance(std::size_t body_nbytes) { return 8 * body_nbytes + 4096; }

Result<Message> decode_body(FrameType type, ByteSpan body) {
  Header header;
  header.type = type;
  header.body_nbytes = static_cast<std::uint32_t>(body.size());
  static std::size_t used;
  used = 0;
  memory_failure::fails = [](std::size_t nbytes) noexcept { return used += nbytes, false; };
  Result<Message> result = decode(header, body);
  memory_failure::fails = nullptr;
  if (used > allowance(body.size()))
    FAIL(std::string(name_of(type)) + " of " + std::to_string(body.size()) + " bytes allocated " +
         std::to_string(used));
  return result;
}

// A body is accepted only if the encoder would write exactly these bytes.
void check_rejected_or_canonical(FrameType type, ByteSpan body) {
  const Result<Message> result = decode_body(type, body);
  if (!result.ok()) {
    CHECK_EQ(result.status().code(), Code::kProtocol);
    CHECK(result.status().message().starts_with(name_of(type)));
    return;
  }
  CHECK_EQ(type_of(result.value()), type);
  const Bytes again = encode(result.value(), 0);
  CHECK(std::ranges::equal(body_of(again), body));
}

Conversion number_conversion() {
  Conversion conversion{};
  conversion.src_dtype = Dtype::kBf16;
  conversion.dst_dtype = Dtype::kE4m3;
  conversion.src_scales = ScalePlace::kRegion;
  conversion.saturate = 1;
  return conversion;
}

TEST(every_message_comes_back_as_it_was) {
  check::Random random(check::seed());
  for (const std::uint64_t size : {0, 1, 5, 40, 700}) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      for (int repetition = 0; repetition < 20; ++repetition) {
        const Message message = Sampler(random, size, true).message(kind);
        REQUIRE_EQ(message.index(), kind);
        const std::uint64_t sequence = random.next();
        const Bytes frame = encode(message, sequence);
        const Result<Header> header = decode_header(frame, kMaxBody);
        REQUIRE_OK(header);
        CHECK_EQ(header.value().type, type_of(message));
        CHECK_EQ(header.value().sequence, sequence);
        CHECK_EQ(header.value().frame_nbytes(), frame.size());
        for (const std::byte b : ByteSpan(frame).last(kMacNbytes)) CHECK(b == std::byte{0});
        const Result<Message> decoded = decode_body(header.value().type, body_of(frame));
        REQUIRE_OK(decoded);
        CHECK(same(decoded.value(), message));
        CHECK(encode(decoded.value(), sequence) == frame);
      }
    }
  }
}

TEST(the_largest_messages_fit_their_bounds) {
  Offer offer;
  offer.spec.grid = {0, 4, kMaxBlocks, 1, kMaxBlocks};
  offer.spec.src_ids.resize(kMaxBlocks, 7);
  offer.spec.dst_ids.resize(kMaxBlocks, 8);
  offer.spec.notify.resize(kMaxNotify);
  offer.pages.resize(kMaxEagerNbytes);
  Program program;
  program.program.num_layers = kMaxLayers;
  program.program.loops.resize(kMaxLoops);
  program.program.conversions.resize(kMaxLoops, number_conversion());
  program.program.scales.resize(kMaxScales, 0.5f);
  Lease lease;
  lease.blocks.resize(kMaxBlocks);
  Region region;
  region.name.assign(kMaxName, 'n');
  region.spans.resize(kMaxSpans);
  region.layout.resize(kMaxLayout);
  region.keys.resize(kMaxTransports, {std::string(kMaxName, 't'), Bytes(kMaxKeyBytes)});
  Checksums checksums;
  checksums.crc32c.resize(kMaxCreditPieces);
  for (const Message& message : {Message(offer), Message(Request{offer.spec}), Message(program),
                                 Message(lease), Message(region), Message(checksums)}) {
    const Bytes frame = encode(message, 1);
    REQUIRE_OK(decode_header(frame, kMaxBody));
    const Result<Message> decoded = decode_body(type_of(message), body_of(frame));
    REQUIRE_OK(decoded);
    CHECK(same(decoded.value(), message));
  }
}

TEST(handshake_of_an_ordinary_agent_fits_its_bound) {
  Challenge challenge;
  challenge.identity.name.assign(kMaxName, 'n');
  challenge.identity.unix_name.assign(kMaxName, 'u');
  challenge.identity.transports.assign(kMaxTransports, "a-transport-of-thirty-one-bytes");
  CHECK_OK(decode_header(encode(challenge, 0), kMaxHandshakeBody));
}

TEST(truncated_and_extended_bodies_are_rejected) {
  check::Random random(check::seed());
  for (const std::uint64_t size : {0, 3, 12}) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      const Message message = Sampler(random, size).message(kind);
      const Bytes frame = encode(message, 0);
      const ByteSpan body = body_of(frame);
      for (std::size_t nbytes = 0; nbytes < body.size(); ++nbytes) {
        // A context that is not there is left out at the end: without its own such a frame is another that is whole.
        const Result<Message> decoded = decode_body(type_of(message), body.first(nbytes));
        if (!decoded.ok()) continue;
        const Bytes whole = encode(decoded.value(), 0);
        CHECK(std::ranges::equal(body_of(whole), body.first(nbytes)));
      }
      Bytes longer(body.begin(), body.end());
      longer.push_back(std::byte{0});
      for (unsigned last = 0; last < 256; ++last) {
        longer.back() = static_cast<std::byte>(last);
        CHECK(!decode_body(type_of(message), longer).ok());
      }
    }
  }
}

TEST(changed_bodies_are_rejected_or_mean_exactly_their_bytes) {
  check::Random random(check::seed());
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
    for (int repetition = 0; repetition < 1500; ++repetition) {
      const Message message = Sampler(random, repetition % 3 * 6u).message(kind);
      const Bytes frame = encode(message, 0);
      Bytes body(body_of(frame).begin(), body_of(frame).end());
      for (std::uint64_t changes = random.between(1, 4); changes > 0 && !body.empty(); --changes) {
        const std::size_t at = random.below(body.size());
        switch (random.below(5)) {
          case 0: body[at] ^= static_cast<std::byte>(1 << random.below(8)); break;
          case 1: body[at] = static_cast<std::byte>(random.next()); break;
          case 2: body[at] = std::byte{0xff}; break;
          case 3: body.erase(body.begin() + static_cast<std::ptrdiff_t>(at)); break;
          default: body.insert(body.begin() + static_cast<std::ptrdiff_t>(at), body[at]); break;
        }
      }
      check_rejected_or_canonical(type_of(message), body);
      // The same body under another type.
      check_rejected_or_canonical(type_of(Sampler(random, 0).message(random.below(kNumKinds))), body);
    }
  }
}

TEST(random_bytes_are_rejected_or_mean_exactly_their_bytes) {
  check::Random random(check::seed());
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
    const FrameType type = type_of(Sampler(random, 0).message(kind));
    for (int repetition = 0; repetition < 1000; ++repetition) {
      Bytes body(random.below(200));
      // Mostly zeros, because pure noise ends at the first count.
      for (auto& b : body)
        if (random.chance(20)) b = static_cast<std::byte>(random.next());
      check_rejected_or_canonical(type, body);
    }
  }
}

// A count alone allocates nothing: the elements have to be there.
TEST(a_huge_count_in_a_small_frame_allocates_nothing) {
  for (const std::uint32_t claimed :
       {1u, 1000u, kMaxBlocks, kMaxBlocks + 1, 0x3fffffffu, 0x40000000u, 0xffffffffu}) {
    for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
      check::Random random(kind);
      const Message message = Sampler(random, 0).message(kind);
      const Bytes frame = encode(message, 0);
      for (std::size_t at = 0; at + 4 <= body_of(frame).size(); ++at) {
        Bytes body(body_of(frame).begin(), body_of(frame).end());
        std::memcpy(body.data() + at, &claimed, 4);
        check_rejected_or_canonical(type_of(message), body);
      }
    }
  }
}

TEST(errors_name_the_frame_and_the_field) {
  const auto rejection = [](const Message& message) -> std::string {
    const Bytes frame = encode(message, 0);
    const Result<Message> result = decode_body(type_of(message), body_of(frame));
    if (result.ok()) return "accepted";
    CHECK_EQ(result.status().code(), Code::kProtocol);
    return result.status().message();
  };
  Offer offer;
  offer.spec.grid = {0, 2, 3, 1};
  offer.spec.src_ids = offer.spec.dst_ids = {1, 2, 3};
  CHECK_EQ(rejection(offer), "accepted");
  const auto offer_with = [&](auto change) {
    Offer changed = offer;
    change(changed);
    return rejection(changed);
  };

  CHECK_EQ(offer_with([](Offer& m) { m.spec.src_ids.resize(300000); }),
           "OFFER.src_ids: 300000 ids, at most 262144");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.dst_ids.pop_back(); }), "OFFER.dst_ids: 2 ids for 3 pairs");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.src_ids.push_back(4); }), "OFFER.src_ids: 4 ids for 3 pairs");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.num_layers = 0; }),
           "OFFER.grid.num_layers: 0, must be 1 to 4096");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.first_layer = 4095; }),
           "OFFER.grid.num_layers: 2 from layer 4095, at most 4096 layers exist");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.pairs_per_piece = 0; }),
           "OFFER.grid.pairs_per_piece: 0, must be 1 to 262144");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.pairs_per_piece = 0xffffffff; }),
           "OFFER.grid.pairs_per_piece: 4294967295, must be 1 to 262144");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid = {0, 4096, 257, 1}; }),
           "OFFER.grid.pairs_per_piece: 1052672 pieces, at most 1048576");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid = {0, 4096, kMaxBlocks, 1}; }),
           "OFFER.grid.pairs_per_piece: 1073741824 pieces, at most 1048576");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.num_fine = 3; }), "accepted");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.grid.num_fine = 4; }), "OFFER.grid.num_fine: 4, must be 0 to 3");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.flags = 16; }), "OFFER.flags: 16, must be 0 to 15");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.flags = 4; }), "OFFER.context: empty");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.notify.resize(kMaxNotify + 1); }),
           "OFFER.notify: 4097 bytes, at most 4096");
  CHECK_EQ(offer_with([](Offer& m) { m.pages.resize(kMaxEagerNbytes + 1); }),
           "OFFER.pages: 65537 bytes, at most 65536");
  CHECK_EQ(offer_with([](Offer& m) { m.layers_ready = 3; }), "OFFER.layers_ready: 3, must be 0 to 2");
  CHECK_EQ(offer_with([](Offer& m) { m.fence_slot = 65535; }), "accepted");
  CHECK_EQ(offer_with([](Offer& m) { m.fence_slot = 65536; }), "OFFER.fence_slot: 65536, must be 0 to 65535");
  CHECK_EQ(offer_with([](Offer& m) { m.spec.timeout_ns = UINT64_MAX; }),
           "OFFER.timeout_ns: 18446744073709551615, must be 0 to 9223372036854775807");

  // A transfer without blocks is valid.
  CHECK_EQ(rejection(Request{{.grid = {0, 1, 0, 1}, .src_ids = {}, .dst_ids = {}, .notify = {}}}),
           "accepted");

  const auto region_with = [&](std::uint64_t base, std::vector<MemorySpan> spans) {
    Region region;
    region.base = base;
    region.spans = std::move(spans);
    return rejection(region);
  };
  CHECK_EQ(region_with(0, {{0, 10}, {10, 5}}), "accepted");
  CHECK_EQ(region_with(0, {{0, 10}, {9, 5}}),
           "REGION.spans: span 1 begins before the end of the one before it");
  CHECK_EQ(region_with(0, {{20, 10}, {0, 5}}),
           "REGION.spans: span 1 begins before the end of the one before it");
  CHECK_EQ(region_with(0, {{UINT64_MAX, 2}}), "REGION.spans: span 0 ends beyond 2^64");
  CHECK_EQ(region_with(UINT64_MAX - 9, {{0, 10}}), "REGION.spans: span 0 ends beyond the address space");
  CHECK_EQ(region_with(UINT64_MAX - 10, {{0, 10}}), "accepted");

  Program program;
  program.program.num_layers = 1;
  program.program.loops.resize(1);
  CHECK_EQ(rejection(program), "accepted");
  const auto program_with = [&](auto change) {
    Program changed = program;
    changed.program.conversions = {number_conversion()};
    change(changed.program);
    return rejection(changed);
  };
  CHECK_EQ(program_with([](CopyProgram& p) { p.loops[0].conversion = 1; }), "accepted");
  CHECK_EQ(program_with([](CopyProgram& p) { p.loops[0].grain = 2; }),
           "PROGRAM.loops.grain: 2, only 0 (units) and 1 (tokens) exist");
  CHECK_EQ(program_with([](CopyProgram& p) { p.loops[0].conversion = 2; }),
           "PROGRAM.loops.conversion: 2, but there are 1 conversions");
  CHECK_EQ(program_with([](CopyProgram& p) { p.loops.resize(kMaxLoops + 1); }),
           "PROGRAM.loops: 8193 loops, at most 8192");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions.resize(kMaxLoops + 1, p.conversions[0]); }),
           "PROGRAM.conversions: 8193 conversions, at most 8192");
  CHECK_EQ(program_with([](CopyProgram& p) { p.scales.resize(kMaxScales + 1); }),
           "PROGRAM.scales: 65537 scales, at most 65536");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions[0].src_dtype = Dtype::kBytes; }),
           "PROGRAM.conversions.dtype: 0 is not a numeric dtype");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions[0].dst_dtype = Dtype{7}; }),
           "PROGRAM.conversions.dtype: 7 is not a numeric dtype");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions[0].dst_scales = ScalePlace{3}; }),
           "PROGRAM.conversions.scales: 3 is not a place of scales");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions[0].saturate = 2; }),
           "PROGRAM.conversions.reserved: must be 0");
  CHECK_EQ(program_with([](CopyProgram& p) { p.conversions[0].reserved[2] = 1; }),
           "PROGRAM.conversions.reserved: must be 0");
  CHECK_EQ(program_with([](CopyProgram& p) { p.units[kCoarse].dst = kMaxUnits + 1; }),
           "PROGRAM.units: 1048577, must be 0 to 1048576");
  CHECK_EQ(program_with([](CopyProgram& p) { p.dst_heads.num = 0; }),
           "PROGRAM.dst_heads: 0, must be 1 to 65536");
  CHECK_EQ(program_with([](CopyProgram& p) { p.dst_heads.total = kMaxHeads + 1; }),
           "PROGRAM.dst_heads: 65537, must be 1 to 65536");

  CHECK_EQ(rejection(Lease{.mode = LeaseMode{3}, .blocks = {}}), "LEASE.mode: 3, must be 1 to 2");
  CHECK_EQ(rejection(LeaseEnded{1, Code::kOk}), "LEASE_ENDED.code: 0 is not an error code");
  // A peer can end a transfer with any code, but not its own session or this agent.
  for (const Code code : {Code{60000}, Code{49}, Code::kOk, Code::kOutOfRange, Code::kRailFailed,
                          Code::kPeerLost, Code::kClosed})
    CHECK_EQ(rejection(Fail{1, code, ""}), "FAIL.code: " + std::to_string(static_cast<unsigned>(code)) +
                                               " is not an error code of a transfer");
  CHECK_EQ(rejection(Done{1, Bytes(kMaxContext + 1)}), "DONE.context: 257 bytes, at most 256");
  CHECK_EQ(rejection(Done{1, {std::byte{0xff}}}), "DONE.context: not UTF-8");
  CHECK_EQ(rejection(Credit{1, 0, 0, 0}), "CREDIT.num_pieces: 0, must be 1 to 65536");
  CHECK_EQ(rejection(Credit{1, 0, kMaxPieces - 1, 2}),
           "CREDIT.num_pieces: 2 pieces from piece 1048575, at most 1048576 exist");
  CHECK_EQ(rejection(Checksums{1, 0, {}}), "CHECKSUMS.crc32c: names no piece");
  CHECK_EQ(rejection(LayersReady{1, kMaxLayers + 1}), "LAYERS_READY.layers_ready: 4097, must be 0 to 4096");

  Hello hello;
  hello.identity.name = "caf\xe9";
  CHECK_EQ(rejection(hello), "HELLO.identity.name: not UTF-8");
  hello.identity.name.assign(kMaxName + 1, 'x');
  CHECK_EQ(rejection(hello), "HELLO.identity.name: 129 bytes, at most 128");
  hello.identity.name = "prefill-0";
  hello.extensions.resize(kMaxExtensions + 1);
  CHECK_EQ(rejection(hello), "HELLO.extensions: 513 bytes, at most 512");
  hello.extensions.resize(kMaxExtensions);
  CHECK_EQ(rejection(hello), "accepted");
  const auto hello_of = [&](std::uint16_t newest, std::uint16_t oldest) {
    hello.version = newest;
    hello.oldest = oldest;
    return rejection(hello);
  };
  CHECK_EQ(hello_of(9, 2), "accepted");
  CHECK_EQ(hello_of(6, 0), "accepted");
  CHECK_EQ(hello_of(1, 1),
           "HELLO.version: the peer speaks protocol version 1 at most, this agent 6; upgrade kvxfer at the "
           "peer");
  CHECK_EQ(hello_of(9, 7),
           "HELLO.version: the peer speaks protocol version 7 to 9, this agent 6; upgrade kvxfer here");
  CHECK_EQ(hello_of(7, 7),
           "HELLO.version: the peer speaks protocol version 7, this agent 6; upgrade kvxfer here");
  CHECK_EQ(rejection(RailHello{.rail = kNoRail, .transport = {}}),
           "RAIL_HELLO.rail: 65535, must be 0 to 65534");
}

TEST(headers_are_checked_before_a_body_is_awaited) {
  const Bytes frame = encode(Heartbeat{1}, 5);
  for (std::size_t nbytes = 0; nbytes < kHeaderNbytes; ++nbytes)
    CHECK_EQ(decode_header(ByteSpan(frame).first(nbytes), kMaxBody).status().code(), Code::kAgain);
  CHECK_OK(decode_header(ByteSpan(frame).first(kHeaderNbytes), kMaxBody));
  CHECK_OK(decode_header(frame, 8));
  CHECK_EQ(decode_header(frame, 7).status().message(),
           "HEARTBEAT: a body of 8 bytes, but at most 7 are accepted here");

  Bytes other = frame;
  other[6] = std::byte{1};
  CHECK_EQ(decode_header(other, kMaxBody).status().message(), "header.flags: 1, must be 0 to 0");
  std::size_t num_types = 0;
  for (unsigned type = 0; type < 0x10000; ++type) {
    other = frame;
    const auto type16 = static_cast<std::uint16_t>(type);
    std::memcpy(other.data() + 4, &type16, 2);
    const Result<Header> header = decode_header(other, kMaxBody);
    if (header.ok()) {
      ++num_types;
      CHECK(name_of(header.value().type) != "UNKNOWN");
    } else {
      CHECK_EQ(header.status().code(), Code::kProtocol);
    }
  }
  CHECK_EQ(num_types, kNumKinds);
}

TEST(words_for_people_never_make_a_frame_that_is_refused) {
  check::Random random(check::seed());
  for (int repetition = 0; repetition < 2000; ++repetition) {
    std::string text(random.below(700), '\0');
    const bool noise = random.chance(50);
    for (char& c : text) c = static_cast<char>(noise ? random.next() : "a\xe2\x82\xac"[random.below(4)]);
    const Bytes frame = encode(Fail{1, Code::kRefused, text}, 0);
    const Result<Message> decoded = decode_body(FrameType::kFail, body_of(frame));
    REQUIRE_OK(decoded);
    const std::string& arrived = std::get<Fail>(decoded.value()).text;
    CHECK(arrived.size() <= kMaxText);
    CHECK(arrived.size() + 3 >= std::min<std::size_t>(text.size(), kMaxText));
  }
}

TEST(utf8_is_judged_as_rfc_3629_says) {
  for (const char* good : {"", "a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    CHECK_EQ(utf8_prefix(good), std::strlen(good));
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x82", "\xe2\x28\xa1"})
    CHECK_EQ(utf8_prefix(std::string("ok") + bad), 2);
}

// The layout of version 6. If this fails, the layout has changed: raise kProtocolVersion.
TEST(the_layout_is_that_of_version_6) {
  const auto hex = [](ByteSpan bytes) {
    std::string out;
    for (const std::byte b : bytes) {
      out += "0123456789abcdef"[std::to_integer<unsigned>(b >> 4)];
      out += "0123456789abcdef"[std::to_integer<unsigned>(b & std::byte{15})];
    }
    return out;
  };
  CHECK_EQ(kProtocolVersion, 6);
  CHECK_EQ(hex(encode(Credit{0x1122334455667788, {2, 5}, 3, 4}, 0x99)),
           "16000000"
           "2b00"
           "0000"
           "9900000000000000"
           "8877665544332211"
           "0200"
           "05000000"
           "03000000"
           "04000000"
           "00000000000000000000000000000000");
  check::Random random(1);
  kvxfer::Sha256 all;
  for (std::size_t kind = 0; kind < kNumKinds; ++kind)
    all.update(encode(Sampler(random, 9).message(kind), kind));
  CHECK_EQ(hex(all.finish()), "a19b05c1adfd0332a7da2bc5b14fccbe30d9c351a1f0d2f8c1f77f5be95f7c1b");
}

}  // namespace
}  // namespace wire_samples
