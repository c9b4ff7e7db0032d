// A peer in the simulation that knows the secret and breaks all other rules.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "simulated_pair.h"

namespace simulation {

// The far end of one connection, driven frame by frame: it knows the secret, answers heartbeats, and keeps what it is told.
class FarEnd {
 public:
  FarEnd(World& world, Node& victim, const SessionConfig& config, int place = -1) : world_(world) {
    session_ = std::make_unique<Session>(
        SessionRole::kInitiator, config, world.now(),
        [&](std::span<std::byte> bytes) { world.random().fill(bytes.data(), bytes.size()); });
    pipe_ = victim.accept_from({place, [this](std::uint32_t, const wire::Bytes& frame) { receive(frame); },
                                [this](std::uint32_t, const std::string&) { ended = true; }});
    flush();
  }
  FarEnd(const FarEnd&) = delete;
  FarEnd& operator=(const FarEnd&) = delete;

  void send(const wire::Message& message) {
    session_->send(world_.now(), message);
    flush();
  }
  void hang_up() { pipe_->close(0); }
  bool is_open() const { return session_->state() == SessionState::kOpen; }
  template <class T>
  const T* last() const {
    for (auto it = received.rbegin(); it != received.rend(); ++it)
      if (const T* found = std::get_if<T>(&*it)) return found;
    return nullptr;
  }
  template <class T>
  std::ptrdiff_t count() const {
    return std::count_if(received.begin(), received.end(),
                         [](const wire::Message& each) { return std::holds_alternative<T>(each); });
  }

  std::vector<wire::Message> received;
  bool ended = false, is_mute = false;

 protected:
  World& world_;

 private:
  void receive(const wire::Bytes& frame) {
    auto message = session_->receive(world_.now(), frame);
    if (message.ok() && message.value()) received.push_back(std::move(*message.value()));
    flush();
  }
  void flush() {
    if (!pipe_) return;
    for (wire::Bytes& frame : session_->take_output())
      if (!is_mute) pipe_->send(0, std::move(frame));
  }

  std::unique_ptr<Session> session_;
  std::shared_ptr<Pipe> pipe_;
};

inline SessionConfig config_of(const std::string& name) {
  SessionConfig config;
  config.secret = "secret";
  config.self.name = name;
  return config;
}

// Mallory's end of the session, and an agent whose memory her rails show.
class Mallory : public FarEnd {
 public:
  // She has no features, unless the test says which.
  Mallory(World& world, Node& victim, std::optional<RailPlan> rail = two_sided_rail(),
          const wire::Features& features = {})
      : Mallory(world, victim, std::move(rail), features, world.add("mallory")) {}

  SessionKey key() const { return victim_.session_with("mallory"); }
  void send(const wire::Message& message) {
    FarEnd::send(message);
    world_.run_for(kMillisecond);
  }
  // Sends a program that copies block to block, changed by the test.
  template <class Change>
  void tell_program(std::uint32_t id, RegionId theirs, bool write, Change&& change) {
    wire::Program program{id, write ? region_ : theirs, write ? theirs : region_,
                          program_between(layout, layout)};
    change(program.program);
    send(program);
  }
  wire::TransferSpec spec(TransferId transfer, std::uint32_t program, Blocks from, Blocks to) const {
    wire::TransferSpec out;
    out.transfer = transfer;
    out.program = program;
    out.grid = {0, layout.num_layers, static_cast<std::uint32_t>(from.size()), 1};
    out.timeout_ns = kSecond;
    out.src_ids = std::move(from);
    out.dst_ids = std::move(to);
    return out;
  }
  // The code of the last refusal. If it is not the code of a transfer, the words begin with it.
  Code refused_with() const {
    const wire::Fail* const fail = last<wire::Fail>();
    if (fail == nullptr) return Code::kOk;
    for (std::uint16_t number = 1; number < 30; ++number)
      if (const Code code{number}; fail->text.starts_with(std::string(name_of(code)) + ": ")) {
        CHECK_EQ(fail->code, Code::kRefused);
        return code;
      }
    return fail->code;
  }
  Memory& memory() { return body_.memory(region_); }
  RegionId region() const { return region_; }

  Layout layout;

 private:
  Mallory(World& world, Node& victim, std::optional<RailPlan> rail, const wire::Features& features,
          Node& body)
      : FarEnd(world, victim, with(features), body.place()),
        victim_(victim),
        body_(body),
        region_(body_.add_region(layout)) {
    REQUIRE(world.until([&] { return is_open(); }));
    wire::Region region;
    region.id = region_;
    region.name = "hers";
    region.spans = {{0, body_.memory(region_).bytes.size()}};
    region.num_blocks = layout.num_blocks;
    region.keys = {{"mapped", {}}, {"stream", {}}};
    send(region);
    send(wire::RegionsEnd{});
    REQUIRE(world.until([&] { return key() != 0; }));
    if (rail) victim.give_rail(key(), *rail, body_);
  }
  static SessionConfig with(const wire::Features& features) {
    SessionConfig config = config_of("mallory");
    config.features = features;
    return config;
  }

  Node& victim_;
  Node& body_;
  RegionId region_;
};

// Checks that honest agents still work: a copy from start to end.
inline void check_undisturbed(Pair& pair) {
  pair.world.after_step = nullptr;
  pair.grant_read(kFrom);
  auto handle = pair.read(kFrom, kTo);
  REQUIRE(pair.ends(handle));
  CHECK_EQ(handle->outcome(), Outcome::kDone);
  CHECK(pair.equal(kFrom, kTo));
  pair.check_quiet();
}

}  // namespace simulation
