#include "bindings/transports.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "gpu/gpu_part.h"

namespace kvxfer::python {

using nb::literals::operator""_a;

NamedOptions to_named_options(const nb::dict& options) {
  NamedOptions named;
  for (const auto [key, value] : options) {
    const std::string name = to_text(key, "an option's name");
    OptionValue& to = named[name];
    if (nb::isinstance<nb::bool_>(value))
      to = nb::cast<bool>(value);
    else if (std::int64_t number = 0; nb::isinstance<nb::int_>(value) && nb::try_cast(value, number))
      to = number;
    else if (nb::isinstance<nb::str>(value))
      to = to_text(value, "option " + name);
    else
      raise({Code::kInvalidArgument, "option " + name + " is " + shown_of(value) +
                                         ", but must be True, False, a 64-bit whole number or a text"});
  }
  return named;
}

namespace {

nb::object to_python(const TransportOption& option) {
  return std::visit([](const auto& value) { return nb::cast(value); }, option.default_value);
}

nb::dict described(const TransportKind& kind) {
  nb::dict options;
  for (const TransportOption& option : kind.options) {
    nb::dict one;
    one["help"] = option.help;
    one["default"] = to_python(option);
    if (std::holds_alternative<std::int64_t>(option.default_value)) {
      one["least"] = option.least;
      one["most"] = option.most;
    }
    options[nb::str((std::string(kind.name) + "." + std::string(option.name)).c_str())] = one;
  }
  nb::list memory;
  if (kind.memory.has(MemoryKind::kHost)) memory.append("host");
  if (kind.memory.has(MemoryKind::kGpu)) memory.append("gpu");
  static constexpr const char* kReaches[] = {"process", "host", "network"};
  nb::dict told;
  told["name"] = kind.name;
  told["purpose"] = kind.purpose;
  told["remedy"] = kind.remedy;
  told["options"] = options;
  told["memory"] = nb::tuple(memory);
  told["reach"] = kReaches[static_cast<std::size_t>(kind.reach)];
  told["rank"] = kind.rank;
  told["is_default"] = kind.is_default;
  told["why_off"] = kind.why_off({});
  told["devices"] =
      nb::tuple(nb::cast(kind.describe == nullptr ? std::vector<std::string>() : kind.describe()));
  return told;
}

void check_transports(nb::handle names, const nb::dict& options) {
  take(transports_in_use(to_texts(names, "option transports")));
  check(check_options(to_named_options(options)));
}

nb::list transports() {
  nb::list all;
  for (const TransportKind* kind : transport_kinds()) all.append(described(*kind));
  return all;
}

}  // namespace

void define_transports(nb::module_& m) {
  m.def("transports", &transports);
  m.def("check_transports", &check_transports, "names"_a, "options"_a);
}

}  // namespace kvxfer::python
