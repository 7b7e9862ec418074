// The timeline of a run: a lane for each client, its calls as bars, and weight versions as lines through all lanes.

import { ask, serviceTime } from "./api.js";
import { el, keyed, mark, say, Seen } from "./dom.js";
import { bytes, clock, many, seconds } from "./format.js";
import { Pace } from "./pace.js";
import { palette } from "./palette.js";
import { pointable } from "./point.js";
import { BAND, BANDS, find, LANE, lanesOf, sameSpan, spanAt, ticks, underWay, versionsOf, View } from "./spans.js";
import { hatch, Surface } from "./surface.js";

const AXIS = 22;
const KEPT = 2000; // number of calls that the service keeps
const SHORT_S = 30;
const LONG_S = 60;
const REACH = 4; // tolerance of the pointer in pixels

export class Timeline {
  #node = document.getElementById("timeline");
  #labels = el("div", { class: "lanes" });
  #canvas = el("canvas", { tabindex: "0", role: "img" });
  #none = document.getElementById("no-spans");
  #told = document.getElementById("timeline-told");
  #lanes = [];
  #versions = [];
  #view = new View();
  #marked = null;
  #now = 0;
  #pace = new Pace();
  #known = -Infinity; // the service has discarded calls that ended before
  #section = document.getElementById("timeline-section");
  #surface;
  #again;
  #seen;

