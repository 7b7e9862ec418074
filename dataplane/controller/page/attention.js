// Problems that need attention, and calls that wait, with the reasons. The sentences are built from the same data as
// the rest of the page.

import { ask, Refused } from "./api.js";
import { el, keyed, mark, say } from "./dom.js";
import { bytes, clientName, count, host, many, names, percent, seconds } from "./format.js";

const PATIENCE_S = 5; // shorter waits of claims are normal in a pipeline
const SILENT_S = 10;
const WHYS = 3; // number of reasons fetched per round

/**
 * Returns the problems, worst first: [{key, level, text, why?}]. `level` is "bad" or "warn". `why` is the task to fetch
 * the reason for. `stats` and `waits` are the answers of the service.
 */
export function troubles(stats, waits) {
  return [...aboutUnits(stats), ...aboutPartitions(stats), ...aboutWaits(waits), ...aboutSessions(stats)].sort(
    (a, b) => (b.level === "bad") - (a.level === "bad"),
  );
}

function aboutUnits({ units }) {
  if (!units.length) {
    return [trouble("units", "bad", "No storage unit: puts cannot succeed. Start one with tq unit.")];
  }
  return units.flatMap((unit) => {
    const who = `Storage unit ${unit.unit} (${unit.name})`;
    const found = [];
    if (!unit.connected) {
      found.push(trouble(`gone ${unit.unit}`, "bad", `${who} is not connected: its rows cannot be read.`));
    }
    if (unit.problem) found.push(trouble(`grow ${unit.unit}`, "bad", `${who} cannot grow: ${unit.problem}`));
    if (unit.pressed) {
      const share = `${percent(unit.used_bytes, unit.limit_bytes)} of the ${bytes(unit.limit_bytes)}`;
      const text = `${who} is filling up: ${share} that new rows may use is used. Clear consumed samples.`;
      found.push(trouble(`full ${unit.unit}`, "warn", text));
    }
    return found;
  });
}

function aboutPartitions({ partitions }) {
  return partitions.flatMap((one) => {
    const found = [];
    if (one.pressed) {
      const share = percent(one.used_bytes, one.limit_bytes ?? one.budget_bytes);
      const text = `Partition ${one.partition} is near its budget: ${share} of the space for new rows is used.`;
      found.push(trouble(`budget ${one.partition}`, "warn", text));
    }
    if (one.evicted_unconsumed) {
      const lost = many(one.evicted_unconsumed, "sample");
      const text = `Partition ${one.partition} evicted ${lost} before consumption.`;
      found.push(trouble(`lost ${one.partition}`, "warn", text));
    }
    return found;
  });
}

function aboutWaits({ now, waits, total = waits.length }) {
  const others = (calls, noun) => {
    if (calls.length < 2) return "";
    return ` ${total > waits.length ? "At least " : ""}${many(calls.length - 1, `more ${noun}`)} too.`;
  };
  const puts = waits.filter((wait) => wait.what === "put");
  const found = [];
  if (puts.length) {
    const first = puts.reduce((a, b) => (a.since <= b.since ? a : b));
    const who = clientName(first.client, first.session);
    const space = `it needs ${bytes(first.wanted)}, ${bytes(first.ready)} are free`;
    const waited = seconds(age(now, first));
    const text = `A put of ${who} has waited ${waited} for space in ${first.partition}: ${space}.${others(puts, "put")}`;
    found.push(trouble("puts", "bad", text));
  }
  const tasks = new Map();
  for (const wait of waits) {
    if (wait.what !== "claim" || age(now, wait) < PATIENCE_S) continue;
    const key = JSON.stringify([wait.partition, wait.task]);
    tasks.set(key, [...(tasks.get(key) ?? []), wait]);
  }
  for (const [key, claims] of tasks) {
    const first = claims.reduce((a, b) => (a.since <= b.since ? a : b));
    const who = clientName(first.client, first.session);
    const wants = `${many(first.wanted, "sample")}${first.fields.length ? ` with ${names(first.fields)}` : ""}`;
    const text =
      `Task ${first.task} of ${first.partition}: ${who} has waited ${seconds(age(now, first))} for ${wants}; ` +
      `${count(first.ready)} ready.${others(claims, "claim")}`;
    found.push({ ...trouble(key, "warn", text), why: { partition: first.partition, task: first.task } });
  }
  return found;
}

function aboutSessions({ sessions }) {
  return sessions
    .filter((session) => session.silent_s > SILENT_S)
    .map((session) => {
      const who = clientName(session.name, session.session);
      return trouble(
        `silent ${session.session}`,
        "warn",
        `Client ${who} on host ${host(session.host)} has been silent for ${seconds(session.silent_s)} (${session.state}).`,
      );
    });
}

function trouble(key, level, text) {
  return { key, level, text };
}

function age(now, wait) {
  return Math.max(0, now - wait.since);
}

export class Attention {
  #list = document.getElementById("attention");
  #well = document.getElementById("well");
  #found = [];
  #reasons = new Map();

  /** Shows the problems, and the reasons why the first few tasks wait. */
  async refresh({ stats, waits }) {
    this.#found = troubles(stats, waits);
    this.#show();
    const asked = this.#found.filter((one) => one.why).slice(0, WHYS);
    const said = await Promise.all(asked.map(async (one) => [one.key, await reason(one.why)]));
    this.#reasons = new Map(said);
    this.#show();
  }

  get count() {
    return this.#found.length;
  }

  get worst() {
    return this.#found[0]?.level ?? "well";
  }

  #show() {
    this.#well.hidden = this.#found.length > 0;
    keyed(
      this.#list,
      this.#found,
      (one) => one.key,
      () => {
        const [text, why] = [el("div", {}), el("div", { class: "sentence" })];
        const node = el("li", {}, text, why);
        return {
          node,
          update: (one) => {
            mark(node, "class", one.level);
            say(text, one.text);
            say(why, this.#reasons.get(one.key) ?? "");
            why.hidden = !why.textContent;
          },
        };
      },
    );
  }
}

async function reason(task) {
  try {
    return (await ask("why", task)).why;
  } catch (error) {
    if (error instanceof Refused) return error.message;
    throw error;
  }
}
