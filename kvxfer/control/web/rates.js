// Transfer rates between agents, from the events of ended transfers. Each transfer counts once, though both of its
// ends report it. (kvxfer/control/transfers/live_rates.py does the same for `kvxfer top`.)

const WINDOW_MS = 5000;
const MOST = 100000;
const POINTS = 60;

export class Rates {
  constructor() {
    this.ended = [];
    this.seen = new Set();
    this.past = new Map();
    this.since = performance.now();
  }

  add(data, now) {
    if (this.seen.has(data.id) || this.ended.length >= MOST) return;
    if (data.role !== "source" && data.role !== "destination") return;
    const agent = data.agent.slice(0, 16);
    const [one, other] = data.id.split("-");
    const peer = one === agent ? other : one;
    const link = data.role === "source" ? `${agent} ${peer}` : `${peer} ${agent}`;
    this.seen.add(data.id);
    this.ended.push({ at: now, id: data.id, link, nbytes: data.nbytes });
  }

  // Returns bytes and transfers a second, by link ("source destination").
  links(now) {
    let gone = 0;
    while (gone < this.ended.length && this.ended[gone].at < now - WINDOW_MS) {
      this.seen.delete(this.ended[gone].id);
      gone += 1;
    }
    this.ended.splice(0, gone);
    // Just after the start, less time than the window has passed.
    const seconds = Math.min(WINDOW_MS, Math.max(1000, now - this.since)) / 1e3;
    const found = new Map();
    for (const { link, nbytes } of this.ended) {
      const sum = found.get(link) || { nbytes: 0, count: 0 };
      sum.nbytes += nbytes / seconds;
      sum.count += 1 / seconds;
      found.set(link, sum);
    }
    return found;
  }

  // Adds one point to each link's curve; called once a second.
  remember(found) {
    for (const link of new Set([...this.past.keys(), ...found.keys()])) {
      const points = this.past.get(link) || new Array(POINTS).fill(0);
      points.push(found.get(link)?.nbytes || 0);
      points.shift();
      if (points.some((point) => point > 0)) this.past.set(link, points);
      else this.past.delete(link);
    }
  }
}
