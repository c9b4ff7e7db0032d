// The page of a node: its parts, and when each of them is requested again.

import { Daemon, Problem } from "./daemon.js";
import { cells, curve, element, endsOf, rows, say, timeline, way } from "./draw.js";
import { Rates } from "./rates.js";
import { bytes, duration, short, since } from "./words.js";

const TOPICS = ["transfers", "agents", "leases", "drain", "pages"];
const MOST_ENDED = 40;
const MOST_LEASES = 100;
const ALL_STALE_MS = 10e3; // for what no event reports, such as the rest of a lease's time
const DOCTOR_MS = 60e3;
const ROLES = ["read", "transfer", "admin"];

const daemon = new Daemon();
const rates = new Rates();
const $ = (id) => document.getElementById(id);

const now = {
  after: null,
  incarnation: "",
  online: false,
  signedIn: false,
  role: "read",
  names: new Map(), // by the first 16 digits of an id
  links: [],
  search: { context: "", state: "" },
  holds: false, // the list of ended transfers is not updated
  endedTurn: 0, // how often that list was requested
  dirty: new Set(["agents", "leases", "pools", "drain", "ended"]),
  wrong: "",
  doctorAt: -Infinity,
  allAt: 0,
};

const may = (role) => ROLES.indexOf(now.role) >= ROLES.indexOf(role);
const nameOf = (id) => now.names.get(id.slice(0, 16)) || id.slice(0, 8);

// ---- connection ----------------------------------------------------------------------------------

function connection(state, words) {
  $("connection").dataset.state = state;
  say($("connection"), words);
  $("main").classList.toggle("stale", state !== "on");
}

function askForToken(words) {
  now.signedIn = false;
  daemon.token = "";
  $("sign-in").hidden = false;
  $("sign-out").hidden = true;
  $("main").hidden = true;
  say($("sign-in-error"), words);
  connection("off", "Needs a token");
  $("token").focus();
}

async function signIn() {
  try {
    const [node, who] = await Promise.all([daemon.get("/v1/node"), daemon.get("/v1/whoami")]);
    showNode(node);
    now.role = who.role;
    const from = document.activeElement === $("token") || $("sign-in").contains(document.activeElement);
    $("sign-in").hidden = true;
    $("main").hidden = false;
    $("sign-out").hidden = !daemon.token;
    $("drain-form").hidden = !may("admin");
    if (from) $("main").focus();
    now.signedIn = true;
    return true;
  } catch (error) {
    if (error.status === 401) {
      askForToken(daemon.token ? error.message : "");
      return null;
    }
    connection("off", "The daemon does not answer: trying again");
    return false;
  }
}

function showNode(node) {
  say($("node"), node.node);
  say($("about"), `version ${node.version}, up ${since(node.started_at_s)}`);
  document.title = `${node.node} - kvxfer`;
}

function opened(last, incarnation) {
  const restarted = now.incarnation !== "" && now.incarnation !== incarnation;
  if (now.after === null) now.after = last;
  now.incarnation = incarnation;
  now.online = true;
  now.doctorAt = restarted ? -Infinity : now.doctorAt;
  markAll();
  connection("on", restarted ? "Connected again: the daemon was restarted" : "Live");
}

function markAll() {
  for (const part of ["agents", "leases", "pools", "drain", "ended"]) now.dirty.add(part);
}

function happened(index, topic, event) {
  if (index !== null) now.after = index;
  if (event === null) return;
  if (topic === "missed") {
    markAll();
    return;
  }
  const [part] = topic.split(".");
  if (part === "transfers") {
    now.dirty.add("ended");
    if (topic === "transfers.done") rates.add(event.data, performance.now());
  } else if (part === "agents") {
    now.dirty.add("agents").add("leases");
  } else if (part === "leases" || part === "drain") {
    now.dirty.add(part);
  } else if (part === "pages") {
    now.dirty.add("pools");
  }
}

async function watch() {
  for (let failures = 0; ; ) {
    const ready = await signIn();
    if (ready === null) {
      await new Promise((resolve) => (tokenGiven = resolve));
      continue;
    }
    if (ready) {
      try {
        await daemon.events(now.after, TOPICS, (last, incarnation) => {
          failures = 0;
          opened(last, incarnation);
        }, happened);
      } catch (error) {
        if (error.status === 401) continue;
        connection("off", error.status ? `${error.message}: trying again` : "The daemon does not answer: trying again");
      }
    }
    now.online = false;
    await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 300 * 2 ** failures)));
    failures += 1;
  }
}

