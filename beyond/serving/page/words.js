// What the page says, in the language that the browser asks for. English is the key; a number goes where its {name} is.

const CHINESE = {
  "The engine at work": "推理引擎实况",
  "What is a KV cache?": "什么是 KV cache？",
  Ask: "提问", "the model": "模型", Question: "问题", answers: "回答数", "tokens, at most": "token 上限", temperature: "温度",
  Abort: "中止", "New conversation": "新对话", key: "密钥", aborted: "已中止",
  complete: "回答完整", "cut off: it has as many tokens as were allowed": "已达到允许的 token 数，回答被截断", "Go on": "接着写",
  "no answer for {n} s": "{n} 秒没有响应",
  "The engine": "引擎", connecting: "正在连接", Pause: "暂停", Resume: "继续", "One step": "单步",
  paused: "已暂停", running: "运行中", idle: "空闲", gone: "已停止",
  "Pool of blocks": "块池", free: "空闲", "free, content cached": "空闲，内容仍在缓存", "of one request (its batch slot's colour)": "属于一个请求（批槽位的颜色）", shared: "共享",
  "{used} of {all} in use, {size} tokens each": "共 {all} 块，已用 {used}，每块 {size} 个 token", "; one in {n} is drawn": "；每 {n} 块画一块",
  "block {n}: free": "块 {n}：空闲", "block {n}: free, content cached": "块 {n}：空闲，内容仍在缓存",
  "block {n}: of request {id}": "块 {n}：属于请求 {id}", "block {n}: shared by {users} requests": "块 {n}：由 {users} 个请求共享",
  "Tokens per step": "每步 token 数", prefill: "预填充（prefill）", recomputed: "重算", decode: "解码（decode）",
  "accepted drafts": "被接受的草稿", rejected: "被拒绝的", "budget {n}": "预算 {n}",
  "the last {n} of {all} steps, highest: {most}": "共 {all} 步，显示最近 {n} 步，最高 {most}",
  "step {number}: {prefill} prefill + {decode} decode in {ms} ms": "第 {number} 步：预填充 {prefill} + 解码 {decode}，用时 {ms} ms",
  ", {n} computed again": "，重算 {n}", ", {accepted} of {guesses} drafts accepted": "，草稿 {guesses} 个，接受 {accepted} 个", ", {n} preempted": "，抢占 {n} 个",
  "The last minute": "最近一分钟", "tokens per second": "每秒 token 数", "requests that wait": "等待的请求",
  "{now} tokens/s, highest {most}; up to {waiting} wait": "每秒 {now} 个 token，最高 {most}；最多 {waiting} 个等待",
  "no preemptions": "没有抢占", "preemptions: {n}, the last in step {step}: request {id} lost {blocks} blocks with {tokens} tokens": "抢占 {n} 次，最近一次在第 {step} 步：请求 {id} 失去 {blocks} 块、{tokens} 个 token",
  Waiting: "等待", "request {id} waits: all {n} batch slots are taken": "请求 {id} 在等：{n} 个批槽位都已占用",
  "request {id} waits: needs {needs} blocks, {free} are free": "请求 {id} 在等：需要 {needs} 块，空闲 {free} 块",
  ", {kept} must stay free for those that run": "，还须给运行中的请求留 {kept} 块", "; {held} more it would share": "；另有 {held} 块可以共享",
  "request {id} waits: an earlier prompt takes what the decodes leave of {n} tokens per step": "请求 {id} 在等：每步 {n} 个 token，解码之外的都给了更早的提示词",
  "request {id} is tried in the next step": "下一步尝试请求 {id}",
  "{prompt} prompt tokens, {generated} generated, preempted {n} times": "提示词 {prompt} 个 token，已生成 {generated} 个，被抢占 {n} 次",
  "{id} lost {n} tokens": "{id} 失去 {n} 个 token",
  Running: "运行", "{n} of {all} batch slots": "{all} 个批槽位，已用 {n}",
  "prefill {n} of {all}": "预填充 {n} / {all}", "{n} of {all} tokens": "token {n} / {all}", "{n} blocks": "{n} 块",
  "Nothing runs. Ask a question, or try one of these and watch:": "现在没有请求。提一个问题，或者试试下面的例子：",
  "One question": "一个问题", "Nine answers, step by step": "九个回答，逐步运行", "Sixteen long answers": "十六个长回答",
  "A walk through the engine in six steps": "六步看懂引擎",
  "prompt, from the prefix cache": "提示词，来自前缀缓存", "prompt, computed": "提示词，已计算", answer: "回答", "lost by preemption": "因抢占失去", constrained: "受约束",
  "Block table": "块表", "choose a request with the mouse or the arrow keys": "用鼠标或方向键选一个请求",
  "request {id}: position in the request → block in the pool": "请求 {id}：请求中的位置 → 池中的块", "request {id} holds no block now": "请求 {id} 现在没有块",
  "tokens {first} to {last}; the block is used by {users} requests": "token {first} 到 {last}；此块由 {users} 个请求使用",
  "Last requests": "最近的请求", prompt: "提示词", cached: "命中缓存", tokens: "token", "TTFT, ms": "TTFT（ms）", "TPOT, ms": "TPOT（ms）", end: "结束",
  "The engine is gone: {why}. Start it again with make serve; this page connects by itself.": "引擎已停止：{why}。请用 make serve 重新启动，本页会自动连接。",
  "the server does not answer": "服务器没有响应", "the server was ended": "服务器已关闭",
  "The last step failed: {why}. The requests that ran ended with this error.": "上一步失败：{why}。运行中的请求都以此错误结束。",
  Details: "更多", "The words on this page": "本页用语", "prefill, decode": "预填充（prefill）、解码（decode）",
  "The prompt is computed many tokens at a time, the answer one token per step.": "提示词一次计算许多 token，回答每步一个 token。",
  "block, block table": "块（block）、块表（block table）",
  "The KV cache is a pool of blocks. The table of a request says which block of the pool holds its first tokens, its next, and so on.": "KV cache 是一池块。请求的块表依次写明它的 token 存在池中哪些块里。",
  "batch slot": "批槽位（batch slot）", "The place of a running request. Who has none waits.": "运行中请求的位置。没有槽位的请求等待。",
  "prefix cache": "前缀缓存（prefix cache）", "Requests that begin with the same tokens share the blocks of these. A free block keeps its content until it is needed.": "开头 token 相同的请求共享这些 token 的块。空闲块在被取用之前保留内容。",
  preemption: "抢占（preemption）", "No block is free, so the request that arrived last gives its blocks back and waits. Its tokens are computed again later.": "没有空闲块时，最晚到达的请求交回它的块并等待，它的 token 以后重算。",
  budget: "预算（budget）", "Tokens that one step may compute. Decodes come first, prompts take the rest.": "一步最多计算的 token 数。解码优先，其余给提示词。",
  "TTFT, TPOT": "TTFT、TPOT", "Time to the first token, and time per token after it.": "首个 token 的时间，以及之后每个 token 的时间。",
  "All words: the glossary": "全部用语：术语表",
};
const isChinese = navigator.language.startsWith("zh");

export function t(text, values = {}) {
  const said = (isChinese && CHINESE[text]) || text;
  return said.replace(/\{(\w+)\}/g, (_, name) => values[name].toLocaleString());
}

// What is written in the page itself: each of its texts is a key as it is.
if (isChinese) {
  document.documentElement.lang = "zh-CN";
  document.title = t(document.title);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    if (CHINESE[text]) texts.currentNode.data = CHINESE[text];
  }
  for (const link of document.querySelectorAll('a[href^="/lesson/"]')) link.href = link.href.replace(".md", ".zh-CN.md");
}
