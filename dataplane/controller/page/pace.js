// Limits the rate of expensive requests, so that the page does not slow down the service: a request is repeated only
// after a multiple of the time that the previous one took.

import { quickestMs } from "./api.js";

const REST = 20; // limits each chart to 5 % of the service's time
const LONGEST_MS = 10000;

export class Pace {
  #next = 0;

  /** Whether the next request may start now. */
  get due() {
    return performance.now() >= this.#next;
  }

  /** Returns the result of `ask()` and measures its time, minus the network round trip. */
  async time(ask) {
    const began = performance.now();
    try {
      return await ask();
    } finally {
      const now = performance.now();
      this.#next = now + Math.min(LONGEST_MS, REST * (now - began - quickestMs()));
    }
  }
}