let tokenGiven = () => {};

// ---- parts ---------------------------------------------------------------------------------------

const PARTS = {
  async agents() {
    const [agents, peers] = await Promise.all([all("/v1/agents"), all("/v1/peers")]);
    now.names = new Map(peers.map((peer) => [peer.id.slice(0, 16), peer.name]));
    for (const agent of agents) now.names.set(agent.id.slice(0, 16), agent.name);
    now.links = peers;
    say($("total-agents"), String(agents.length));
    table("agent", agents, (agent) => agent.id, (row, agent) =>
      cells(row, [
        agent.name,
        agent.address || "accepts no peers",
        `${agent.pid} on ${agent.host}`,
        agent.regions,
        agent.peers,
        agent.leases,
        agent.may.join(", ") || "nothing",
        (agent.draining ? "draining, " : "") + `attached ${since(agent.attached_at_s)}` +
          (agent.records_dropped ? `, ${agent.records_dropped} records lost` : ""),
      ]));
  },
  async leases() {
    const { items, next } = await daemon.get("/v1/leases", { limit: MOST_LEASES });
    say($("total-leases"), String(items.length) + (next ? "+" : ""));
    table("lease", items, (lease) => lease.id, (row, lease) =>
      cells(row, [
        lease.region_name || `region ${lease.region}`,
        lease.agent_name,
        lease.holder || (lease.session === null ? "any agent with the token" : `session ${lease.session}`),
        lease.mode,
        lease.num_blocks === null ? "all" : lease.num_blocks,
        lease.state,
        lease.seconds_left === null ? "no time limit" : duration(lease.seconds_left * 1e6),
      ]));
  },
  async pools() {
    const { items } = await daemon.get("/v1/pools");
    const used = items.reduce((sum, pool) => sum + pool.used_nbytes, 0);
    say($("total-pool"), items.length ? bytes(used) : "none");
    table("pool", items, (pool) => pool.name, (row, pool) =>
      cells(row, [
        pool.name,
        `${bytes(pool.used_nbytes)} of ${bytes(pool.nbytes)}`,
        {
          mark: `${pool.used_nbytes}/${pool.nbytes}`,
          make: () => [element("meter", { min: 0, max: Math.max(1, pool.nbytes), value: pool.used_nbytes, "aria-label": `${pool.name} full` })],
        },
        bytes(pool.pinned_nbytes),
        pool.pages,
        pool.leases,
        pool.hits_total,
        pool.misses_total,
        pool.evicted_total,
      ]));
  },
  async drain() {
    const drain = await daemon.get("/v1/drain");
    const refused = drain.agents.filter((agent) => agent.refused).map((agent) => `${agent.name}: ${agent.refused}`);
    const left = drain.deadline_at_s ? Math.max(0, drain.deadline_at_s - Date.now() / 1e3) : 0;
    const state = drain.ready ? "Drained: ready to stop." : `Draining: ${drain.running} transfers run, ${duration(left * 1e6)} left.`;
    say($("drain-state"), drain.draining ? [state, ...refused].join(" ") : "The node accepts work.");
    say($("drain-begin"), drain.draining ? "Set another deadline" : "Drain this node");
    $("drain-end").hidden = !drain.draining;
    if (drain.draining && !drain.ready) setTimeout(() => now.dirty.add("drain"), 1000);
  },
  async ended() {
    if (now.holds) return;
    const { context, state } = now.search;
    const turn = ++now.endedTurn;
    const { items } = await daemon.get("/v1/transfers", { context, state, limit: MOST_ENDED });
    if (turn !== now.endedTurn) return; // a later request's answer will be shown
    const searched = context || state;
    say($("ended-caption"), searched ? `Found: ${items.length}${context ? ` of ${context}` : ""}${state ? `, ${state}` : ""}` : "Just ended");
    say($("ended-nothing"), searched ? "No known transfer matches." : "No transfer has ended yet.");
    table("ended", items, (transfer) => transfer.id, (row, transfer) =>
      cells(row, [
        ...whoAndWhere(transfer),
        {
          mark: `${transfer.state} ${transfer.code}`,
          make: () => [element("span", { class: { done: "good", failed: "bad", cancelled: "warn" }[transfer.state] || "" },
            transfer.state + (transfer.code ? ` [${transfer.code}]` : "")), element("small", {}, transfer.message)],
        },
        bytes(transfer.nbytes),
        {
          mark: endsOf(transfer).map(([word, end]) => word + end.ended_after_us).join(),
          kind: "stages",
          make: () => timeline(transfer, transfer.updated_at_s, { brief: true }),
        },
        transfer.context,
      ]));
  },
};

