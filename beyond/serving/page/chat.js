// The chat box: a client of /v1/chat/completions like any other.

import { render } from "./markdown.js";
import { events, post } from "./server.js";
import { t } from "./words.js";

const find = (id) => document.getElementById(id);
const messages = find("messages");
let conversation = JSON.parse(sessionStorage.getItem("conversation") ?? "[]"); // as long as this tab is open
let running = null; // aborts the answer under way

// What ends an answer, as the API calls it.
const ends = () => ({
  stop: t("complete"),
  length: t("cut off: it has as many tokens as were allowed"),
});

function show(role, text) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  add(message, text);
  messages.append(message);
  message.scrollIntoView({ block: "nearest" });
  return message;
}

function add(message, text) {
  message.text = (message.text ?? "") + text;
  message.replaceChildren(message.classList.contains("assistant") ? render(message.text) : message.text);
}

function keep() {
  sessionStorage.setItem("conversation", JSON.stringify(conversation));
}

// The end of what is written stays in sight, unless somebody has scrolled up to read.
function write(change) {
  const follows = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  change();
  if (follows) messages.scrollTop = messages.scrollHeight;
}

function showEnd(message, reason, before) {
  const note = document.createElement("p");
  note.className = "end";
  note.textContent = ends()[reason] ?? reason;
  if (reason === "length") {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = t("Go on");
    button.addEventListener("click", () => goOn(message, note, before));
    note.append(" ", button);
  }
  write(() => message.after(note));
}

// Reads a stream of answers to the conversation `before`, each into the message that `of` has for its index.
async function read(path, asked, before, of) {
  const body = { ...asked, stream: true, max_tokens: find("most-tokens").valueAsNumber, temperature: find("temperature").valueAsNumber };
  for await (const event of events(path, body, running.signal)) {
    if (event === "[DONE]") break;
    const told = JSON.parse(event);
    if (told.error) throw new Error(told.error.message);
    for (const { index, delta, text, finish_reason: reason } of told.choices) {
      const message = of(index);
      write(() => add(message, delta?.content ?? text ?? ""));
      if (reason) showEnd(message, reason, before);
    }
  }
}

// One at a time: an answer, or more of one.
async function busy(work) {
  if (running) return;
  running = new AbortController();
  setBusy(true);
  try {
    await work();
  } catch (error) {
    show("error", error.name === "AbortError" ? t("aborted") : error.message);
  }
  running = null;
  setBusy(false);
}

function setBusy(busy) {
  find("send").disabled = busy;
  find("abort").disabled = !busy;
}

async function send() {
  const question = find("question").value.trim();
  if (running || !question) return;
  show("user", question);
  conversation.push({ role: "user", content: question });
  const mine = conversation;
  const before = [...mine];
  const shown = [];
  await busy(() => read("/v1/chat/completions", { messages: before, n: find("answers").valueAsNumber }, before, (i) => (shown[i] ??= show("assistant", ""))));
  if (shown[0]) mine.push((shown[0].turn = { role: "assistant", content: shown[0].text }));
  else mine.pop();
  keep();
}

// A model goes on with any text: that of the conversation with the answer so far, whose blocks are cached.
function goOn(message, note, before) {
  return busy(async () => {
    const [asked, told] = await Promise.all([
      post("/tokenize", { messages: before }),
      post("/tokenize", { prompt: message.text, add_special_tokens: false }),
    ]);
    note.remove();
    await read("/v1/completions", { prompt: [...asked.tokens, ...told.tokens] }, before, () => message);
    if (message.turn) message.turn.content = message.text;
    keep();
  });
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter chooses a word in an input method
  event.preventDefault();
  send();
});
find("abort").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  keep();
  messages.replaceChildren();
});
setBusy(false);
for (const turn of conversation) show(turn.role, turn.content).turn = turn;
