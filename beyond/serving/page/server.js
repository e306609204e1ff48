// What the page asks of its server: one JSON answer, or server-sent events as they come.

const keyField = document.getElementById("key-field");
const key = document.getElementById("key");
key.value = sessionStorage.getItem("key") ?? ""; // as long as this tab is open
key.addEventListener("change", () => sessionStorage.setItem("key", key.value));
keyField.hidden = !key.value;

async function ask(path, body, signal) {
  const headers = {};
  if (key.value) headers["Authorization"] = `Bearer ${key.value}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (!response.ok) {
    if (response.status === 401) keyField.hidden = false;
    throw Object.assign(new Error((await response.json()).error.message), { status: response.status });
  }
  return response;
}

export async function post(path, body) {
  return (await ask(path, body)).json();
}

// The data of each event. An event ends with an empty line, and each of its lines begins with `data: `.
export async function* events(path, body, signal) {
  const reader = (await ask(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (pending + value).split("\n\n");
    pending = frames.pop();
    for (const frame of frames) yield frame.split("\n").map((line) => line.slice("data: ".length)).join("\n");
  }
}
