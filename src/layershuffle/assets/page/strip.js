// The strip of blocks: buttons in an ordered list, moved by dragging, keyboard or the row below.

import { at, hue, make, say } from "./dom.js";
import * as orders from "./order.js";

const FAR = 6; // CSS pixels after which a press is a drag
const EDGE = 0.3; // of a round's width: beyond it a drop goes between rounds, else beside

export class Strip {
  constructor(depth, changed) {
    this.depth = depth;
    this.changed = changed;
    this.place = [0, 0];
    this.list = at("strip");
    this.list.addEventListener("keydown", (event) => this.type(event));
    for (const button of document.querySelectorAll("[data-block]")) {
      button.addEventListener("click", () => this.act(button.dataset.block));
    }
    for (const button of document.querySelectorAll("[data-order]")) {
      button.addEventListener("click", () => this.rearrange(button.dataset.order));
    }
    at("order-form").addEventListener("submit", (event) => {
      event.preventDefault();
      try {
        this.set(orders.parse(at("order").value, depth));
      } catch (error) {
        // Where it was typed, not in the line below the page's fold.
        say(at("order-error"), error.message);
        at("order").setAttribute("aria-invalid", "true");
      }
    });
  }

  rearrange(how) {
    const all = [...this.rounds, ...orders.leftOut(this.rounds, this.depth).map((block) => [block])];
    if (how === "shuffle") this.set(orders.shuffle([...new Set(all.flat())].map((block) => [block])));
    if (how === "reverse") this.set(orders.reverse(this.rounds));
    if (how === "sequential") this.set(orders.sequential(this.depth));
  }

  act(what) {
    const { rounds, place } = this;
    const block = rounds[place[0]][place[1]];
    const after = {
      left: () => orders.moveBy(rounds, place, -1),
      right: () => orders.moveBy(rounds, place, 1),
      beside: () => orders.beside(rounds, place),
      twice: () => orders.twice(rounds, place),
      out: () => orders.leaveOut(rounds, place),
    }[what]();
    if (after === rounds) return;
    // The block stays chosen: by its number, nearest to where it stood.
    const homes = after.flatMap((round, r) => round.flatMap((id, i) => (id === block ? [[r, i]] : [])));
    const far = ([round]) => Math.abs(round - place[0]);
    if (homes.length) this.place = homes.reduce((best, home) => (far(home) < far(best) ? home : best));
    this.set(after);
  }

  type(event) {
    const keys = { "+": "beside", 2: "twice", Delete: "out", Backspace: "out" };
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    const step = steps[event.key];
    if (step && event.shiftKey) this.act(step < 0 ? "left" : "right");
    else if (step) this.choose(step);
    else if (keys[event.key]) this.act(keys[event.key]);
    else return;
    event.preventDefault();
    this.tile()?.focus();
  }

  choose(step) {
    const places = this.rounds.flatMap((round, r) => round.map((_, i) => [r, i]));
    const now = places.findIndex(([r, i]) => r === this.place[0] && i === this.place[1]);
    this.place = places[Math.min(places.length - 1, Math.max(0, now + step))];
    this.mark();
  }

  tile() {
    return this.list.children[this.place[0]]?.children[this.place[1]];
  }

  set(rounds) {
    const focused = this.list.contains(document.activeElement);
    this.rounds = rounds;
    const [round, index] = this.place;
    const r = Math.min(round, rounds.length - 1);
    this.place = [r, Math.min(index, rounds[r].length - 1)];
    this.list.replaceChildren(...rounds.map((ids, at_) => this.round(ids, at_)));
    const out = orders.leftOut(rounds, this.depth);
    at("tray").replaceChildren(
      out.length ? "Left out:" : "No block is left out.",
      ...out.map((block) => this.spare(block)),
    );
    at("order").value = orders.format(rounds);
    at("order").removeAttribute("aria-invalid");
    say(at("order-error"), "");
    this.mark();
    if (focused) this.tile()?.focus();
    this.changed(orders.format(rounds));
  }

  mark() {
    for (const tile of this.list.querySelectorAll(".tile")) {
      const chosen = tile === this.tile();
      tile.setAttribute("aria-pressed", chosen);
      tile.tabIndex = chosen ? 0 : -1;
    }
    if (this.list.contains(document.activeElement)) this.tile()?.focus();
    say(at("chosen"), `Block ${this.rounds[this.place[0]][this.place[1]]}`);
  }

  round(ids, round) {
    const tiles = ids.map((block, index) => {
      const beside = ids.length > 1 ? `, beside ${ids.filter((id) => id !== block).join(" and ")}` : "";
      const tile = make("button", { type: "button", class: "tile",
        "aria-label": `Block ${block}, step ${round + 1} of ${this.rounds.length}${beside}` }, String(block));
      hue(tile, block, this.depth);
      tile.addEventListener("click", () => {
        this.place = [round, index];
        this.mark();
      });
      tile.addEventListener("pointerdown", (event) => this.press(event, tile, [round, index]));
      return tile;
    });
    return make("li", { class: "round" }, ...tiles);
  }

  spare(block) {
    const tile = make("button", { type: "button", class: "tile", "aria-label": `Put block ${block} back` }, String(block));
    hue(tile, block, this.depth);
    tile.addEventListener("click", () => this.set(orders.putBack(this.rounds, block)));
    return tile;
  }

  press(event, tile, place) {
    const [x, y] = [event.clientX, event.clientY];
    let target = null;
    let dragged = false;
    const move = (now) => {
      dragged ||= Math.hypot(now.clientX - x, now.clientY - y) > FAR;
      if (!dragged) return;
      tile.classList.add("dragged");
      tile.style.transform = `translate(${now.clientX - x}px, ${now.clientY - y}px)`;
      target = this.target(now.clientX, now.clientY, place);
      this.show(target);
    };
    const end = (now) => {
      tile.removeEventListener("pointermove", move);
      this.show(null);
      tile.classList.remove("dragged");
      tile.style.transform = "";
      if (dragged && target && now.type === "pointerup") {
        this.place = place;
        this.set(target.after());
      }
    };
    tile.setPointerCapture(event.pointerId);
    tile.addEventListener("pointermove", move);
    tile.addEventListener("pointerup", end, { once: true });
    tile.addEventListener("pointercancel", end, { once: true });
  }

  // What a drop at this point would do.
  target(x, y, place) {
    const { rounds } = this;
    if (y > this.list.getBoundingClientRect().bottom) {
      return { element: at("tray"), side: "over", after: () => orders.leaveOut(rounds, place) };
    }
    const items = [...this.list.children];
    const inside = (box) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
    const round = items.findIndex((item) => inside(item.getBoundingClientRect()));
    if (round < 0) return null;
    const box = items[round].getBoundingClientRect();
    const share = (x - box.left) / box.width;
    const element = items[round];
    if (share < EDGE) return { element, side: "before", after: () => orders.moveTo(rounds, place, round) };
    if (share > 1 - EDGE) return { element, side: "after", after: () => orders.moveTo(rounds, place, round + 1) };
    return { element, side: "over", after: () => orders.join(rounds, place, round) };
  }

  show(target) {
    for (const element of document.querySelectorAll("[data-drop]")) delete element.dataset.drop;
    if (target) target.element.dataset.drop = target.side;
  }
}
