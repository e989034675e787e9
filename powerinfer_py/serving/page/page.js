// The page of `powerinfer serve`: a chat over the OpenAI API, and beside it the engine's figures.
// Whatever a model or a server says becomes text nodes, never HTML.
"use strict";

const POLL_MS = 500;
const SLOW_POLL_MS = 5000; // the tab is hidden, or the server doesn't answer
const TIMEOUT_MS = 4000; // of one poll
const LINE_MS = 60000; // the speed's line
const MAX_COLUMNS = 400; // of the map; a wide window shows fewer
const COLUMN_PX = 4;

const $ = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** For screen readers. */
const say = (text) => { $("say").textContent = text; };

// ---- The API key: for this tab only, or for this page where the browser stores nothing.

let apiKey = null;
try { apiKey = sessionStorage.getItem("powerinfer-key"); } catch { /* storage is switched off */ }

function headers(more = {}) {
  return apiKey ? { ...more, Authorization: `Bearer ${apiKey}` } : more;
}

function askForKey() {
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = $("key").value;
  try { sessionStorage.setItem("powerinfer-key", apiKey); } catch { /* storage is switched off */ }
  $("key").value = "";
  $("key-form").hidden = true;
  $("question").focus();
  poll();
});

/** Why the server refused: OpenAI's error object, FastAPI's detail, or the text itself. */
async function refusal(response) {
  const text = await response.text().catch(() => "");
  let said = text.slice(0, 500);
  try {
    const answer = JSON.parse(text);
    said = String(answer.error?.message ?? answer.detail ?? said);
  } catch { /* not JSON */ }
  if (response.status === 429) return `The server is busy. ${said}`;
  return said || `The server answered ${response.status} ${response.statusText}.`;
}

// ---- Answers as elements: fenced code, inline code, bold, headings, lists. Links stay text.

/** Split an answer into blocks: {kind: "code" | "heading" | "list" | "text", ...}. An unclosed fence is code so far. */
function blocksOf(text) {
  const blocks = [];
  let open = null; // the paragraph, list or code that the next line may continue
  for (const line of text.split(/\r\n|[\n\r]/)) {
    if (open?.kind === "code") {
      if (line.trim() === open.fence) open = null;
      else open.lines.push(line.startsWith(open.indent) ? line.slice(open.indent.length) : line.trimStart());
      continue;
    }
    const [, indent, fence] = line.match(/^(\s*)(`{3,}|~{3,})[^`]*$/) ?? [];
    const [, level, marker, item] = line.match(/^(\s*)([-*+]|\d{1,9}[.)])\s+(\S.*)$/) ?? [];
    const heading = line.match(/^#{1,6}\s+(\S.*)$/)?.[1];
    if (fence) {
      blocks.push(open = { kind: "code", fence, indent, lines: [] });
    } else if (item) {
      if (open?.kind !== "list") blocks.push(open = { kind: "list", items: [] });
      open.items.push({ indent: level.length, number: parseInt(marker), text: item });
    } else if (heading) {
      blocks.push({ kind: "heading", text: heading });
      open = null;
    } else if (!line.trim()) {
      if (open?.kind === "text") open = null;
    } else if (open?.kind === "list" && /^\s/.test(line)) {
      open.items.at(-1).text += `\n${line.trim()}`;
    } else if (open?.kind === "text") {
      open.text += `\n${line}`;
    } else {
      blocks.push(open = { kind: "text", text: line });
    }
  }
  return blocks;
}

