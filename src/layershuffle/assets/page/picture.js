// The picture: one of the test, a drawing, or a file. `file()` is what the server gets.

import { ask, at, say } from "./dom.js";

const FINE = 16; // dots of the drawing per pixel of the model
const PEN = 1.5; // pixels; the digits of the data have strokes as wide
const ACROSS = 10; // pictures in a row of the sheet

// `facts`: width and height of the model's images; `changed`: called for every other picture;
// `seen`: what of a file is shown, as a promise of a bitmap, rejected for a file that is refused.
export class Picture {
  constructor(facts, { changed, seen }) {
    this.changed = changed;
    this.seen = seen;
    this.canvas = at("canvas");
    this.canvas.width = facts.width;
    this.canvas.height = facts.height;
    this.canvas.style.aspectRatio = `${facts.width} / ${facts.height}`;
    this.pen = this.canvas.getContext("2d", { willReadFrequently: true });
    this.paper = new OffscreenCanvas(facts.width * FINE, facts.height * FINE);
    this.ink = this.paper.getContext("2d", { willReadFrequently: true });
    this.cursor = [2, 2];
    this.number = -1;
    this.label = null; // the class of a test picture, as text
    this.given = null; // a file, sent as it is
    this.opened = 0; // files and other pictures until now: only the newest is shown
    this.drawing = false;
    this.empty = true; // nothing to answer for
    this.listen();
  }

  async loadPairs() {
    const [sheet, labels] = await Promise.all([
      ask("page/pairs.png").then((answer) => answer.blob()).then(createImageBitmap),
      ask("page/pairs.json").then((answer) => answer.json()),
    ]);
    this.sheet = sheet;
    this.labels = labels;
  }

  showPair(number) {
    const { width, height } = this.canvas;
    this.opened += 1;
    this.number = number % this.labels.length;
    const [left, top] = [(this.number % ACROSS) * width, Math.floor(this.number / ACROSS) * height];
    this.pen.drawImage(this.sheet, left, top, width, height, 0, 0, width, height);
    this.label = this.labels[this.number];
    this.given = null;
    this.drawing = false;
    this.empty = false;
    say(at("picture-text"), `${this.label}, never seen in training.`);
    this.changed();
  }

  // A test picture by itself, with its class; the picture that is shown stays.
  async pairFile(number) {
    const { width, height } = this.canvas;
    const place = number % this.labels.length;
    const small = new OffscreenCanvas(width, height);
    const [left, top] = [(place % ACROSS) * width, Math.floor(place / ACROSS) * height];
    small.getContext("2d").drawImage(this.sheet, left, top, width, height, 0, 0, width, height);
    const file = await small.convertToBlob({ type: "image/png" });
    return { file, label: this.labels[place] };
  }

  // A blank sheet. Nothing is asked before there is ink.
  blank() {
    this.opened += 1;
    this.label = null;
    this.given = null;
    this.drawing = true;
    this.empty = true;
    this.ink.fillStyle = this.pen.fillStyle = "#000";
    this.ink.fillRect(0, 0, this.paper.width, this.paper.height);
    this.pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const pairs = this.labels?.every((label) => /^[0-9]{2}$/.test(label));
    say(at("picture-text"), pairs ? "Draw two digits, one in each half." : "Draw something.");
    this.changed();
  }

  async file() {
    return this.given ?? new Promise((done) => this.canvas.toBlob(done, "image/png"));
  }

  async open(file) {
    this.opened += 1;
    const turn = this.opened;
    let image;
    try {
      image = await this.seen(file);
    } catch (error) {
      if (turn === this.opened) this.refuse(`${file.name}: ${error.message}`);
      return;
    }
    if (turn !== this.opened) return;
    // A transparent picture would leave the one of before to be seen.
    this.pen.fillStyle = "#000";
    this.pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.pen.drawImage(image, 0, 0, this.canvas.width, this.canvas.height);
    this.label = null;
    this.given = file;
    this.drawing = false;
    this.empty = false;
    say(at("picture-text"), file.name);
    this.changed();
  }

  // A file that cannot be answered for: no picture and no answer of before stays beside the reason.
  refuse(message) {
    this.blank();
    say(at("picture-text"), message);
    say(at("status"), message);
  }

  // Every pixel is the mean of its dots, as the digits of the data were made.
  reduce() {
    const { width, height } = this.canvas;
    const dots = this.ink.getImageData(0, 0, this.paper.width, this.paper.height).data;
    const pixels = this.pen.createImageData(width, height);
    for (let y = 0; y < height; y += 1) {
      for (let x = 0; x < width; x += 1) {
        let sum = 0;
        for (let dy = 0; dy < FINE; dy += 1) {
          const row = (y * FINE + dy) * this.paper.width + x * FINE;
          for (let dx = 0; dx < FINE; dx += 1) sum += dots[4 * (row + dx)];
        }
        pixels.data.set([sum / FINE ** 2, sum / FINE ** 2, sum / FINE ** 2, 255], 4 * (y * width + x));
      }
    }
    this.pen.putImageData(pixels, 0, 0);
  }

  stroke(from, to) {
    if (!this.drawing) this.blank();
    this.empty = false;
    Object.assign(this.ink, { strokeStyle: "#fff", lineWidth: PEN * FINE, lineCap: "round" });
    this.ink.beginPath();
    this.ink.moveTo(...from);
    this.ink.lineTo(...to);
    this.ink.stroke();
    this.reduce();
  }

  listen() {
    let last = null;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * this.paper.width,
        ((event.clientY - box.top) / box.height) * this.paper.height];
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      last = place(event);
      this.stroke(last, last);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      const now = place(event);
      this.stroke(last, now);
      last = now;
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, () => {
        if (last) this.changed();
        last = null;
      });
    }
    this.canvas.addEventListener("keydown", (event) => this.type(event));
    at("clear").addEventListener("click", () => {
      this.blank();
      this.canvas.focus();
    });
    at("next").addEventListener("click", () => this.showPair(this.number + 1));
    at("file").addEventListener("change", (event) => {
      const [file] = event.target.files;
      event.target.value = ""; // or the same file could not be opened again
      if (file) this.open(file);
    });
    const card = at("picture");
    card.addEventListener("dragover", (event) => event.preventDefault());
    card.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) this.open(event.dataTransfer.files[0]);
    });
  }

  // Drawing by keyboard: arrows move a pen of one pixel, Space puts it down.
  type(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const step = steps[event.key];
    const centre = () => this.cursor.map((at_) => (at_ + 0.5) * FINE);
    if (step) {
      const size = [this.canvas.width, this.canvas.height];
      const from = centre();
      this.cursor = this.cursor.map((at_, i) => Math.min(size[i] - 1, Math.max(0, at_ + step[i])));
      if (event.shiftKey) this.stroke(from, centre());
      const [column, row] = this.cursor;
      say(at("picture-text"), `Pen at column ${column + 1}, row ${row + 1}. Space draws, Shift with arrows draws lines.`);
    } else if (event.key === " ") {
      this.stroke(centre(), centre());
    } else {
      return;
    }
    event.preventDefault();
    if (event.key === " " || event.shiftKey) this.changed();
  }
}
