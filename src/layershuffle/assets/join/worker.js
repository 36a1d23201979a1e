// A host in a worker of a tab: it dials in, holds the blocks that the gateway assigns, and serves
// visits. docs/host-protocol.md specifies what is said. The page gets { why, name, held, wanted,
// served, ms } twice a second (`why`: it is no host), and sends { token } first and "drain" last.

import * as ort from "./ort.wasm.min.mjs";
import { answerTo, finite, FLOAT32, headerOf, MAX_IMAGES, PROTOCOL, refusalOf, stateIn, WHY, WireError } from "./wire.js";

const GATEWAY = new URL("../v1/", import.meta.url); // this file is at PREFIX/join/worker.js
const MEMORY = 200_000_000; // bytes of weights
const MOST_WAITING = 1024;
const FIRST_DELAY = 100, LONGEST_DELAY = 3000; // ms
const SILENT = 15_000; // ms; a gateway tries loaded blocks every few seconds
const SILENT_IDLE = 60_000; // ms; nothing is said to a host without blocks, which may wait 30 s for one
// An ONNX graph: a, b float32 [256, 256]; c = MatMul(a, b).
const PRODUCT = "CAg6WwoRCgFhCgFiEgFjIgZNYXRNdWwSAWdaFQoBYRIQCg4IARIKCgMIgAIKAwiAAloVCgFiEhAKDggBEgoKAwiAAgoDCIACYhUKAWMSEAoOCAESCgoDCIACCgMIgAJCBAoAEA0=";
const BROKEN = 4400; // a browser lets us close with 1000 and from 3000 only

ort.env.wasm.numThreads = 1; // with more a phone gets hot
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;

const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
const random = (length) => hex(crypto.getRandomValues(new Uint8Array(length)));
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
const keyOf = (block) => `${block.graph.sha256} ${block.weights.sha256}`;

const instance = random(8);
const name = `tab-${random(3)}`;
const blocks = new Map(); // what is loaded, by the digests of its files
const queue = []; // visits that wait
const spent = { served: 0, images: 0, ms: 0 };
let slots = new Map(); // slot -> key of a block
let token = "", why = "it is being started", socket = null, loading = null;
let working = false, running = null, draining = false, heard = 0;
let loads = Promise.resolve(); // they follow one another

// --- visits --------------------------------------------------------------------------------------

// A lost connection takes its visits with it: another one knows nothing of them.
const send = (content, link) => { if (link?.readyState === WebSocket.OPEN) link.send(content); };
const tell = (type, fields = {}) => send(JSON.stringify({ type, ...fields }), socket);
const refuse = ({ header, link }, reason) => send(refusalOf(header, reason), link);

function visited(frame, link) {
  const header = headerOf(frame);
  const block = blocks.get(slots.get(header.slot));
  if (draining) refuse({ header, link }, WHY.draining);
  else if (!block) refuse({ header, link }, WHY.unknown);
  else if (queue.length >= MOST_WAITING) refuse({ header, link }, WHY.full);
  else {
    queue.push({ header, link, block, state: stateIn(frame, header, block.shape), arrived: performance.now() });
    if (!working) turn.port2.postMessage("");
    working = true;
  }
}

// Each batch is a task of its own, so that frames that came while one ran can join the next.
const turn = new MessageChannel();
turn.port1.onmessage = async () => {
  running = queue[0].block;
  const batch = nextBatch();
  if (batch.length && !await served(batch)) {
    // One state may have broken it for the others.
    for (const visit of batch) if (batch.length === 1 || !await served([visit])) refuse(visit, WHY.failed);
  }
  running = null;
  working = queue.length > 0;
  if (working) turn.port2.postMessage("");
};

// The oldest visit and those of its block, out of the queue; late ones are refused.
function nextBatch() {
  const [now, { block }, batch, others] = [performance.now(), queue[0], [], []];
  let images = 0;
  for (const visit of queue.splice(0)) {
    const { header } = visit;
    if (visit.block !== block || images + header.images > MAX_IMAGES) others.push(visit);
    else if (visit.arrived + header.time / 1000 < now) refuse(visit, WHY.late);
    else {
      batch.push(visit);
      images += header.images;
    }
  }
  queue.push(...others);
  return batch;
}

