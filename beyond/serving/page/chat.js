// The chat box: a client of /v1/chat/completions like any other.

import { events } from "./server.js";
import { t } from "./words.js";

const find = (id) => document.getElementById(id);
const messages = find("messages");
let conversation = [];
let running = null; // aborts the answer under way

function show(role, text) {
  const message = document.createElement("p");
  message.className = `message ${role}`;
  message.textContent = text;
  messages.append(message);
  message.scrollIntoView();
  return message;
}

async function answer() {
  const body = {
    messages: conversation,
    stream: true,
    n: find("answers").valueAsNumber,
    max_tokens: find("most-tokens").valueAsNumber,
    temperature: find("temperature").valueAsNumber,
  };
  const shown = [];
  try {
    for await (const event of events("/v1/chat/completions", body, running.signal)) {
      if (event === "[DONE]") break;
      const told = JSON.parse(event);
      if (told.error) throw new Error(told.error.message);
      for (const { index, delta } of told.choices) {
        shown[index] ??= show("assistant", "");
        shown[index].textContent += delta.content;
      }
    }
  } catch (error) {
    show("error", error.name === "AbortError" ? t("aborted") : error.message);
  }
  return shown;
}

function setBusy(busy) {
  find("send").disabled = busy;
  find("abort").disabled = !busy;
}

async function send() {
  const question = find("question").value.trim();
  if (running || !question) return;
  running = new AbortController();
  setBusy(true);
  show("user", question);
  conversation.push({ role: "user", content: question });
  const mine = conversation;
  const shown = await answer();
  if (shown[0]) mine.push({ role: "assistant", content: shown[0].textContent });
  else mine.pop();
  running = null;
  setBusy(false);
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
  messages.replaceChildren();
});
setBusy(false);
