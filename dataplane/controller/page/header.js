// The top of the page: identity of the service, state of the connection, and six key figures.

import { mark, say } from "./dom.js";
import { brief, bytes, clock, count, many, percent, seconds } from "./format.js";
import { serviceTime } from "./api.js";

export class Header {
  #state = null;
  #epoch = null;
  #answered = null;

  constructor() {
    say(find("address"), window.location.host);
    setInterval(() => this.#tellLost(), 1000); // updates the time since the connection was lost, also between requests
  }

  refresh({ stats, waits }, attention, rates) {
    this.#answered = serviceTime();
    if (this.#epoch !== stats.epoch) say(find("epoch"), `epoch ${stats.epoch}`);
    this.#epoch = stats.epoch;
    const health = attention.count
      ? `${count(attention.count)} need${attention.count === 1 ? "s" : ""} attention`
      : "healthy";
    say(find("health"), health);
    mark(find("health"), "data-level", attention.worst);
    say(find("as-of"), clock(this.#answered));
    this.#tiles(stats, waits, rates);
    const live = stats.partitions.reduce((total, one) => total + one.live, 0);
    document.title = `${attention.count ? `(${attention.count}) ` : ""}${brief(live)} samples – data plane`;
  }

  #tiles(stats, { now, waits, total: waiting }, rates) {
    const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);
    say(find("tile-live"), count(sum(stats.partitions, "live")));
    say(
      find("tile-live-more"),
      `${bytes(sum(stats.partitions, "live_bytes"))} in ${many(stats.partitions.length, "partition")}`,
    );
    const [used, capacity] = [sum(stats.units, "used_bytes"), sum(stats.units, "capacity_bytes")];
    say(find("tile-memory"), percent(used, capacity));
    say(find("tile-memory-more"), `${bytes(used)} of ${bytes(capacity)}`);
    say(find("tile-waits"), count(waiting));
    const longest = waits.length ? seconds(Math.max(0, now - Math.min(...waits.map((wait) => wait.since)))) : "";
    say(find("tile-waits-more"), longest ? `longest for ${longest}` : "no calls waiting");
    say(find("tile-clients"), count(stats.sessions.length));
    say(find("tile-clients-more"), `${count(sum(stats.sessions, "pins"))} reading now`);
    if (!rates) return;
    say(find("tile-in"), `${brief(rates.puts)}/s`);
    say(find("tile-in-more"), `${bytes(rates.put_bytes)}/s put`);
    say(find("tile-out"), `${brief(rates.claims)}/s`);
    say(find("tile-out-more"), `${bytes(rates.get_bytes)}/s read`);
  }

  /** Shows the connection state that the poll reports. */
  connection(state) {
    this.#state = state;
    mark(document.documentElement, "data-lost", state.lost);
    const word = state.paused ? "paused" : state.lost ? "connection lost" : "live";
    say(find("connection"), word);
    mark(find("connection"), "data-level", state.lost ? "bad" : state.paused ? "warn" : "well");
    this.#tellLost();
  }

  #tellLost() {
    const { lost, lostAt, retryAt, why } = this.#state ?? {};
    find("lost").hidden = !lost;
    if (!lost) return;
    const since = seconds(Math.max(1, Math.round((Date.now() - lostAt) / 1000)));
    const next = retryAt ? Math.max(0, Math.ceil((retryAt - Date.now()) / 1000)) : 0;
    const seen = this.#answered === null ? "" : ` The data below is from ${clock(this.#answered)}.`;
    say(find("lost-why"), `Connection lost: ${why || "no response"}.${seen}`);
    say(find("lost-next"), `${since} ago; ${next ? `next try in ${next} s` : "trying now"}.`);
  }
}

function find(id) {
  return document.getElementById(id);
}
