// An answer card: the guess, its rivals as bars, and how often this order is right.

import { make, say } from "./dom.js";

const ROWS = 5;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export class AnswerCard {
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
    this.range = make("span", { class: "range" });
    this.foot = make("p", { class: "note foot" }, "\u00a0");
    card.replaceChildren(
      make("div", { class: "row spread" }, make("h2", {}, title), this.model),
      make("div", { class: "said" }, this.guess, this.verdict),
      make("ul", { class: "bars" }, ...this.rows.map((parts) => parts.row)),
      this.right,
      make("p", { class: "scale", "aria-hidden": "true" }, this.scale, this.range),
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

  // The interval of the accuracy to expect, in percent, as a bracket on the scale.
  showExpected(expected) {
    this.range.hidden = !expected;
    if (!expected) return;
    // Painted, not placed: what moves to another place is a shift of the page for browsers.
    this.range.style.setProperty("--low", `${expected.low}%`);
    this.range.style.setProperty("--high", `${expected.high}%`);
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
