// The registry: the tests run with every transport of this build and the toy, and once more without each transport
// of the build (registry/).
#include "agent_pair.h"
#include "core/transport_registry.h"
#include "library_leaks.h"

namespace kvxfer {
namespace {

using namespace agent_pair;

bool needs_gpu(const TransportKind& kind) { return !kind.memory.has(MemoryKind::kHost); }

TEST(a_handover_goes_over_each_transport_of_this_build) {
  check::Random random(check::seed());
  for (const TransportKind* kind : transport_kinds()) {
    if (needs_gpu(*kind)) continue;
    const std::string why_off = kind->why_off({});
    std::printf("  %s%s%s\n", std::string(kind->name).c_str(), why_off.empty() ? "" : ": skipped, ",
                why_off.c_str());
    if (!why_off.empty()) continue;
    const auto used = transports_in_use({std::string(kind->name)});
    REQUIRE_OK(used);
    Pair both({.transports = {std::string(kind->name)}});
    CHECK(both.hand_over(random));
  }
}

TEST(what_needs_a_gpu_is_off_without_one_and_says_so) {
  for (const TransportKind* kind : transport_kinds()) {
    if (!needs_gpu(*kind)) continue;
    CHECK(!kind->why_off({}).empty());
    RuntimeOptions options;
    options.name = "alone";
    options.transports = {std::string(kind->name)};
    const auto refused = Runtime::create(std::move(options));
    CHECK_REFUSED(refused.status(), Code::kUnsupported, kind->why_off({}));
  }
}

TEST(kinds_are_unlike_and_their_rails_are_what_they_say) {
  EpollReactor reactor;
  const auto fences = FenceTable::create();
  REQUIRE_OK(fences);
  SharedParts shared;
  const std::vector<GpuPart> gpus;
  for (const TransportKind* kind : transport_kinds()) {
    CHECK(find_transport_kind(kind->name) == kind);
    if (!kind->why_off(gpus).empty()) continue;
    const auto rails = kind->make({reactor, *fences.value(), gpus, shared}, OptionValues(*kind, {}));
    // A library that is missing shows when it is opened.
    if (!rails.ok() && !kind->is_default) {
      CHECK_EQ(rails.status().code(), Code::kUnsupported);
      continue;
    }
    REQUIRE_OK(rails);
    for (const auto& rail : rails.value()) {
      CHECK_EQ(rail->capabilities().name, kind->name);
      CHECK(rail->capabilities().memory.has(kind->memory));
    }
  }
}

TEST(what_no_transport_has_is_refused_in_words) {
  CHECK_EQ(transports_in_use({}).status().code(), Code::kInvalidArgument);
  // Of one reach as they are named, with those behind that come beside.
  std::vector<std::string> names;
  for (const TransportKind* kind : transport_kinds()) names.insert(names.begin(), std::string(kind->name));
  const auto used = transports_in_use(names);
  REQUIRE_OK(used);
  CHECK_EQ(used.value().size(), names.size());
  const auto place_of = [&](const TransportKind* kind) {
    return std::find(names.begin(), names.end(), kind->name) - names.begin();
  };
  CHECK(std::is_sorted(used.value().begin(), used.value().end(), [&](const auto* a, const auto* b) {
    return std::pair(a->reach, place_of(a)) < std::pair(b->reach, place_of(b));
  }));
  const auto unknown = transports_in_use({"pigeon"});
  CHECK_EQ(unknown.status().code(), Code::kInvalidArgument);
  for (const TransportKind* kind : transport_kinds()) {
    CHECK_HAS(unknown.status().message(), kind->name);
    const std::string name(kind->name);
    for (const TransportOption& option : kind->options) {
      const std::string whole = name + "." + std::string(option.name);
      if (!std::holds_alternative<std::int64_t>(option.default_value)) continue;
      CHECK_OK(check_options({{whole, option.least}}));
      CHECK_OK(check_options({{whole, option.most}}));
      CHECK_EQ(check_options({{whole, option.least - 1}}).code(), Code::kInvalidArgument);
      CHECK_EQ(check_options({{whole, option.most + 1}}).code(), Code::kInvalidArgument);
      CHECK_EQ(check_options({{whole, std::string("2")}}).code(), Code::kInvalidArgument);
      CHECK_EQ(check_options({{whole, true}}).code(), Code::kInvalidArgument);
    }
    CHECK_EQ(check_options({{name + ".wheels", std::int64_t{1}}}).code(), Code::kInvalidArgument);
  }
  CHECK_EQ(check_options({{"rails", std::int64_t{1}}}).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace kvxfer
