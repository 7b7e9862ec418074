// The waiting calls and the clients.

import { el, keyed, mark, say } from "./dom.js";
import { bytes, clientName, count, host, many, seconds } from "./format.js";

export class Waits {
  #body = document.getElementById("waits");
  #table = document.getElementById("waits-table");
  #none = document.getElementById("no-waits");
  #some = document.getElementById("some-waits");
  #clients = document.getElementById("clients");
  #clientsTold = document.getElementById("clients-told");

  refresh({ stats, waits }) {
    this.#none.hidden = waits.waits.length > 0;
    this.#table.hidden = !waits.waits.length;
    this.#some.hidden = waits.waits.length >= waits.total;
    say(this.#some, `The ${count(waits.waits.length)} longest-waiting of ${count(waits.total)} calls.`);
    keyed(
      this.#body,
      numbered(waits.waits, waits.now),
      (item) => item.key,
      () => row(8, fillWait),
    );
    say(this.#clientsTold, many(stats.sessions.length, "client"));
    keyed(
      this.#clients,
      stats.sessions,
      (session) => session.session,
      () => row(7, fillClient),
    );
  }
}

/** Adds a unique key to each call; a counter distinguishes equal calls of one client. */
function numbered(waits, now) {
  const seen = new Map();
  return waits.map((wait) => {
    const alike = JSON.stringify([wait.session, wait.what, wait.partition, wait.task, wait.fields, wait.since]);
    seen.set(alike, (seen.get(alike) ?? 0) + 1);
    return { key: `${alike} ${seen.get(alike)}`, wait, now };
  });
}

function fillWait(cells, { wait, now }) {
  const isPut = wait.what === "put";
  const amount = isPut ? bytes : count;
  const left = wait.until === null ? "–" : `in ${seconds(Math.max(0, wait.until - now))}`;
  const told = [
    clientName(wait.client, wait.session),
    isPut ? "put" : `claim for ${wait.task}`,
    wait.partition,
    wait.fields.join(", ") || "–",
    `${amount(wait.wanted)}${isPut ? "" : wait.wanted === 1 ? " sample" : " samples"}`,
    `${amount(wait.ready)}${isPut ? " free" : " ready"}`,
    seconds(Math.max(0, now - wait.since)),
    left,
  ];
  told.forEach((text, place) => say(cells[place], text));
  mark(cells[1], "class", `op ${wait.what}`);
}

function fillClient(cells, session) {
  const told = [
    clientName(session.name, session.session),
    host(session.host),
    session.state,
    `${seconds(session.silent_s)} ago`,
    count(session.parked),
    count(session.reservations),
    count(session.pins),
  ];
  told.forEach((text, place) => say(cells[place], text));
}

function row(columns, fill) {
  const cells = Array.from({ length: columns }, (_, place) => (place ? el("td", {}) : el("th", { scope: "row" })));
  return { node: el("tr", {}, ...cells), update: (item) => fill(cells, item) };
}
