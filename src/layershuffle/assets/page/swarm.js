// The swarm, live: its hosts, a request that walks, and what came of all of them.

import { ask, at, hue, make, say } from "./dom.js";
import { setLines, showWalk } from "./walk.js";

const PAUSE = 300; // ms between test pairs
const AGAIN = 2000; // ms until a stream that broke is asked for anew
const BREAKS = [["crash", "Kill"], ["freeze", "Freeze"], ["slow", "Slow down"], ["rejoin", "Bring back"]];
const WORDS = { healthy: "works", suspect: "does not answer", "shut-out": "is shut out", draining: "takes no more", gone: "is dead" };

const cards = new Map();
const sent = { answered: 0, right: 0, expected: 0 };
let facts;
let before = null;

function card(host) {
  const parts = { state: make("span", {}), blocks: make("p", { class: "chips" }), visits: make("p", { class: "note" }) };
  parts.card = make("li", { class: "host" }, make("h3", {}, make("span", {}, host.name), parts.state), parts.blocks, parts.visits);
  if (facts.token) {
    parts.card.append(make("div", { class: "row", role: "group", "aria-label": `Break ${host.name}` },
      ...BREAKS.map(([kind, text]) => {
        const button = make("button", { type: "button" }, text);
        button.addEventListener("click", () => breakHost(host.name, kind, text));
        return button;
      })));
  }
  cards.set(host.name, parts);
  return parts;
}

async function breakHost(host, kind, text) {
  const body = new FormData();
  body.append("host", host);
  body.append("kind", kind);
  say(at("status"), `${text}: ${host} ...`);
  try {
    await ask("page/break", { method: "POST", body, headers: { "X-Page-Token": facts.token } });
    say(at("status"), `${text}: ${host}. Done.`);
  } catch (error) {
    say(at("status"), error.message);
  }
}

function showHosts(hosts) {
  for (const host of hosts) {
    const parts = cards.get(host.name) ?? card(host);
    parts.card.dataset.usable = host.usable;
    say(parts.state, WORDS[host.condition] ?? host.condition);
    parts.state.title = host.why;
    if (parts.held !== String(host.blocks)) parts.blocks.replaceChildren(...chips(host.blocks));
    parts.held = String(host.blocks);
    const visits = Object.values(host.visits).reduce((sum, count) => sum + count, 0);
    const time = host.compute_ms === null ? "" : `, ${host.compute_ms.toFixed(1)} ms a block`;
    say(parts.visits, `${visits} visits${time}`);
  }
  const names = new Set(hosts.map((host) => host.name));
  for (const name of cards.keys()) if (!names.has(name)) cards.delete(name);
  const order = hosts.map((host) => cards.get(host.name).card);
  if (order.some((element, i) => at("hosts").children[i] !== element) || at("hosts").children.length > order.length) {
    at("hosts").replaceChildren(...order);
  }
  setLines(hosts.map((host) => host.name));
}

// Blocks as small tiles, in the colours of the strip.
function chips(blocks) {
  return blocks.map((block) => {
    const chip = make("span", { class: "chip" }, String(block));
    hue(chip, block, facts.depth);
    return chip;
  });
}

function show(state) {
  if (state.hosts) {
    showState(state);
    at("swarm").hidden = false; // not before: its hosts would push what stands below them down
  }
  if (!state.walk) return;
  const busy = showWalk(state.walk);
  for (const [name, parts] of cards) parts.card.dataset.walked = busy.has(name);
}

function showState(state) {
  showHosts(state.hosts);
  const total = state.answered + state.failed;
  const rate = before && state.at > before.at ? (state.answered - before.answered) / (state.at - before.at) : 0;
  const words = [`${rate.toFixed(1)} answers a second`];
  if (total) {
    words.push(`${((100 * state.answered) / total).toFixed(1)} % of ${total} answered`);
    words.push(`${(state.blocks / Math.max(1, state.answered)).toFixed(1)} blocks each`);
  }
  if (sent.answered) {
    const share = (100 * sent.right) / sent.answered;
    const expected = sent.expected ? `, ${(sent.expected / sent.answered).toFixed(1)} % expected` : "";
    words.push(`of this page's ${sent.answered} pairs ${share.toFixed(1)} % right${expected}`);
  }
  say(at("line"), words.join(" \u00b7 "));
  before = state;
}

// Server-sent events by fetch, not EventSource: that cannot send an API key.
async function listen() {
  const reader = (await ask("page/live")).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    // Only the newest of each kind: after a pause, as of a tab in the background, the others are
    // history.
    show(Object.assign({}, ...events.map((event) => JSON.parse(event.replace("data: ", "")))));
  }
}

// Test pairs one after the other, each once the one before is answered: never more than one.
async function sendPairs(picture) {
  for (let number = 0; at("send").checked; number += 1) {
    let pause = PAUSE;
    const body = new FormData();
    const pair = await picture.pairFile(number);
    body.append("image", pair.file);
    body.append("top_k", "1");
    try {
      const answer = await (await ask("v1/classify", { method: "POST", body })).json();
      sent.answered += 1;
      sent.right += answer.images[0].top[0].label === pair.label;
      sent.expected += answer.expected?.top1 ?? 0;
    } catch (error) {
      pause = AGAIN; // it may have asked for less
      say(at("status"), error.message);
    }
    await new Promise((done) => { setTimeout(done, pause); });
  }
}

export async function watch(given, picture) {
  facts = given;
  at("break-note").hidden = !facts.token;
  at("send").parentElement.hidden = !facts.pairs;
  at("send").addEventListener("change", () => { if (at("send").checked) sendPairs(picture); });
  for (;;) {
    try {
      await listen();
      say(at("line"), "The swarm has ended.");
    } catch (error) {
      say(at("line"), `The swarm cannot be seen now: ${error.message}`);
      at("swarm").hidden = false;
    }
    await new Promise((done) => { setTimeout(done, AGAIN); });
  }
}
