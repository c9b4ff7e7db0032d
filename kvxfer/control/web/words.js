// Formats figures for people.

export function bytes(count) {
  if (count === null || count === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function duration(us) {
  if (us === null || us === undefined) return "-";
  if (us < 1e3) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1e3).toFixed(1)} ms`;
  if (us < 600e6) return `${(us / 1e6).toFixed(1)} s`;
  if (us < 7200e6) return `${Math.round(us / 60e6)} min`;
  return `${(us / 3600e6).toFixed(1)} h`;
}

export function since(atS) {
  return duration(Math.max(0, Date.now() / 1e3 - atS) * 1e6);
}

// Whether a part of a transfer's id is the beginning of an agent's id.
export function isAgent(part) {
  return /^[0-9a-f]{16}$/.test(part);
}

// Shortens a transfer's id: most digits of both agents are left out; the rest tells transfers on the screen apart.
export function short(id) {
  const [one, other, ...rest] = id.split("-");
  return rest.length && isAgent(one) ? [one.slice(0, 4), isAgent(other) ? other.slice(0, 4) : other, ...rest].join("-") : id;
}
