#include "transports/verbs/classes.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <system_error>
#include <utility>

namespace kvxfer::verbs {
namespace {

struct KnownRate {
  std::uint32_t tenths_of_gbps;
  abi::Rate rate;
};
constexpr KnownRate kRates[] = {
    {25, abi::Rate::k2_5},   {50, abi::Rate::k5},     {100, abi::Rate::k10},     {140, abi::Rate::k14},
    {200, abi::Rate::k20},   {250, abi::Rate::k25},   {280, abi::Rate::k28},     {300, abi::Rate::k30},
    {400, abi::Rate::k40},   {500, abi::Rate::k50},   {560, abi::Rate::k56},     {600, abi::Rate::k60},
    {800, abi::Rate::k80},   {1000, abi::Rate::k100}, {1120, abi::Rate::k112},   {1200, abi::Rate::k120},
    {1680, abi::Rate::k168}, {2000, abi::Rate::k200}, {3000, abi::Rate::k300},   {4000, abi::Rate::k400},
    {6000, abi::Rate::k600}, {8000, abi::Rate::k800}, {12000, abi::Rate::k1200},
};

struct Key {
  std::string_view name;
  std::uint32_t least, most;
};
constexpr Key kKeys[] = {
    {"pairs", 1, kMostPairs}, {"traffic_class", 0, 255}, {"service_level", 0, 15}, {"rate_gbps", 1, 100'000}};

std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// The text before the mark, and the text behind it. Without a mark: all of it, and nothing.
std::pair<std::string_view, std::string_view> cut(std::string_view text, char mark) noexcept {
  const std::size_t at = text.find(mark);
  if (at == std::string_view::npos) return {text, {}};
  return {text.substr(0, at), text.substr(at + 1)};
}

std::optional<std::uint32_t> number_of(std::string_view text, std::uint32_t most) noexcept {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number > most) return std::nullopt;
  return number;
}

Status wrong(const std::string& what) { return {Code::kInvalidArgument, "verbs.classes: " + what}; }

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

// Reads the range of one class's priorities, which must begin with `first`.
Result<unsigned> read_end(std::string_view range, unsigned first) {
  const auto [from, to] = cut(range, '-');
  const auto begin = number_of(trimmed(from), PriorityClasses::kEnd - 1);
  const auto last = number_of(trimmed(to), PriorityClasses::kEnd - 1);
  if (!begin || !last || *begin > *last)
    return wrong(quoted(range) + " is not a range of priorities within 0-255, such as 0-63");
  if (*begin == first) return *last + 1;
  return wrong(*begin < first
                   ? "priority " + std::to_string(*begin) + " is in two classes"
                   : "priorities from " + std::to_string(first) + " to " + std::to_string(*begin - 1) +
                         " are in no class (each class begins after the one before)");
}

// `named`: one bit for each key that the class has named already.
Status read_pair(std::string_view pair, PairClass& into, unsigned& named) {
  const auto [name, value] = cut(pair, '=');
  const auto* const key = std::find_if(std::begin(kKeys), std::end(kKeys),
                                       [&name = name](const Key& each) { return each.name == name; });
  if (key == std::end(kKeys))
    return wrong(quoted(name) + " is not one of pairs, traffic_class, service_level and rate_gbps");
  const unsigned bit = 1u << (key - std::begin(kKeys));
  if ((std::exchange(named, named | bit) & bit) != 0)
    return wrong("a class names " + std::string(name) + " twice");
  const auto number = number_of(value, key->most);
  if (!number || *number < key->least)
    return wrong(std::string(name) + " is " + quoted(value) + ": it must be a whole number from " +
                 std::to_string(key->least) + " to " + std::to_string(key->most));
  if (name == "pairs") into.num_pairs = *number;
  if (name == "traffic_class") into.traffic_class = static_cast<std::uint8_t>(*number);
  if (name == "service_level") into.service_level = static_cast<std::uint8_t>(*number);
  if (name == "rate_gbps") into.rate_gbps = *number;
  return {};
}

}  // namespace

std::optional<abi::Rate> rate_below(std::uint32_t tenths_of_gbps) noexcept {
  std::optional<abi::Rate> highest;
  for (const KnownRate& known : kRates)
    if (known.tenths_of_gbps <= tenths_of_gbps) highest = known.rate;
  return highest;
}

PairPath PairClass::path() const noexcept {
  const std::optional<abi::Rate> rate =
      rate_gbps == 0 ? std::nullopt : rate_below(10 * rate_gbps / num_pairs);
  return {traffic_class, service_level, rate.value_or(abi::Rate::kPort)};
}

Result<std::vector<PairClass>> parse_classes(std::string_view text, const PairClass& rest) {
  if (trimmed(text).empty()) return std::vector<PairClass>{rest};
  std::vector<PairClass> classes;
  unsigned end = 0;
  std::uint32_t num_pairs = 0;
  for (std::string_view left = text; !trimmed(left).empty();) {
    const auto [one, others] = cut(left, ';');
    left = others;
    if (end == PriorityClasses::kEnd) return wrong(quoted(trimmed(one)) + " comes after priority 255");
    if (classes.size() == PriorityClasses::kMost)
      return wrong("there are more than " + std::to_string(PriorityClasses::kMost) + " classes");
    PairClass made = rest;
    made.first = static_cast<std::uint8_t>(end);
    const auto [range, pairs] = cut(one, ':');
    const Result<unsigned> its_end = read_end(trimmed(range), end);
    if (!its_end.ok()) return its_end.status();
    end = its_end.value();
    unsigned named = 0;
    for (std::string_view more = trimmed(pairs); !more.empty();) {
      const auto [pair, rest_of_it] = cut(more, ' ');
      if (Status read = read_pair(pair, made, named); !read.ok()) return read;
      more = trimmed(rest_of_it);
    }
    if (made.rate_gbps != 0 && !rate_below(10 * made.rate_gbps / made.num_pairs))
      return wrong("a rate of " + std::to_string(made.rate_gbps) + " Gb/s for " +
                   std::to_string(made.num_pairs) +
                   " queue pairs is less than 2.5 Gb/s for each, the lowest rate that devices have");
    num_pairs += made.num_pairs;
    classes.push_back(made);
  }
  if (end != PriorityClasses::kEnd)
    return wrong("priorities from " + std::to_string(end) + " to 255 are in no class");
  if (num_pairs > kMostPairs)
    return wrong("its classes have " + std::to_string(num_pairs) + " queue pairs in all; at most " +
                 std::to_string(kMostPairs) + " are allowed");
  return classes;
}

PriorityClasses priorities_of(const std::vector<PairClass>& classes) noexcept {
  PriorityClasses priorities;
  for (const PairClass& each : classes) priorities.add(each.first);
  return priorities;
}

std::string in_words(const std::vector<PairClass>& classes) {
  const PriorityClasses priorities = priorities_of(classes);
  std::string words;
  for (std::size_t i = 0; i < classes.size(); ++i) {
    const PairClass& each = classes[i];
    words += (words.empty() ? "priorities " : "; ") + std::to_string(each.first) + " to " +
             std::to_string(priorities.end(i) - 1) + ": " + std::to_string(each.num_pairs) + " queue pair" +
             (each.num_pairs == 1 ? "" : "s") + ", traffic class " + std::to_string(each.traffic_class);
    if (each.service_level != 0) words += ", service level " + std::to_string(each.service_level);
    if (each.rate_gbps != 0) words += ", " + std::to_string(each.rate_gbps) + " Gb/s";
  }
  return words;
}

}  // namespace kvxfer::verbs