/** Add a text with `code` and **bold**; lengths are limited so that odd text can't take long. */
function addInline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(/(?<!`)(`{1,9})(?!`)(.{1,400}?)(?<!`)\1(?!`)|\*\*(?=\S)(.{1,800}?\S|\S)\*\*/gs)) {
    parent.append(text.slice(end, match.index));
    if (match[1]) parent.append(element("code", { textContent: match[2] }));
    else addInline(parent.appendChild(element("strong")), match[3]);
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

function listElement(items) {
  const root = element("div");
  const open = []; // lists that the next item may belong to, outermost first
  for (const item of items) {
    const name = item.number >= 0 ? "OL" : "UL";
    while (open.length && item.indent < open.at(-1).indent) open.pop();
    if (open.at(-1)?.indent === item.indent && open.at(-1).list.tagName !== name) open.pop();
    if (!open.length || item.indent > open.at(-1).indent) {
      const list = element(name);
      if (item.number >= 0) list.start = item.number;
      (open.at(-1)?.list.lastChild ?? root).append(list);
      open.push({ indent: item.indent, list });
    }
    addInline(open.at(-1).list.appendChild(element("li")), item.text);
  }
  return root;
}

function blockElement(block) {
  if (block.kind === "code") return element("pre", { tabIndex: 0 }, element("code", { textContent: block.lines.join("\n") }));
  if (block.kind === "list") return listElement(block.items);
  const paragraph = element("p", { className: block.kind === "heading" ? "heading" : "" });
  addInline(paragraph, block.text);
  return paragraph;
}

const sources = new WeakMap();

/** Show an answer; elements of unchanged blocks stay, and with them the reader's selection. */
function render(parent, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, i) => {
    const source = JSON.stringify(block);
    const old = parent.children[i];
    if (old && sources.get(old) === source) return;
    const made = blockElement(block);
    sources.set(made, source);
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

// ---- Chat.

/** The data of server-sent events, however the bytes were cut into chunks. */
async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/); // a \r at the end may be half of \r\n
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let turns = []; // {question, answer, parts: elements}
let running = null; // AbortController of the answer that is being written

const toEnd = () => { $("log").scrollTop = $("log").scrollHeight; };

/** Change the log; it follows its end where the reader was there. */
function change(what) {
  const log = $("log");
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  what();
  if (follow) toEnd();
}

function messagesFor(question) {
  const said = turns.filter((turn) => turn.answer).flatMap((turn) => [["user", turn.question], ["assistant", turn.answer]]);
  return [["system", $("system").value.trim()], ...said, ["user", question]]
    .filter(([, content]) => content).map(([role, content]) => ({ role, content }));
}

function setRunning(controller) {
  const [from, to] = controller ? [$("send"), $("stop")] : [$("stop"), $("send")];
  const hadFocus = document.activeElement === from;
  running = controller;
  from.hidden = true;
  to.hidden = false;
  if (hadFocus) to.focus();
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or a page that isn't from this machine or by HTTPS
    const field = element("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    from.focus();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

function button(text, act) {
  const made = element("button", { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}

const ENDS = {
  stopped: "stopped",
  length: "ended at the limit of tokens",
  timeout: "ended at the server's time limit",
  cancelled: "cancelled by the server",
};

/** Send a question and show the answer as it comes. */
async function ask(question) {
  const controller = new AbortController();
  const body = element("div", { className: "body" });
  const footer = element("footer");
  const answering = element("article", { className: "answering", ariaLabel: "Answer" }, body, footer);
  const request = {
    messages: messagesFor(question),
    stream: true,
    stream_options: { include_usage: true },
    temperature: $("temperature").valueAsNumber,
    max_tokens: $("max-tokens").value ? $("max-tokens").valueAsNumber : null,
  };
  const asked = element("article", { className: "you", ariaLabel: "You", textContent: question });
  const turn = { question, answer: "", parts: [asked, answering] };
  turns.push(turn);
  setRunning(controller);
  $("empty").hidden = true;
  $("log").append(...turn.parts);
  toEnd();
  say("Asked.");

  let frame = 0;
  const show = () => { frame = 0; change(() => render(body, turn.answer)); };
  let end = null; // finish_reason
  let usage = null;
  let first_ms = 0;
  let last_ms = 0;
  const asked_ms = performance.now();
  let error = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(request),
      signal: controller.signal,
    });
    if (!response.ok) {
      error = await refusal(response);
      if (response.status === 401) askForKey();
    } else {
      for await (const data of eventsOf(response.body)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) {
          error = event.error.message;
          break;
        }
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        end = choice?.finish_reason ?? end;
        const text = choice?.delta?.content;
        if (!text) continue;
        last_ms = performance.now();
        first_ms ||= last_ms;
        turn.answer += text;
        frame ||= requestAnimationFrame(show);
      }
      if (!end && !error) error = "The connection ended before the answer did.";
    }
  } catch (failure) {
    if (controller.signal.aborted) end = "stopped";
    else if (failure instanceof SyntaxError) error = `The server sent what isn't JSON: ${failure.message}`;
    else error = first_ms ? "The connection was lost." : "The server is not reachable.";
  }
  cancelAnimationFrame(frame);
  if (running === controller) setRunning(null);
  if (!turns.includes(turn)) return; // a new chat was begun

  change(() => {
    render(body, turn.answer);
    answering.classList.remove("answering");
    const notes = ENDS[end] ? [ENDS[end]] : [];
    if (usage?.completion_tokens) {
      notes.push(`${usage.completion_tokens} tokens`);
      if (last_ms > first_ms) notes.push(`${amount((usage.completion_tokens - 1) / (last_ms - first_ms) * 1e3)} tokens/s`);
      notes.push(`first after ${amount((first_ms - asked_ms) / 1e3)} s`);
    }
    if (error) footer.before(element("p", { className: "error", textContent: error }));
    if (error) footer.append(button("Try again", () => {
      if (running) return;
      forget(turn);
      ask(question);
    }));
    if (turn.answer) footer.append(button("Copy", (event) => copy(turn.answer, event.target)));
    footer.append(notes.join(", "));
  });
  say(error ? `Error: ${error}` : `Answer: ${turn.answer}`);
}

