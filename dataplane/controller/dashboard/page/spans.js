// Where the spans of the timeline lie: a lane for each client, in it a band for each kind of call, so that the kinds
// can be told apart by place as well as by colour. No drawing here.

export const BANDS = ["put", "claim", "get", "clear"];
export const BAND = 7;
export const LANE = BANDS.length * BAND + 8;
const LANES = 64;

/** The lanes of these spans, in the order in which the clients first showed up: [{key, name, spans}]. */
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

/** The calls that wait now, as spans that have not ended: `open`. They end at `time`, which is now. */
export function underWay({ now, waits }, time) {
  return waits.map((wait) => ({
    ...wait,
    name: wait.task || wait.fields.join(", "),
    start: time - Math.max(0, now - wait.since),
    end: time,
    open: true,
  }));
}

/** The steps: where a partition's version was set. */
export function versionsOf(spans) {
  return spans.filter((span) => span.what === "version");
}

/** The part of time that is shown: it follows now, or stays where it was put. */
export class View {
  follow = true;
  length = 60;
  #end = 0;

  /** The last moment shown, with `now` being the latest there is. */
  end(now) {
    return this.follow ? now : this.#end;
  }

  /** `factor` below 1 shows less time, around the moment `at`. */
  zoom(factor, now, at = null) {
    const end = this.end(now);
    const length = Math.max(0.05, Math.min(3600, this.length * factor));
    if (at !== null && !this.follow) this.#end = at + ((end - at) * length) / this.length;
    this.length = length;
  }

  /** Shows `by` seconds later, or earlier if it is negative. At the latest moment it follows again. */
  move(by, now) {
    this.#end = Math.min(this.end(now) + by, now);
    this.follow = this.#end >= now;
  }

  /** Puts the latest moment and so many seconds before it into view. */
  latest(length) {
    this.follow = true;
    this.length = length;
  }
}

/** The span at a moment in a band of a lane, or the nearest within `reach` seconds; null if there is none. */
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

/** Whether two are the same call: every answer of the service brings new objects. */
export function sameSpan(a, b) {
  const alike = a.session === b.session && a.what === b.what && Boolean(a.open) === Boolean(b.open);
  return alike && (a.open ? Math.abs(a.start - b.start) < 2 : a.start === b.start && a.end === b.end);
}

/** The lane of a span and its place there: [lane, place]; [0, -1] if it is forgotten. */
export function find(lanes, span) {
  for (const [number, lane] of lanes.entries()) {
    const place = lane.spans.findIndex((one) => sameSpan(one, span));
    if (place >= 0) return [number, place];
  }
  return [0, -1];
}

/** Round moments for an axis of so many seconds, at most `most` of them. */
export function ticks(start, end, most) {
  const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800];
  const step = steps.find((each) => (end - start) / each <= most) ?? 3600;
  const first = Math.ceil(start / step);
  const found = [];
  for (let place = first; place * step <= end; place += 1) found.push(place * step);
  return { step, moments: found };
}
