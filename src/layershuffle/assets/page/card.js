// An answer card: the guess, its rivals as bars, and how often answers of this kind are right.

import { make, say } from "./dom.js";

const ROWS = 5; // classes on a card
const TIMES = 10; // answers of which the time is the median

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export class AnswerCard {
  constructor(card) {
    this.card = card;
    this.title = make("h2", {}, "\u00a0");
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
      make("div", { class: "row spread" }, this.title, this.model),
      make("div", { class: "said" }, this.guess, this.verdict),
      make("ul", { class: "bars" }, ...this.rows.map((parts) => parts.row)),
      this.right,
      make("p", { class: "scale", "aria-hidden": "true" }, this.scale),
      this.foot,
    );
  }

  showModel({ title, name }) {
    say(this.title, title);
    say(this.model, name);
  }

  // `answer`: {top: [{label, probability}]}; `label`: the right class, or null if nobody knows.
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
    say(this.right, `${right} of ${of} right in this order`);
    this.scale.style.inlineSize = `${(100 * right) / of}%`;
  }

  // Another question is asked: what is said of the answer before holds no longer.
  wait() {
    for (const part of [this.verdict, this.foot, this.right]) say(part, "\u00a0");
    this.scale.style.inlineSize = "0";
    this.card.classList.add("waiting");
  }

  clear() {
    this.wait();
    say(this.guess, "\u2013");
    this.guess.classList.remove("word");
    for (const { name, bar, share } of this.rows) {
      say(name, "\u00a0");
      say(share, "");
      bar.style.inlineSize = "0";
    }
    this.card.classList.remove("waiting");
  }
}

// The median of the last times in milliseconds: a single one is mostly noise.
export class Times {
  constructor() {
    this.last = [];
  }

  // `what`: what takes so long, as in "a forward pass takes".
  said(what, ms) {
    this.last = [...this.last, ms].slice(-TIMES);
    const sorted = [...this.last].sort((a, b) => a - b);
    const half = (sorted.length - 1) / 2;
    const median = (sorted[Math.floor(half)] + sorted[Math.ceil(half)]) / 2;
    const of = sorted.length > 1 ? ` (median of ${sorted.length})` : "";
    return `${what} ${median.toFixed(median < 10 ? 1 : 0)} ms${of}`;
  }
}
