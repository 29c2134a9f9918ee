// The page polls the clusters' state twice a second and draws it. It needs no library and no build step.
const EVERY_MS = 500;
const CHART_S = 90;
const GAP_S = 5;
const DEARER = 1.1; // factor by which times must differ to count as different
const WHAT = { // overload policy -> what a cluster does when its memory is full
  drop: "Memory full? Two workers throw half of the layers overboard, each keeps what the other lacks. Requests go on.",
  recompute: "Memory full? Requests wait in line, and some begin anew.",
  swap: "Memory full? Requests wait, their KV in host memory.",
  migrate: "Memory full? Requests move to a worker with room, and the others wait.",
  "static-pipeline": "Workers share the layers all the time: more room, slower tokens.",
};
const SVG = "http://www.w3.org/2000/svg";
const views = [];
let failures = 0;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function bytes(count) {
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"]]) if (count >= size) return `${(count / size).toFixed(1)} ${name}`;
  return `${Math.round(count / 1024)} KiB`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
}

function count(value) {
  return value >= 10000 ? `${(value / 1000).toFixed(1)}k` : Math.round(value).toLocaleString("en");
}

function notice(text, bad = false) {
  const line = document.getElementById("notice");
  set(line, text);
  line.classList.toggle("bad", bad);
}

// The token that is sent with orders. It is stored for this tab only, until the tab is closed.
const token = {
  key: "ballast-token",
  value: "",
  load() { try { this.value = sessionStorage.getItem(this.key) || ""; } catch { /* not allowed here: until the page is left */ } },
  keep(value) {
    this.value = value;
    try { if (value) sessionStorage.setItem(this.key, value); else sessionStorage.removeItem(this.key); } catch { /* as above */ }
    this.show();
  },
  show() {
    for (const id of ["token", "use"]) document.getElementById(id).hidden = Boolean(this.value);
    document.getElementById("forget").hidden = !this.value;
  },
};

async function act(action, query = {}) {
  const url = `api/${action}?${new URLSearchParams(query)}`;
  const headers = { "X-Ballast-Dashboard": "1", ...(token.value && { Authorization: `Bearer ${token.value}` }) };
  try {
    const answer = await fetch(url, { method: "POST", headers });
    const told = await answer.json().catch(() => ({ message: `status ${answer.status}` }));
    notice(told.message, !answer.ok);
    if (answer.status === 401 || answer.status === 403) {
      token.keep("");
      document.getElementById("token").focus();
    }
  } catch (error) {
    notice(`no answer: ${error.message}`, true);
  }
}

class WorkerView {
  constructor(cluster, id) {
    this.name = make("b", {}, id);
    this.state = make("span", { class: "state" });
    this.kvtext = make("span", { class: "kvtext" });
    this.kill = make("button", { class: "small kill", type: "button", title: `end the process of ${id}, as a fault would`,
      onclick: () => act("kill", { cluster, worker: id }) }, "kill");
    this.params = make("div", { class: "params" });
    this.used = make("div", { class: "used" });
    this.retained = make("div", { class: "retained" });
    this.kv = make("div", { class: "kv" }, this.used, this.retained);
    this.stones = make("div", { class: "stones" });
    this.root = make("div", { class: "worker", "data-worker": id },
      make("div", { class: "row" }, this.name, this.state, this.kvtext, this.kill),
      make("div", { class: "hull", role: "img" }, this.params, this.kv),
      make("div", { class: "sea" }, this.stones));
    this.whole = 0; // fraction of the memory that complete parameters take
  }

