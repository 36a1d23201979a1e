// One request while it walks: a line for every host, with a bar for each visit from its beginning to
// its end. Bars at one time stand below each other: those visits run side by side.

import { at, hue, make, say } from "./dom.js";

const LONGEST = 500; // ms across that a slow request leaves to the next one

const lines = new Map();
let bars = [];
let number = null;
let scale = 1; // ms across; that of the request before, until this one is over or takes longer

// The lines of the hosts that there are; they stay as they are between requests.
export function setLines(names) {
  if (names.length === lines.size && names.every((name) => lines.has(name))) return;
  lines.clear();
  bars = [];
  number = null;
  at("walk").replaceChildren(...names.map((name) => {
    const line = make("ol", { class: "visits", "aria-label": `Visits to ${name}` });
    lines.set(name, line);
    return make("li", {}, make("span", { class: "name" }, name), line);
  }));
}

function words(visit) {
  if (visit.outcome === "") return visit.ended === null ? "under way" : "answered";
  if (visit.outcome === "dropped") return "given up";
  if (visit.outcome === "answered") return visit.late ? "answered late" : "answered";
  return visit.outcome;
}

function bar(visit, depth) {
  const element = make("li", { class: "visit" }, visit.blocks.join(" "));
  hue(element, visit.blocks[0], depth);
  lines.get(visit.host)?.append(element);
  return element;
}

function draw(element, visit, { ms }) {
  const end = visit.ended ?? ms;
  element.style.setProperty("--begun", (100 * visit.begun) / scale);
  element.style.inlineSize = `${(100 * Math.max(0, end - visit.begun)) / scale}%`;
  const state = words(visit);
  element.dataset.state = visit.late && state === "under way" ? "late" : state;
  element.title = visit.why;
  const time = visit.ended === null ? "" : `, ${(visit.ended - visit.begun).toFixed(0)} ms`;
  element.setAttribute("aria-label", `block ${visit.blocks.join(" and ")}, ${element.dataset.state}${time}`);
}

// `walk`: {number, depth, ms, over, answered, blocks, skipped, visits}, as `live.py` has it.
export function showWalk(walk) {
  if (walk.number !== number) {
    for (const element of bars) element.remove();
    bars = [];
    number = walk.number;
    scale = Math.min(scale, LONGEST);
  }
  scale = walk.over ? Math.max(1, walk.ms) : Math.max(scale, walk.ms);
  walk.visits.forEach((visit, i) => {
    bars[i] ??= bar(visit, walk.depth);
    draw(bars[i], visit, walk);
  });
  const now = walk.visits.filter((visit) => visit.ended === null && !walk.over).length;
  const state = walk.over ? (walk.answered ? "Newest request" : "Given up") : `Walking, ${now} ${now === 1 ? "visit" : "visits"} under way`;
  say(at("walk-text"), `${state}: ${walk.blocks} of ${walk.depth} blocks in ${walk.ms.toFixed(0)} ms`);
  const reasons = Map.groupBy(walk.skipped, (skip) => skip.why);
  const skipped = [...reasons].map(([why, skips]) => `Skipped ${skips.map((skip) => skip.block).join(", ")}: ${why}.`);
  const troubles = walk.visits.filter((visit) => visit.why);
  const failed = new Set(troubles.map((visit) => `${visit.host} ${words(visit)} (${visit.why}).`));
  say(at("skipped"), [...skipped, ...failed].join(" ") || "\u00a0");
  const busy = new Set(walk.visits.filter((visit) => visit.ended === null).map((visit) => visit.host));
  return walk.over ? new Set() : busy;
}
