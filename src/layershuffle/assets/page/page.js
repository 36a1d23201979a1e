// The page of `layershuffle demo`: a picture, the blocks of models, and their answers.

import { AnswerCard, Times } from "./card.js";
import { ask, at, say } from "./dom.js";
import { Picture } from "./picture.js";
import { Strip } from "./strip.js";

const SETTLED = 120; // ms without a change before the test pictures are asked

// Made before anything is known of the models, so that nothing moves once it is.
const cards = { ours: new AnswerCard(at("ours")), ordinary: new AnswerCard(at("ordinary")) };
let facts;
let picture;
let strip;
let order = "";
let times = {};
let running = null;

async function post(path, body, signal) {
  return (await ask(`${path}?order=${encodeURIComponent(order)}`, { method: "POST", body, signal })).json();
}

// What the models see of a file: the server reads more formats than browsers do, and crops it.
async function seen(file) {
  const answer = await ask("page/picture", { method: "POST", body: file });
  return createImageBitmap(await answer.blob());
}

// All models, with what is known of their answers. A newer change ends what an older one began.
async function update() {
  running?.abort();
  say(at("status"), "");
  for (const card of Object.values(cards)) card.wait();
  if (picture.empty) {
    for (const card of Object.values(cards)) card.clear();
    return;
  }
  running = new AbortController();
  const { signal } = running;
  try {
    const { answers } = await post("page/answer", await picture.file(), signal);
    const words = Object.entries(answers).map(([role, answer]) => {
      const right = cards[role].show(answer, picture.label);
      times[role] ??= new Times();
      cards[role].showFoot(times[role].said("A forward pass takes", answer.ms));
      const verdict = picture.label === null ? "" : right ? ", right" : ", wrong";
      return `${facts.models[role].title}: ${answer.top[0].label}${verdict}.`;
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
  for (const [role, count] of Object.entries(right)) {
    cards[role].showScore(count, of);
    words.push(`${facts.models[role].title}: ${count} of ${of} test pictures.`);
  }
  say(at("status"), words.join(" "));
}

// --- clicks while the models are loaded, which are carried out once they are there --------------

const kept = [];

function keep(event) {
  const button = event.target.closest("button");
  if (!button) return;
  event.preventDefault();
  event.stopPropagation();
  kept.push({ button, order: at("order").value });
}

function carryOut() {
  document.removeEventListener("click", keep, true);
  for (const { button, order: typed } of kept) {
    if (button.form) at("order").value = typed;
    if (!button.hidden) button.click();
  }
  if (at("file").files.length) at("file").dispatchEvent(new Event("change"));
}

function showModels() {
  for (const [role, card] of Object.entries(cards)) {
    if (facts.models[role]) card.showModel(facts.models[role]);
    else {
      at(role).hidden = true;
      delete cards[role];
    }
  }
  say(at("training"), facts.training);
}

async function start() {
  document.addEventListener("click", keep, true);
  at("order").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // an order is one line, however long
    at("run").click();
  });
  say(at("status"), "The models are being loaded. What you click meanwhile is done after that.");
  facts = await (await ask("page/facts")).json();
  showModels();
  picture = new Picture(facts, {
    // An order that was refused stands no longer in the field.
    changed: () => (strip.refused ? strip.set(strip.rounds) : update()),
    seen,
  });
  strip = new Strip(facts, {
    changed: (text) => {
      order = text;
      times = {}; // more blocks take longer
      update();
    },
    refused: () => {
      running?.abort();
      say(at("status"), "");
      for (const card of Object.values(cards)) card.clear();
    },
  });
  if (facts.pairs) await picture.loadPairs();
  strip.rearrange("reverse"); // the first look is out of order, and the same for everybody
  if (facts.pairs) picture.showPair(0);
  else {
    at("next").hidden = true;
    picture.blank();
  }
  carryOut();
}

start().catch((error) => fail(error.message));