  draw(worker, canKill) {
    this.kill.hidden = !canKill;
    this.kill.disabled = worker.down;
    this.root.classList.toggle("down", worker.down);
    const others = (worker.group || []).filter((id) => id !== worker.id);
    if (worker.down || !worker.budget) {
      set(this.state, worker.down ? "not there" : others.length ? `with ${others.join(", ")}; its memory is not known here` : "starting");
      set(this.kvtext, "");
      return;
    }
    const layers = worker.layer_count, held = worker.last_layer - worker.first_layer;
    this.grow(layers);
    for (let i = 0; i < layers; i++) {
      const gone = i < worker.first_layer || i >= worker.last_layer;
      this.params.children[i].classList.toggle("gone", gone);
      this.stones.children[i].classList.toggle("sunk", gone);
    }
    const share = worker.parameters / worker.budget;
    if (held === layers) this.whole = share;
    this.params.style.width = `${100 * share}%`;
    this.kv.style.width = `${100 * worker.kv / worker.budget}%`;
    this.stones.style.width = `${100 * (this.whole || Math.min(1, share * layers / Math.max(1, held)))}%`;
    this.used.style.width = `${100 * worker.used}%`;
    this.retained.style.left = this.used.style.width;
    this.retained.style.width = `${100 * worker.retained}%`;
    this.kv.classList.toggle("full", worker.used > 0.97);
    const role = others.length ? `layers ${worker.first_layer}–${worker.last_layer - 1}, with ${others.join(", ")}` : "all layers";
    set(this.state, `${worker.running} running · ${role}${worker.draining ? ", draining" : ""}`);
    set(this.kvtext, `KV ${bytes(worker.kv)}, ${Math.round(100 * worker.used)} %`);
    this.root.dataset.held = held;
    this.root.querySelector(".hull").setAttribute("aria-label",
      `${bytes(worker.parameters)} of parameters, ${bytes(worker.kv)} of KV, ${Math.round(100 * worker.used)} percent used,` +
      ` ${Math.round(100 * worker.retained)} percent retained`);
  }

  grow(layers) {
    while (this.params.children.length < layers) {
      this.params.append(make("i", { class: "layer" }));
      const stone = make("i", { class: "stone" });
      stone.style.transitionDelay = `${Math.min(600, 18 * this.stones.children.length)}ms`;
      this.stones.append(stone);
    }
    while (this.params.children.length > layers) { this.params.lastChild.remove(); this.stones.lastChild.remove(); }
  }
}

class Chart {
  constructor(title, css, format) {
    this.format = format;
    this.now = make("span");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", `chart ${css}`);
    this.svg.setAttribute("viewBox", "0 0 100 40");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.area = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "area");
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("class", "line");
    this.svg.append(this.area, this.line);
    this.root = make("figure", {}, make("figcaption", {}, make("span", {}, title), this.now), this.svg);
  }

  draw(points, top, endS) {
    set(this.now, `top ${this.format(top)}`);
    const shown = points.filter(([atS]) => atS > endS - CHART_S);
    if (shown.length < 2) return;
    const at = ([atS, value]) => `${(100 * (1 - (endS - atS) / CHART_S)).toFixed(2)} ${(39 - 37 * Math.min(1, value / top)).toFixed(2)}`;
    const runs = [[]]; // polylines; a gap in the data interrupts the line
    for (const point of shown) {
      const run = runs[runs.length - 1];
      if (run.length && point[0] - run[run.length - 1][0] > GAP_S) runs.push([point]); else run.push(point);
    }
    this.line.setAttribute("d", runs.map((run) => `M${run.map(at).join("L")}`).join(""));
    this.area.setAttribute("d", runs.map((run) => `M${at([run[0][0], 0])}L${run.map(at).join("L")}L${at([run[run.length - 1][0], 0])}Z`).join(""));
  }
}

class ClusterView {
  constructor(number) {
    this.number = number;
    this.title = make("h2");
    this.drop = make("button", { type: "button", class: "drop", onclick: () => act("drop", { cluster: number }) }, "Drop");
    this.restore = make("button", { type: "button", class: "restore", onclick: () => act("restore", { cluster: number }) }, "Restore");
    this.orders = make("div", { class: "orders" }, this.drop, this.restore);
    this.problem = make("p", { class: "problem" });
    this.does = make("p", { class: "does" });
    this.tiles = {};
    const tiles = make("div", { class: "tiles" });
    for (const [key, text] of [["waiting", "waiting"], ["running", "running"], ["slowest", "slowest TTFT"], ["tpot", "per token"], ["rate", "tokens/s"]]) {
      this.tiles[key] = make("b", {}, "–");
      tiles.append(make("div", { class: "tile" }, this.tiles[key], make("span", {}, text)));
    }
    this.workers = make("div");
    this.views = new Map();
    this.ttft = new Chart("slowest first token (TTFT)", "ttft", seconds);
    this.rate = new Chart("tokens per second", "rate", count);
    this.lines = make("ol", { class: "lines" });
    this.root = make("section", { class: "cluster", "data-cluster": number },
      make("div", { class: "top" }, this.title, this.orders), this.does, this.problem, tiles, this.workers,
      make("div", { class: "charts" }, this.ttft.root, this.rate.root), make("h3", {}, "what happened"), this.lines);
  }

