// The page selection.md: which keys each query keeps, and what a cache holds. fdma_select() of the C
// library (tools/site/wasm/selection.c, in selection.wasm.js) makes every selection.
"use strict";

/* global selectionModule */

const SLIDERS = { // name: least, most and first value, and what it says
  query: [0, 47, 30, "query"],
  window: [1, 24, 6, "window: keys by score"],
  recent: [0, 24, 4, "recent: newest keys"],
  sinks: [0, 8, 1, "sinks: first keys"],
  keys: [8, 96, 48, "keys"],
};
const SCORES = { // score of key j of n
  random: () => Math.random(),
  rising: (j, n) => (j + 1) / n,
  falling: (j, n) => 1 - j / n,
  equal: () => 0.5,
  "few high": () => (Math.random() < 0.12 ? 0.8 + 0.2 * Math.random() : 0.3 * Math.random()),
};
const KINDS = { sink: "sink", newest: "recent", score: "by score" };
const BARS = 0.16; // height of the bars, as a part of the picture's width

/** A function (scores, window, recent, sinks) -> {expiry, slot} that calls the C library. */
async function loadSelect() {
  const bytes = Uint8Array.from(atob(selectionModule), (byte) => byte.charCodeAt(0));
  const output = { fd_write: () => 0, fd_seek: () => 0, fd_close: () => 0 }; // never called
  const { instance } = await WebAssembly.instantiate(bytes, { wasi_snapshot_preview1: output });
  const c = instance.exports;
  return (scores, window, recent, sinks) => {
    const numbers = (type, address) => new type(c.memory.buffer, address(), scores.length);
    numbers(Float32Array, c.score_address).set(scores);
    const status = c.select_keys(scores.length, window, recent, sinks);
    if (status !== 0) throw new Error(`fdma_select() returned ${status}`);
    const copy = (address) => Array.from(numbers(Int32Array, address));
    return { expiry: copy(c.expiry_address), slot: copy(c.slot_address) };
  };
}

/** The keys that query p keeps, by the definition in algorithm.md, from nothing but the scores. */
function rankAnew(scores, p, window, recent, sinks) {
  const outranks = (j, r) => {
    const [z, y] = [scores[j], scores[r]];
    if (j < sinks !== r < sinks) return j < sinks;
    if (Number.isNaN(z) !== Number.isNaN(y)) return Number.isNaN(y);
    return z > y || (!(z < y) && j > r); // equal, or both NaN
  };
  const older = Array.from({ length: Math.max(0, p + 1 - recent) }, (_, j) => j);
  const newest = Array.from({ length: p + 1 - older.length }, (_, n) => older.length + n);
  const best = older.sort((j, r) => (outranks(j, r) ? -1 : 1)).slice(0, window);
  return [...best, ...newest].sort((j, r) => j - r);
}

const keeps = (selection, p, j) => j <= p && p < selection.expiry[j];

function keptKeys(selection, p) {
  return selection.expiry.map((_, j) => j).filter((j) => keeps(selection, p, j));
}

