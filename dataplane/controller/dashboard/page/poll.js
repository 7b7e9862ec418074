// When to ask. One round at a time: the next begins a while after the last has ended, so that requests never pile up,
// however slow the service is. Nobody looking, or nobody answering, makes the rounds rarer.

import { LoginNeeded, ServiceGone } from "./api.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 15000;
const RETRY_MS = [1000, 2000, 4000, 8000, 15000];

export class Poll {
  #round;
  #onState;
  #timer = null;
  #running = false;
  #again = false;
  #failures = 0;
  #lostAt = null;
  #paused = false;

  /** `round()` fetches and shows once. `onState({lost, lostAt, retryAt, why, paused})` hears how it went. */
  constructor(round, onState) {
    this.#round = round;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.now();
    });
    window.addEventListener("online", () => this.now());
  }

  /** A round at once, or as soon as the one that runs has ended. */
  now() {
    if (this.#paused) return;
    if (this.#running) this.#again = true;
    else void this.#run();
  }

  get paused() {
    return this.#paused;
  }

  set paused(value) {
    this.#paused = value;
    clearTimeout(this.#timer);
    this.#tell({});
    if (!value) this.now();
  }

  async #run() {
    this.#running = true;
    this.#again = false;
    clearTimeout(this.#timer);
    const began = performance.now();
    let why = "";
    try {
      await this.#round();
      this.#failures = 0;
      this.#lostAt = null;
    } catch (error) {
      if (error instanceof LoginNeeded) {
        window.location.reload(); // the same address answers with the login form
        return;
      }
      // A fault of this page is shown the same way as a lost service, and goes to the console as well.
      if (!(error instanceof ServiceGone)) console.error(error);
      this.#failures += 1;
      this.#lostAt ??= Date.now();
      why = error.message;
    } finally {
      this.#running = false;
    }
    this.#plan(performance.now() - began, why);
  }

  #plan(took, why) {
    if (this.#paused) return this.#tell({ why });
    let wait = document.hidden ? HIDDEN_MS : Math.max(EVERY_MS - took, EVERY_MS / 4);
    if (this.#failures) wait = RETRY_MS[Math.min(this.#failures, RETRY_MS.length) - 1];
    else if (this.#again) wait = 0;
    this.#timer = setTimeout(() => this.now(), wait);
    this.#tell({ retryAt: Date.now() + wait, why });
    return undefined;
  }

  #tell(more) {
    this.#onState({ lost: this.#failures > 0, lostAt: this.#lostAt, paused: this.#paused, ...more });
  }
}
