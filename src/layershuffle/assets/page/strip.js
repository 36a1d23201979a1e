// The strip of blocks: buttons in an ordered list, moved by dragging, keyboard or the row below.
//
// An order is a list of rounds: [[3, 7], [1]] is "3+7,1". The functions on it change none of their
// arguments. A place is [round, index in the round].

import { at, hue, make, say } from "./dom.js";

const FAR = 6; // CSS pixels after which a press is a drag
const EDGE = 0.3; // of a round's width: beyond it a drop goes between rounds, else beside

// Blocks that keep their place run with stem and head, and stand in no order of the strip.
// `blocks`: the others, ascending.

function parse(text, blocks) {
  const rounds = text.split(",").map((word) => word.split("+").map((id) => {
    if (!/^\s*\d{1,4}\s*$/.test(id)) {
      throw new Error(`"${id.trim()}" is no block: write numbers with commas, as in 3,1,2`);
    }
    return Number(id);
  }));
  for (const block of rounds.flat()) {
    if (!blocks.includes(block)) {
      throw new Error(`There is no block ${block} to move: they are ${blocks[0]} to ${blocks.at(-1)}`);
    }
  }
  if (rounds.some((round) => new Set(round).size < round.length)) {
    throw new Error("A block cannot run beside itself");
  }
  return rounds;
}

const format = (rounds) => rounds.map((round) => round.join("+")).join(",");

const sequential = (blocks) => blocks.map((block) => [block]);

// All blocks, one after the other, by Fisher and Yates.
function shuffled(blocks) {
  const rounds = sequential(blocks);
  for (let last = rounds.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [rounds[last], rounds[other]] = [rounds[other], rounds[last]];
  }
  return rounds;
}

const leftOut = (rounds, blocks) => blocks.filter((block) => !rounds.flat().includes(block));

// What runs with stem and head, as a sentence; "" if nothing does.
function endsAround(blocks, depth) {
  const all = [...Array(depth).keys()];
  const ends = [["stem", all.slice(0, blocks[0])], ["head", all.slice(blocks.at(-1) + 1)]];
  const words = ends.filter(([, own]) => own.length).map(([part, own]) => `${own.join(", ")} with the ${part}`);
  return words.length ? `In their place: ${words.join("; ")}.` : "";
}

// Without the block at the place; a round that is empty then stays, so that numbers hold.
function lifted(rounds, [round, index]) {
  return rounds.map((ids, r) => (r === round ? ids.filter((_, i) => i !== index) : ids));
}

const full = (rounds) => rounds.filter((round) => round.length);

// The block at the place becomes a round of its own before round `gap` (0 to the number of rounds).
function moveTo(rounds, place, gap) {
  const block = rounds[place[0]][place[1]];
  const rest = lifted(rounds, place);
  return full([...rest.slice(0, gap), [block], ...rest.slice(gap)]);
}

function moveBy(rounds, place, by) {
  const alone = rounds[place[0]].length === 1;
  // Out of a round of several, the step is to stand alone beside it.
  const gap = by < 0 ? place[0] - (alone ? 1 : 0) : place[0] + (alone ? 2 : 1);
  return gap < 0 || gap > rounds.length ? rounds : moveTo(rounds, place, gap);
}

// The block at the place joins another round, unless that has it already.
function join(rounds, place, round) {
  const block = rounds[place[0]][place[1]];
  if (round === place[0] || rounds[round]?.includes(block) !== false) return rounds;
  return full(lifted(rounds, place).map((ids, r) => (r === round ? [...ids, block] : ids)));
}

// Beside the round before (or after, for the first one); a block that is beside others stands alone.
function beside(rounds, place) {
  if (rounds[place[0]].length > 1) return moveTo(rounds, place, place[0] + 1);
  const before = join(rounds, place, place[0] - 1);
  return before === rounds ? join(rounds, place, place[0] + 1) : before;
}

function twice(rounds, place) {
  const [round, index] = place;
  return [...rounds.slice(0, round + 1), [rounds[round][index]], ...rounds.slice(round + 1)];
}

function leaveOut(rounds, place) {
  const rest = full(lifted(rounds, place));
  return rest.length ? rest : rounds; // an order has a block at least
}

// `changed`: called with every order, as text; `refused`: called when one that was typed is none.
export class Strip {
  constructor({ depth, fixed: [first, last] }, { changed, refused }) {
    this.depth = depth;
    this.blocks = [...Array(depth).keys()].slice(first, depth - last);
    this.changed = changed;
    this.rounds = sequential(this.blocks);
    say(at("ends"), endsAround(this.blocks, depth) || "\u00a0");
    this.refused = false; // whether the field holds an order that was refused
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
        this.set(parse(at("order").value, this.blocks));
      } catch (error) {
        // Where it was typed, not in the line below the page's fold.
        say(at("order-error"), error.message);
        at("order").setAttribute("aria-invalid", "true");
        this.refused = true;
        refused();
      }
    });
    at("order").addEventListener("input", () => this.grow());
    window.addEventListener("resize", () => this.grow());
  }

  // The field is as high as its order, which is seen whole.
  grow() {
    const field = at("order");
    field.style.blockSize = "auto";
    field.style.blockSize = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
  }

  rearrange(how) {
    if (how === "shuffle") this.set(shuffled(this.blocks));
    if (how === "reverse") this.set([...this.rounds].reverse());
    if (how === "sequential") this.set(sequential(this.blocks));
  }

  act(what) {
    const { rounds, place } = this;
    const block = rounds[place[0]][place[1]];
    const after = {
      left: () => moveBy(rounds, place, -1),
      right: () => moveBy(rounds, place, 1),
      beside: () => beside(rounds, place),
      twice: () => twice(rounds, place),
      out: () => leaveOut(rounds, place),
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
    const out = leftOut(rounds, this.blocks);
    at("tray").replaceChildren(
      out.length ? "Left out:" : "No block is left out.",
      ...out.map((block) => this.spare(block)),
    );
    at("order").value = format(rounds);
    this.grow();
    at("order").removeAttribute("aria-invalid");
    this.refused = false;
    say(at("order-error"), "");
    this.mark();
    if (focused) this.tile()?.focus();
    this.changed(format(rounds));
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
      const others = ids.length > 1 ? `, beside ${ids.filter((id) => id !== block).join(" and ")}` : "";
      const tile = make("button", { type: "button", class: "tile",
        "aria-label": `Block ${block}, step ${round + 1} of ${this.rounds.length}${others}` }, String(block));
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
    tile.addEventListener("click", () => this.set([...this.rounds, [block]]));
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
      return { element: at("tray"), side: "over", after: () => leaveOut(rounds, place) };
    }
    const items = [...this.list.children];
    const inside = (box) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
    const round = items.findIndex((item) => inside(item.getBoundingClientRect()));
    if (round < 0) return null;
    const box = items[round].getBoundingClientRect();
    const share = (x - box.left) / box.width;
    const element = items[round];
    if (share < EDGE) return { element, side: "before", after: () => moveTo(rounds, place, round) };
    if (share > 1 - EDGE) return { element, side: "after", after: () => moveTo(rounds, place, round + 1) };
    return { element, side: "over", after: () => join(rounds, place, round) };
  }

  show(target) {
    for (const element of document.querySelectorAll("[data-drop]")) delete element.dataset.drop;
    if (target) target.element.dataset.drop = target.side;
  }
}