async function showOpen() {
  const { items } = await daemon.get("/v1/open-transfers", { limit: 100 });
  const moving = items.filter((transfer) => transfer.source || transfer.destination || transfer.expectation);
  say($("total-open"), String(items.length) + (items.length === 100 ? "+" : ""));
  table("open", moving, (transfer) => transfer.id, (row, transfer) => {
    const done = Math.max(...endsOf(transfer).map(([, end]) => end.nbytes_done));
    cells(row, [
      ...whoAndWhere(transfer),
      `${bytes(done)} of ${bytes(transfer.nbytes)}`,
      { mark: String(performance.now()), kind: "stages", make: () => timeline(transfer, Date.now() / 1e3, { brief: true }) },
      transfer.context,
      { mark: now.role, make: () => (may("transfer") && (transfer.source || transfer.destination) ? [cancelButton(transfer.id)] : ["-"]) },
    ]);
  });
}

// Shows links with a session, and links that moved something; each direction is a link.
function showLinks() {
  const found = rates.links(performance.now());
  rates.remember(found);
  const rails = new Map();
  for (const peer of now.links) {
    const pair = [peer.agent.slice(0, 16), peer.id.slice(0, 16)];
    for (const link of [pair.join(" "), pair.reverse().join(" ")]) rails.set(link, peer.rails.join(", "));
  }
  const links = [...new Set([...rails.keys(), ...found.keys(), ...rates.past.keys()])];
  const rateOf = (link) => found.get(link) || { nbytes: 0, count: 0 };
  links.sort((a, b) => rateOf(b).nbytes - rateOf(a).nbytes || a.localeCompare(b));
  table("link", links.slice(0, 200), (link) => link, (row, link) => {
    const [source, destination] = link.split(" ");
    const points = rates.past.get(link);
    cells(row, [
      nameOf(source),
      nameOf(destination),
      rails.get(link) || "-",
      `${bytes(rateOf(link).nbytes)}/s`,
      { mark: points ? points.join() : "", make: () => (points ? [curve(points)] : ["-"]) },
      rateOf(link).count.toFixed(1),
    ]);
  });
  const sum = [...found.values()].reduce((a, b) => ({ nbytes: a.nbytes + b.nbytes, count: a.count + b.count }), { nbytes: 0, count: 0 });
  say($("total-rate"), `${bytes(sum.nbytes)}/s`);
  say($("total-count"), sum.count.toFixed(1));
}

async function showDoctor() {
  const doctor = await daemon.get("/v1/doctor");
  const warnings = doctor.findings.filter((finding) => finding.state !== "good" && finding.state !== "note");
  say($("warning-nothing"), "Nothing to change.");
  table("warning", warnings, (finding) => `${finding.subject}/${finding.name}`, (row, finding) =>
    cells(row, [
      `${finding.subject}: ${finding.name}`,
      { mark: finding.state, make: () => [element("span", { class: finding.state === "blocks" ? "bad" : "warn" }, finding.state)] },
      `${finding.found}. ${finding.why}`,
      finding.change || "-",
    ]));
}

function table(name, items, keyOf, fill) {
  rows($(`${name}-rows`), items, keyOf, fill);
  $(`${name}-nothing`).hidden = items.length > 0;
  $(`${name}-rows`).parentElement.tHead.hidden = items.length === 0;
}

