// Draws the engine from the pictures that the server sends. Each picture is complete, so nothing is remembered but the
// request that was chosen.

import { events, post } from "./server.js";
import { t } from "./words.js";

// One for each batch slot, and again from the first. White text on any of them has a contrast of more than 4.5.
const COLOURS = ["#0072b2", "#c04a00", "#00805e", "#b5478a", "#8a6d00", "#8457c4", "#4a7d1e", "#c2374f", "#1a7ca4", "#5d7480"];
const FREE = 0;
const CACHED = 1;
const TICKS = 120; // of a minute
const colourOf = (slot) => COLOURS[slot % COLOURS.length];
const find = (id) => document.getElementById(id);
const put = (id, text) => (find(id).textContent = text);
const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
let picture = null;
let chosen = null; // a request's number
let table = []; // its blocks, and how many requests use each
let stream = new AbortController();

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

// As many children as there are values, each changed only if its value has: most of 2,000 blocks stay as they are.
function fill(parent, values, change) {
  while (parent.children.length > values.length) parent.lastChild.remove();
  while (parent.children.length < values.length) parent.append(make("div", ""));
  values.forEach((value, i) => {
    const element = parent.children[i];
    const said = JSON.stringify(value);
    if (element.drawn === said) return;
    element.drawn = said;
    element.replaceChildren();
    change(element, value, i);
  });
}

function chip(request) {
  const element = make("span", "chip", `${request.id}`);
  if (request.slot >= 0) element.style.background = colourOf(request.slot);
  return element;
}

function drawPool() {
  const { blocks, every_nth_block: nth, running } = picture;
  const pool = find("pool");
  const mine = new Set(table.map(([block]) => block));
  const { clientWidth: width, clientHeight: height } = pool;
  let cell = 34;
  while (cell > 3 && Math.ceil(blocks.length / Math.floor(width / cell)) * cell > height) cell -= 1;
  pool.style.setProperty("--cell", `${cell}px`);
  const idOf = new Map(running.map((request) => [request.slot, request.id]));
  const drawn = blocks.map((block, i) => {
    const [users, ...slots] = Array.isArray(block) ? block : [0];
    const kind = block === FREE ? "free" : block === CACHED ? "cached" : users > 1 ? "shared" : "owned";
    return [kind, users, slots, users === 1 ? idOf.get(slots[0]) : -1, mine.has(i * nth)];
  });
  fill(pool, drawn, (element, [kind, users, slots, id, isMine], i) => {
    element.className = `block ${kind}${isMine ? " mine" : ""}`;
    const share = 100 / slots.length;
    const stripes = slots.map((slot, k) => `${colourOf(slot)} ${k * share}% ${(k + 1) * share}%`);
    element.style.background = slots.length ? `linear-gradient(90deg, ${stripes.join(", ")})` : "";
    const n = i * nth;
    element.title = {
      free: () => t("block {n}: free", { n }),
      cached: () => t("block {n}: free, content cached", { n }),
      owned: () => t("block {n}: of request {id}", { n, id }),
      shared: () => t("block {n}: shared by {users} requests", { n, users }),
    }[kind]();
  });
  for (const [kind, number] of Object.entries(picture.count)) put(kind, number.toLocaleString());
  const size = { used: picture.num_used_blocks, all: picture.num_blocks, size: picture.block_size };
  put("pool-size", t("{used} of {all} in use, {size} tokens each", size) + (nth > 1 ? t("; one in {n} is drawn", { n: nth }) : ""));
}

function tell(step) {
  let text = t("step {number}: {prefill} prefill + {decode} decode in {ms} ms", step);
  if (step.recomputed) text += t(", {n} computed again", { n: step.recomputed });
  if (step.guesses) text += t(", {accepted} of {guesses} drafts accepted", step);
  if (step.preempted) text += t(", {n} preempted", { n: step.preempted });
  return text;
}

function drawSteps() {
  const { steps, token_budget: budget } = picture;
  const sizes = steps.map((step) => step.prefill + step.decode).toSorted((a, b) => a - b);
  const most = sizes.at(-1) ?? 0;
  const usual = sizes[Math.floor(0.9 * (sizes.length - 1))] ?? 0;
  const highest = sizes.findLast((size) => size <= 16 * usual) ?? 0; // a long prefill would flatten the others
  const scale = budget <= 4 * highest ? budget : highest; // else the budget is far above all columns, and its line says so
  fill(find("steps"), steps.map((step) => [scale, step]), (element, [, step]) => {
    const isFar = step.prefill + step.decode > scale;
    const top = isFar ? step.prefill + step.decode : scale; // a separate scale, which the break in the column says
    const { guesses, accepted, recomputed } = step;
    const parts = {
      decode: step.decode - guesses,
      accepted,
      rejected: guesses - accepted,
      recomputed,
      prefill: step.prefill - recomputed,
    };
    let from = 0;
    const stops = Object.entries(parts).map(([kind, tokens]) => {
      const to = from + (100 * tokens) / top;
      const stop = `var(--${kind}) ${from}% ${to}%`;
      from = to;
      return stop;
    });
    element.style.background = `linear-gradient(0deg, ${stops.join(", ")}, transparent ${from}%)`;
    element.classList.toggle("preempts", step.preempted > 0);
    element.classList.toggle("far", isFar);
    element.title = tell(step);
  });
  find("budget").classList.toggle("far", scale !== budget);
  find("budget").firstChild.textContent = (scale === budget ? "" : "↑ ") + t("budget {n}", { n: budget });
  for (const element of document.querySelectorAll(".drafts")) element.hidden = !steps.some((step) => step.guesses);
  put("num-steps", t("the last {n} of {all} steps, highest: {most}", { n: steps.length, all: picture.num_steps, most }));
  put("last-step", steps.length ? tell(steps.at(-1)) : "");
}