function forget(turn) {
  turns = turns.filter((other) => other !== turn);
  for (const part of turn.parts) part.remove();
}

const stop = () => running?.abort();

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (running || !question) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("new").addEventListener("click", () => {
  stop();
  turns.forEach(forget);
  $("empty").hidden = false;
  $("question").focus();
});
// An invalid setting can't be pointed at while its box is closed.
$("settings").addEventListener("invalid", () => { $("settings").open = true; }, true);

// ---- Figures.

let engine = null; // the newest answer of powerinfer/stats; null while there is none
let speeds = []; // {ms, value} of the last minute; value null: not known
let columns = []; // of the map: the layers, or null for a pause
let chosen = null; // the layer that is pointed at
let timer = 0;
let polling = false;

const amount = (x) => x >= 100 || !x ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
const count = (n) => n.toLocaleString("en-US");
const share = (x) => x == null ? "-" : `${(x * 100).toFixed(x < 0.0995 ? 1 : 0)}\u00a0%`;

function bytes(n) {
  const i = n < 1e3 ? 0 : n < 1e6 ? 1 : n < 1e9 ? 2 : n < 1e12 ? 3 : 4;
  return `${amount(n / 1000 ** i)} ${"B kB MB GB TB".split(" ")[i]}`;
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  let stats = null;
  let state = "";
  let text = "";
  try {
    const response = await fetch("powerinfer/stats", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.ok) stats = await response.json();
    else text = await refusal(response);
    state = response.status === 401 ? "API key needed" : `server error ${response.status}`;
  } catch {
    state = "server not reachable";
    text = `The server doesn't answer. Asking again every ${SLOW_POLL_MS / 1000} seconds.`;
  }
  polling = false;
  if (stats) take(stats);
  else trouble(state, text);
  if (state === "API key needed") askForKey(); // its form polls again
  else timer = setTimeout(poll, stats && !document.hidden ? POLL_MS : SLOW_POLL_MS);
}

const setState = (text, kind) => Object.assign($("state"), { textContent: text, className: kind });

/** No figures rather than old ones. */
function trouble(state, text) {
  if (engine || !$("state").classList.contains("error")) say(state);
  engine = null;
  addTime(null, null);
  setState(state, "error");
  $("figures").hidden = true;
  $("trouble").hidden = false;
  $("trouble").textContent = text;
}

/** One step of the line and of the map; a pause is one empty column, however long it takes. */
function addTime(speed, column) {
  const ms = performance.now();
  speeds = [...speeds.filter((old) => old.ms > ms - LINE_MS - 2 * SLOW_POLL_MS), { ms, value: speed }];
  if (column || columns.at(-1)) columns = [...columns.slice(1 - MAX_COLUMNS), column];
}

