#include "core/tls/identity.h"

#include <algorithm>

namespace kvxfer::tls {
namespace {

constexpr std::string_view kScheme = "kvxfer://";
constexpr std::size_t kMostNbytes = 512;

bool is_of_a_name(char c) noexcept {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("-._~:@+").find(c) != std::string_view::npos;
}

struct Parts {
  std::string_view tenant, engine, agent;
  bool has_agent = false;
};

std::optional<Parts> split(std::string_view text) {
  Parts out;
  const std::size_t first = text.find('/');
  if (first == std::string_view::npos) return std::nullopt;
  const std::size_t second = text.find('/', first + 1);
  out.tenant = text.substr(0, first);
  out.engine = text.substr(first + 1, second == std::string_view::npos ? second : second - first - 1);
  out.has_agent = second != std::string_view::npos;
  if (out.has_agent) out.agent = text.substr(second + 1);
  if (out.tenant.empty() || out.engine.empty() || (out.has_agent && out.agent.empty())) return std::nullopt;
  return out;
}

// Stars are few and texts are short: the time is at most their product.
bool fits(std::string_view pattern, std::string_view text) noexcept {
  std::size_t p = 0, t = 0, star = std::string_view::npos, after_star = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after_star = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++after_star;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace

std::optional<Identity> Identity::parse(std::string_view uri) {
  if (!uri.starts_with(kScheme) || uri.size() > kMostNbytes) return std::nullopt;
  const std::string_view path = uri.substr(kScheme.size());
  if (!std::ranges::all_of(path, [](char c) { return c == '/' || is_of_a_name(c); })) return std::nullopt;
  const std::optional<Parts> parts = split(path);
  if (!parts) return std::nullopt;
  return Identity{std::string(parts->tenant), std::string(parts->engine), std::string(parts->agent)};
}

Result<Pattern> Pattern::parse(const std::string& text) {
  const std::optional<Parts> parts = split(text);
  const bool sound =
      parts && parts->has_agent && text.size() <= kMostNbytes &&
      std::ranges::all_of(text, [](char c) { return c == '/' || c == '*' || is_of_a_name(c); });
  if (!sound)
    return Status(Code::kInvalidArgument, "'" + text.substr(0, kMostNbytes) +
                                              "' is not a pattern of identities: write TENANT/ENGINE/AGENT, "
                                              "where * matches any text, such as \"acme/prefill-*/*\"");
  Pattern out;
  out.tenant_ = parts->tenant;
  out.engine_ = parts->engine;
  out.agent_ = parts->agent;
  return out;
}

bool Pattern::matches(std::string_view identity) const {
  const std::optional<Parts> parts = split(identity);
  return parts && fits(tenant_, parts->tenant) && fits(engine_, parts->engine) && fits(agent_, parts->agent);
}

bool Pattern::matches(const Identity& identity, std::string_view agent) const {
  return fits(tenant_, identity.tenant) && fits(engine_, identity.engine) &&
         (agent.empty() || fits(agent_, agent));
}

}  // namespace kvxfer::tls