  draw(cluster, tops, endS, cheapest) {
    set(this.does, WHAT[cluster.policy] || "");
    this.title.replaceChildren(cluster.title || "Cluster", make("small", {}, cluster.model || ""));
    this.orders.hidden = !cluster.can_operate;
    set(this.problem, cluster.error ? `no word from it: ${cluster.error}` : "");
    if (!cluster.workers) return;
    const last = cluster.points[cluster.points.length - 1] || [0, 0, 0, 0, 0];
    set(this.tiles.waiting, count(cluster.waiting));
    set(this.tiles.running, count(cluster.running));
    set(this.tiles.slowest, last[1] ? seconds(last[1]) : "–");
    this.tiles.slowest.classList.toggle("alarm", last[1] > 5);
    set(this.tiles.tpot, last[2] ? seconds(last[2]) : "–");
    this.tiles.tpot.classList.toggle("alarm", cheapest > 0 && last[2] > DEARER * cheapest);
    set(this.tiles.rate, count(last[3]));
    this.drawWorkers(cluster);
    this.ttft.draw(cluster.points.map((p) => [p[0], p[1]]), tops.ttft, endS);
    this.rate.draw(cluster.points.map((p) => [p[0], p[3]]), tops.rate, endS);
    this.drawLines(cluster.lines);
    this.root.dataset.replays = cluster.replays;
  }

  drawWorkers(cluster) {
    const known = new Set(cluster.workers.map((worker) => worker.id));
    for (const [id, view] of this.views) if (!known.has(id)) { view.root.remove(); this.views.delete(id); }
    for (const worker of cluster.workers) {
      if (!this.views.has(worker.id)) {
        this.views.set(worker.id, new WorkerView(this.number, worker.id));
        this.workers.append(this.views.get(worker.id).root);
      }
      this.views.get(worker.id).draw(worker, cluster.can_kill);
    }
  }

  drawLines(lines) {
    const key = JSON.stringify(lines);
    if (key === this.shown) return;
    this.shown = key;
    this.lines.replaceChildren(...lines.map((line) => make("li", { class: line.kind },
      make("time", {}, new Date(1000 * line.at_s).toLocaleTimeString("en-GB")), make("span", { class: "dot" }), make("span", {}, line.text))));
    if (!lines.length) this.lines.replaceChildren(make("li", {}, "nothing yet"));
  }
}

function isOver(cluster) {
  return cluster.burst.done === cluster.burst.sent;
}

// Results of the last burst; while it runs, the longest TTFT and the current time per token since its start.
function measured(cluster) {
  if (isOver(cluster)) return cluster.burst;
  const since = (cluster.points || []).filter((p) => p[0] >= cluster.burst.began_at_s);
  const most = (index) => since.length ? Math.max(...since.map((p) => p[index])) || null : null;
  return { ...cluster.burst, ttft_p99_s: most(1), tpot_p50_s: since.length ? since[since.length - 1][2] || null : null };
}

