// Schedules the rounds of requests. A round starts only after the previous one has ended, so that requests do not pile
// up on a slow service. Rounds are less frequent while the page is hidden or the service does not answer.

import { TokenNeeded, ServiceGone } from "./api.js";

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

  /** `round()` fetches and shows once. `onState({lost, lostAt, retryAt, why, paused})` receives the state. */
  constructor(round, onState) {
    this.#round = round;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.now();
    });
    window.addEventListener("online", () => this.now());
  }

  /** Starts a round immediately, or as soon as the current one has ended. */
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
      if (error instanceof TokenNeeded) {
        window.location.reload(); // the browser then asks for the token
        return;
      }
      // An error in this page is shown like a lost connection, and is also logged to the console.
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
