// Layout of the timeline, without drawing: a lane for each client, with a band for each kind of call, so that the kinds
// differ in position as well as in colour.

export const BANDS = ["put", "claim", "get", "clear"];
export const BAND = 7;
export const LANE = BANDS.length * BAND + 8;
const LANES = 64;

/** Groups spans into lanes, in the order of each client's first call: [{key, name, spans}]. */
export function lanesOf(spans) {
  const lanes = new Map();
  for (const span of spans) {
    if (span.what === "version") continue;
    const key = `${span.session} ${span.client}`;
    if (!lanes.has(key)) lanes.set(key, { key, name: span.client || `session ${span.session}`, spans: [] });
    lanes.get(key).spans.push(span);
  }
  return [...lanes.values()].slice(0, LANES);
}

/** Converts the waiting calls to spans marked `open`, which end at `time`, the current time. */
export function underWay({ now, waits }, time) {
  return waits.map((wait) => ({
    ...wait,
    name: wait.task || wait.fields.join(", "),
    start: time - Math.max(0, now - wait.since),
    end: time,
    open: true,
  }));
}

/** Returns the spans that set the version of a partition. */
export function versionsOf(spans) {
  return spans.filter((span) => span.what === "version");
}

/** The visible part of the timeline: it either follows the current time or stays fixed. */
export class View {
  follow = true;
  length = 60;
  #end = 0;

  /** Returns the end of the visible time; `now` is the latest time. */
  end(now) {
    return this.follow ? now : this.#end;
  }

  /** Zooms around the time `at`; a `factor` below 1 shows less time. */
  zoom(factor, now, at = null) {
    const end = this.end(now);
    const length = Math.max(0.05, Math.min(3600, this.length * factor));
    if (at !== null && !this.follow) this.#end = at + ((end - at) * length) / this.length;
    this.length = length;
  }

  /** Moves by `by` seconds, to earlier times if negative. At the latest time the view follows again. */
  move(by, now) {
    this.#end = Math.min(this.end(now) + by, now);
    this.follow = this.#end >= now;
  }

  /** Shows the last `length` seconds and follows the current time. */
  latest(length) {
    this.follow = true;
    this.length = length;
  }
}

/** Returns the span at `time` in a band of a lane, or the nearest within `reach` seconds, or null. */
export function spanAt(lane, band, time, reach) {
  let best = null;
  let nearest = reach;
  for (const span of lane.spans) {
    if (span.what !== BANDS[band]) continue;
    const off = Math.max(span.start - time, time - span.end, 0);
    if (off < nearest || (off === 0 && best !== null && span.end - span.start < best.end - best.start)) {
      best = span;
      nearest = off;
    }
  }
  return best;
}

/** Returns whether two spans are the same call; every response creates new objects. */
export function sameSpan(a, b) {
  const alike = a.session === b.session && a.what === b.what && Boolean(a.open) === Boolean(b.open);
  return alike && (a.open ? Math.abs(a.start - b.start) < 2 : a.start === b.start && a.end === b.end);
}

/** Returns [lane index, index in the lane] of a span, or [0, -1] if it was discarded. */
export function find(lanes, span) {
  for (const [number, lane] of lanes.entries()) {
    const place = lane.spans.findIndex((one) => sameSpan(one, span));
    if (place >= 0) return [number, place];
  }
  return [0, -1];
}

/** Returns at most `most` round times for an axis from `start` to `end`. */
export function ticks(start, end, most) {
  const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800];
  const step = steps.find((each) => (end - start) / each <= most) ?? 3600;
  const first = Math.ceil(start / step);
  const found = [];
  for (let place = first; place * step <= end; place += 1) found.push(place * step);
  return { step, moments: found };
}
