// A canvas that is sharp at every pixel ratio, follows its size and the theme, and paints at most once per frame.
// Updates between two frames are merged, and each frame is painted completely, so that nothing flickers.

import { onTheme, palette } from "./palette.js";

export class Surface {
  #draw;
  #frame = 0;
  #size = { width: 0, height: 0 };
  #resized;
  #theme;

  /** `draw(context, width, height)` paints everything, in CSS pixels. */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.#draw = draw;
    this.#resized = new ResizeObserver(() => this.paint());
    this.#resized.observe(canvas);
    this.#theme = onTheme(() => this.paint());
  }

  get width() {
    return this.canvas.clientWidth;
  }

  paint() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#now();
    });
  }

  close() {
    this.#resized.disconnect();
    this.#theme();
    cancelAnimationFrame(this.#frame);
  }

  #now() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    const size = { width: Math.round(width * ratio), height: Math.round(height * ratio) };
    if (size.width !== this.#size.width || size.height !== this.#size.height) {
      Object.assign(this.canvas, size);
      this.#size = size;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${palette().font}`;
    context.textBaseline = "middle";
    this.#draw(context, width, height);
  }
}

/** Fills a rectangle with thin diagonals, which are recognizable without colour. */
export function hatch(context, x, y, width, height, colour, step = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  const first = Math.floor((x - height) / step) * step;
  for (let at = first; at < x + width; at += step) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