function take(stats) {
  if (!engine && $("state").classList.contains("error")) say("server reachable again");
  const { layers } = stats;
  if (columns.find(Boolean)?.length !== layers.length) columns = [];
  addTime(stats.tokens_per_s, layers.some((layer) => layer.density != null) ? layers : null);
  if (stats.sparsity !== engine?.sparsity) $("sparsity").value = stats.sparsity;
  engine = stats;
  $("trouble").hidden = true;
  $("figures").hidden = false;
  show();
}

function show() {
  const { layers, slots } = engine;
  setState(engine.n_running ? `${engine.n_running} running` : "idle", engine.n_running ? "busy" : "");
  $("model").textContent = $("model").title = engine.model;

  $("speed").textContent = amount(engine.tokens_per_s);
  const prompts = engine.prompt_tokens_per_s ? `, prompts ${amount(engine.prompt_tokens_per_s)} tokens/s` : "";
  $("speed-more").textContent = `last minute up to ${amount(Math.max(...speeds.map((speed) => speed.value)))}${prompts}`;

  const hasPlan = engine.computed_by !== "upstream";
  $("no-plan").hidden = hasPlan;
  $("bytes").hidden = $("layers").hidden = !hasPlan;
  $("sparsity").disabled = !hasPlan;
  $("no-plan-command").textContent = `powerinfer profile ${engine.model.endsWith(".gguf") ? engine.model : "MODEL.gguf"} --text text.txt`;
  if (hasPlan) showLayers(layers);

  $("running").textContent = engine.n_running;
  $("waiting").textContent = engine.n_waiting;
  showSlots(slots);
  const reasons = Object.entries(engine.n_requests).map(([reason, n]) => `${reason} ${count(n)}`).join(", ") || "none";
  $("finished").textContent = `Finished: ${reasons}; refused ${count(engine.n_rejected)}. Prompt tokens: `
    + `${count(engine.n_prompt_tokens)} computed, ${count(engine.n_cached_tokens)} from the cache.`;

  const modes = new Map();
  for (const layer of layers) {
    modes.set(layer.sparsity, (modes.get(layer.sparsity) ?? 0) + 1);
  }
  $("modes").textContent = [...modes].map(([mode, n]) => `${n} layers ${mode}`).join(", ");
  $("kernels").textContent = hasPlan ? engine.kernels : "llama.cpp's";
  $("context").textContent = `${count(engine.n_ctx)} tokens for each of ${count(engine.n_parallel)} requests`;
  draw();
}

function showLayers(layers) {
  const skipped = engine.dense_bytes ? 1 - engine.read_bytes / engine.dense_bytes : null;
  $("skipped").textContent = share(skipped);
  $("skipped-bar").style.transform = `scaleX(${Math.max(0, skipped)})`;
  $("skipped-more").textContent = skipped == null ? "nothing computed yet" : skipped < 0
    ? `${bytes(engine.read_bytes)} read, dense ${bytes(engine.dense_bytes)}`
    : `${bytes(engine.dense_bytes - engine.read_bytes)} of ${bytes(engine.dense_bytes)} since the start`;
  $("density").textContent = share(engine.density);
  $("candidates").textContent = share(engine.candidate_density);
  const n_hot = layers.reduce((n, layer) => n + layer.n_hot, 0);
  const n_ff = layers.reduce((n, layer) => n + layer.n_ff, 0);
  const did = engine.gpu_share == null ? "" : ` They are ${share(engine.gpu_share)} of the rows that were read.`;
  $("layers").classList.toggle("split", n_hot > 0);
  $("split").textContent = n_hot
    ? `Hot neurons, on a GPU: ${share(n_hot / n_ff)}; the cold ones are on the CPU.${did}`
    : "No hot/cold split: all neurons are on the CPU.";
  $("last-layer").textContent = layers.length - 1;
  $("map").ariaValueMax = layers.length - 1;
  showReadout();
}