class SelectionPage {
  constructor(place, select) {
    this.select = select;
    this.place = place;
    this.key = 12; // whose column is marked
    place.replaceChildren();
    place.insertAdjacentHTML(
      "beforeend",
      `<div class="selection-picture">
       <p>Bars: scores of the keys; drag or tap them. Below: a row for each query, a column for each key. ${Object.entries(KINDS)
         .map(([kind, words]) => `<span class="selection-kind ${kind}">${words}</span>`)
         .join(" ")}</p>
       <canvas role="img" aria-label="Which keys each query keeps"></canvas>
       <form class="selection-query"></form></div>
       <div class="selection-side"><h3>The cache beside query <output class="at"></output></h3>
       <ol class="selection-cache"></ol><p class="selection-cache-says"></p>
       <h3>The mask: one int32 for each key</h3>
       <p class="selection-key" aria-live="polite"></p>
       <p class="selection-expiries"></p><p class="selection-mask-says"></p>
       <h3>Rules and scores</h3><form class="selection-rules"></form></div>`,
    );
    this.find = (selector) => place.querySelector(selector);
    this.canvas = this.find("canvas");
    this.addControls();
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.point(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.newScores();
  }

  addControls() {
    const form = this.find(".selection-rules");
    this.sliders = {};
    for (const [name, [least, most, first, words]] of Object.entries(SLIDERS)) {
      const label = document.createElement("label");
      label.innerHTML = `<span>${words}</span><input type="range" name="${name}" min="${least}"
        max="${most}" value="${first}"><output>${first}</output>`;
      (name === "query" ? this.find(".selection-query") : form).append(label);
      this.sliders[name] = label.querySelector("input");
      this.sliders[name].addEventListener("input", () => (name === "keys" ? this.newScores() : this.update()));
    }
    const label = document.createElement("label");
    const options = Object.keys(SCORES).map((name) => `<option>${name}</option>`);
    label.innerHTML = `<span>scores</span><select>${options.join("")}</select><button type="button">new</button>`;
    form.append(label);
    label.querySelector("select").addEventListener("change", () => this.newScores());
    label.querySelector("button").addEventListener("click", () => this.newScores());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  value(name) {
    return Number(this.sliders[name].value);
  }

  newScores() {
    const n = this.value("keys");
    const rule = SCORES[this.find("select").value];
    this.scores = Float32Array.from({ length: n }, (_, j) => rule(j, n));
    this.sliders.query.max = n - 1;
    this.key = Math.min(this.key, n - 1);
    this.update();
  }

  /** A pointer on a bar sets its score; on the picture below it, the query and the marked key. */
  point(event) {
    const n = this.scores.length;
    const box = this.canvas.getBoundingClientRect();
    const cell = box.width / n;
    const y = event.clientY - box.top - BARS * box.width;
    this.key = Math.max(0, Math.min(n - 1, Math.floor((event.clientX - box.left) / cell)));
    if (y < 0) this.scores[this.key] = Math.max(0, Math.min(1, -y / (BARS * box.width)));
    else this.sliders.query.value = Math.min(n - 1, Math.floor(y / cell));
    this.update();
    event.preventDefault();
  }

  update() {
    if (this.value("sinks") > this.value("window")) this.sliders.sinks.value = this.value("window");
    for (const input of Object.values(this.sliders)) input.nextElementSibling.value = input.value;
    const rules = ["window", "recent", "sinks"].map((name) => this.value(name));
    this.selection = this.select(this.scores, ...rules);
    const queries = Array.from(this.scores, (_, p) => p);
    this.agreeing = queries.filter(
      (p) => rankAnew(this.scores, p, ...rules).join() === keptKeys(this.selection, p).join(),
    ).length;
    this.draw();
    this.showCache();
    this.showMask();
  }

  /** Why query p keeps key j. */
  kind(p, j) {
    if (j < this.value("sinks")) return "sink";
    return j > p - this.value("recent") ? "newest" : "score";
  }

  draw() {
    if (!this.selection) return;
    const n = this.scores.length;
    const style = getComputedStyle(this.place);
    const color = (name) => style.getPropertyValue(`--selection-${name}`);
    const width = this.canvas.parentElement.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    const bars = BARS * width;
    const cell = width / n;
    this.canvas.width = width * ratio;
    this.canvas.height = (width + bars) * ratio;
    const paint = this.canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const query = this.value("query");
    const fill = (name, x, y, w, h) => {
      paint.fillStyle = color(name);
      paint.fillRect(x, y, w, h);
    };
    for (let j = 0; j < n; j++) {
      const height = Math.max(2, this.scores[j] * (bars - 6));
      const name = keeps(this.selection, query, j) ? this.kind(query, j) : "gone";
      fill(name, j * cell + 0.5, bars - 4 - height, cell - 1, height);
      for (let p = j; p < n; p++) {
        const kept = keeps(this.selection, p, j);
        paint.globalAlpha = kept && p > query ? 0.35 : 1;
        fill(kept ? this.kind(p, j) : "none", j * cell + 0.5, bars + p * cell + 0.5, cell - 1, cell - 1);
        paint.globalAlpha = 1;
      }
    }
    paint.strokeStyle = color("mark");
    paint.lineWidth = 2;
    paint.strokeRect(0.5, bars + query * cell - 0.5, (query + 1) * cell, cell + 1);
    paint.lineWidth = 1;
    paint.strokeRect(this.key * cell, 1, cell, bars + n * cell - 2);
  }

  showCache() {
    const query = this.value("query");
    const rows = this.value("window") + this.value("recent");
    const before = query > 0 ? keptKeys(this.selection, query - 1) : [];
    const kept = keptKeys(this.selection, query);
    const left = before.find((j) => !kept.includes(j));
    const at = new Map(kept.map((j) => [this.selection.slot[j], j]));
    const item = (row) => {
      const key = at.get(row);
      const kind = key === undefined ? "empty" : this.kind(query, key);
      return `<li class="${kind}${key === query ? " new" : ""}">${key ?? ""}</li>`;
    };
    this.find(".at").value = query;
    this.find(".selection-cache").innerHTML = Array.from({ length: rows }, (_, row) => item(row)).join("");
    const entered = kept.includes(query)
      ? `Key ${query} enters row ${this.selection.slot[query]}` +
        (left === undefined ? ", which was empty." : `, in place of key ${left}.`)
      : `Key ${query} is worse than all that are kept: it does not enter.`;
    this.find(".selection-cache-says").textContent =
      `${entered} ${kept.length} of ${query + 1} keys so far are kept, in ${rows} rows.`;
  }

  showMask() {
    const { expiry, slot } = this.selection;
    const n = expiry.length;
    const [j, end] = [this.key, expiry[this.key]];
    const queries = end - 1 > j ? `queries ${j} to ${end - 1} keep it` : `query ${j} alone keeps it`;
    this.find(".selection-key").textContent =
      `Key ${j}: score ${this.scores[j].toFixed(2)}, expiry ${end}: ` +
      (end > j ? `${queries}, in row ${slot[j]} of the cache.` : "no query keeps it.");
    this.find(".selection-expiries").innerHTML = expiry
      .map((number, key) => `<span class="${key === j ? "marked" : ""}">${number}</span>`)
      .join(" ");
    this.find(".selection-mask-says").textContent =
      `These ${n} numbers say which of ${n * n} pairs are kept. Ranked anew from the scores, ` +
      `${this.agreeing} of ${n} queries keep exactly these keys.`;
  }
}

(async () => {
  const place = document.getElementById("selection");
  try {
    window.selectKeys = await loadSelect();
    window.selectionPage = new SelectionPage(place, window.selectKeys);
  } catch (error) {
    const words = document.createElement("p");
    words.textContent = `The sliders need WebAssembly, which failed here: ${error.message}`;
    place.append(words);
  }
})();
