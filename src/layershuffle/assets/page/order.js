// Execution orders as rounds: [[3, 7], [1]] is "3+7,1". Pure functions; none changes its arguments.
// A place is [round, index in the round].

export function parse(text, depth) {
  const rounds = text.split(",").map((word) => word.split("+").map((id) => {
    if (!/^\s*\d{1,4}\s*$/.test(id)) {
      throw new Error(`"${id.trim()}" is no block: write numbers with commas, as in 3,0,2`);
    }
    return Number(id);
  }));
  for (const block of rounds.flat()) {
    if (block >= depth) throw new Error(`There is no block ${block}: they are 0 to ${depth - 1}`);
  }
  if (rounds.some((round) => new Set(round).size < round.length)) {
    throw new Error("A block cannot run beside itself");
  }
  return rounds;
}

export const format = (rounds) => rounds.map((round) => round.join("+")).join(",");

export const sequential = (depth) => Array.from({ length: depth }, (_, block) => [block]);

export const reverse = (rounds) => [...rounds].reverse();

// Fisher and Yates; the blocks that are there, one after the other.
export function shuffle(rounds, random = Math.random) {
  const blocks = rounds.flat();
  for (let last = blocks.length - 1; last > 0; last -= 1) {
    const other = Math.floor(random() * (last + 1));
    [blocks[last], blocks[other]] = [blocks[other], blocks[last]];
  }
  return blocks.map((block) => [block]);
}

export const leftOut = (rounds, depth) => {
  const there = new Set(rounds.flat());
  return Array.from({ length: depth }, (_, block) => block).filter((block) => !there.has(block));
};

// Without the block at the place; a round that is empty then stays, so that numbers hold.
function lifted(rounds, [round, index]) {
  return rounds.map((ids, at) => (at === round ? ids.filter((_, i) => i !== index) : ids));
}

const full = (rounds) => rounds.filter((round) => round.length);

// The block at the place becomes a round of its own before round `gap` (0 to the number of rounds).
export function moveTo(rounds, place, gap) {
  const block = rounds[place[0]][place[1]];
  const rest = lifted(rounds, place);
  return full([...rest.slice(0, gap), [block], ...rest.slice(gap)]);
}

export function moveBy(rounds, place, by) {
  const alone = rounds[place[0]].length === 1;
  // Out of a round of several, the step is to stand alone beside it.
  const gap = by < 0 ? place[0] - (alone ? 1 : 0) : place[0] + (alone ? 2 : 1);
  return gap < 0 || gap > rounds.length ? rounds : moveTo(rounds, place, gap);
}

// The block at the place joins another round, unless that has it already.
export function join(rounds, place, round) {
  const block = rounds[place[0]][place[1]];
  if (round === place[0] || rounds[round]?.includes(block) !== false) return rounds;
  return full(lifted(rounds, place).map((ids, at) => (at === round ? [...ids, block] : ids)));
}

// Beside the round before (or after, for the first one); a block that is beside others stands alone.
export function beside(rounds, place) {
  if (rounds[place[0]].length > 1) return moveTo(rounds, place, place[0] + 1);
  const before = join(rounds, place, place[0] - 1);
  return before === rounds ? join(rounds, place, place[0] + 1) : before;
}

export function twice(rounds, place) {
  const [round, index] = place;
  return [...rounds.slice(0, round + 1), [rounds[round][index]], ...rounds.slice(round + 1)];
}

export function leaveOut(rounds, place) {
  const rest = full(lifted(rounds, place));
  return rest.length ? rest : rounds; // an order has a block at least
}

export const putBack = (rounds, block) => [...rounds, [block]];
