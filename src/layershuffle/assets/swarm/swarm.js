// The page of a swarm, all of it from what the gateway says: its hosts and counts, asked for each
// second, and its answers to this page. The newest answer is replayed: a line for every host, with
// a bar for each visit from its beginning to its end. Bars at one time stand below each other: those
// visits ran side by side.

import { AnswerCard, Times } from "./card.js";
import { ask, at, hue, make, mayKill, say } from "./dom.js";
import { Picture } from "./picture.js";

const EVERY = 1000; // ms between two looks, and between two test pairs
const REPLAY = 900; // ms in which the bars of a request appear, in their order
const ORDERS = [["kill", "Kill"], ["readmit", "Bring back"]];
const WORDS = { healthy: "works", suspect: "does not answer", "shut-out": "is shut out", draining: "takes no more", gone: "is dead" };
const REFUSED = [413, 415, 422]; // statuses of a file that the gateway takes for no image

const hostCards = new Map();
const lines = new Map(); // of the walk
const sent = { answered: 0, right: 0, known: 0, expected: 0 };
const answerCard = new AnswerCard(at("answer"));
const times = new Times();
let facts;
let picture;
let running = null;
let depth = 0;
let before = null;

const pause = () => new Promise((done) => { setTimeout(done, EVERY); });

// --- hosts ---------------------------------------------------------------------------------------

function hostCard(host) {
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
  hostCards.set(host.name, parts);
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
    const parts = hostCards.get(host.name) ?? hostCard(host);
    parts.card.dataset.usable = host.condition === "healthy";
    say(parts.state, WORDS[host.condition] ?? host.condition);
    parts.state.title = host.why;
    if (parts.held !== String(host.blocks)) parts.blocks.replaceChildren(...chips(host.blocks));
    parts.held = String(host.blocks);
    const time = host.compute_ms === null ? "" : `, ${host.compute_ms.toFixed(1)} ms a block`;
    say(parts.visits, `${host.visits} visits${time}`);
  }
  const names = new Set(hosts.map((host) => host.name));
  for (const name of hostCards.keys()) if (!names.has(name)) hostCards.delete(name);
  const order = hosts.map((host) => hostCards.get(host.name).card);
  if (order.some((element, i) => at("hosts").children[i] !== element) || at("hosts").children.length > order.length) {
    at("hosts").replaceChildren(...order);
  }
  setLines(hosts.map((host) => host.name));
}

// Blocks as small tiles, in colours by their place in the model.
function chips(blocks) {
  return blocks.map((block) => {
    const chip = make("span", { class: "chip" }, String(block));
    hue(chip, block, depth);
    return chip;
  });
}

const range = ({ top1, low, high }) => `${top1.toFixed(1)} % (${low.toFixed(1)} to ${high.toFixed(1)})`;

// How many blocks hosts serve; those that keep their place run with stem and head at the gateway.
const served = ({ depth: all, fixed: [first, last] }) => all - first - last;

function showState(swarm) {
  ({ depth } = swarm);
  showHosts(swarm.hosts);
  answerCard.showModel({ title: "The answer", name: swarm.model });
  const working = swarm.hosts.filter((host) => host.condition === "healthy").length;
  const missing = swarm.unreachable_blocks;
  const hosted = served(swarm);
  const now = [`${working} of ${swarm.hosts.length} hosts work`, `${hosted - missing.length} of ${hosted} blocks can run`];
  if (hosted < depth) now.push(`${depth - hosted} more run with stem and head`);
  if (missing.length) now.push(`no host has ${missing.join(", ")}`);
  now.push(swarm.expected ? `expected to be right: ${range(swarm.expected)}` : swarm.expected_why);
  say(at("now"), now.filter(Boolean).join(" \u00b7 "));
  showCounts(swarm.counters);
}

function showCounts({ answered = 0, degraded = 0, unanswered = 0, failed = 0 }) {
  const good = answered + degraded;
  const total = good + unanswered + failed;
  const moment = performance.now();
  const rate = before ? (1000 * (good - before.good)) / (moment - before.moment) : 0;
  const words = [`${rate.toFixed(1)} answers a second`];
  if (total) words.push(`${((100 * good) / total).toFixed(1)} % of ${total} answered`);
  if (sent.answered) {
    const share = (100 * sent.right) / sent.answered;
    const expected = sent.known ? `, ${(sent.expected / sent.known).toFixed(1)} % expected` : "";
    words.push(`of this page's ${sent.answered} pairs ${share.toFixed(1)} % right${expected}`);
  }
  say(at("line"), words.join(" \u00b7 "));
  before = { good, moment };
}

