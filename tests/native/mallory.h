// A peer in the simulation that knows the secret and breaks all other rules.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "simulated_pair.h"

namespace simulation {

// Mallory's end of the session, driven frame by frame, and an agent whose memory her rails show.
class Mallory {
 public:
  // She has no features, unless the test says which.
  Mallory(World& world, Node& victim, std::optional<RailPlan> rail = two_sided_rail(),
          const wire::Features& features = {})
      : world_(world), victim_(victim), body_(world.add("mallory")), region_(body_.add_region(layout)) {
    SessionConfig config;
    config.secret = "secret";
    config.self.name = "mallory";
    config.features = features;
    session_ = std::make_unique<Session>(
        SessionRole::kInitiator, config, world.now(),
        [&](std::span<std::byte> bytes) { world.random().fill(bytes.data(), bytes.size()); });
    pipe_ = victim.accept_from({body_.place(), [this](std::uint32_t, wire::Bytes frame) { receive(frame); },
                                [this](std::uint32_t, const std::string&) { ended = true; }});
    flush();
    REQUIRE(world.until([&] { return session_->state() == SessionState::kOpen; }));
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

  SessionKey key() const { return victim_.session_with("mallory"); }
  void send(const wire::Message& message) {
    session_->send(world_.now(), message);
    flush();
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
  template <class T>
  const T* last() const {
    for (auto it = received.rbegin(); it != received.rend(); ++it)
      if (const T* found = std::get_if<T>(&*it)) return found;
    return nullptr;
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
  std::vector<wire::Message> received;
  bool ended = false;

 private:
  void receive(const wire::Bytes& frame) {
    auto message = session_->receive(world_.now(), frame);
    if (message.ok() && message.value()) received.push_back(std::move(*message.value()));
    flush();
  }
  void flush() {
    for (wire::Bytes& frame : session_->take_output())
      pipe_ ? pipe_->send(0, std::move(frame)) : early_.push_back(frame);
    if (pipe_)
      for (wire::Bytes& frame : std::exchange(early_, {})) pipe_->send(0, std::move(frame));
  }

  World& world_;
  Node& victim_;
  Node& body_;
  RegionId region_;
  std::unique_ptr<Session> session_;
  std::shared_ptr<Pipe> pipe_;
  std::vector<wire::Bytes> early_;
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
