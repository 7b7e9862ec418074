// The tasks of a partition: counts of ready, leased and claimed samples and, on demand, the sentence that explains why
// a claim waits.

import { ask, Refused } from "./api.js";
import { el, keyed, mark, say } from "./dom.js";
import { count, names, seconds } from "./format.js";

export class TaskLines {
  #partition;
  #body = el("tbody", {});
  #sentences = new Map(); // by task, shown or hidden
  #open = new Map(); // the shown ones

  constructor(partition) {
    this.#partition = partition;
    const heads = ["task", "claims", "ready", "on lease", "held", "claimed", "waiting", "lag"];
    const titles = {
      ready: "live and unclaimed samples with all fields of the latest claim",
      claimed: "samples claimed by this task, including leased ones",
      held: "samples held for data-parallel ranks that have not claimed them yet",
      lag: "number of versions by which the stalest ready sample is behind",
    };
    const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col", title: titles[name] }, name)));
    this.node = el("div", { class: "scroll" }, el("table", { class: "tasks" }, el("thead", {}, head), this.#body));
  }

  /** `waits` are the waiting calls of this partition. */
  show(tasks, waits, now) {
    this.node.hidden = !tasks.length;
    const items = tasks.map((task) => ({ task, now, waits: waits.filter((wait) => wait.task === task.task) }));
    keyed(
      this.#body,
      items.flatMap((item) => [item, { ...item, why: true }]),
      keyOf,
      (item) => (item.why ? this.#whyLine(item) : this.#line(item)),
    );
  }

  /** Fetches the shown sentences. */
  async refresh() {
    await Promise.all([...this.#open.entries()].map(([task, line]) => this.#fetch(task, line)));
  }

  async #fetch(task, line) {
    try {
      const answer = await ask("why", { partition: this.#partition, task });
      say(line, answer.why);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say(line, error.message);
    }
  }

  #line({ task: { task } }) {
    const button = el("button", { type: "button", class: "why", "aria-expanded": "false", title: "why it waits" });
    const cells = Array.from({ length: 7 }, () => el("td", {}));
    const node = el("tr", {}, el("th", { scope: "row" }, button), ...cells);
    button.addEventListener("click", () => this.#toggle(task, button));
    say(button, task);
    return {
      node,
      update: ({ task: now, waits, now: time }) => {
        const longest = waits.length ? time - Math.min(...waits.map((wait) => wait.since)) : null;
        const waiting = now.waiting
          ? `${count(now.waiting)}${longest === null ? "" : `, ${seconds(Math.max(0, longest))}`}`
          : "–";
        const lag = lagOf(now);
        const figures = [now.ready, now.leased, now.held, now.claimed].map(count);
        [names(now.fields) || "–", ...figures, waiting, lag].forEach((text, place) => say(cells[place], text));
        mark(cells[5], "class", now.waiting ? "waits" : null);
      },
    };
  }

  #whyLine({ task: { task } }) {
    const said = el("td", { colspan: "8", class: "sentence" });
    const node = el("tr", { hidden: true }, said);
    this.#sentences.set(task, { node, said });
    return { node, update: () => {}, close: () => this.#forget(task) };
  }

  #forget(task) {
    this.#open.delete(task);
    this.#sentences.delete(task);
  }

  #toggle(task, button) {
    const { node, said } = this.#sentences.get(task);
    node.hidden = !node.hidden;
    mark(button, "aria-expanded", String(!node.hidden));
    if (node.hidden) return this.#open.delete(task);
    say(said, "loading …");
    this.#open.set(task, said);
    return this.#fetch(task, said).catch((error) => say(said, error.message));
  }
}

/** Samples may have a version before the trainer has set the version of the partition. */
function lagOf({ lag, stalest_version: stalest }) {
  if (lag !== null && lag !== undefined) return count(lag);
  return stalest === null || stalest === undefined ? "–" : "version not set";
}

function keyOf({ task, why }) {
  return `${why ? "why" : "line"} ${task.task}`;
}
