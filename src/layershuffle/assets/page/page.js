// The page of a model: its picture, its blocks, its answers, and its swarm if it has one.

import { ask, at, make, say } from "./dom.js";
import { Picture } from "./picture.js";
import { Strip } from "./strip.js";

const ROWS = 5; // classes on a card
const SETTLED = 120; // ms without a change before the test pictures are asked
const TIMES = 10; // answers of which the time is the median
// The first look is out of order: drawn once, so that everybody sees the same.
const FIRST = [7, 2, 10, 0, 5, 11, 3, 8, 1, 9, 4, 6];

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// An answer card: the guess, its rivals as bars, and how often this order is right.
class AnswerCard {
  constructor(card, title) {
    this.card = card;
    this.model = make("span", { class: "note" }, "\u00a0");
    this.guess = make("p", { class: "guess" }, "\u2013");
    this.verdict = make("p", { class: "verdict" }, "\u00a0");
    // All rows are there from the start, so that nothing moves when answers come.
    this.rows = Array.from({ length: ROWS }, () => {
      const parts = { name: make("span", { class: "name" }, "\u00a0"), bar: make("span", { class: "bar" }), share: make("span", { class: "share" }) };
      parts.row = make("li", {}, parts.name, make("span", { class: "track" }, parts.bar), parts.share);
      return parts;
    });
    this.right = make("p", { class: "right" }, "\u00a0");
    this.scale = make("span", { class: "bar" });
    this.foot = make("p", { class: "note foot" }, "\u00a0");
    card.replaceChildren(
      make("div", { class: "row spread" }, make("h2", {}, title), this.model),
      make("div", { class: "said" }, this.guess, this.verdict),
      make("ul", { class: "bars" }, ...this.rows.map((parts) => parts.row)),
      this.right,
      make("p", { class: "scale", "aria-hidden": "true" }, this.scale),
      this.foot,
    );
  }

  showModel(name) {
    say(this.model, name);
  }

  // `answer`: {top: [{label, probability}], ms}; `label`: the right class, or null if nobody knows.
  show(answer, label) {
    const best = answer.top[0];
    say(this.guess, best.label);
    this.guess.classList.toggle("word", best.label.length > 6);
    const right = best.label === label;
    this.card.dataset.right = label === null ? "unknown" : right;
    say(this.verdict, label === null ? "\u00a0" : right ? "\u2713 right" : `\u2717 it is ${label}`);
    this.rows.forEach((parts, place) => {
      const guess = answer.top[place];
      say(parts.name, guess ? guess.label : "\u00a0");
      say(parts.share, guess ? percent(guess.probability) : "");
      parts.bar.style.inlineSize = `${100 * (guess?.probability ?? 0)}%`;
    });
    this.card.classList.remove("waiting");
    return right;
  }

  showFoot(text) {
    say(this.foot, text || "\u00a0");
  }

  showScore(right, of) {
    say(this.right, right === null ? "\u00a0" : `${right} of ${of} right in this order`);
    this.scale.style.inlineSize = `${right === null ? 0 : (100 * right) / of}%`;
  }

  clear() {
    say(this.guess, "\u2013");
    for (const part of [this.verdict, this.foot]) say(part, "\u00a0");
    for (const { name, bar, share } of this.rows) {
      say(name, "\u00a0");
      say(share, "");
      bar.style.inlineSize = "0";
    }
    this.card.classList.remove("waiting");
  }

  wait() {
    this.card.classList.add("waiting");
  }
}

const TITLES = { ours: "LayerShuffle", ordinary: "Ordinary model" };
// Made before anything is known of the models, so that nothing moves once it is.
const cards = Object.fromEntries(Object.entries(TITLES).map(([role, title]) => [role, new AnswerCard(at(role), title)]));
let facts;
let picture;
let order = "";
let running = null;

async function post(path, body, signal) {
  return (await ask(`${path}?order=${encodeURIComponent(order)}`, { method: "POST", body, signal })).json();
}

// What the swarm answers, in the words of the in-process models.
async function throughSwarm(image, signal) {
  const answer = await (await import("./swarm.js")).classify(image, { signal });
  return { top: answer.top, ms: answer.ms.total, expected: answer.expected, why: answer.expected_why };
}

// The median of the last answers of a model: a single one is mostly noise.
const times = {};
function usual(role, ms) {
  times[role] = [...(times[role] ?? []), ms].slice(-TIMES);
  const sorted = [...times[role]].sort((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.floor(sorted.length / 2)]) / 2;
}

function footer(role, answer) {
  const ms = usual(role, answer.ms);
  const time = `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  const { expected } = answer;
  if (!expected) return answer.why ? `${time} \u00b7 ${answer.why}` : time;
  const range = `${expected.low.toFixed(1)} to ${expected.high.toFixed(1)}`;
  return `Expected with ${expected.kept} blocks: ${expected.top1.toFixed(1)} % (${range}) \u00b7 ${time}`;
}

// Both models, with what is known of the answer. A newer change ends what an older one began.
async function update() {
  running?.abort();
  if (picture.empty) {
    for (const card of Object.values(cards)) card.clear();
    return;
  }
  running = new AbortController();
  const { signal } = running;
  for (const card of Object.values(cards)) card.wait();
  try {
    const image = await picture.file();
    const answers = facts.models.ours ? (await post("page/answer", image, signal)).answers
      : { ours: await throughSwarm(image, signal) };
    const words = Object.entries(answers).map(([name, answer]) => {
      const right = cards[name].show(answer, picture.label);
      cards[name].showFoot(footer(name, answer));
      const verdict = picture.label === null ? "" : right ? ", right" : ", wrong";
      return `${TITLES[name]} answers ${answer.top[0].label}${verdict}.`;
    });
    say(at("status"), words.join(" "));
    await score(signal, words);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
}

// Where the answers would stand, and in the line that is read out.
function fail(message) {
  for (const card of Object.values(cards)) {
    card.clear();
    card.showFoot(message);
  }
  say(at("status"), message);
}

// How often the models are right in this order, once the visitor pauses.
async function score(signal, words) {
  if (!facts.pairs) return;
  await new Promise((done) => { setTimeout(done, SETTLED); });
  if (signal.aborted) return;
  const { right, of } = await post("page/score", "", signal);
  for (const [name, count] of Object.entries(right)) {
    cards[name].showScore(count, of);
    words.push(`${count} of ${of} test pictures.`);
  }
  say(at("status"), words.join(" "));
}

async function start() {
  facts = await (await ask("page/facts")).json();
  at("api").hidden = !facts.swarm;
  for (const [role, card] of Object.entries(cards)) {
    const name = facts.models[role] ?? (role === "ours" && facts.swarm);
    if (name) card.showModel(name);
    else {
      at(role).hidden = true;
      delete cards[role];
    }
  }
  at("fair").hidden = !facts.models.ordinary?.startsWith("bundled:");
  picture = new Picture(facts, update);
  // A model that is on the hosts alone runs in the order in which they answer.
  at("blocks").hidden = !facts.models.ours;
  if (facts.models.ours) {
    const strip = new Strip(facts.depth, (text) => {
      order = text;
      update();
    });
    if (facts.depth === FIRST.length) strip.set(FIRST.map((block) => [block]));
    else strip.rearrange("shuffle");
  }
  if (facts.pairs) {
    await picture.loadPairs();
    picture.showPair(0);
  } else {
    at("next").hidden = true;
    picture.blank();
  }
  if (facts.swarm) (await import("./swarm.js")).watch(facts, picture);
}

start().catch((error) => fail(error.message));
