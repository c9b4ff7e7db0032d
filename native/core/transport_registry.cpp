#include "core/transport_registry.h"

#include <algorithm>
#include <vector>

namespace kvxfer {
namespace {

// "a, b and c" without the "and": names in a message.
template <class Range, class Name>
std::string listed(Range&& range, Name name) {
  std::string text;
  for (const auto& each : range) {
    if (!text.empty()) text += ", ";
    text += name(each);
  }
  return text;
}

// Does `beside` reach the memory that `partial` may not reach?
bool goes_beside(const TransportKind& beside, const TransportKind& partial) {
  return partial.is_partial && !beside.is_partial && beside.reach == partial.reach &&
         beside.memory.has(partial.memory);
}

Status check_option(const TransportOption& option, const std::string& name, const OptionValue& value) {
  const auto refuse = [&](const std::string& why) -> Status {
    return {Code::kInvalidArgument, "option " + name + " (" + std::string(option.help) + ") " + why};
  };
  if (value.index() != option.default_value.index()) {
    static constexpr const char* kTypes[] = {"is True or False", "is a whole number", "is a text"};
    return refuse(kTypes[option.default_value.index()]);
  }
  if (const auto* number = std::get_if<std::int64_t>(&value);
      number != nullptr && (*number < option.least || *number > option.most))
    return refuse("is " + std::to_string(*number) + ", not within " + std::to_string(option.least) + " to " +
                  std::to_string(option.most));
  return {};
}

}  // namespace

std::string names_reaching(MemoryKind memory) {
  // A loop: clang 14 cannot read libstdc++'s views.
  std::vector<const TransportKind*> reaching;
  for (const TransportKind* kind : transport_kinds())
    if (kind->memory.has(memory)) reaching.push_back(kind);
  return listed(reaching, [](const TransportKind* kind) { return std::string(kind->name); });
}

OptionValues::OptionValues(const TransportKind& kind, const NamedOptions& named) {
  for (const TransportOption& option : kind.options) {
    const auto found = named.find(std::string(kind.name) + "." + std::string(option.name));
    OptionValue& value = values_[option.name];
    if (found != named.end())
      value = found->second;
    else if (const auto* text = std::get_if<std::string_view>(&option.default_value))
      value = std::string(*text);
    else if (const auto* number = std::get_if<std::int64_t>(&option.default_value))
      value = *number;
    else
      value = std::get<bool>(option.default_value);
  }
}

const TransportKind* find_transport_kind(std::string_view name) noexcept {
  const auto kinds = transport_kinds();
  const auto found =
      std::find_if(kinds.begin(), kinds.end(), [&](const auto* kind) { return kind->name == name; });
  return found == kinds.end() ? nullptr : *found;
}

Result<std::vector<const TransportKind*>> transports_in_use(const std::vector<std::string>& names) {
  std::vector<const TransportKind*> used;
  // The nearest first, and within one reach in the order in which they were named. Built in order at once:
  // std::stable_sort of libstdc++ 12 calls a function that clang 19 warns of.
  const auto use = [&](const TransportKind* kind) {
    if (std::find(used.begin(), used.end(), kind) == used.end())
      used.insert(std::upper_bound(used.begin(), used.end(), kind,
                                   [](const auto* a, const auto* b) { return a->reach < b->reach; }),
                  kind);
  };
  std::vector<const TransportKind*> named;
  for (const std::string& name : names) {
    const TransportKind* const kind = find_transport_kind(name);
    if (kind == nullptr)
      return Status(Code::kInvalidArgument,
                    "there is no transport '" + name + "': this build has " +
                        listed(transport_kinds(), [](const auto* each) { return each->name; }));
    use(kind);
    named.push_back(kind);
  }
  for (const TransportKind* kind : named)
    for (const TransportKind* beside : transport_kinds())
      if (goes_beside(*beside, *kind)) use(beside);
  if (used.empty()) return Status(Code::kInvalidArgument, "an agent needs at least one transport");
  return used;
}

Status check_options(const NamedOptions& options) {
  for (const auto& [name, value] : options) {
    const std::size_t dot = name.find('.');
    const TransportKind* const kind = find_transport_kind(std::string_view(name).substr(0, dot));
    const TransportOption* option = nullptr;
    if (kind != nullptr && dot != std::string::npos)
      for (const TransportOption& each : kind->options)
        if (each.name == std::string_view(name).substr(dot + 1)) option = &each;
    if (option == nullptr) {
      std::string known;
      for (const TransportKind* each : transport_kinds())
        for (const TransportOption& one : each->options)
          known += (known.empty() ? "" : ", ") + std::string(each->name) + "." + std::string(one.name);
      return {Code::kInvalidArgument, "no transport of this build has an option '" + name + "': there are " +
                                          (known.empty() ? "none" : known)};
    }
    if (Status status = check_option(*option, name, value); !status.ok()) return status;
  }
  return {};
}

}  // namespace kvxfer
