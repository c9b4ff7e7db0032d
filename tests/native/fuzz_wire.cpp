// Fuzzes the code that a stranger's bytes reach first: the header, the codec, and a session in every state.
// Built with -fsanitize=fuzzer and -DKVXFER_LIBFUZZER it is a libFuzzer target. Built by any compiler without
// these, it replays a corpus and then runs seeded mutations of it:
//
//   sessions --file fuzz_wire tests/native/corpus/wire [--runs N] [--seed N]
//   sessions --file fuzz_wire --write-corpus DIR       # one small input for each frame and each state
//
// An input is one byte that chooses a Target, then bytes for it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/control/session.h"
#include "core/control/wire.h"

namespace {

using namespace kvxfer;
using wire::Bytes;
using wire::ByteSpan;

enum Target : std::uint8_t {
  kDecode,  // a frame
  kAwaitHello,  // an acceptor that reads a stream of frames, from the first on
  kAwaitProof,  // an acceptor after a valid HELLO
  kAwaitChallenge,  // an initiator
  kAcceptorOpen,  // an open session that reads a stranger's frames
  kInitiatorOpen,
  kTrueAcceptor,  // an open session whose peer seals the bodies of the input
  kTrueInitiator,
  kNumTargets,
};

constexpr Time kStart = 1'000'000'000;

// Not assert, because it must also hold in release builds.
void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_wire: broken promise: %s\n", what);
  std::abort();
}

RandomSource random_source(unsigned char first) {
  return [next = first](std::span<std::byte> out) mutable {
    for (std::byte& b : out) b = static_cast<std::byte>(next++);
  };
}

SessionConfig config_of(const char* name) {
  SessionConfig config;
  config.secret = "secret";
  config.self.name = name;
  config.self.transports = {"tcp"};
  return config;
}

struct Pair {
  Session initiator{SessionRole::kInitiator, config_of("a"), kStart, random_source(1)};
  Session acceptor{SessionRole::kAcceptor, config_of("b"), kStart, random_source(101)};

  void carry(Session& from) {
    Session& to = &from == &initiator ? acceptor : initiator;
    for (const Bytes& frame : from.take_output())
      must(to.receive(kStart, frame).ok(), "a true frame is accepted");
  }
  void open() {
    carry(initiator);
    carry(acceptor);
    carry(initiator);
    must(acceptor.state() == SessionState::kOpen, "a true handshake opens");
  }
};

void run_decode(ByteSpan input) {
  const Result<wire::Header> header = wire::decode_header(input, wire::kMaxBody);
  if (!header.ok()) return;
  if (input.size() < header.value().frame_nbytes()) return;
  const ByteSpan body = input.subspan(wire::kHeaderNbytes, header.value().body_nbytes);
  const Result<wire::Message> message = wire::decode(header.value(), body);
  if (!message.ok()) {
    must(message.status().code() == Code::kProtocol, "a frame that is not right is a breach of protocol");
    must(!message.status().message().empty(), "an error says why");
    return;
  }
  const Bytes again = wire::encode(message.value(), header.value().sequence);
  must(again.size() == header.value().frame_nbytes() &&
           std::equal(again.begin(), again.end() - wire::kMacNbytes, input.begin()),
       "a frame that is accepted is the one that encode writes");
}

void check_output(Session& session) {
  for (const Bytes& frame : session.take_output()) {
    const Result<wire::Header> header = wire::decode_header(frame, wire::kMaxBody);
    must(header.ok() && header.value().frame_nbytes() == frame.size(), "what is sent is a frame");
  }
}

// Cuts the stream into frames as a socket's reader does. The stream's writer does not have the secret, so the
// session must neither open nor deliver anything.
void run_stream(Session& session, ByteSpan input) {
  const SessionState first = session.state();
  Time now = kStart;
  while (session.state() != SessionState::kClosed) {
    const Result<wire::Header> header = wire::decode_header(input, session.max_body());
    if (!header.ok() || input.size() < header.value().frame_nbytes()) break;
    const ByteSpan frame = input.first(header.value().frame_nbytes());
    const auto result = session.receive(now, frame);
    must(result.ok() == (session.state() != SessionState::kClosed), "an error closes, and nothing else");
    must(!result.ok() || !result.value().has_value(), "a stranger's frame is not delivered");
    must(session.state() != SessionState::kOpen || first == SessionState::kOpen, "a stranger does not open");
    input = input.subspan(frame.size());
    now += 1'000'000;
  }
  // The rest, as one frame that its reader did not check.
  const auto result = session.receive(now, input);
  must(!result.ok() && session.state() == SessionState::kClosed, "half a frame ends the session");
  must(!session.reason().ok(), "a closed session has a reason");
  must(session.next_deadline() == kNever, "a closed session has no timer");
  check_output(session);
}

