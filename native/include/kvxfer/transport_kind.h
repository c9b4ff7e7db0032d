// What a transport says of itself: all that an agent, Python and `kvxfer doctor` know of it besides its rails.
//
// Each folder of transports/ that native/CMakeLists.txt registers by its line kvxfer_transport(NAME) defines one
// constant of this type, named NAME_transport. The registry is generated from these lines. No other code holds a
// transport's name: which rails an agent dials follows from what stands here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <typeindex>
#include <variant>
#include <vector>

#include "kvxfer/status.h"
#include "kvxfer/transport.h"

namespace kvxfer {

struct GpuPart;  // gpu/gpu_part.h: a GPU of the agent, and the kernels that copy there
struct TransportKind;

using OptionValue = std::variant<bool, std::int64_t, std::string>;
// As callers name them: "tcp.rails" is option "rails" of transport "tcp".
using NamedOptions = std::map<std::string, OptionValue, std::less<>>;

struct TransportOption {
  std::string_view name;
  std::string_view help;  // a noun phrase: what it counts or names, and in which unit
  std::variant<bool, std::int64_t, std::string_view> default_value;  // its type is the option's
  std::int64_t least = 0, most = 0;  // of a number
};

// The options of one kind, whole: what the caller named, and the defaults of the others.
class OptionValues {
 public:
  // Of checked options (check_options).
  OptionValues(const TransportKind& kind, const NamedOptions& named);
  bool flag(std::string_view name) const { return std::get<bool>(values_.at(name)); }
  std::int64_t number(std::string_view name) const { return std::get<std::int64_t>(values_.at(name)); }
  const std::string& text(std::string_view name) const { return std::get<std::string>(values_.at(name)); }

 private:
  std::map<std::string_view, OptionValue> values_;
};

// How far it goes: the nearest of those that two agents have in common is used.
enum class Reach : std::uint8_t { kProcess, kHost, kNetwork };

// What a rail's socket is, over which its ends exchange what they need of each other.
enum class RailSocket : std::uint8_t { kUnix, kTcp };

// What rails of several kinds hold together in one agent, by its type: made by the first that asks.
class SharedParts {
 public:
  template <class T>
  std::shared_ptr<T> get(const std::function<std::shared_ptr<T>()>& make) {
    std::shared_ptr<void>& part = parts_[typeid(T)];
    if (part == nullptr) part = make();
    return std::static_pointer_cast<T>(part);
  }

 private:
  std::map<std::type_index, std::shared_ptr<void>> parts_;
};

class CopyWorkers;

// What an agent gives to the rails that it makes. Reactor and fence table outlive them, and the GPUs' driver.
struct RailParts {
  Reactor& reactor;
  const FenceTable& fences;
  const std::vector<GpuPart>& gpus;
  SharedParts& shared;
  std::shared_ptr<CopyWorkers> workers = nullptr;  // null: whoever drives copies alone
};

struct TransportKind {
  std::string_view name;
  std::string_view purpose;  // "moves pages between ...": a sentence without its subject
  std::string_view remedy;  // what most often forbids it, and what to do
  std::span<const TransportOption> options;

  MemoryKinds memory;  // that its rails reach; streams reach a GPU's as well, where the agent stages
  Reach reach;
  RailSocket socket;
  // Lower is preferred among those of one reach by agents that name none; others say so by the order of their names.
  std::uint32_t rank;
  // Some of that memory it cannot reach, which shows only when a region is attached: a kind of the same reach
  // that is not partial is in use with it, and has a rail beside it.
  bool is_partial = false;
  // Its ends map each other's memory: control frames may go through memory as well.
  bool shares_memory = false;
  bool is_default = true;  // used by agents that name no transports

  // In words why no rail can be made here, "" where one can. Costs little, and has no effect.
  std::string (*why_off)(const std::vector<GpuPart>& gpus);
  // Which devices rails use on this machine, and which not and why: sentences for people. Null: there is no choice.
  std::vector<std::string> (*describe)() = nullptr;
  // One for each rail of a session (a socket, a NIC, a GPU). Not ok: why it cannot be had though why_off said
  // nothing, or that an option does not fit this machine.
  Result<std::vector<std::unique_ptr<Transport>>> (*make)(const RailParts& parts,
                                                          const OptionValues& options);
};

// Those of this build, in the order of their lines.
std::span<const TransportKind* const> transport_kinds() noexcept;

}  // namespace kvxfer
