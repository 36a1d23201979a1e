// The way of an answer through the swarm, replayed: a line for every host, with a bar for each visit
// from its beginning to its end. Bars at one time stand below each other: those visits ran side by
// side. They appear in their order, slowed down to REPLAY.

import { at, hue, make, say } from "./dom.js";

const REPLAY = 900; // ms in which the bars of a request appear

const lines = new Map();

// The lines of the hosts that there are; they stay as they are between requests.
export function setLines(names) {
  if (names.length === lines.size && names.every((name) => lines.has(name))) return;
  lines.clear();
  at("walk").replaceChildren(...names.map((name) => {
    const line = make("ol", { class: "visits", "aria-label": `Visits to ${name}` });
    lines.set(name, line);
    return make("li", {}, make("span", { class: "name" }, name), line);
  }));
}

function bar(hop, depth, whole) {
  const element = make("li", { class: "visit", title: hop.why, "data-state": hop.outcome,
    "aria-label": `block ${hop.block}, ${hop.outcome}, ${hop.ms.toFixed(0)} ms` }, String(hop.block));
  hue(element, hop.block, depth);
  element.style.setProperty("--begun", (100 * hop.begun_ms) / whole);
  element.style.inlineSize = `${(100 * hop.ms) / whole}%`;
  element.style.animationDelay = `${(REPLAY * hop.begun_ms) / whole}ms`;
  return element;
}

// `answer`: what /v1/classify answers.
export function showWalk(answer) {
  const whole = Math.max(1, ...answer.route.map((hop) => hop.begun_ms + hop.ms));
  const bars = new Map([...lines.keys()].map((name) => [name, []]));
  for (const hop of answer.route) bars.get(hop.host)?.push(bar(hop, answer.depth, whole));
  for (const [name, own] of bars) lines.get(name).replaceChildren(...own);
  const ran = new Set(answer.blocks).size;
  say(at("walk-text"), `Newest request: ${ran} of ${answer.depth} blocks in ${answer.ms.total.toFixed(0)} ms`);
  const reasons = Map.groupBy(answer.skipped, (skip) => skip.why);
  const skipped = [...reasons].map(([why, skips]) => `Skipped ${skips.map((skip) => skip.block).join(", ")}: ${why}.`);
  const troubles = answer.route.filter((hop) => hop.why);
  const failed = new Set(troubles.map((hop) => `${hop.host} ${hop.outcome} (${hop.why}).`));
  say(at("skipped"), [...skipped, ...failed].join(" ") || "\u00a0");
}