// Run visits of one block together, and answer them; whether that went well.
async function served(batch) {
  const { block } = batch[0];
  const begin = performance.now();
  const together = batch.reduce((sum, visit) => sum + visit.header.images, 0);
  let before = batch[0].state;
  if (batch.length > 1) {
    before = new Float32Array(together * block.shape[0] * block.shape[1]);
    batch.reduce((place, visit) => { before.set(visit.state, place); return place + visit.state.length; }, 0);
  }
  let after;
  try {
    after = await run(block, before, together);
  } catch (error) {
    console.warn("a block failed:", error.message);
    return false;
  }
  const ms = performance.now() - begin;
  let place = 0;
  for (const visit of batch) {
    const added = after.slice(place, place += visit.state.length);
    if (visit.header.dtype !== FLOAT32) for (let i = 0; i < added.length; i += 1) added[i] -= visit.state[i];
    const times = { micros: 1000 * ms, waited: 1000 * (begin - visit.arrived) };
    send(answerTo(visit.header, added, { width: block.shape[1], together, ...times }), visit.link);
  }
  spent.served += batch.length;
  spent.images += together;
  spent.ms += ms;
  return true;
}

// The state after a block, of `images` images.
async function run(block, before, images) {
  const { session, shape, oneByOne } = block;
  if (oneByOne && images > 1) {
    const [after, size] = [new Float32Array(before.length), before.length / images];
    for (let place = 0; place < before.length; place += size) {
      after.set(await run(block, before.slice(place, place + size), 1), place);
    }
    return after;
  }
  const fed = new ort.Tensor("float32", before, [images, ...shape]);
  const { [session.outputNames[0]]: out } = await session.run({ [session.inputNames[0]]: fed });
  const same = out.type === "float32" && String(out.dims) === String(fed.dims);
  if (!same || !finite(out.data)) throw new Error("it gives no finite state of the shape that it got");
  return out.data;
}

// --- blocks --------------------------------------------------------------------------------------

function assigned(entries) {
  loading?.abort();
  const { signal } = loading = new AbortController();
  slots = new Map(entries.map((block) => [block.slot, keyOf(block)]));
  loads = loads.then(() => loadAll(entries, signal));
}

// Drop what is not assigned, load what is missing, and try again what failed.
async function loadAll(entries, signal) {
  const wanted = new Set(slots.values());
  for (const [key, block] of blocks) {
    if (wanted.has(key)) continue;
    blocks.delete(key);
    // Its visits end first.
    while (running === block || queue.some((visit) => visit.block === block)) await pause(5);
    await block.session.release();
  }
  for (let left = entries, delay = FIRST_DELAY; left.length && !signal.aborted; delay = Math.min(LONGEST_DELAY, 2 * delay)) {
    const failed = [];
    for (const block of left) {
      try {
        if (!blocks.has(keyOf(block))) blocks.set(keyOf(block), await load(block, signal));
        if (!signal.aborted) tell("ready", { slot: block.slot, seconds: blocks.get(keyOf(block)).seconds });
      } catch (error) {
        if (signal.aborted) return;
        tell("failed", { slot: block.slot, why: String(error.message).slice(0, 400) });
        failed.push(block);
      }
    }
    left = failed;
    if (left.length) await pause(delay * (0.5 + Math.random() / 2));
  }
}

