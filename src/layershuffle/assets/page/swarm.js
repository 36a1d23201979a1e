// The swarm: its hosts and counts, asked for each second, and the way of every answer to this page,
// replayed: a line for every host, with a bar for each visit from its beginning to its end. Bars at
// one time stand below each other: those visits ran side by side.

import { ask, at, hue, make, mayKill, say } from "./dom.js";

const EVERY = 1000; // ms between two looks, and between two test pairs
const REPLAY = 900; // ms in which the bars of a request appear, in their order
const ORDERS = [["kill", "Kill"], ["readmit", "Bring back"]];
const WORDS = { healthy: "works", suspect: "does not answer", "shut-out": "is shut out", draining: "takes no more", gone: "is dead" };

const cards = new Map();
const lines = new Map(); // of the walk
const sent = { answered: 0, right: 0, expected: 0 };
let depth = 0;
let before = null;

const pause = () => new Promise((done) => { setTimeout(done, EVERY); });

function card(host) {
  const parts = { state: make("span", {}), blocks: make("p", { class: "chips" }), visits: make("p", { class: "note" }) };
  parts.card = make("li", { class: "host" }, make("h3", {}, make("span", {}, host.name), parts.state), parts.blocks, parts.visits);
  if (mayKill() && host.started_here) {
    parts.card.append(make("div", { class: "row", role: "group", "aria-label": `Kill ${host.name}` },
      ...ORDERS.map(([order, text]) => {
        const button = make("button", { type: "button" }, text);
        button.addEventListener("click", () => command(host.name, order, text));
        return button;
      })));
  }
  cards.set(host.name, parts);
  return parts;
}

async function command(host, order, text) {
  say(at("status"), `${text}: ${host} ...`);
  try {
    await ask(`operator/${order}`, { method: "POST", body: JSON.stringify({ host }), headers: { "Content-Type": "application/json" } });
    say(at("status"), `${text}: ${host}. Done.`);
  } catch (error) {
    say(at("status"), error.message);
  }
}

function showHosts(hosts) {
  for (const host of hosts) {
    const parts = cards.get(host.name) ?? card(host);
    parts.card.dataset.usable = host.condition === "healthy";
    say(parts.state, WORDS[host.condition] ?? host.condition);
    parts.state.title = host.why;
    if (parts.held !== String(host.blocks)) parts.blocks.replaceChildren(...chips(host.blocks));
    parts.held = String(host.blocks);
    const time = host.compute_ms === null ? "" : `, ${host.compute_ms.toFixed(1)} ms a block`;
    say(parts.visits, `${host.visits} visits${time}`);
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
    hue(chip, block, depth);
    return chip;
  });
}

function showState(swarm) {
  showHosts(swarm.hosts);
  const { answered = 0, degraded = 0, unanswered = 0, failed = 0 } = swarm.counters;
  const good = answered + degraded;
  const total = good + unanswered + failed;
  const now = performance.now();
  const rate = before ? (1000 * (good - before.good)) / (now - before.now) : 0;
  const words = [`${rate.toFixed(1)} answers a second`];
  if (total) words.push(`${((100 * good) / total).toFixed(1)} % of ${total} answered`);
  if (sent.answered) {
    const share = (100 * sent.right) / sent.answered;
    const expected = sent.expected ? `, ${(sent.expected / sent.answered).toFixed(1)} % expected` : "";
    words.push(`of this page's ${sent.answered} pairs ${share.toFixed(1)} % right${expected}`);
  }
  say(at("line"), words.join(" \u00b7 "));
  before = { good, now };
}

// The lines of the hosts that there are; they stay as they are between requests.
function setLines(names) {
  if (names.length === lines.size && names.every((name) => lines.has(name))) return;
  lines.clear();
  at("walk").replaceChildren(...names.map((name) => {
    const line = make("ol", { class: "visits", "aria-label": `Visits to ${name}` });
    lines.set(name, line);
    return make("li", {}, make("span", { class: "name" }, name), line);
  }));
}

function bar(hop, whole) {
  const element = make("li", { class: "visit", title: hop.why, "data-state": hop.outcome,
    "aria-label": `block ${hop.block}, ${hop.outcome}, ${hop.ms.toFixed(0)} ms` }, String(hop.block));
  hue(element, hop.block, depth);
  element.style.setProperty("--begun", (100 * hop.begun_ms) / whole);
  element.style.inlineSize = `${(100 * hop.ms) / whole}%`;
  element.style.animationDelay = `${(REPLAY * hop.begun_ms) / whole}ms`;
  return element;
}

// `answer`: what /v1/classify answers.
function showWalk(answer) {
  const whole = Math.max(1, ...answer.route.map((hop) => hop.begun_ms + hop.ms));
  const bars = new Map([...lines.keys()].map((name) => [name, []]));
  for (const hop of answer.route) bars.get(hop.host)?.push(bar(hop, whole));
  for (const [name, own] of bars) lines.get(name).replaceChildren(...own);
  const ran = new Set(answer.blocks).size;
  say(at("walk-text"), `Newest request: ${ran} of ${answer.depth} blocks in ${answer.ms.total.toFixed(0)} ms`);
  const reasons = Map.groupBy(answer.skipped, (skip) => skip.why);
  const skipped = [...reasons].map(([why, skips]) => `Skipped ${skips.map((skip) => skip.block).join(", ")}: ${why}.`);
  const troubles = answer.route.filter((hop) => hop.why);
  const failed = new Set(troubles.map((hop) => `${hop.host} ${hop.outcome} (${hop.why}).`));
  say(at("skipped"), [...skipped, ...failed].join(" ") || "\u00a0");
}

// What the swarm answers for an image file; its way is replayed.
export async function classify(image, { signal, top = 5 } = {}) {
  const response = await ask(`v1/classify?top=${top}`, { method: "POST", body: image, signal });
  const answer = await response.json();
  showWalk(answer);
  return answer;
}

// Test pairs one after the other, each once the one before is answered: never more than one.
async function sendPairs(picture) {
  for (let number = 0; at("send").checked; number += 1) {
    const pair = await picture.pairFile(number);
    try {
      const answer = await classify(pair.file, { top: 1 });
      sent.answered += 1;
      sent.right += answer.top[0].label === pair.label;
      sent.expected += answer.chance === null ? (answer.expected?.top1 ?? 0) : 100 * answer.chance;
    } catch (error) {
      say(at("status"), error.message);
    }
    await pause();
  }
}

export async function watch(facts, picture) {
  ({ depth } = facts);
  at("kill-note").hidden = !mayKill();
  at("send").parentElement.hidden = !facts.pairs;
  at("send").addEventListener("change", () => { if (at("send").checked) sendPairs(picture); });
  for (; ; await pause()) {
    try {
      showState(await (await ask("v1/swarm")).json());
    } catch (error) {
      say(at("line"), `The swarm cannot be seen now: ${error.message}`);
    }
    at("swarm").hidden = false; // not before: its hosts would push what stands below them down
  }
}