// | type u16 | milliseconds u8 | body_nbytes u16 | body |, repeated
void run_true_peer(Session& session, Session& peer, ByteSpan input) {
  Time now = kStart;
  while (input.size() >= 5 && session.state() == SessionState::kOpen && peer.state() == SessionState::kOpen) {
    wire::Header header;
    std::uint16_t type, body_nbytes;
    std::memcpy(&type, input.data(), 2);
    now += std::to_integer<Time>(input[2]) * 1'000'000;
    std::memcpy(&body_nbytes, input.data() + 3, 2);
    input = input.subspan(5);
    header.type = wire::FrameType{type};
    header.body_nbytes = std::min<std::uint32_t>(body_nbytes, static_cast<std::uint32_t>(input.size()));
    const ByteSpan body = input.first(header.body_nbytes);
    input = input.subspan(body.size());
    if (header.type < wire::FrameType::kHeartbeat) continue;  // the peer's session never seals these
    const Result<wire::Message> message = wire::decode(header, body);
    if (!message.ok()) continue;
    peer.send(now, message.value());
    for (const Bytes& frame : peer.take_output()) {
      const auto result = session.receive(now, frame);
      must(result.ok() == (session.state() == SessionState::kOpen), "an error closes, and nothing else");
      const bool own = header.type == wire::FrameType::kHeartbeat ||
                       header.type == wire::FrameType::kHeartbeatAck ||
                       header.type == wire::FrameType::kGoodbye;
      must(!result.ok() || result.value().has_value() != own, "what is the layer's above is delivered");
    }
    const Status status = session.on_time(now);
    must(status.ok() || session.state() == SessionState::kClosed, "an error closes");
    check_output(session);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes == 0) return 0;
  const ByteSpan input(reinterpret_cast<const std::byte*>(data) + 1, nbytes - 1);
  const auto target = static_cast<Target>(data[0] % kNumTargets);
  if (target == kDecode) {
    run_decode(input);
    return 0;
  }
  Pair pair;
  switch (target) {
    case kAwaitHello: run_stream(pair.acceptor, input); break;
    case kAwaitProof:
      pair.carry(pair.initiator);
      run_stream(pair.acceptor, input);
      break;
    case kAwaitChallenge: run_stream(pair.initiator, input); break;
    case kAcceptorOpen:
    case kInitiatorOpen:
      pair.open();
      run_stream(target == kAcceptorOpen ? pair.acceptor : pair.initiator, input);
      break;
    case kTrueAcceptor:
      pair.open();
      run_true_peer(pair.acceptor, pair.initiator, input);
      break;
    default:
      pair.open();
      run_true_peer(pair.initiator, pair.acceptor, input);
      break;
  }
  return 0;
}

#ifndef KVXFER_LIBFUZZER

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "wire_samples.h"