const FIGURES = {
  mode: (layer) => layer.sparsity, // "upstream": llama.cpp computes it
  n_ff: (layer) => layer.n_ff ? count(layer.n_ff) : "-",
  density: (layer) => share(layer.density),
  candidates: (layer) => share(layer.candidate_density),
  hot: (layer) => layer.n_hot ? share(layer.n_hot / layer.n_ff) : "-",
};

function showReadout() {
  const layer = engine.layers[chosen];
  let text = "Point at a layer, or use the arrow keys in the map.";
  if (layer) {
    text = `Layer ${chosen}, ${layer.sparsity}: ` + (layer.density == null ? "idle"
      : `${share(layer.density)} of ${count(layer.n_ff)} neurons used, ${share(layer.candidate_density)} candidates`);
    if (layer.n_hot) text += `; ${count(layer.n_hot)} hot (${FIGURES.hot(layer)})`;
  }
  $("readout").textContent = text;
  Object.assign($("map"), { ariaValueNow: chosen ?? 0, ariaValueText: text });
}

function showTable(layers) {
  const figures = Object.values(FIGURES);
  while ($("table").children.length > layers.length) $("table").lastChild.remove();
  layers.forEach((layer, i) => {
    const row = $("table").children[i] ?? $("table").appendChild(
      element("tr", {}, element("th", { scope: "row", textContent: i }), ...figures.map(() => element("td"))));
    figures.forEach((figure, k) => { row.children[k + 1].textContent = figure(layer); });
  });
}

function showSlots(slots) {
  const list = $("slots");
  while (list.children.length > slots.length) list.lastChild.remove();
  slots.forEach((slot, i) => {
    const item = list.children[i] ?? list.appendChild(
      element("li", {}, element("span"), element("div", { className: "bar" }, element("i"))));
    item.className = slot.state;
    item.firstChild.textContent = slot.n_tokens ? `${slot.state}, ${count(slot.n_tokens)} tokens` : slot.state;
    item.querySelector("i").style.transform = `scaleX(${Math.min(1, slot.n_tokens / engine.n_ctx)})`;
  });
}

// ---- Pictures. All sizes are CSS pixels; the canvas has as many device pixels as fit.

const isDark = matchMedia("(prefers-color-scheme: dark)");

/** A canvas's context in CSS pixels, emptied. */
function cleared(canvas, height) {
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.scale(canvas.width / width, canvas.height / height);
  context.imageSmoothingEnabled = false;
  return context;
}

/**
 * 256 colours of the scale: a helix in OKLCH, whose even steps look even, and lightness alone tells them apart too. The
 * first is near the theme's background.
 */
function palette() {
  const made = element("canvas", { width: 256, height: 1 });
  const context = made.getContext("2d", { willReadFrequently: true });
  for (let i = 0; i < 256; i++) {
    const t = isDark.matches ? i / 255 : 1 - i / 255; // 0: the dark end
    context.fillStyle = `oklch(${0.3 + 0.65 * t} 0.1 ${285 - 180 * t})`;
    context.fillRect(i, 0, 1, 1);
  }
  return made;
}

let strip = palette();

function draw() {
  if (!engine || !$("engine").clientWidth) return;
  drawLine();
  if ($("layers").hidden) return;
  drawLayers();
  if ($("table-box").open) showTable(engine.layers);
}

function drawLine() {
  const canvas = $("line");
  const height = 38;
  const context = cleared(canvas, height);
  const now = performance.now();
  const top = Math.max(1, ...speeds.map((speed) => speed.value));
  context.strokeStyle = getComputedStyle(canvas).color;
  context.lineWidth = 1.5;
  context.beginPath();
  let isDown = false;
  for (const { ms, value } of speeds) {
    const x = canvas.clientWidth * (1 - (now - ms) / LINE_MS);
    if (value != null) context[isDown ? "lineTo" : "moveTo"](x, height - 1 - (height - 3) * value / top);
    isDown = value != null;
  }
  context.stroke();
}