// If an end's agent is not attached here, the other end's name for it is shown.
function whoAndWhere(transfer) {
  const end = (mine, theirs) => {
    if (mine) return `${mine.agent_name || nameOf(mine.agent)}: ${mine.region_name || `region ${mine.region}`}`;
    if (!theirs || !theirs.peer_name) return "-";
    return theirs.peer_name + (theirs.remote_region_name ? `: ${theirs.remote_region_name}` : "");
  };
  return [
    { mark: transfer.id, make: () => [detailButton(transfer.id)] },
    end(transfer.source, transfer.destination),
    end(transfer.destination || transfer.expectation, transfer.source),
  ];
}

// ---- what one can do -----------------------------------------------------------------------------

function detailButton(id) {
  const button = element("button", { type: "button", class: "link", "aria-label": `Details of transfer ${id}` }, short(id));
  button.addEventListener("click", () => attempt(() => showDetail(id)));
  return button;
}

function cancelButton(id) {
  const button = element("button", { type: "button", class: "danger", "aria-label": `Cancel transfer ${id}` }, "Cancel");
  button.addEventListener("click", () => {
    button.disabled = true;
    attempt(async () => {
      const told = await daemon.ask("POST", `/v1/transfers/${encodeURIComponent(id)}/cancel`);
      tell(told.found ? `Transfer ${id} is cancelled.` : `Transfer ${id} had already ended.`);
    }).finally(() => {
      button.disabled = false;
      // The transfer's row is removed; if it had the focus, the title gets it.
      if (document.activeElement === document.body) $("transfers-title").focus();
    });
  });
  return button;
}

async function showDetail(id) {
  let transfer;
  try {
    transfer = await daemon.get(`/v1/transfers/${encodeURIComponent(id)}`);
  } catch (error) {
    // Only its agents know an open transfer that was not made by REST.
    const { items } = await daemon.get("/v1/open-transfers", { limit: 250 });
    transfer = items.find((each) => each.id === id);
    if (!transfer) throw error;
  }
  const list = (pairs) => element("dl", {}, ...pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]));
  say($("detail-title"), `Transfer ${id}`);
  const parts = [
    list([
      ["State", transfer.state + (transfer.code ? ` [${transfer.code}] ${transfer.message}` : "")],
      ["Request", transfer.context || "-"],
      ["Trace parent", transfer.trace_parent || "-"],
      ["Tenant", transfer.tenant || "-"],
      ["Size", `${transfer.num_blocks} blocks, ${transfer.num_layers} layers, ${bytes(transfer.nbytes)}`],
      ["Created by", transfer.created_by || "its agent"],
    ]),
    ...(endsOf(transfer).length ? timeline(transfer, Date.now() / 1e3) : []),
  ];
  if (transfer.context) parts.splice(1, 0, button("Show the request's trace", () => showWay(transfer.context)));
  for (const [word, end] of endsOf(transfer)) {
    parts.push(
      element("h3", {}, `${word[0].toUpperCase()}${word.slice(1)}: ${end.agent_name || end.agent}`),
      list([
        ["Region", end.region_name || end.region],
        ["State", end.state + (end.code ? ` [${end.code}] ${end.message}` : "")],
        ["Began it", end.began_it ? "yes" : "no"],
        ["Rails", end.rails.join(", ") || "-"],
        ["Posted", end.posted_at_s ? new Date(end.posted_at_s * 1e3).toISOString() : "-"],
        ["Begun after", duration(end.begun_after_us)],
        ["First piece after", duration(end.first_piece_after_us)],
        ["Ended after", duration(end.ended_after_us)],
        ["Moved", `${bytes(end.nbytes_done)} of ${bytes(end.nbytes)}`],
      ]),
    );
  }
  $("detail-body").replaceChildren(...parts);
  $("detail").showModal();
}

// Shows a request's way through router, engines, and both ends of each transfer.
async function showWay(request) {
  const { rows: found } = await daemon.get("/v1/request-trace", { request });
  const save = async () => {
    const file = await daemon.get("/v1/request-trace/perfetto", { request });
    const link = element("a", { download: "request.perfetto.json" });
    link.href = URL.createObjectURL(new Blob([JSON.stringify(file)], { type: "application/json" }));
    link.click();
    URL.revokeObjectURL(link.href);
  };
  say($("detail-title"), `Request ${request}`);
  $("detail-body").replaceChildren(way(found), button("Save for ui.perfetto.dev", save));
  if (!$("detail").open) $("detail").showModal();
}

