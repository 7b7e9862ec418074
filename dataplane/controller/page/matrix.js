// The matrix of a partition: a row for each field and task, and a column for each part of the samples, oldest first.
// Missing values are hollow, so that gaps are visible at a glance.

import { el, keyed, mark, say } from "./dom.js";
import { count, percent } from "./format.js";
import { level, LEVELS, palette } from "./palette.js";
import { hide, pointable } from "./point.js";
import { Surface } from "./surface.js";

const WIDEST = 22;
const GAP = 10; // between fields and tasks
const MOST_TALL_ROWS = 14;
const MOST_NARROW = 460; // minimum width for the text below the matrix

/** Returns the number of columns that fit into `width` pixels. */
export function columnsFor(width) {
  return Math.max(16, Math.min(512, Math.floor(width / 3)));
}

export class MatrixPicture {
  #matrix = null;
  #marked = null;
  #rows = [];
  #height = 20;
  #cell = WIDEST;
  #labels = el("div", { class: "rows" });
  #canvas = el("canvas", { tabindex: "0", role: "img" });
  #oldest = el("span", {});
  #newest = el("span", {});
  #empty = el("p", { class: "quiet", hidden: true }, "No live samples.");
  #ends = el("div", { class: "ends" }, this.#oldest, this.#newest);
  #picture;
  #surface;
  #again;

  constructor() {
    const cells = el("div", {}, this.#canvas, this.#ends);
    this.#picture = el("div", { class: "matrix" }, this.#labels, cells);
    this.node = el("div", {}, this.#picture, this.#empty);
    this.#surface = new Surface(this.#canvas, (context, width) => this.#draw(context, width));
    this.#again = pointable(this.#canvas, {
      at: (x, y) => this.#at(x, y),
      describe: (cell) => this.#describe(cell),
      step: (cell, dx, dy) => this.#step(cell, dx, dy),
      place: (cell) => ({ x: this.#left(cell.column + 1), y: this.#top(cell.row) + this.#height }),
      mark: (cell) => {
        this.#marked = cell;
        this.#surface.paint();
      },
    });
  }

  get columns() {
    return columnsFor(this.#canvas.clientWidth || 600);
  }

  close() {
    hide(this.#canvas);
    this.#surface.close();
  }

  show(matrix) {
    this.#matrix = matrix;
    const fields = Object.entries(matrix.produced).map(([name, produced]) => ({ kind: "field", name, produced }));
    const tasks = matrix.tasks.map((task) => ({ kind: "task", name: task.task, task }));
    this.#rows = [...fields, ...tasks];
    this.#height = this.#rows.length > MOST_TALL_ROWS ? 15 : 20;
    this.#picture.hidden = !matrix.samples.length;
    this.#empty.hidden = Boolean(matrix.samples.length);
    keyed(
      this.#labels,
      this.#rows,
      (row) => `${row.kind} ${row.name}`,
      () => label(),
    );
    this.#rows.forEach((row, place) => {
      const node = this.#labels.children[place];
      node.style.height = `${this.#height}px`;
      node.style.marginTop = place && place === this.#fields ? `${GAP}px` : "0";
      say(node.lastChild, this.#figure(row));
    });
    this.#canvas.style.height = `${this.#top(this.#rows.length)}px`;
    say(this.#oldest, `oldest: generation ${matrix.first_generation}`);
    this.#newest.hidden = matrix.live < 2;
    say(this.#newest, `newest: generation ${matrix.last_generation}`);
    mark(this.#canvas, "aria-label", this.#summary());
    if (this.#marked && this.#describable(this.#marked) === null) hide(this.#canvas);
    this.#again();
    this.#surface.paint();
  }

  get #fields() {
    return this.#rows.filter((row) => row.kind === "field").length;
  }

  #top(row) {
    return row * this.#height + (row >= this.#fields && this.#fields ? GAP : 0);
  }

  #left(column) {
    return Math.round(column * this.#cell);
  }

  #figure(row) {
    const { examined } = this.#matrix;
    return percent(sum(row.kind === "field" ? row.produced : row.task.claimed), sum(examined));
  }

  #summary() {
    const told = this.#rows.map(
      (row) => `${row.name} ${this.#figure(row)} ${row.kind === "field" ? "produced" : "claimed"}`,
    );
    return `${count(this.#matrix.live)} samples by age. ${told.join(", ")}. Arrow keys move through the parts.`;
  }

  #draw(context, width) {
    const { samples } = this.#matrix ?? { samples: [] };
    if (!samples.length) return;
    this.#cell = Math.min(WIDEST, width / samples.length);
    this.#ends.style.maxWidth = `${Math.max(MOST_NARROW, this.#left(samples.length))}px`;
    const gap = this.#cell >= 6 ? 1 : 0;
    this.#rows.forEach((row, place) => {
      const looks = this.#looks(row);
      for (const [first, end] of runs(looks, gap > 0)) {
        const left = this.#left(first);
        const box = [left, this.#top(place) + 1, this.#left(end) - left - gap, this.#height - 2];
        if (row.kind === "field") drawField(context, looks[first], box);
        else drawTask(context, looks[first], box);
      }
    });
    if (this.#marked) this.#outline(context, this.#marked, gap);
  }

  /** Returns a number per column of a row; adjacent columns with equal numbers are painted together. */
  #looks({ produced, task }) {
    const { examined } = this.#matrix;
    if (produced) return examined.map((all, column) => level(produced[column] / all));
    return examined.map((all, column) => {
      const [claimed, leased] = [level(task.claimed[column] / all), level(task.leased[column] / all)];
      return claimed * (LEVELS + 1) + leased;
    });
  }

