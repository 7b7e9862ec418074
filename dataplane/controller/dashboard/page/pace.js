// How often something that is dear may be asked for. Looking must not slow down what is looked at: an answer that took
// the service a while is not asked for again until a multiple of that has passed.

import { quickestMs } from "./api.js";

const REST = 20; // so that one picture takes 5 % of the service's time at most
const LONGEST_MS = 10000;

export class Pace {
  #next = 0;

  /** Whether it may be asked for now. */
  get due() {
    return performance.now() >= this.#next;
  }

  /** The answer of `ask()`, whose time is counted, but for what every answer takes on its way. */
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