  constructor(onSeen) {
    this.#seen = new Seen(onSeen);
    this.#seen.watch(this.#section);
    this.#node.append(this.#labels, this.#canvas);
    this.#surface = new Surface(this.#canvas, (context, width, height) => this.#draw(context, width, height));
    this.#again = pointable(this.#canvas, {
      at: (x, y) => this.#at(x, y),
      describe: (span) => describe(span),
      step: (span, dx, dy) => this.#step(span, dx, dy),
      place: (span) => this.#place(span),
      mark: (span) => {
        this.#marked = span;
        this.#surface.paint();
      },
    });
    this.#listen();
  }

  async refresh({ waits }) {
    if (!this.#seen.has(this.#section) || !this.#pace.due) return;
    const { spans } = await this.#pace.time(() => ask("timeline"));
    this.#known = spans.length < KEPT ? -Infinity : spans[0].end;
    spans.push(...underWay(waits, serviceTime()));
    this.#lanes = lanesOf(spans);
    this.#versions = versionsOf(spans);
    this.#now = Math.max(serviceTime(), ...spans.slice(-200).map((span) => span.end));
    if (spans.length && !this.#none.hidden) this.#fit(spans[0].start);
    this.#none.hidden = this.#lanes.length > 0;
    this.#node.hidden = !this.#lanes.length;
    this.#canvas.style.height = `${AXIS + this.#lanes.length * LANE}px`;
    keyed(
      this.#labels,
      this.#lanes,
      (lane) => lane.key,
      ({ name }) => {
        return { node: el("div", { class: "lane", title: name }, name), update() {} };
      },
    );
    const told = `${many(spans.length, "call")} of ${many(this.#lanes.length, "client")} over time`;
    mark(this.#canvas, "aria-label", `${told}. Arrow keys go from call to call, plus and minus zoom, 0 follows.`);
    this.#again();
    this.#paint();
  }

  /** Shows a short history completely at first, so that its calls are not at the right edge. */
  #fit(first) {
    this.#view.latest(Math.max(SHORT_S, Math.min(LONG_S, (this.#now - first) * 1.1)));
  }

  #paint() {
    const what = this.#view.follow ? "following" : `until ${clock(this.#view.end(this.#now))}`;
    say(this.#told, `${seconds(this.#view.length)}, ${what}`);
    this.#surface.paint();
  }

  #listen() {
    const zoom = (factor, at = null) => {
      this.#view.zoom(factor, this.#now, at);
      this.#paint();
    };
    const move = (share) => {
      this.#view.move(share * this.#view.length, this.#now);
      this.#paint();
    };
    const follow = (length) => {
      this.#view.latest(length);
      this.#paint();
    };
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("zoom-in", () => zoom(0.5));
    on("zoom-out", () => zoom(2));
    on("earlier", () => move(-0.5));
    on("later", () => move(0.5));
    on("follow", () => follow(LONG_S));
    this.#canvas.addEventListener("keydown", (event) => {
      const keys = {
        "+": () => zoom(0.5),
        "=": () => zoom(0.5),
        "-": () => zoom(2),
        0: () => follow(LONG_S),
        "<": () => move(-0.5),
        ">": () => move(0.5),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    // Without a modifier, the wheel scrolls the page.
    this.#canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.shiftKey) return;
        event.preventDefault();
        if (event.shiftKey) move((event.deltaY || event.deltaX) > 0 ? 0.1 : -0.1);
        else zoom(event.deltaY > 0 ? 1.25 : 0.8, this.#time(event.offsetX));
      },
      { passive: false },
    );
    this.#drag(move);
  }

  #drag(move) {
    let last = null;
    this.#canvas.addEventListener("pointerdown", (event) => {
      last = event.clientX;
      this.#canvas.setPointerCapture(event.pointerId);
    });
    this.#canvas.addEventListener("pointermove", (event) => {
      if (last === null || event.clientX === last) return;
      move((last - event.clientX) / this.#surface.width);
      last = event.clientX;
    });
    for (const name of ["pointerup", "pointercancel"]) this.#canvas.addEventListener(name, () => (last = null));
  }

  #x(time, width = this.#surface.width) {
    return ((time - this.#view.end(this.#now) + this.#view.length) / this.#view.length) * width;
  }

  #time(x) {
    return this.#view.end(this.#now) - this.#view.length * (1 - x / this.#surface.width);
  }

  #draw(context, width, height) {
    const colour = palette();
    this.#drawAxis(context, width, height, colour);
    const forgotten = Math.min(width, this.#x(this.#known, width));
    if (forgotten > 0) hatch(context, 0, AXIS, forgotten, height - AXIS, colour.line);
    this.#lanes.forEach((lane, place) => {
      const top = AXIS + place * LANE;
      if (place % 2 === 0) {
        context.fillStyle = colour.inset;
        context.fillRect(0, top, width, LANE);
      }
      for (const span of lane.spans) this.#drawSpan(context, span, top, width, colour);
    });
    for (const version of this.#versions) {
      const x = Math.round(this.#x(version.start, width)) + 0.5;
      if (x < 0 || x > width) continue;
      context.strokeStyle = colour.version;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, height);
      context.stroke();
      context.setLineDash([]);
    }
  }

  #drawAxis(context, width, height, colour) {
    const end = this.#view.end(this.#now);
    const { step, moments } = ticks(end - this.#view.length, end, Math.max(2, width / 100));
    context.fillStyle = colour.muted;
    context.strokeStyle = colour.line;
    context.textAlign = "center";
    for (const moment of moments) {
      const x = Math.round(this.#x(moment, width)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, height);
      context.stroke();
      if (x > 30 && x < width - 30) context.fillText(clock(moment, step < 1), x, 8);
    }
  }

  #drawSpan(context, span, top, width, colour) {
    const left = this.#x(span.start, width);
    const right = this.#x(span.end, width);
    if (right < 0 || left > width) return;
    const y = top + 4 + BANDS.indexOf(span.what) * BAND;
    context.fillStyle = colour[span.what];
    context.globalAlpha = span.open ? 0.4 : 1;
    context.fillRect(left, y, Math.max(2, right - left), BAND - 1);
    context.globalAlpha = 1;
    if (!this.#marked || !sameSpan(span, this.#marked)) return;
    context.strokeStyle = colour.text;
    context.lineWidth = 1.5;
    context.strokeRect(left, y, Math.max(2, right - left), BAND - 1);
    context.lineWidth = 1;
  }

  #at(x, y) {
    const reach = (REACH * this.#view.length) / this.#surface.width;
    const time = this.#time(x);
    const lane = this.#lanes[Math.floor((y - AXIS) / LANE)];
    const band = Math.floor((((y - AXIS) % LANE) - 4) / BAND);
    const found = lane ? spanAt(lane, band, time, reach) : null;
    return found ?? this.#versions.find((one) => Math.abs(one.start - time) < reach) ?? null;
  }

  #step(span, dx, dy) {
    const [place, at] = span ? find(this.#lanes, span) : [0, -1];
    const lane = this.#lanes[Math.max(0, Math.min(this.#lanes.length - 1, place + dy))];
    if (!lane) return null;
    const next = at < 0 || dy ? lane.spans.length - 1 : at + dx;
    return lane.spans[Math.max(0, Math.min(lane.spans.length - 1, next))];
  }

  #place(span) {
    const [lane] = find(this.#lanes, span);
    const x = Math.max(0, Math.min(this.#surface.width, this.#x(span.end)));
    return { x, y: AXIS + (lane + 1) * LANE };
  }
}

function describe(span) {
  const who = span.client || `session ${span.session}`;
  if (span.what === "version")
    return [`${span.partition}: ${span.name}`, `set by ${who} at ${clock(span.start, true)}`];
  const lines = [`${span.what} ${span.name}`, `${who}, partition ${span.partition}`];
  if (span.open) return [...lines, `waits since ${clock(span.start, true)}`];
  if (span.samples) lines.push(many(span.samples, "sample") + (span.bytes ? `, ${bytes(span.bytes)}` : ""));
  lines.push(`${clock(span.start, true)}, took ${seconds(span.end - span.start)}`);
  return lines;
}
