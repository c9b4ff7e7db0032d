// A transport that misbehaves within its contract.
#include "core/faulty_transport.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>
#include <string>

namespace kvxfer {
namespace {

template <class Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

Status refuse(std::string_view part, std::string_view why) {
  return Status(Code::kInvalidArgument, "faults: \"" + std::string(part) + "\": " + std::string(why));
}

}  // namespace

Result<Faults> Faults::parse(std::string_view text) {
  Faults faults;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) return refuse(part, "is not of the form name=number");
    const std::string_view name = part.substr(0, equals), value = part.substr(equals + 1);

    if (name == "seed" || name == "down_after") {
      if (!read_number(value, name == "seed" ? faults.seed : faults.down_after))
        return refuse(part, "needs a whole number, 0 or more");
      continue;
    }
    double* rate = name == "again"     ? &faults.again
                   : name == "delay"   ? &faults.delay
                   : name == "reorder" ? &faults.reorder
                   : name == "fail"    ? &faults.fail
                   : name == "mistake" ? &faults.mistake
                                       : nullptr;
    if (rate == nullptr)
      return refuse(part,
                    "is not a fault; the faults are seed, again, delay, reorder, fail, mistake, down_after");
    if (!read_number(value, *rate) || !(*rate >= 0 && *rate <= 1))
      return refuse(part, "needs a rate from 0 to 1");
    if (name == "again" && *rate == 1) return refuse(part, "nothing would ever be accepted; stay below 1");
  }
  return faults;
}

FaultyTransport::FaultyTransport(std::unique_ptr<Transport> inner, const Faults& faults)
    : inner_(std::move(inner)), faults_(faults), random_state_(faults.seed) {}

Result<PeerId> FaultyTransport::connect(UniqueFd socket, const ConnectInfo& info) {
  Result<PeerId> peer = inner_->connect(std::move(socket), info);
  if (peer.ok()) connected_.insert(peer.value());
  return peer;
}

void FaultyTransport::disconnect(PeerId peer) noexcept {
  connected_.erase(peer);
  down_.erase(peer);
  inner_->disconnect(peer);
  std::erase_if(held_, [peer](const Held& held) {
    return held.completion.kind != CompletionKind::kWork && held.completion.peer == peer;
  });
}

Status FaultyTransport::attach(PeerId peer, const RemoteRegion& region) {
  if (down_.contains(peer)) return Status(Code::kRailFailed, "the rail was taken down by an injected fault");
  if (chance(faults_.mistake)) throw std::logic_error("injected fault: a mistake");
  return inner_->attach(peer, region);
}

Code FaultyTransport::post(PeerId peer, const Work& work) noexcept {
  if (!connected_.contains(peer) || down_.contains(peer)) return Code::kRailFailed;
  if (chance(faults_.again)) return Code::kAgain;
  const bool to_fail = chance(faults_.fail);
  // A fetch may fail before or after its bytes moved. A send or a receive goes ahead: the other
  // end has its counterpart posted, and a rail that is up does deliver.
  if (to_fail && work.kind == WorkKind::kFetch && chance(0.5)) {
    Completion completion;
    completion.work = work.id;
    completion.code = Code::kRailFailed;
    completion.detail = "injected fault: the work was not started";
    hold(std::move(completion));
  } else {
    outstanding_[work.id] = {peer, to_fail, false};
    if (const Code posted = inner_->post(peer, work); posted != Code::kOk) {
      outstanding_.erase(work.id);
      return posted;
    }
  }
  if (++num_accepted_ == faults_.down_after) take_down(peer);
  return Code::kOk;
}

void FaultyTransport::cancel(std::span<const WorkId> works) noexcept {
  for (const WorkId work : works)
    if (const auto found = outstanding_.find(work); found != outstanding_.end())
      found->second.cancelled = true;
  inner_->cancel(works);
}

std::size_t FaultyTransport::poll(std::span<Completion> completions) noexcept {
  for (Held& held : held_)
    if (held.polls_left != 0) --held.polls_left;

  std::array<Completion, 64> fresh;
  const std::size_t num_fresh = inner_->poll(fresh);
  for (std::size_t i = 0; i < num_fresh; ++i) hold(std::move(fresh[i]));

  std::size_t count = 0;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].polls_left == 0 && count < completions.size()) {
      completions[count++] = std::move(held_[i].completion);
    } else {
      if (kept != i) held_[kept] = std::move(held_[i]);
      ++kept;
    }
  }
  held_.resize(kept);
  for (std::size_t i = 0; i < count; ++i)
    if (chance(faults_.reorder)) std::swap(completions[i], completions[random(count)]);
  return count;
}

// Receives a completion, and decides what becomes of it.
void FaultyTransport::hold(Completion completion) {
  std::uint32_t polls = 0;
  if (completion.kind == CompletionKind::kRailDown)
    down_.insert(completion.peer);  // it went down by itself, and not by our hand
  if (completion.kind == CompletionKind::kWork) {
    if (const auto found = outstanding_.find(completion.work); found != outstanding_.end()) {
      const Outstanding& work = found->second;
      const bool rail_went =
          completion.code == Code::kCancelled && !work.cancelled && down_.contains(work.peer);
      if (rail_went || (work.to_fail && completion.code == Code::kOk)) {
        completion.code = Code::kRailFailed;
        completion.detail =
            rail_went ? "injected fault: the rail went down" : "injected fault: the work failed";
      }
      outstanding_.erase(found);
    }
    if (chance(faults_.delay)) polls = 1 + static_cast<std::uint32_t>(random(Faults::kMaxDelayPolls));
  }
  held_.push_back({std::move(completion), polls});
}

void FaultyTransport::take_down(PeerId peer) {
  down_.insert(peer);
  inner_->disconnect(peer);  // the other end meets the end of its socket
  Completion completion;
  completion.kind = CompletionKind::kRailDown;
  completion.peer = peer;
  completion.code = Code::kRailFailed;
  completion.detail =
      "injected fault: the rail was taken down after " + std::to_string(num_accepted_) + " works";
  held_.push_back({std::move(completion), 0});
}

// splitmix64: the same numbers on every machine.
std::uint64_t FaultyTransport::random(std::uint64_t bound) noexcept {
  std::uint64_t z = random_state_ += 0x9e37'79b9'7f4a'7c15u;
  z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9u;
  z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11ebu;
  return (z ^ (z >> 31)) % bound;
}

bool FaultyTransport::chance(double rate) noexcept {
  constexpr std::uint64_t kSteps = 1u << 30;
  return rate > 0 && static_cast<double>(random(kSteps)) < rate * kSteps;
}

}  // namespace kvxfer
