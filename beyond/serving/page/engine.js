// Draws the engine from the pictures that the server sends. Each picture is complete, so nothing is remembered.

import { events, post } from "./server.js";

// Okabe and Ito's colours, which most people with a colour-blindness can tell apart, and darker ones.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a67c00", "#7a3e9d", "#00586b", "#8c2f39", "#5b7a1f"];
const FREE = 0;
const CACHED = 1;
const colourOf = (id) => COLOURS[id % COLOURS.length];
const find = (id) => document.getElementById(id);
const put = (id, text) => (find(id).textContent = text);
let paused = false;

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function chip(id) {
  const element = make("span", "chip", `${id}`);
  element.style.background = colourOf(id);
  return element;
}

function drawQueues(picture) {
  put("num-waiting", picture.num_waiting);
  find("waiting").replaceChildren(
    ...picture.waiting.map((request) => {
      const element = chip(request.id);
      element.title = `${request.prompt} prompt tokens, ${request.generated} generated, preempted ${request.preemptions}×`;
      return element;
    }),
  );
  put("num-running", `${picture.running.length} of ${picture.batch_slots} batch slots`);
  find("running").replaceChildren(...picture.running.map(drawRunning));
}

// A bar as long as the longest that the request may become: what is computed of the prompt (hatched), of the answer.
function drawRunning(request) {
  const row = make("div", "running");
  const bar = make("div", "bar");
  const part = (className, tokens) => {
    const element = make("i", className);
    element.style.width = `${(100 * tokens) / request.most}%`;
    bar.append(element);
    return element;
  };
  part("computed", request.computed).style.background = colourOf(request.id);
  part("of-prompt", Math.min(request.computed, request.prompt));
  const edge = make("i", "end-of-prompt");
  edge.style.left = `${(100 * request.prompt) / request.most}%`;
  bar.append(edge);
  const did =
    request.state === "prefilling"
      ? `prefill ${request.computed} of ${request.prompt + request.generated}`
      : `${request.generated} of ${request.most - request.prompt} tokens`;
  row.append(chip(request.id), bar, make("span", "", `${did}, ${request.blocks} blocks`));
  return row;
}

function drawPool(picture) {
  const pool = find("pool");
  const count = { free: 0, cached: 0, owned: 0, shared: 0 };
  while (pool.children.length > picture.blocks.length) pool.lastChild.remove();
  while (pool.children.length < picture.blocks.length) pool.append(make("i", "block"));
  const small = picture.blocks.length > 512 ? " small" : "";
  picture.blocks.forEach((block, i) => {
    const [owner, owners] = Array.isArray(block) ? block : [null, 0];
    const kind = block === FREE ? "free" : block === CACHED ? "cached" : owners > 1 ? "shared" : "owned";
    count[kind] += 1;
    const element = pool.children[i];
    element.className = `block ${kind}${small}`;
    element.style.backgroundColor = owner === null ? "" : colourOf(owner);
    const whose = owner === null ? kind : owners > 1 ? `shared by ${owners} requests` : `of request ${owner}`;
    element.title = `block ${i * picture.every_nth_block}: ${whose}`;
  });
  for (const [kind, number] of Object.entries(count)) put(kind, number);
  const sample = picture.every_nth_block > 1 ? `; every ${picture.every_nth_block}th is drawn` : "";
  put("pool-size", `${picture.num_used_blocks} of ${picture.num_blocks} in use, ${picture.block_size} tokens each${sample}`);
}

function drawSteps(picture) {
  const steps = picture.steps;
  const most = Math.max(8, ...steps.map((step) => step.prefill + step.decode));
  find("steps").replaceChildren(
    ...steps.map((step) => {
      const column = make("div", "");
      for (const kind of ["prefill", "decode"]) {
        const part = make("i", kind);
        part.style.height = `${(100 * step[kind]) / most}%`;
        column.append(part);
      }
      column.title = tell(step);
      return column;
    }),
  );
  put("num-steps", `the last ${steps.length} of ${picture.num_steps} steps; highest: ${most}; preemptions: ${picture.num_preemptions}`);
  put("last-step", steps.length ? tell(steps.at(-1)) : "");
}

function tell(step) {
  const preempted = step.preempted ? `, ${step.preempted} preempted` : "";
  return `step ${step.number}: ${step.prefill} prefill + ${step.decode} decode in ${step.ms} ms${preempted}`;
}

function drawEnded(picture) {
  find("ended").replaceChildren(
    ...picture.ended.toReversed().map((request) => {
      const row = make("tr", "");
      const first = make("td", "");
      first.append(chip(request.id));
      const { prompt, cached, generated, ttft_ms, tpot_ms, reason } = request;
      const cells = [prompt, cached, generated, ttft_ms.toFixed(1), tpot_ms.toFixed(2), reason];
      row.append(first, ...cells.map((cell) => make("td", "", cell)));
      return row;
    }),
  );
}

function draw(picture) {
  paused = picture.paused;
  put("model", picture.model);
  put("engine", picture.engine);
  put("status", paused ? "paused" : picture.running.length ? "running" : "idle");
  put("pause", paused ? "Resume" : "Pause");
  find("step").disabled = !paused;
  drawQueues(picture);
  drawPool(picture);
  drawSteps(picture);
  drawEnded(picture);
}

async function follow() {
  for (;;) {
    try {
      for await (const event of events("/live/events")) draw(JSON.parse(event));
      put("status", "the server has ended");
    } catch (error) {
      put("status", `not connected: ${error.message}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function control(action) {
  try {
    await post("/live/control", { action });
  } catch (error) {
    put("status", error.message);
  }
}

find("pause").addEventListener("click", () => control(paused ? "resume" : "pause"));
find("step").addEventListener("click", () => control("step"));
follow();