function drawLayers() {
  const map = $("map");
  const { layers } = engine;
  const what = document.querySelector("[name=shown]:checked").value;
  const row = Math.min(14, Math.max(3, Math.floor(260 / layers.length)));
  const height = row * layers.length;
  const shown = columns.slice(-Math.floor(map.clientWidth / COLUMN_PX));
  const values = shown.flatMap((column) => column ?? []).map((layer) => layer[what]).filter((value) => value != null);
  const most = Math.max(...values, 0.01);
  const step = most > 0.2 ? 0.1 : most > 0.05 ? 0.05 : 0.01; // of the scale's ends
  const top = Math.ceil(most / step - 1e-6) * step;
  const bottom = Math.min(Math.floor(Math.min(...values) / step) * step, top - step);
  $("scale-bottom").textContent = share(bottom);
  $("scale-top").textContent = share(top);
  cleared($("ramp"), 10).drawImage(strip, 0, 0, $("ramp").clientWidth, 10);

  const colours = new Uint32Array(strip.getContext("2d").getImageData(0, 0, 256, 1).data.buffer);
  const context = cleared(map, height);
  if (shown.length) {
    const image = new ImageData(shown.length, layers.length); // one pixel for a layer in a column
    const pixels = new Uint32Array(image.data.buffer);
    shown.forEach((column, x) => column?.forEach(({ [what]: value }, y) => {
      if (value != null) pixels[y * shown.length + x] = colours[Math.round((value - bottom) / (top - bottom) * 255)];
    }));
    const small = element("canvas", { width: image.width, height: image.height });
    small.getContext("2d").putImageData(image, 0, 0);
    const width = shown.length * COLUMN_PX;
    context.drawImage(small, map.clientWidth - width, 0, width, height);
  }
  if (chosen != null) {
    context.strokeStyle = getComputedStyle(map).color;
    context.strokeRect(0.5, chosen * row - 0.5, map.clientWidth - 1, row + 1);
  }

  if ($("hot").clientWidth) {
    const hot = cleared($("hot"), height);
    hot.fillStyle = getComputedStyle($("hot")).color;
    layers.forEach((layer, i) => {
      if (layer.n_hot) hot.fillRect(0, i * row, $("hot").clientWidth * layer.n_hot / layer.n_ff, row - (row > 4 ? 1 : 0));
    });
  }
}

function choose(layer) {
  if (!engine?.layers.length) return;
  chosen = layer == null ? null : Math.min(engine.layers.length - 1, Math.max(0, layer));
  showReadout();
  drawLayers();
}

$("map").addEventListener("pointermove", (event) => {
  choose(Math.floor(event.offsetY / $("map").clientHeight * engine?.layers.length));
});
$("map").addEventListener("pointerleave", () => choose(document.activeElement === $("map") ? chosen : null));
$("map").addEventListener("focus", () => choose(chosen ?? 0));
$("map").addEventListener("blur", () => choose(null));
$("map").addEventListener("keydown", (event) => {
  const to = {
    ArrowDown: chosen + 1, ArrowUp: chosen - 1, ArrowRight: chosen + 1, ArrowLeft: chosen - 1,
    PageDown: chosen + 10, PageUp: chosen - 10, Home: 0, End: Infinity,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(to);
});
$("table-box").addEventListener("toggle", draw);
document.querySelectorAll("[name=shown]").forEach((radio) => radio.addEventListener("change", draw));
isDark.addEventListener("change", () => { strip = palette(); draw(); });
new ResizeObserver(draw).observe($("engine"));

$("sparsity").addEventListener("change", async () => {
  const mode = $("sparsity").value;
  let error = "";
  try {
    const response = await fetch("powerinfer/sparsity", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ sparsity: mode }),
    });
    if (!response.ok) error = await refusal(response);
    else if (engine) engine.sparsity = mode; // before stats say so
    if (response.status === 401) askForKey();
  } catch {
    error = "The server is not reachable.";
  }
  $("sparsity-error").hidden = !error;
  $("sparsity-error").textContent = error;
  if (error && engine) $("sparsity").value = engine.sparsity;
  poll();
});

$("switch").addEventListener("click", () => {
  const isEngine = document.body.classList.toggle("engine");
  Object.assign($("switch"), { ariaExpanded: isEngine, textContent: isEngine ? "Chat" : "Engine" });
});
addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
