// Makes elements. Whatever an agent reported becomes text nodes or text attributes, never markup.

import { bytes, duration } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Sets text only if it differs, so that a selection or a screen reader is not disturbed.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Updates the rows of a table to `items`. A row whose key stays is kept, and with it the focus in it.
export function rows(body, items, keyOf, fill) {
  const kept = new Map(Array.from(body.children, (row) => [row.dataset.key, row]));
  const keys = new Set(items.map(keyOf));
  // Removed first, so that the rows that stay need not be moved; moving a row would take its focus away.
  for (const [key, row] of kept) if (!keys.has(key)) row.remove();
  let place = body.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = kept.get(key);
    if (!row) {
      row = element("tr");
      row.dataset.key = key;
    }
    fill(row, item);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
}

// Fills a row's cells: each with text, or with a node that is made again only if its `mark` changes.
export function cells(row, values) {
  values.forEach((value, index) => {
    let cell = row.children[index];
    if (!cell) {
      cell = element(index === 0 ? "th" : "td", index === 0 ? { scope: "row" } : {});
      row.append(cell);
    }
    if (value !== null && typeof value === "object") {
      if (cell.dataset.mark === value.mark) return;
      cell.dataset.mark = value.mark;
      cell.className = value.kind || "";
      cell.replaceChildren(...value.make());
    } else {
      say(cell, String(value ?? "-"));
    }
  });
}

// Draws the stages of a transfer's ends: one line for each end, all on the same scale.
export function timeline(transfer, nowS, { brief = false } = {}) {
  const ends = endsOf(transfer);
  const first = Math.min(...ends.map(([, end]) => end.posted_at_s || Infinity));
  const spans = ends.map(([word, end]) => spanOf(word, end, first, nowS));
  const total = Math.max(1, ...spans.map((span) => span.offset + span.ended));
  const picture = svg("svg", {
    viewBox: `0 0 1000 ${spans.length * 14}`,
    preserveAspectRatio: "none",
    height: spans.length * 12,
    role: "img",
    "aria-label": spans.map((span) => span.words).join("; "),
  });
  spans.forEach((span, line) => {
    const y = line * 14 + 2;
    picture.append(svg("rect", { class: "track", x: 0, y, width: 1000, height: 9 }));
    let from = 0;
    for (const [kind, until] of [["waits", span.begun], ["asks", span.firstPiece], ["moves", span.ended]]) {
      if (until > from) {
        const x = ((span.offset + from) / total) * 1000;
        const width = Math.max(3, ((until - from) / total) * 1000);
        picture.append(svg("rect", { class: kind, x: Math.min(x, 997), y, width, height: 9 }));
        from = until;
      }
    }
  });
  // In brief, only the destination is described: it knows when the pages arrived.
  const said = brief ? spans.filter((span) => span.word === "destination" || spans.length === 1) : spans;
  return [picture, ...said.map((span) => element("small", { "aria-hidden": "true" }, span.words))];
}

export function endsOf(transfer) {
  const words = { source: "source", destination: "destination", expectation: "expected" };
  return Object.entries(words)
    .map(([name, word]) => [word, transfer[name]])
    .filter(([, end]) => end);
}

function spanOf(word, end, firstS, nowS) {
  const offset = end.posted_at_s ? (end.posted_at_s - firstS) * 1e6 : 0;
  const isOpen = end.ended_after_us === null;
  const ended = isOpen ? Math.max(0, (nowS - (end.posted_at_s || nowS)) * 1e6) : end.ended_after_us;
  const firstPiece = end.first_piece_after_us ?? (isOpen ? ended : end.begun_after_us ?? ended);
  const begun = Math.min(end.begun_after_us ?? firstPiece, firstPiece);
  const told = [];
  if (end.begun_after_us !== null) told.push(`begun ${duration(end.begun_after_us)}`);
  if (end.first_piece_after_us !== null) told.push(`first piece ${duration(end.first_piece_after_us)}`);
  told.push(isOpen ? `${end.state}, ${bytes(end.nbytes_done)}` : `${end.outcome} ${duration(ended)}`);
  return { word, offset, begun, firstPiece, ended, words: `${word}: ${told.join(", ")}` };
}

// Draws a request's way: one line for each row, all on the same scale.
export function way(rows) {
  const first = Math.min(...rows.map((row) => row.started_at_s));
  const total = Math.max(1, ...rows.map((row) => (row.started_at_s - first) * 1e6 + row.took_us));
  const body = element("tbody");
  for (const row of rows) {
    const at = (row.started_at_s - first) * 1e6;
    const x = Math.min((at / total) * 1000, 997);
    const picture = svg("svg", { viewBox: "0 0 1000 9", preserveAspectRatio: "none", height: 9, "aria-hidden": "true" });
    picture.append(
      svg("rect", { class: "track", x: 0, y: 0, width: 1000, height: 9 }),
      svg("rect", { class: Object.hasOwn(KINDS, row.name) ? KINDS[row.name] : "whole", x, y: 0, width: Math.max(3, (row.took_us / total) * 1000), height: 9 }),
    );
    const told = Object.entries(row.details).map(([name, value]) => `${name}: ${value}`).join("\n");
    const line = element("tr");
    cells(line, [
      duration(at),
      duration(row.took_us),
      row.process,
      {
        mark: "",
        make: () => [
          element("span", { class: `depth-${Math.min(row.depth, 4)}`, title: told }, row.name),
          ...(row.error ? [element("small", { class: "bad" }, row.error)] : []),
        ],
      },
      { mark: "", kind: "stages", make: () => [picture] },
    ]);
    body.append(line);
  }
  const heads = ["At", "Took", "Where", "What", "When"].map((name) => element("th", { scope: "col" }, name));
  return element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "The request's trace" },
    element("table", { class: "way" }, element("thead", {}, element("tr", {}, ...heads)), body));
}

const KINDS = { "waits for the right": "waits", "until the first piece": "asks", "pages move": "moves" };

export function curve(points) {
  const most = Math.max(1, ...points);
  const step = 100 / (points.length - 1);
  const line = points.map((point, index) => `${(index * step).toFixed(1)},${(23 - (point / most) * 22).toFixed(1)}`);
  const picture = svg("svg", {
    class: "spark",
    viewBox: "0 0 100 24",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `at most ${bytes(most)}/s in the last minute`,
  });
  picture.append(svg("polyline", { class: "curve", points: line.join(" ") }));
  return picture;
}