function drawMinute() {
  const rates = new Array(TICKS).fill(0);
  const queue = new Array(TICKS).fill(0);
  for (const [ago, tokens, waiting] of picture.ticks) {
    const at = TICKS - 1 + ago;
    if (at < 0) continue;
    rates[at] = tokens / picture.tick_seconds;
    queue.fill(waiting, at); // and after it, where no step ran
  }
  const line = (values) => values.map((value, i) => `L${i} ${98 - (96 * value) / (Math.max(...values) || 1)}h1`).join("");
  find("rates").setAttribute("d", `M0 98${line(rates)}V98Z`);
  find("queue").setAttribute("d", `M0 98${line(queue)}`);
  const now = total(rates.slice(-5, -1)) / 4; // the newest is not over
  const numbers = { now: Math.round(now), most: Math.round(Math.max(...rates)), waiting: Math.max(...queue) };
  put("rate", t("{now} tokens/s, highest {most}; up to {waiting} wait", numbers));
  const last = picture.preempted.at(-1);
  const said = "preemptions: {n}, the last in step {step}: request {id} lost {blocks} blocks with {tokens} tokens";
  put("preempted", last ? t(said, { n: picture.num_preemptions, ...last }) : t("no preemptions"));
}

function why() {
  if (!picture.why) return "";
  const { id, reason, needs, held, kept } = picture.why;
  if (reason === "slots") return t("request {id} waits: all {n} batch slots are taken", { id, n: picture.running.length });
  if (reason === "tokens") {
    return t("request {id} waits: an earlier prompt takes what the decodes leave of {n} tokens per step", { id, n: picture.token_budget });
  }
  if (reason === "step") return t("request {id} is tried in the next step", { id });
  const blocks = t("request {id} waits: needs {needs} blocks, {free} are free", { id, needs, free: picture.num_free_blocks });
  return blocks + (kept ? t(", {kept} must stay free for those that run", { kept }) : "") + (held ? t("; {held} more it would share", { held }) : "");
}

function drawWaiting() {
  put("num-waiting", picture.num_waiting);
  put("why", why());
  fill(find("waiting"), picture.waiting, (element, request) => {
    element.className = `chip${request.preemptions ? " lost" : ""}${request.constrained ? " constrained" : ""}`;
    element.dataset.id = request.id;
    element.textContent = request.lost ? t("{id} lost {n} tokens", { id: request.id, n: request.lost }) : request.id;
    const { prompt, generated, preemptions: n } = request;
    element.title = t("{prompt} prompt tokens, {generated} generated, preempted {n} times", { prompt, generated, n });
  });
}

// A lane as long as the longest that its request may become. Its parts are layers, whose lengths are variables here.
function drawRunning() {
  const running = picture.running.toSorted((a, b) => a.slot - b.slot);
  const lanes = find("running");
  const n = running.length;
  const rows = n <= 32 ? 8 : Math.min(32, Math.ceil(n / 8));
  lanes.className = n <= 8 ? "wide" : n <= 32 ? "narrow" : "dense";
  lanes.style.gridTemplateRows = `repeat(${rows}, minmax(0, 1fr))`;
  fill(lanes, running.map((request) => [request, request.id === chosen]), (lane, [request, isChosen]) => {
    const { id, slot, prompt, cached, computed, lost, generated, accepted, most, preemptions, constrained } = request;
    lane.className = `lane ${request.state}${isChosen ? " chosen" : ""}${constrained ? " constrained" : ""}`;
    lane.dataset.id = id;
    const bar = make("div", "bar");
    bar.style.setProperty("--colour", colourOf(slot));
    const lengths = { computed, cached: Math.min(cached, computed), prompt: Math.min(prompt, computed), lost: computed + lost, end: prompt };
    for (const [name, tokens] of Object.entries(lengths)) bar.style.setProperty(`--${name}`, `${(100 * tokens) / most}%`);
    const did =
      request.state === "prefilling"
        ? t("prefill {n} of {all}", { n: computed, all: prompt + generated })
        : t("{n} of {all} tokens", { n: generated, all: most - prompt });
    const marks = [accepted ? `✓${accepted}` : "", preemptions ? `↩${preemptions}` : "", constrained ? "{}" : ""].filter(Boolean);
    const text = [did, t("{n} blocks", { n: request.blocks }), ...marks].join(" · ");
    lane.append(chip(request), bar, make("small", "", text));
    lane.title = `${id}: ${text}`;
  });
  put("num-running", t("{n} of {all} batch slots", { n, all: picture.batch_slots }));
  find("idle").hidden = n > 0 || picture.num_waiting > 0;
}

