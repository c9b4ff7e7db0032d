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

// All options of one kind: those that the caller named, and the defaults of the others.
class OptionValues {
 public:
  // Made from checked options (check_options).
  OptionValues(const TransportKind& kind, const NamedOptions& named);
  bool flag(std::string_view name) const { return std::get<bool>(values_.at(name)); }
  std::int64_t number(std::string_view name) const { return std::get<std::int64_t>(values_.at(name)); }
  const std::string& text(std::string_view name) const { return std::get<std::string>(values_.at(name)); }

 private:
  std::map<std::string_view, OptionValue> values_;
};

// How far its rails go. Two agents use the nearest of the kinds that they have in common.
enum class Reach : std::uint8_t { kProcess, kHost, kNetwork };

// The kind of socket over which a rail's two ends exchange what they need of each other.
enum class RailSocket : std::uint8_t { kUnix, kTcp };

// Objects that rails of several kinds share in one agent, found by their type. The first rail that asks
// makes one.
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

// What an agent gives to the rails that it makes. The reactor, the fence table and the driver of the GPUs
// outlive them.
struct RailParts {
  Reactor& reactor;
  const FenceTable& fences;
  const std::vector<GpuPart>& gpus;
  SharedParts& shared;
  std::shared_ptr<CopyWorkers> workers = nullptr;  // null: the driving thread copies alone
};

struct TransportKind {
  std::string_view name;
  std::string_view purpose;  // "moves pages between ...": a sentence without its subject
  std::string_view remedy;  // what most often forbids it, and what to do
  std::span<const TransportOption> options;

  MemoryKinds memory;  // kinds that its rails reach; streams reach a GPU's as well, if the agent stages
  Reach reach;
  RailSocket socket;
  // Agents that name no transports prefer the lower rank among kinds of one reach. Other agents say what
  // they prefer by the order of the names.
  std::uint32_t rank;
  // True: it cannot reach some of that memory, and that shows only when a region is attached. Beside it
  // the agent uses another kind of the same reach that is not partial, and that kind has a rail beside its
  // own.
  bool is_partial = false;
  // Its ends map each other's memory: control frames may go through memory as well.
  bool shares_memory = false;
  bool is_default = true;  // used by agents that name no transports

  // Says in words why no rail can be made here, or "" if one can. Costs little, and has no effect.
  std::string (*why_off)(const std::vector<GpuPart>& gpus);
  // Says which devices rails use on this machine, and which not and why: sentences for people. Null: there
  // is no choice.
  std::vector<std::string> (*describe)() = nullptr;
  // Makes one instance for each rail of a session (a socket, a NIC, a GPU). Not ok: why it cannot make one
  // although why_off said nothing, or which option does not fit this machine.
  Result<std::vector<std::unique_ptr<Transport>>> (*make)(const RailParts& parts,
                                                          const OptionValues& options);
};

// The transport kinds of this build, in the order of their lines.
std::span<const TransportKind* const> transport_kinds() noexcept;

}  // namespace kvxfer
