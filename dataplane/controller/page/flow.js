// Throughput: samples and bytes over time, and live bytes.

import { ask, learnTime } from "./api.js";
import { Chart } from "./chart.js";
import { brief, bytes } from "./format.js";

const POINTS = 60; // maximum number of points per line; more would be noisy

export class Flow {
  #samples = new Chart("samples per second", { write: (value) => brief(value) });
  #bytes = new Chart("bytes per second", { write: (value) => bytes(value), base: 1024 });
  #held = new Chart("live bytes", { write: (value) => bytes(value), base: 1024 });
  #span = document.getElementById("flow-span");
  #flow = null;

  constructor() {
    document.getElementById("flow-charts").append(this.#samples.node, this.#bytes.node, this.#held.node);
    this.#span.addEventListener("change", () => this.#show());
  }

  /** Recent rates per second, for the figures at the top. */
  get rates() {
    const flow = this.#flow;
    if (!flow) return null;
    const names = ["puts", "claims", "gets", "clears", "put_bytes", "get_bytes"];
    return Object.fromEntries(names.map((name) => [name, recent(flow[name])]));
  }

  async refresh() {
    this.#flow = await ask("flow");
    learnTime(this.#flow.times.at(-1));
    this.#show();
  }

  #show() {
    if (!this.#flow) return;
    const span = Number(this.#span.value);
    const bins = binsOf(this.#flow.times, span, Math.max(1, span / POINTS));
    const times = bins.map(([, end]) => this.#flow.times[end - 1]);
    const series = (name, colour, values, more = {}) => {
      const all = this.#flow[values];
      const write = more.area ? (bin) => all[bin[1] - 1] : (bin) => mean(all, bin);
      return { name, colour, values: bins.map(write), now: more.area ? all.at(-1) : recent(all), ...more };
    };
    this.#samples.show(times, [
      series("put", "put", "puts"),
      series("claimed", "claim", "claims", { dash: [6, 3] }),
      series("read", "get", "gets", { dash: [2, 2] }),
      series("cleared", "clear", "clears", { dash: [8, 3, 2, 3] }),
    ]);
    this.#bytes.show(times, [series("put", "put", "put_bytes"), series("read", "get", "get_bytes", { dash: [2, 2] })]);
    this.#held.show(times, [series("live", "live", "live_bytes", { area: true })]);
  }
}

/**
 * Divides the last `span` seconds into bins of `size`: [first, end) indices into `times`. Bins begin at multiples of
 * the size, so that the value of a point does not change over time. An incomplete bin is omitted.
 */
export function binsOf(times, span, size) {
  const first = Math.max(
    0,
    times.findIndex((time) => time > times.at(-1) - span),
  );
  const bins = [];
  let begin = first;
  for (let place = first; place < times.length; place += 1) {
    if (times[place] % size) continue;
    bins.push([begin, place + 1]);
    begin = place + 1;
  }
  return bins;
}

function mean(values, [first, end]) {
  let total = 0;
  for (let place = first; place < end; place += 1) total += values[place];
  return total / (end - first);
}

/** Returns the mean of the last few seconds, because single seconds vary too much. */
function recent(values, seconds = 5) {
  return mean(values, [Math.max(0, values.length - seconds), values.length]);
}
