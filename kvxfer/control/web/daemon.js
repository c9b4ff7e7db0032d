// Sends requests to the daemon, and reads its events. The token is kept only in this tab's session storage.

const KEY = "kvxfer-token";
const SILENT_MS = 40e3; // the daemon sends something every 15 s

export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

export class Daemon {
  get token() {
    return sessionStorage.getItem(KEY) || "";
  }

  set token(text) {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  }

  headers(more = {}) {
    return this.token ? { ...more, Authorization: `Bearer ${this.token}` } : more;
  }

  async ask(method, path, body) {
    const headers = this.headers();
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (method === "POST") headers["Idempotency-Key"] = randomKey();
    let answer;
    try {
      answer = await fetch(path, {
        method,
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        cache: "no-store",
        signal: AbortSignal.timeout(30e3),
      });
    } catch (error) {
      throw new Problem(0, "unreachable", String(error));
    }
    return answer.ok ? answer.json() : Promise.reject(await problemOf(answer));
  }

  get(path, params = {}) {
    const told = Object.entries(params).filter(([, value]) => value !== "" && value !== null);
    const query = new URLSearchParams(told).toString();
    return this.ask("GET", query ? `${path}?${query}` : path);
  }

  // Calls `opened` with the daemon's incarnation, then `on` with each event. Throws when the stream ends.
  async events(after, topics, opened, on) {
    const stop = new AbortController();
    let silent = setTimeout(() => stop.abort(), SILENT_MS);
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => stop.abort(), SILENT_MS);
    };
    try {
      const params = topics.map((topic) => ["topic", topic]);
      if (after !== null) params.push(["after", after]);
      const answer = await fetch(`/v1/events?${new URLSearchParams(params)}`, {
        headers: this.headers({ Accept: "text/event-stream" }),
        cache: "no-store",
        signal: stop.signal,
      });
      if (!answer.ok) throw await problemOf(answer);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        heard();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) take(block, opened, on);
      }
    } catch (error) {
      throw error instanceof Problem ? error : new Problem(0, "unreachable", String(error));
    } finally {
      clearTimeout(silent);
      stop.abort();
    }
    throw new Problem(0, "unreachable", "the stream ended");
  }
}

function take(block, opened, on) {
  const found = {};
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    found[line.slice(0, colon) || "comment"] = line.slice(colon + 1).trimStart();
  }
  const told = /^events from (\d+) of (\S+)$/.exec(found.comment || "");
  if (told) opened(Number(told[1]) - 1, told[2]);
  on(found.id ? Number(found.id) : null, found.event || "", found.data ? JSON.parse(found.data) : null);
}

async function problemOf(answer) {
  try {
    const told = await answer.json();
    return new Problem(answer.status, String(told.code), String(told.detail));
  } catch {
    return new Problem(answer.status, "protocol", `status ${answer.status}`);
  }
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (n) => n.toString(16).padStart(2, "0")).join("");
}
