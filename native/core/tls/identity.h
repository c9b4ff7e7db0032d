// The identity that a certificate gives an agent: "kvxfer://TENANT/ENGINE/AGENT", one of its names of kind
// URI. Without the last part it holds for every agent of that engine. A certificate may have several.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvxfer/status.h"

namespace kvxfer::tls {

// "TENANT/ENGINE", or with "/AGENT".
struct Identity {
  // Nothing if the text is no such name. Parts are not empty, and consist of letters, digits and
  // "-._~:@+"; AGENT may also contain "/". So a name contains neither a wildcard nor a NUL.
  static std::optional<Identity> parse(std::string_view uri);

  bool is_of(std::string_view agent) const noexcept { return name.empty() || name == agent; }
  std::string with(std::string_view agent) const { return tenant + "/" + engine + "/" + std::string(agent); }
  std::string in_words() const { return name.empty() ? tenant + "/" + engine : with(name); }

  std::string tenant, engine;
  std::string name;  // the agent's; empty: any
};

// Which peers an agent accepts: "acme/prefill-*/*". A star matches any text without "/"; in the last part,
// any text.
class Pattern {
 public:
  static Result<Pattern> parse(const std::string& text);
  // For an identity without an agent's name: may one of its agents match?
  bool matches(const Identity& identity, std::string_view agent) const;
  // "TENANT/ENGINE/AGENT"; never "".
  bool matches(std::string_view identity) const;

 private:
  std::string tenant_, engine_, agent_;
};

}  // namespace kvxfer::tls
