// The frames of docs/host-protocol.md: a header of 20 bytes, then a state. Everything is
// little-endian, as all processors that run browsers are.

export const PROTOCOL = "1.0";
export const FLOAT32 = 1;
const MAX_FRAME_BYTES = 64 << 20;
export const MAX_IMAGES = 256;
const KIND = { visit: 1, answer: 2, refusal: 3 };
export const WHY = { unknown: 1, full: 2, late: 3, failed: 4, draining: 5 };
const HEADER = 20;
const FLOAT16 = 2, INT8 = 3;
const LARGEST_HALF = 65504;

export class WireError extends Error {}

// Whether this browser has the numbers of all frames.
export const canSpeak = () => typeof Float16Array === "function";

export function headerOf(frame) {
  if (frame.byteLength < HEADER || frame.byteLength > MAX_FRAME_BYTES) throw new WireError(`a frame of ${frame.byteLength} bytes`);
  const view = new DataView(frame);
  const header = {
    kind: view.getUint8(0), dtype: view.getUint8(1), slot: view.getUint16(2, true),
    visit: view.getUint32(4, true), images: view.getUint16(8, true), time: view.getUint32(12, true),
  };
  if (header.kind !== KIND.visit || header.dtype < FLOAT32 || header.dtype > INT8) throw new WireError(`a frame of kind ${header.kind} and dtype ${header.dtype}`);
  if (header.images < 1 || header.images > MAX_IMAGES) throw new WireError(`a frame of ${header.images} images`);
  return header;
}

// The state of a visit as float32, its numbers one after the other.
export function stateIn(frame, { dtype, images }, [tokens, width]) {
  const rows = images * tokens;
  const scales = dtype === INT8 ? rows : 0;
  const Numbers = { [FLOAT32]: Float32Array, [FLOAT16]: Float16Array, [INT8]: Int8Array }[dtype];
  const begin = HEADER + 4 * scales;
  if (frame.byteLength !== begin + Numbers.BYTES_PER_ELEMENT * rows * width) throw new WireError(`${frame.byteLength} bytes are no state`);
  const state = new Float32Array(new Numbers(frame, begin));
  if (scales) {
    const factors = new Float32Array(frame, HEADER, scales);
    for (let i = 0; i < state.length; i += 1) state[i] *= factors[Math.floor(i / width)];
  }
  if (!finite(state)) throw new WireError("a state with numbers that are not finite");
  return state;
}

// One number that is not finite makes the sum so, which is of float64 and does not overflow.
export function finite(numbers) {
  let sum = 0;
  for (const number of numbers) sum += number;
  return Number.isFinite(sum);
}

const most = (limit, number) => Math.min(limit, Math.max(0, Math.round(number)));

// A frame for the visit `header`; `state` is float32, with rows of `width` numbers.
export function answerTo(header, state, { width, together, micros, waited }) {
  const rows = state.length / width;
  const scales = new Float32Array(header.dtype === INT8 ? rows : 0);
  const numbers = { [FLOAT32]: () => state, [FLOAT16]: () => halves(state), [INT8]: () => bytes(state, scales, width) }[header.dtype]();
  const frame = new Uint8Array(HEADER + scales.byteLength + numbers.byteLength);
  write(frame, { ...header, kind: KIND.answer, note: together, time: micros, waited });
  frame.set(new Uint8Array(scales.buffer), HEADER);
  frame.set(new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength), HEADER + scales.byteLength);
  return frame;
}

export function refusalOf(header, why) {
  const frame = new Uint8Array(HEADER);
  write(frame, { ...header, kind: KIND.refusal, note: why, time: 0, waited: 0 });
  return frame;
}

function write(frame, { kind, dtype, slot, visit, images, note, time, waited }) {
  const view = new DataView(frame.buffer);
  view.setUint8(0, kind);
  view.setUint8(1, dtype);
  view.setUint16(2, slot, true);
  view.setUint32(4, visit, true);
  view.setUint16(8, images, true);
  view.setUint16(10, note, true);
  view.setUint32(12, most(0xffffffff, time), true);
  view.setUint32(16, most(0xffffffff, waited), true);
}

const halves = (state) => Float16Array.from(state, (number) => Math.min(LARGEST_HALF, Math.max(-LARGEST_HALF, number)));

// A scale for each row, so that one with large numbers does not coarsen the others.
function bytes(state, scales, width) {
  const numbers = new Int8Array(state.length);
  for (let row = 0; row < scales.length; row += 1) {
    const [begin, end] = [row * width, (row + 1) * width];
    let largest = 0;
    for (let i = begin; i < end; i += 1) largest = Math.max(largest, Math.abs(state[i]));
    scales[row] = largest === 0 ? 1 : largest / 127;
    for (let i = begin; i < end; i += 1) numbers[i] = Math.round(state[i] / scales[row]);
  }
  return numbers;
}
