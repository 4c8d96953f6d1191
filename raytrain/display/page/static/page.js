// The page: connects to its server, reconnects by itself, and shows one run or several.

import { Comparison } from "./comparison.js";
import { el, fill, printable } from "./format.js";
import { Home } from "./home.js";
import { RunView } from "./run_view.js";

const RECONNECT_MS = [500, 1000, 2000, 4000];
const LOOK_AGAIN_MS = 2000; // for a run that is not there yet
const SILENCE_MS = 25_000; // the server says something every ten seconds

const given = new URLSearchParams(location.hash.slice(1));
const token = readToken();
const chosen = given.getAll("run"); // on the home of all runs
const views = new Map();
const connection = el("span", { class: "connection", role: "status" });
const nav = el("nav", { hidden: true });
const starting = el("p", { class: "facts", role: "status" });
const main = el("main", {}, starting);
let comparison = null;
let again = ""; // the command that shows these runs again, once the page has ended

function readToken() {
  const token = given.get("token");
  try {
    if (token) sessionStorage.setItem("raytrain-token", token);
    return token ?? sessionStorage.getItem("raytrain-token") ?? "";
  } catch {
    return token ?? "";
  }
}

/** Ask the server; relative, because a proxy may serve the page below any path. */
async function request(path, options = {}) {
  const response = await fetch(`api/${path}`, { ...options, headers: { "X-Raytrain-Token": token } });
  if (!response.ok) throw Object.assign(new Error((await response.json().catch(() => ({}))).error ?? response.statusText), { status: response.status });
  return response;
}

const unanswered = new Set();

/** Ask the server, and return its answer; `listen` waits for all of them before it leaves a server that ends. */
function ask(path, options) {
  const answer = request(path, options).then((response) => response.json());
  unanswered.add(answer);
  const forget = () => unanswered.delete(answer);
  answer.then(forget, forget);
  return answer;
}

const api = {
  curves: (run, first, last) => ask(`curves?${new URLSearchParams({ run, first, last })}`),
  documents: (run) => ask(`documents?${new URLSearchParams({ run })}`),
  machines: (run) => ask(`machines?${new URLSearchParams({ run })}`),
  runs: () => ask("runs"),
  open: (run) => ask(`open?${new URLSearchParams({ run })}`, { method: "POST" }),
  stop: (run) => request(`stop?${new URLSearchParams({ run })}`, { method: "POST" }),
};

const handlers = {
  runs({ runs, home, phase, sweep_dollars, again: command }) {
    again = command;
    // A run that is not there yet, such as a trial of a sweep, is shown once it is.
    const waits = runs.length === 1 ? `waiting for ${runs[0]} …` : `waiting for ${runs.length} runs …`;
    fill(starting, phase || (runs.length && !views.size ? waits : ""));
    if (home && !main.querySelector(".home")) main.append(new Home(api, address).element);
    if (runs.length > 1 && !comparison) {
      comparison = new Comparison(api, select);
      main.prepend(comparison.element);
    }
    if (comparison) comparison.names = runs;
    comparison?.showCost(sweep_dollars);
  },
  run(message) {
    starting.remove();
    if (!views.has(message.run)) add(message.run);
    views.get(message.run).apply(message);
    comparison?.apply(message, views.get(message.run));
    if (views.size === 1) document.title = `${Math.floor((100 * message.state.step) / message.state.num_steps)} % · ${printable(message.run)}`;
  },
};

/** Where the page of a run is, from the home of all runs. */
function address(...names) {
  return `#${new URLSearchParams([["token", token], ...names.map((name) => ["run", name])])}`;
}

function add(name) {
  const view = new RunView(name, api);
  views.set(name, view);
  view.element.hidden = comparison !== null;
  main.append(view.element);
}

/** Show one run of several, or none. */
function select(name) {
  for (const [each, view] of views) view.element.hidden = each !== name;
  views.get(name)?.redraw();
}

/** Handle the events of one connection; returns true if the server has said its last word and answered what its last messages made the page ask. */
async function listen() {
  const abort = new AbortController();
  let silence = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const opened = (await Promise.all(chosen.map(api.open))).flatMap(({ runs }) => runs);
    const { body } = await request(`events?${new URLSearchParams(opened.map((run) => ["run", run]))}`, { signal: abort.signal });
    show("live", "live");
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
      const messages = (rest + part.value).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        if (!handle(message)) continue;
        for (const view of views.values()) view.readDocuments(); // the last ones are written after the last state of a run is sent
        await Promise.allSettled(unanswered);
        abort.abort(); // the server waits for this end of the connection before it ends itself
        return true;
      }
    }
  } finally {
    clearTimeout(silence);
  }
  return false;
}

function handle(message) {
  const fields = Object.fromEntries(message.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  handlers[fields.event]?.(JSON.parse(fields.data));
  return fields.event === "closed";
}

async function connect() {
  for (let failures = 0; ; failures++) {
    try {
      if (await listen()) return show("closed", `the page has ended; again with: ${printable(again)}`);
      failures = 0;
    } catch (error) {
      if (error.status === 403) return refuse();
      if (error.status === 409) {
        await waitFor(error.message);
        continue;
      }
    }
    show("lost", "reconnecting …");
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS[Math.min(failures, RECONNECT_MS.length - 1)]));
  }
}

/** Say what the server answers for a run that is not there, and let the next try come soon: it may be about to start. */
async function waitFor(problem) {
  show("lost", "waiting …");
  fill(starting, `${printable(problem)} This page shows it once it is there.`);
  if (!starting.isConnected) main.prepend(starting);
  await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN_MS));
}

function show(state, text) {
  connection.dataset.state = state;
  fill(connection, text);
}

function refuse() {
  show("closed", "not allowed");
  fill(main, el("div", { class: "banner", "data-status": "failed" }, el("strong", {}, "This address lacks the right token. "), "Open the whole address that raytrain printed, with everything behind the #."));
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redraw();
}

function redraw() {
  comparison?.redraw();
  for (const view of views.values()) view.redraw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.body.append(
  el("div", { class: "top" }, el("span", { class: "brand" }, "raytrain"), nav, connection, el("button", { type: "button", class: "quiet", click: switchTheme, title: "light or dark", "aria-label": "light or dark" }, "◐")),
  main,
);
if (chosen.length) {
  nav.hidden = false;
  nav.append(el("a", { href: address() }, "All runs"));
}
addEventListener("hashchange", () => location.reload());
show("lost", "connecting …");
connect();