function drawVerdict(clusters) {
  const bursts = clusters.filter((cluster) => cluster.burst).map((cluster) => ({ ...cluster, burst: measured(cluster) }));
  const box = document.getElementById("verdict");
  box.hidden = !bursts.length;
  if (!bursts.length) return;
  const over = bursts.length > 1 && bursts.every(isOver); // earlier, the slowest requests are missing
  const best = (key) => Math.min(...bursts.map((c) => c.burst[key] ?? Infinity));
  const columns = [["TTFT p50", "ttft_p50_s", "wide"], ["TTFT p99", "ttft_p99_s", "p99"], ["per token", "tpot_p50_s", "tpot"]];
  const head = make("tr", {}, make("th", {}, "the last burst"), make("th", {}, "answered"), make("th", {}, "lost"),
    make("th", { class: "wide" }, "replayed"), ...columns.map(([name, , css]) => make("th", { class: css }, name)), make("th", { class: "wide" }, "took"));
  const rows = bursts.map((c) => make("tr", {}, make("td", {}, c.title), make("td", { class: "answered" }, `${c.burst.done - c.burst.failed} of ${c.burst.sent}`),
    make("td", { class: "lost" }, `${c.burst.failed}`), make("td", { class: "wide" }, `${c.burst.replayed}`),
    ...columns.map(([, key, css]) => {
      const value = c.burst[key];
      const colour = !over || value === null ? "" : value === best(key) ? "best" : value > DEARER * best(key) ? "dear" : "";
      return make("td", { class: `${css} ${colour}` }, seconds(value));
    }),
    make("td", { class: "wide" }, c.burst.took_s ? seconds(c.burst.took_s) : "…")));
  const told = make("p", {}, verdict(bursts));
  box.replaceChildren(told, make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
}

function verdict(bursts) {
  const many = bursts.length > 1;
  const each = (key) => bursts.map((c) => `${seconds(c.burst[key])}${many ? ` with ${c.policy || c.title}` : ""}`).join(", ");
  if (!bursts.every(isOver)) return `The ${many ? "same burst runs on both clusters" : "burst is running"}. So far the slowest first token took ${each("ttft_p99_s")}.`;
  const told = `99 of 100 requests had their first token within ${each("ttft_p99_s")}; a token after it took ${each("tpot_p50_s")}.`;
  if (!many) return told;
  const [won, lost] = [...bursts].sort((a, b) => a.burst.ttft_p99_s - b.burst.ttft_p99_s);
  const times = lost.burst.ttft_p99_s / won.burst.ttft_p99_s, price = won.burst.tpot_p50_s / lost.burst.tpot_p50_s - 1;
  if (!(times > DEARER)) return `It makes no difference here. ${told}`;
  const costs = price > DEARER - 1 ? `; its price: further tokens ${Math.round(100 * price)} % slower` : "";
  return `First tokens came ${times.toFixed(1)} times sooner with ${won.policy || won.title}${costs}. ${told}`;
}

function lead(state) {
  if (!state.load) return "What each worker's memory holds now. Layers that another worker has too go overboard when KV needs their room, and come back.";
  if (state.clusters.length > 1) return "Two clusters, the same GPUs. Press Burst: both get the same requests, more than their memory holds. Who answers first?";
  return "Press Burst: more requests than the memory holds. Layers go overboard to make room for KV, and come back.";
}

function draw(state) {
  const main = document.getElementById("clusters");
  while (views.length < state.clusters.length) { views.push(new ClusterView(views.length)); main.append(views[views.length - 1].root); }
  main.classList.toggle("twins", state.clusters.length > 1);
  const points = state.clusters.flatMap((cluster) => cluster.points || []);
  const endS = Math.max(...points.map((p) => p[0]), 0);
  const recent = points.filter((p) => p[0] > endS - CHART_S);
  const tops = { ttft: Math.max(1, ...recent.map((p) => p[1])), rate: Math.max(10, ...recent.map((p) => p[3])) };
  const prices = state.clusters.map((cluster) => (cluster.points || []).at(-1)?.[2] || 0);
  const cheapest = prices.length > 1 ? Math.min(...prices) : 0;
  state.clusters.forEach((cluster, number) => views[number].draw(cluster, tops, endS, cheapest));
  set(document.getElementById("lead"), lead(state));
  document.getElementById("access").hidden = !state.clusters.some((cluster) => cluster.by_token && cluster.can_operate);
  const first = state.clusters[0], workers = (first.workers || []).length;
  set(document.getElementById("what"), `${first.model || "no model yet"} on ${workers} worker${workers === 1 ? "" : "s"}${state.clusters.length > 1 ? " each" : ""}`);
  const burst = document.getElementById("burst"), steady = document.getElementById("steady");
  burst.hidden = steady.hidden = !state.load;
  if (state.load) {
    burst.disabled = state.load.bursting;
    steady.setAttribute("aria-pressed", String(state.load.steady));
  }
  drawVerdict(state.clusters);
}

async function look() {
  try {
    const answer = await fetch("api/state");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    draw(await answer.json());
    if (failures) notice("");
    failures = 0;
  } catch (error) {
    failures += 1;
    if (failures > 2) notice(`the page cannot be brought up to date: ${error.message}`, true);
  }
  setTimeout(look, document.hidden ? 4 * EVERY_MS : EVERY_MS);
}

document.getElementById("burst").addEventListener("click", () => act("burst"));
document.getElementById("steady").addEventListener("click", () => act("steady"));
document.getElementById("access").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  if (!/^[\x21-\x7e]+$/.test(field.value.trim())) return notice("this is no token: it has other characters than letters, digits and signs", true);
  token.keep(field.value.trim());
  field.value = "";
  notice("drops and restores are ordered with this token, until this tab is closed");
});
document.getElementById("forget").addEventListener("click", () => { token.keep(""); notice("the token is forgotten"); });
token.load();
token.show();
look();