function button(words, work) {
  const made = element("button", { type: "button" }, words);
  made.addEventListener("click", () => attempt(work));
  return made;
}

function tell(words) {
  // Emptied first, so that a screen reader also reads a text that is the same as before.
  $("said").textContent = "";
  setTimeout(() => say($("said"), words), 50);
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    tell(error instanceof Problem && error.status ? `${error.message} [${error.code}]` : `The daemon does not answer: ${error.message}`);
  }
}

function confirmed(words) {
  say($("confirm-words"), words);
  $("confirm").returnValue = "no";
  $("confirm").showModal();
  return new Promise((resolve) => $("confirm").addEventListener("close", () => resolve($("confirm").returnValue === "yes"), { once: true }));
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  daemon.token = $("token").value.trim();
  $("token").value = "";
  say($("sign-in-error"), "");
  tokenGiven();
});
$("sign-out").addEventListener("click", () => {
  daemon.token = "";
  location.reload();
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  now.search = { context: $("context").value.trim(), state: $("state").value };
  $("clear").hidden = !now.search.context && !now.search.state;
  now.holds = false;
  $("hold").setAttribute("aria-pressed", "false");
  attempt(async () => {
    await PARTS.ended();
    tell($("ended-caption").textContent);
  });
});
$("way").addEventListener("click", () => attempt(() => showWay($("context").value.trim())));
$("context").addEventListener("input", () => ($("way").disabled = !$("context").value.trim()));
$("hold").addEventListener("click", () => {
  now.holds = !now.holds;
  $("hold").setAttribute("aria-pressed", String(now.holds));
  now.dirty.add("ended");
});
$("clear").addEventListener("click", () => {
  $("search").reset();
  $("way").disabled = true;
  $("context").focus();
  $("search").requestSubmit();
});
$("drain-form").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(async () => {
    const deadline = Number($("deadline").value);
    if (!(await confirmed(`Refuse new work on this node, and let running transfers continue for ${deadline} seconds?`))) return;
    const drain = await daemon.ask("PUT", "/v1/drain", { deadline_s: deadline });
    now.dirty.add("drain");
    tell(drain.ready ? "The node is drained, and ready to stop." : "The node is draining.");
  });
});
$("drain-end").addEventListener("click", () =>
  attempt(async () => {
    await daemon.ask("DELETE", "/v1/drain");
    now.dirty.add("drain");
    $("deadline").focus();
    tell("The node accepts work again.");
  }));

// ---- once a second -------------------------------------------------------------------------------

async function refresh() {
  if (!now.online || !now.signedIn || document.hidden) return;
  if (performance.now() - now.allAt > ALL_STALE_MS) {
    now.allAt = performance.now();
    markAll();
    showNode(await daemon.get("/v1/node"));
  }
  const parts = [...now.dirty];
  now.dirty.clear();
  const work = [...parts.map((part) => PARTS[part]()), showOpen()];
  if (performance.now() - now.doctorAt > DOCTOR_MS) {
    now.doctorAt = performance.now();
    work.push(showDoctor());
  }
  const done = await Promise.allSettled(work);
  parts.forEach((part, index) => done[index].status === "rejected" && now.dirty.add(part));
  showLinks();
  const wrong = done.find((each) => each.status === "rejected" && each.reason.status !== 0)?.reason;
  if (wrong && !(wrong instanceof Problem)) throw wrong;
  // Reported once, though the error may repeat each second.
  const words = wrong && wrong.status !== 401 ? `${wrong.message} [${wrong.code}]` : "";
  if (words && words !== now.wrong) tell(`A part of this page is not up to date: ${words}`);
  now.wrong = words;
}

async function all(path) {
  const found = [];
  for (let cursor = ""; cursor !== null && found.length < 2000; ) {
    const page = await daemon.get(path, { cursor });
    found.push(...page.items);
    cursor = page.next;
  }
  return found;
}

async function beat() {
  for (;;) {
    try {
      await refresh();
    } catch (error) {
      if (!(error instanceof Problem)) console.error(error);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

$("transfers-title").tabIndex = -1;
watch();
beat();