// What was seen of the swarm holds no longer.
function showNothing(message) {
  showHosts([]);
  before = null;
  say(at("now"), `The swarm cannot be seen now: ${message}`);
  say(at("line"), "\u00a0");
}

// --- the newest answer, host by host -------------------------------------------------------------

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
  say(at("walk-text"), `Newest request: ${ran} of ${served(answer)} blocks in ${answer.ms.total.toFixed(0)} ms`);
  const reasons = Map.groupBy(answer.skipped, (skip) => skip.why);
  const skipped = [...reasons].map(([why, skips]) => `Skipped ${skips.map((skip) => skip.block).join(", ")}: ${why}.`);
  const troubles = answer.route.filter((hop) => hop.why);
  const failed = new Set(troubles.map((hop) => `${hop.host} ${hop.outcome} (${hop.why}).`));
  say(at("skipped"), [...skipped, ...failed].join(" ") || "\u00a0");
}

async function classify(image, { signal, top = 5 } = {}) {
  const response = await ask(`v1/classify?top=${top}`, { method: "POST", body: image, signal });
  const answer = await response.json();
  showWalk(answer);
  return answer;
}

// --- the picture and its answer ------------------------------------------------------------------

async function update() {
  running?.abort();
  say(at("status"), "");
  answerCard.wait();
  if (picture.empty) {
    answerCard.clear();
    return;
  }
  running = new AbortController();
  const { signal } = running;
  try {
    const answer = await classify(await picture.file(), { signal });
    const right = answerCard.show(answer, picture.label);
    const { expected, expected_why: why } = answer;
    const words = expected ? `With ${expected.kept} blocks expected to be right: ${range(expected)}` : why;
    const time = times.said("answered in", answer.ms.total);
    answerCard.showFoot([words, time].filter(Boolean).join(" \u00b7 "));
    const verdict = picture.label === null ? "" : right ? ", right" : ", wrong";
    say(at("status"), `The swarm answers ${answer.top[0].label}${verdict}.`);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (picture.given && REFUSED.includes(error.status)) {
      picture.refuse(`${picture.given.name}: ${error.message}`);
      return;
    }
    answerCard.clear();
    answerCard.showFoot(error.message);
    say(at("status"), error.message);
  }
}

// What a browser shows of a file; the gateway gets the file itself.
async function seen(file) {
  try {
    return await createImageBitmap(file);
  } catch (error) {
    throw new Error("this browser cannot show it. Open a JPEG, PNG or WebP file", { cause: error });
  }
}

// Test pairs one after the other, each once the one before is answered: never more than one.
let sending = false;

async function sendPairs() {
  if (sending) return; // one that was ended and begun again within a second goes on
  sending = true;
  for (let number = 0; at("send").checked; number += 1) {
    const pair = await picture.pairFile(number);
    try {
      const answer = await classify(pair.file, { top: 1 });
      sent.answered += 1;
      sent.right += answer.top[0].label === pair.label;
      // Of some kinds of answers it was not measured.
      sent.known += answer.expected !== null;
      sent.expected += answer.expected?.top1 ?? 0;
    } catch (error) {
      say(at("status"), error.message);
    }
    await pause();
  }
  sending = false;
}

async function look() {
  try {
    showState(await (await ask("v1/swarm")).json());
  } catch (error) {
    showNothing(error.message);
  }
}

async function start() {
  facts = await (await ask("page/facts")).json();
  picture = new Picture(facts, { changed: update, seen });
  await look();
  at("kill-note").hidden = !mayKill();
  at("send").parentElement.hidden = !facts.pairs;
  at("send").addEventListener("change", () => { if (at("send").checked) sendPairs(); });
  // Not before: hosts that come would push what stands below them down.
  at("swarm").hidden = false;
  at("stage").hidden = false;
  if (facts.pairs) {
    await picture.loadPairs();
    picture.showPair(0);
  } else {
    at("next").hidden = true;
    picture.blank();
  }
  for (;;) {
    await pause();
    await look();
  }
}

start().catch((error) => say(at("status"), error.message));