namespace {

using Input = std::vector<std::uint8_t>;

Input input_of(Target target, ByteSpan bytes) {
  Input input{target};
  for (const std::byte b : bytes) input.push_back(std::to_integer<std::uint8_t>(b));
  return input;
}

Bytes joined(const std::vector<Bytes>& frames) {
  Bytes all;
  for (const Bytes& frame : frames) all.insert(all.end(), frame.begin(), frame.end());
  return all;
}

int write_corpus(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const auto write = [&](std::string name, const Input& input) {
    std::ranges::replace(name, '_', '-');
    for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  };
  check::Random random(1);
  for (std::size_t kind = 0; kind < wire_samples::kNumKinds; ++kind) {
    const wire::Message message = wire_samples::Sampler(random, 3).message(kind);
    const std::string name(wire::name_of(wire::type_of(message)));
    const Bytes frame = wire::encode(message, 0);
    write("decode-" + name, input_of(kDecode, frame));
    if (wire::type_of(message) < wire::FrameType::kHeartbeat) continue;
    // Twice: the first may forbid the second.
    const ByteSpan body = wire_samples::body_of(frame);
    Bytes item(5);
    std::memcpy(item.data(), frame.data() + 4, 2);
    item[2] = std::byte{250};
    std::memcpy(item.data() + 3, frame.data(), 2);
    item.insert(item.end(), body.begin(), body.end());
    write("true-" + name, input_of(kind % 2 == 0 ? kTrueAcceptor : kTrueInitiator, joined({item, item})));
  }
  // A conversation with another secret and other nonces than the target's.
  SessionConfig a = config_of("x"), b = config_of("y");
  a.secret = b.secret = "another";
  Session initiator(SessionRole::kInitiator, a, kStart, random_source(7));
  Session acceptor(SessionRole::kAcceptor, b, kStart, random_source(77));
  const std::vector<Bytes> hello = initiator.take_output();
  must(acceptor.receive(kStart, hello.at(0)).ok(), "HELLO");
  const std::vector<Bytes> challenge = acceptor.take_output();
  must(initiator.receive(kStart, challenge.at(0)).ok(), "CHALLENGE");
  const std::vector<Bytes> proof = initiator.take_output();
  must(acceptor.receive(kStart, proof.at(0)).ok(), "PROOF");
  initiator.send(kStart, wire::Done{1});
  const std::vector<Bytes> done = initiator.take_output();
  write("await-hello", input_of(kAwaitHello, joined({hello[0], proof[0], done[0]})));
  write("await-challenge", input_of(kAwaitChallenge, joined({challenge[0], done[0]})));
  write("await-proof", input_of(kAwaitProof, joined({proof[0], done[0]})));
  write("acceptor-open", input_of(kAcceptorOpen, done[0]));
  write("initiator-open", input_of(kInitiatorOpen, done[0]));
  return 0;
}

void mutate(check::Random& random, Input& input, const std::vector<Input>& corpus) {
  for (std::uint64_t changes = random.between(1, 5); changes > 0; --changes) {
    if (input.empty()) input.push_back(static_cast<std::uint8_t>(random.next()));
    const std::size_t at = random.below(input.size());
    const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(7)) {
      case 0: *place = static_cast<std::uint8_t>(*place ^ (1u << random.below(8))); break;
      case 1: *place = static_cast<std::uint8_t>(random.next()); break;
      case 2: *place = static_cast<std::uint8_t>(*place + (random.chance(50) ? 1 : 255)); break;
      case 3: input.erase(place); break;
      case 4: input.insert(place, static_cast<std::uint8_t>(random.next())); break;
      case 5: input.resize(at); break;
      default: {  // the end of another input
        const Input& other = corpus[random.below(corpus.size())];
        if (other.empty()) break;
        const auto from = other.begin() + static_cast<std::ptrdiff_t>(random.below(other.size()));
        input.insert(place, from, other.end());
        if (input.size() > 16384) input.resize(16384);
        break;
      }
    }
  }
}

int usage(const char* program) {
  std::printf("usage: %s --file fuzz_wire CORPUS_DIR... [--runs N] [--seed N]\n", program);
  std::printf("       %s --file fuzz_wire --write-corpus DIR\n", program);
  return 2;
}

int replay(int argc, char** argv) {
  std::vector<Input> corpus;
  std::uint64_t num_runs = 100'000, seed = check::seed_of_run();
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg.starts_with("--") && i + 1 == argc) return usage(argv[0]);
    if (arg == "--write-corpus") return write_corpus(argv[i + 1]);
    if (arg == "--runs") {
      num_runs = std::strtoull(argv[++i], nullptr, 0);
    } else if (arg == "--seed") {
      seed = std::strtoull(argv[++i], nullptr, 0);
    } else {
      std::vector<std::filesystem::path> paths;
      if (std::filesystem::is_directory(arg)) {
        for (const auto& entry : std::filesystem::directory_iterator(arg)) paths.push_back(entry.path());
      } else {
        paths.push_back(arg);
      }
      std::ranges::sort(paths);  // the same order on every machine: mutations then depend on the seed only
      for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        if (!file) {
          std::printf("%s: cannot be read\n", path.c_str());
          return 1;
        }
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
  }
  if (corpus.empty()) return usage(argv[0]);
  for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  for (std::uint64_t run = 0; run < num_runs; ++run) {
    // Each run has its own seed: `--seed S+run --runs 1` repeats that run.
    check::Random random(seed + run);
    Input input = corpus[random.below(corpus.size())];
    mutate(random, input, corpus);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs and %llu mutations passed (seed %llu)\n", corpus.size(),
              static_cast<unsigned long long>(num_runs), static_cast<unsigned long long>(seed));
  return 0;
}

FILE_IS_PROGRAM(&replay);

}  // namespace

#endif