function drawEnded() {
  find("ended").replaceChildren(
    ...picture.ended.slice(-5).toReversed().map((request) => {
      const row = make("tr", "");
      const { id, prompt, cached, generated, ttft_ms, tpot_ms, reason } = request;
      row.append(...[id, prompt, cached, generated, ttft_ms.toFixed(1), tpot_ms.toFixed(2), reason].map((cell) => make("td", "", cell)));
      return row;
    }),
  );
}

function drawTable() {
  const size = picture.block_size;
  if (chosen === null) put("chosen", t("choose a request with the mouse or the arrow keys"));
  else if (!table.length) put("chosen", t("request {id} holds no block now", { id: chosen }));
  else put("chosen", t("request {id}: position in the request → block in the pool", { id: chosen }));
  fill(find("table"), table, (entry, [block, users], i) => {
    entry.className = users > 1 ? "shared" : "";
    entry.textContent = `${i} → ${block}${users > 1 ? ` ×${users}` : ""}`;
    entry.title = t("tokens {first} to {last}; the block is used by {users} requests", { first: i * size, last: (i + 1) * size - 1, users });
  });
}

export function draw(told) {
  picture = told;
  const { paused, failure } = picture;
  put("model", picture.model);
  put("engine", picture.engine);
  put("status", t(paused ? "paused" : picture.running.length ? "running" : "idle"));
  find("pause").firstElementChild.textContent = t(paused ? "Resume" : "Pause");
  find("step").disabled = !paused;
  warn(failure && t("The last step failed: {why}. The requests that ran ended with this error.", { why: failure }));
  document.body.classList.remove("is-gone");
  for (const part of [drawPool, drawSteps, drawMinute, drawWaiting, drawRunning, drawTable, drawEnded]) part();
}

function warn(text) {
  find("gone").hidden = !text;
  put("gone", text);
}

async function follow() {
  for (;;) {
    let why = t("the server was ended");
    try {
      for await (const event of events(`/live/events${chosen === null ? "" : `?request=${chosen}`}`, null, stream.signal)) {
        const told = JSON.parse(event);
        if ("table" in told) {
          table = told.table;
          drawTable();
          drawPool();
        } else if ("steps" in told) draw(told);
        else if (told.silent) put("status", t("no answer for {n} s", { n: told.silent }));
        else why = told.failure || why;
      }
    } catch (error) {
      if (stream.signal.aborted) continue;
      why = error.status ? "" : t("the server does not answer");
      put("status", error.message);
    }
    if (why) {
      put("status", t("gone"));
      warn(t("The engine is gone: {why}. Start it again with make serve; this page connects by itself.", { why }));
      document.body.classList.add("is-gone");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function choose(id) {
  chosen = id;
  table = [];
  drawTable();
  drawRunning();
  drawPool();
  stream.abort(); // the next one has the table of this request
  stream = new AbortController();
}

async function control(action) {
  try {
    await post("/live/control", { action });
  } catch (error) {
    put("status", error.message);
  }
}

const toggle = () => control(picture?.paused ? "resume" : "pause");
const step = () => picture?.paused && control("step");

// The neighbour of the chosen request among those that run.
function move(by) {
  const ids = find("running").querySelectorAll(".lane");
  const at = [...ids].findIndex((lane) => Number(lane.dataset.id) === chosen);
  const next = at < 0 ? ids[0] : ids[at + by];
  if (next) choose(Number(next.dataset.id));
}

find("pause").addEventListener("click", toggle);
find("step").addEventListener("click", step);
document.querySelector(".engine").addEventListener("click", ({ target }) => {
  const request = target.closest("[data-id]");
  if (request) choose(Number(request.dataset.id));
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea")) {
    if (event.key === "Escape") event.target.blur(); // so that the other keys can be used
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || !picture) return;
  const keys = { p: toggle, s: step, ArrowDown: () => move(1), ArrowUp: () => move(-1), Escape: () => choose(null) };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
find("idle").addEventListener("click", async ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  const { answers, tokens, temperature } = target.dataset;
  if ("pause" in target.dataset) await control("pause");
  for (const [id, value] of Object.entries({ answers, "most-tokens": tokens, temperature })) find(id).value = value;
  find("ask").requestSubmit();
});
addEventListener("resize", () => picture && drawPool());
follow();
