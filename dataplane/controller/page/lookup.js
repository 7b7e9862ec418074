// Lookup of one sample by its id.

import { ask, TokenNeeded } from "./api.js";
import { el, say } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

export class Lookup {
  #form = document.getElementById("lookup");
  #partition = document.getElementById("lookup-partition");
  #id = document.getElementById("lookup-id");
  #result = document.getElementById("lookup-result");
  #partitions = "";

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#look();
    });
  }

  /** Updates the list of partitions. */
  refresh({ stats }) {
    const names = stats.partitions.map((partition) => partition.partition);
    const known = JSON.stringify(names);
    if (known === this.#partitions) return;
    this.#partitions = known;
    const chosen = this.#partition.value;
    this.#partition.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(chosen)) this.#partition.value = chosen;
  }

  async #look() {
    say(this.#result, "loading …");
    try {
      this.#result.replaceChildren(
        ...tell(await ask("sample", { partition: this.#partition.value, id: this.#id.value })),
      );
    } catch (error) {
      if (error instanceof TokenNeeded) return window.location.reload();
      this.#result.replaceChildren(el("p", { class: "problem" }, error.message));
    }
    return undefined;
  }
}

function tell(shown) {
  const born = `born ${seconds(shown.now - shown.since)} ago`;
  const missing = shown.missing.length ? [el("p", {}, el("b", {}, "not produced: "), shown.missing.join(", "))] : [];
  return [
    el(
      "h3",
      {},
      shown.sample,
      el("span", { class: "told" }, ` generation ${shown.generation}, row ${count(shown.row)}, ${born}`),
    ),
    table(
      ["task", "state", "lacks"],
      shown.tasks.map((task) => [task.task, stateOf(task, shown.now), task.lacking.join(", ") || "–"]),
    ),
    table(["field", "kind", "size", "length", "where", ""], shown.cells.map(cellOf)),
    ...missing,
    table(
      ["tag", "value"],
      Object.entries(shown.tags).map(([name, value]) => [name, JSON.stringify(value)]),
    ),
  ].filter(Boolean);
}

function stateOf(task, now) {
  const who = task.client ? ` by ${task.client}` : "";
  const left =
    task.until === null || task.until === undefined ? "" : `, for another ${seconds(Math.max(0, task.until - now))}`;
  return `${task.state === "leased" ? "on lease" : task.state}${who}${left}`;
}

function cellOf(cell) {
  const inner = cell.spec.inner?.length ? ` [${cell.spec.inner.join(", ")}]` : "";
  const kind = [cell.spec.kind, cell.spec.dtype].filter(Boolean).join(" ") + inner;
  const marks = [cell.pinned ? "pinned" : "", cell.shared ? "shared" : ""].filter(Boolean).join(", ");
  return [
    cell.field,
    kind,
    bytes(cell.size_bytes),
    count(cell.length),
    `unit ${cell.unit} at ${count(cell.offset)}`,
    marks,
  ];
}

function table(heads, rows) {
  if (!rows.length) return null;
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((text, place) => (place ? el("td", {}, text) : el("th", { scope: "row" }, text)))),
  );
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}