  #outline(context, { row, column }, gap) {
    const left = this.#left(column);
    context.strokeStyle = palette().text;
    context.lineWidth = 1.5;
    context.strokeRect(left, this.#top(row) + 1, Math.max(2, this.#left(column + 1) - left - gap), this.#height - 2);
  }

  #at(x, y) {
    if (!this.#matrix) return null;
    const row = this.#rows.findIndex((_, place) => y >= this.#top(place) && y < this.#top(place) + this.#height);
    return this.#describable({ row, column: Math.floor(x / this.#cell) });
  }

  #describable({ row, column }) {
    const inside = row >= 0 && row < this.#rows.length && column >= 0 && column < this.#matrix.samples.length;
    return inside ? { row, column } : null;
  }

  #step(cell, dx, dy) {
    if (!this.#matrix?.samples.length) return null;
    if (cell === null) return this.#describable({ row: 0, column: 0 });
    return this.#describable({ row: cell.row + dy, column: cell.column + dx }) ?? cell;
  }

  #describe({ row, column }) {
    const { samples, examined, live } = this.#matrix;
    const { kind, name, produced, task } = this.#rows[row];
    const first = sum(samples.slice(0, column));
    const last = first + samples[column];
    const which = samples[column] === 1 ? count(last) : `${count(first + 1)} to ${count(last)}`;
    const lines = [`${kind} ${name}`, `sample ${which} of ${count(live)} by age${this.#generations(first, last)}`];
    const all = examined[column];
    if (kind === "field") lines.push(`${count(produced[column])} of ${count(all)} produced`);
    else {
      const [claimed, leased] = [task.claimed[column], task.leased[column]];
      lines.push(
        `${count(all - claimed)} unclaimed`,
        `${count(leased)} on lease`,
        `${count(claimed - leased)} claimed`,
      );
    }
    if (all < samples[column]) lines.push(`(examined ${count(all)} of ${count(samples[column])})`);
    return lines;
  }

  /** Generations are known only if no sample between the first and the last was removed. */
  #generations(first, last) {
    const { first_generation: from, last_generation: to, live } = this.#matrix;
    if (to - from + 1 !== live) return "";
    return last - first === 1 ? `, generation ${from + first}` : `, generations ${from + first} to ${from + last - 1}`;
  }
}

/** Returns runs of equal numbers, [first, end); with `apart`, one run per number. */
function runs(looks, apart) {
  const found = [];
  for (let column = 0; column < looks.length; column += 1) {
    const last = found.at(-1);
    if (!apart && last && looks[last[0]] === looks[column]) last[1] = column + 1;
    else found.push([column, column + 1]);
  }
  return found;
}

function drawField(context, look, box) {
  context.fillStyle = palette().shades[look];
  context.fillRect(...box);
}

function drawTask(context, look, [left, top, width, height]) {
  const colour = palette();
  const leased = ((look % (LEVELS + 1)) / LEVELS) * height;
  const taken = (Math.floor(look / (LEVELS + 1)) / LEVELS) * height;
  context.fillStyle = colour.unclaimed;
  context.fillRect(left, top, width, height);
  context.fillStyle = colour.claimed;
  context.fillRect(left, top + height - taken + leased, width, taken - leased);
  context.fillStyle = colour.leased;
  context.fillRect(left, top + height - taken, width, leased);
}

function label() {
  const node = el("div", { class: "row" }, el("span", { class: "name" }), el("span", { class: "figure" }));
  return {
    node,
    update(row) {
      mark(node, "title", row.name);
      mark(node, "data-kind", row.kind);
      say(node.firstChild, row.name);
    },
  };
}

function sum(numbers) {
  return numbers.reduce((total, value) => total + value, 0);
}