async function load(block, signal) {
  const held = [...blocks.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  if (held + block.weights.bytes > MEMORY) throw new Error(`no memory: ${held} of ${MEMORY} bytes are taken`);
  const [graph, weights] = [await fileOf(block.graph, signal), await fileOf(block.weights, signal)];
  const session = await ort.InferenceSession.create(graph, {
    executionProviders: ["wasm"], externalData: [{ path: "weights", data: weights }],
    enableCpuMemArena: false, // it would keep what the largest batch took, for each block
  });
  // The states of a batch would share the scale of what is quantised as it comes.
  const oneByOne = new TextDecoder("latin1").decode(graph).includes("DynamicQuantizeLinear");
  const loaded = { session, shape: block.shape, bytes: weights.length, oneByOne };
  const empty = new Float32Array(block.shape[0] * block.shape[1]);
  await run(loaded, empty, 1);
  const begin = performance.now();
  await run(loaded, empty, 1);
  return { ...loaded, seconds: (performance.now() - begin) / 1000 };
}

async function fileOf({ sha256, bytes }, signal) {
  const response = await fetch(new URL(`files/${sha256}`, GATEWAY), { headers: { Authorization: `Bearer ${token}` }, redirect: "error", signal });
  if (!response.ok) throw new Error(`the gateway answers ${response.status} for a file`);
  const data = new Uint8Array(await response.arrayBuffer());
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  if (data.length !== bytes || hex(digest) !== sha256) throw new Error("a file is not the one of its digest");
  return data;
}

// --- the connection ------------------------------------------------------------------------------

// GFLOP/s of a product of two matrices of 256 x 256, the best of a few.
async function speed() {
  const session = await ort.InferenceSession.create(Uint8Array.from(atob(PRODUCT), (letter) => letter.charCodeAt(0)));
  const ones = new ort.Tensor("float32", new Float32Array(256 ** 2).fill(1), [256, 256]);
  let least = Infinity;
  for (let time = 0; time < 5; time += 1) {
    const begin = performance.now();
    await session.run({ a: ones, b: ones });
    least = Math.min(least, performance.now() - begin);
  }
  await session.release();
  return 2e-6 * 256 ** 3 / Math.max(0.1, least); // the clock ticks so
}

// Serve until the connection ends; whether the gateway took this host.
function serve(hello) {
  return new Promise((ended) => {
    let taken = false;
    slots = new Map(); // until this gateway assigns some
    const here = socket = new WebSocket(new URL("host", GATEWAY).href.replace(/^http/, "ws"));
    const end = (reason) => {
      if (socket === here) [socket, why] = [null, reason];
      ended(taken);
    };
    here.binaryType = "arraybuffer";
    here.onopen = () => tell("hello", hello);
    here.onclose = ({ code, reason }) => end(reason || (code === 1006 ? "the gateway cannot be reached" : `the gateway has left (${code})`));
    here.onmessage = ({ data }) => {
      heard = performance.now();
      try {
        if (typeof data !== "string") {
          visited(data, here);
          return;
        }
        const message = JSON.parse(data);
        if (message.type !== "assign") throw new WireError(`a message ${message.type} from a gateway`);
        [taken, why] = [true, ""];
        assigned(message.blocks);
      } catch (error) {
        here.close(BROKEN, String(error.message).slice(0, 100));
      }
    };
    // A browser cannot ping, so silence is an end, for which a dead link would let us wait. Before
    // the first block is loaded nothing is said, however long that takes.
    const watch = setInterval(() => {
      const loaded = [...slots.values()].some((key) => blocks.has(key));
      const patience = loaded ? SILENT : slots.size ? Infinity : SILENT_IDLE;
      if (performance.now() - heard > patience) {
        here.close();
        end("the gateway is silent");
      }
      if (socket !== here) clearInterval(watch);
    }, 1000);
  });
}

async function dial() {
  const runtime = `onnxruntime-web ${ort.env.versions.web}`;
  const fields = { protocol: PROTOCOL, token, name, instance, version: "browser", runtime, memory: MEMORY, speed: await speed() };
  for (let delay = FIRST_DELAY; !draining;) {
    heard = performance.now();
    const held = [...new Set([...blocks.keys()].flatMap((key) => key.split(" ")))];
    if (await serve({ ...fields, held })) delay = FIRST_DELAY;
    await pause(delay * (0.5 + Math.random() / 2));
    delay = Math.min(LONGEST_DELAY, 2 * delay);
  }
}

self.onmessage = async ({ data }) => {
  if (data !== "drain") {
    ({ token } = data);
    await dial().catch((error) => { why = error.message; });
    return;
  }
  draining = true;
  tell("drain");
  while (working) await pause(5);
  socket?.close(1000);
};

setInterval(() => {
  const held = [...slots].filter(([, key]) => blocks.has(key)).map(([slot]) => slot).sort((a, b) => a - b);
  postMessage({ why, name, held, wanted: slots.size, served: spent.served, ms: spent.images ? spent.ms / spent.images : null });
}, 500);
