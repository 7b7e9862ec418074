// A small chart over time: lines or one area, axes with round numbers, and a tooltip with the values at any time.

import { el, keyed, mark, say } from "./dom.js";
import { clock } from "./format.js";
import { palette } from "./palette.js";
import { pointable } from "./point.js";
import { Surface } from "./surface.js";

const LEFT = 58;
const BOTTOM = 18;
const TOP = 8;
const RIGHT = 8;

export class Chart {
  #data = { times: [], step: 1, series: [] };
  #marked = null;
  #canvas = el("canvas", { tabindex: "0", role: "img", class: "chart" });
  #legend = el("div", { class: "legend" });
  #surface;
  #again;
  #write;
  #base;
  #title;

  /** `write(value)` formats a value; `base` of the round numbers on the axis: 10, or 1024 for bytes. */
  constructor(title, { write, base = 10 }) {
    this.#title = title;
    this.#write = write;
    this.#base = base;
    this.node = el("figure", {}, el("figcaption", {}, el("span", {}, title), this.#legend), this.#canvas);
    this.#surface = new Surface(this.#canvas, (context, width, height) => this.#draw(context, width, height));
    this.#again = pointable(this.#canvas, {
      at: (x) => this.#at(x),
      describe: (place) => this.#describe(place),
      step: (place, dx) => this.#step(place, dx),
      place: (place) => ({ x: this.#x(place, this.#surface.width), y: TOP + 20 }),
      mark: (place) => {
        this.#marked = place;
        this.#surface.paint();
      },
    });
  }

  /**
   * `series`: [{name, colour, values, now, dash, area}], each with one value per entry of `times` (Unix seconds, evenly
   * spaced) and the current value `now`.
   */
  show(times, series) {
    this.#data = { times, step: times.length > 1 ? times[1] - times[0] : 1, series };
    if (this.#marked !== null && this.#marked >= times.length) this.#marked = null;
    keyed(
      this.#legend,
      series,
      (one) => one.name,
      (one) => {
        const figure = el("b", {});
        const node = el("span", { class: `key ${one.colour}` }, `${one.name} `, figure);
        return { node, update: (now) => say(figure, this.#write(now.now)) };
      },
    );
    const told = series.map((one) => `${one.name} ${this.#write(one.now)}`).join(", ");
    mark(this.#canvas, "aria-label", `${this.#title}: now ${told}. Arrow keys move through time.`);
    this.#again();
    this.#surface.paint();
  }

  #x(place, width) {
    const { times } = this.#data;
    return LEFT + ((width - LEFT - RIGHT) * place) / Math.max(1, times.length - 1);
  }

  #at(x) {
    const { times } = this.#data;
    const place = Math.round(((x - LEFT) / (this.#surface.width - LEFT - RIGHT)) * (times.length - 1));
    return place >= 0 && place < times.length && x >= LEFT - 10 ? place : null;
  }

  #step(place, dx) {
    const last = this.#data.times.length - 1;
    if (last < 0) return null;
    return place === null ? last : Math.max(0, Math.min(last, place + dx));
  }

  #describe(place) {
    const { times, series } = this.#data;
    return [clock(times[place]), ...series.map((one) => `${one.name} ${this.#write(one.values[place])}`)];
  }

  #draw(context, width, height) {
    const { times, series } = this.#data;
    const colour = palette();
    const top = ceiling(Math.max(0, ...series.flatMap((one) => one.values)), this.#base);
    const y = (value) => height - BOTTOM - ((height - BOTTOM - TOP) * value) / top;
    context.strokeStyle = colour.line;
    context.fillStyle = colour.muted;
    context.lineWidth = 1;
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(top * share)) + 0.5;
      line(context, LEFT, at, width - RIGHT, at);
      context.fillText(this.#write(top * share).replace(".0 ", " "), LEFT - 6, at);
    }
    this.#drawTimes(context, width, height);
    if (times.length < 2) return;
    for (const one of series) this.#drawSeries(context, one, width, y);
    if (this.#marked !== null) {
      const at = this.#x(this.#marked, width);
      context.strokeStyle = colour.text;
      line(context, at, TOP, at, height - BOTTOM);
    }
  }

  #drawTimes(context, width, height) {
    const { times, step } = this.#data;
    if (!times.length) return;
    const spoken = Math.max(1, Math.floor(width / 90));
    const span = times.length * step;
    const every = [10, 15, 30, 60, 120, 180, 300, 600].find((each) => span / each <= spoken) ?? 900;
    context.textAlign = "center";
    times.forEach((time, place) => {
      if (Math.floor(time / every) === Math.floor((time - step) / every)) return;
      const at = this.#x(place, width);
      const text = every < 60 ? clock(time) : clock(time).slice(0, 5);
      if (at > LEFT + 14 && at < width - 24) context.fillText(text, at, height - 7);
    });
  }

  #drawSeries(context, one, width, y) {
    context.strokeStyle = palette()[one.colour];
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.setLineDash(one.dash ?? []);
    context.beginPath();
    one.values.forEach((value, place) => context.lineTo(this.#x(place, width), y(value)));
    context.stroke();
    context.setLineDash([]);
    if (!one.area) return;
    context.lineTo(this.#x(one.values.length - 1, width), y(0));
    context.lineTo(this.#x(0, width), y(0));
    context.globalAlpha = 0.18;
    context.fillStyle = palette()[one.colour];
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Returns the smallest round number that is at least `most`. */
export function ceiling(most, base) {
  if (most <= 0) return base === 10 ? 1 : base;
  const power = base ** Math.floor(Math.log(most) / Math.log(base));
  const rounds = base === 10 ? [1, 2, 4, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  return power * (rounds.find((round) => round * power >= most) ?? base);
}

function line(context, x, y, toX, toY) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}
