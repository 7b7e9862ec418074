// The partitions: a card each, with its matrix and its tasks. A matrix is fetched only while it is visible.

import { ask, Refused } from "./api.js";
import { el, keyed, mark, say, Seen } from "./dom.js";
import { bytes, count, many, percent } from "./format.js";
import { MatrixPicture } from "./matrix.js";
import { Pace } from "./pace.js";
import { TaskLines } from "./tasks.js";

const OPEN_AT_FIRST = 4;

export class Partitions {
  #list = document.getElementById("partitions");
  #none = document.getElementById("no-partitions");
  #seen;
  #cards = new Map();

  /** `onSeen()` is called when a card becomes visible. */
  constructor(onSeen) {
    this.#seen = new Seen(onSeen);
  }

  /** Shows the stats, then fetches the visible matrices. */
  async refresh({ stats, waits }) {
    this.#none.hidden = stats.partitions.length > 0;
    const items = stats.partitions.map((partition) => ({
      partition,
      now: waits.now,
      waits: waits.waits.filter((wait) => wait.partition === partition.partition),
    }));
    keyed(
      this.#list,
      items,
      (item) => item.partition.partition,
      (item) => this.#make(item),
    );
    const wanted = [...this.#cards.values()].filter((card) => card.open && this.#seen.has(card.node));
    await Promise.all(wanted.map((card) => card.refresh()));
  }

  #make({ partition: { partition: name } }) {
    const card = new Card(name, this.#cards.size < OPEN_AT_FIRST);
    this.#cards.set(name, card);
    this.#seen.watch(card.node);
    const forget = () => {
      this.#cards.delete(name);
      this.#seen.forget(card.node);
      card.close();
    };
    return { node: card.node, update: (item) => card.update(item), close: forget };
  }
}

class Card {
  #name;
  #pace = new Pace();
  #title = el("span", { class: "title" });
  #told = el("span", { class: "told" });
  #budget = el("div", { class: "budget" }, el("meter", { min: "0" }), el("span", {}));
  #picture = new MatrixPicture();
  #tasks;
  #problem = el("p", { class: "problem", role: "status", hidden: true });

  constructor(name, open) {
    this.#name = name;
    this.#tasks = new TaskLines(name);
    this.node = el(
      "details",
      { class: "card partition", open },
      el("summary", {}, this.#title, this.#told),
      this.#budget,
      this.#picture.node,
      this.#problem,
      this.#tasks.node,
    );
    say(this.#title, name);
    this.node.addEventListener("toggle", () => this.open && this.refresh().catch(() => {}));
  }

  get open() {
    return this.node.open;
  }

  close() {
    this.#picture.close();
  }

  update({ partition, waits, now }) {
    const expected = partition.num_samples === null ? "" : ` of ${count(partition.num_samples)}`;
    const told = [
      partition.version === null ? "version not set" : `version ${count(partition.version)}`,
      `${count(partition.live)} live`,
      `${count(partition.born)}${expected} born`,
      bytes(partition.live_bytes),
      partition.sealed ? "sealed" : "",
      partition.evicted ? `${many(partition.evicted, "sample")} evicted` : "",
      partition.evicted_unconsumed ? `${count(partition.evicted_unconsumed)} evicted unconsumed` : "",
      partition.dropped ? `${count(partition.dropped)} dropped with partial groups` : "",
      partition.waiting_puts ? `${many(partition.waiting_puts, "put")} waiting for space` : "",
    ];
    say(this.#told, told.filter(Boolean).join(" · "));
    this.#showBudget(partition);
    this.#tasks.show(partition.tasks ?? [], waits, now);
    if (partition.live === 0) {
      this.#picture.show({
        live: 0,
        samples: [],
        examined: [],
        produced: {},
        tasks: [],
        first_generation: 0,
        last_generation: 0,
      });
    }
  }

  #showBudget({
    budget_bytes: budget,
    limit_bytes: limit,
    used_bytes: used,
    peak_used_bytes: peak,
    when_full: full,
    pressed,
  }) {
    this.#budget.hidden = budget === null;
    if (budget === null) return;
    const [meter, text] = this.#budget.children;
    Object.assign(meter, { max: budget, high: limit ?? budget, value: used });
    const press = pressed ? ", filling up" : "";
    const what = {
      wait: "puts wait",
      reject: "puts fail",
      evict: "consumed samples are evicted",
      evict_oldest: "the oldest samples are evicted",
    };
    const share = `${bytes(used)} of ${bytes(budget)} (${percent(used, budget)}), peak ${bytes(peak)}`;
    say(text, `budget: ${share}; when full, ${what[full] ?? full}${press}`);
    mark(this.#budget, "data-pressed", pressed);
  }

  async refresh() {
    const columns = this.#picture.columns;
    try {
      if (this.#pace.due) {
        this.#picture.show(await this.#pace.time(() => ask("matrix", { partition: this.#name, columns })));
      }
      this.#problem.hidden = true;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say(this.#problem, error.message);
      this.#problem.hidden = false;
    }
    await this.#tasks.refresh();
  }
}
