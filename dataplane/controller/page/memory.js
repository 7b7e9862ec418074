// The arenas: state of their bytes by address, and fragmentation of the free space.

import { ask, Refused } from "./api.js";
import { el, keyed, mark, say, Seen } from "./dom.js";
import { bytes, host, many, percent } from "./format.js";
import { Pace } from "./pace.js";
import { palette } from "./palette.js";
import { hide, pointable } from "./point.js";
import { hatch, Surface } from "./surface.js";

const KINDS = ["live", "reserved", "retired", "free", "unbacked"];
const MEANING = {
  live: "rows that can be read",
  reserved: "reserved for puts",
  retired: "cleared, but still pinned by readers",
  free: "backed with memory, unused",
  unbacked: "not allocated from the machine yet",
  pinned: "pinned by readers",
};
const PIN_HEIGHT = 6;

export class Memory {
  #list = document.getElementById("memory");
  #seen;
  #arenas = new Map();

  constructor(onSeen) {
    this.#seen = new Seen(onSeen);
  }

  async refresh({ stats }) {
    keyed(
      this.#list,
      stats.units,
      (unit) => unit.unit,
      (unit) => this.#make(unit),
    );
    const wanted = [...this.#arenas.values()].filter((arena) => this.#seen.has(arena.node));
    await Promise.all(wanted.map((arena) => arena.refresh()));
  }

  #make({ unit }) {
    const arena = new Arena(unit);
    this.#arenas.set(unit, arena);
    this.#seen.watch(arena.node);
    const close = () => {
      this.#arenas.delete(unit);
      this.#seen.forget(arena.node);
      arena.close();
    };
    return { node: arena.node, update: (stats) => arena.update(stats), close };
  }
}

class Arena {
  #unit;
  #pace = new Pace();
  #map = null;
  #marked = null;
  #title = el("h3", {});
  #told = el("p", { class: "told" });
  #canvas = el("canvas", { tabindex: "0", role: "img", class: "strip" });
  #legend = el("div", { class: "legend" });
  #problem = el("p", { class: "problem", hidden: true });
  #surface;
  #again;

  constructor(unit) {
    this.#unit = unit;
    this.node = el("div", { class: "arena" }, this.#title, this.#told, this.#problem, this.#canvas, this.#legend);
    this.#surface = new Surface(this.#canvas, (context, width, height) => this.#draw(context, width, height));
    this.#again = pointable(this.#canvas, {
      at: (x) => this.#inside(Math.floor((x / this.#surface.width) * (this.#map?.live.length ?? 0))),
      describe: (cell) => this.#describe(cell),
      step: (cell, dx) => (cell === null ? this.#inside(0) : this.#inside(cell + dx)),
      place: (cell) => ({ x: (this.#surface.width * (cell + 0.5)) / this.#map.live.length, y: 40 }),
      mark: (cell) => {
        this.#marked = cell;
        this.#surface.paint();
      },
    });
  }

  close() {
    hide(this.#canvas);
    this.#surface.close();
  }

  update(unit) {
    say(this.#title, `unit ${unit.unit}: ${unit.name} on host ${host(unit.host)}`);
    const { used_bytes: used, capacity_bytes: capacity, limit_bytes: limit } = unit;
    const share = `${bytes(used)} of ${bytes(capacity)} used (${percent(used, capacity)})`;
    const rows = unit.draining ? "draining, gets no new rows" : `limit for new rows ${bytes(limit)}`;
    say(this.#told, `${share}, peak ${bytes(unit.peak_used_bytes)}; ${rows}`);
    const problems = [unit.connected ? "" : "not connected", unit.pressed ? "filling up" : "", unit.problem];
    say(this.#problem, problems.filter(Boolean).join("; "));
    this.#problem.hidden = !problems.some(Boolean);
  }

  async refresh() {
    if (!this.#pace.due) return;
    try {
      const cells = Math.max(32, Math.min(1024, Math.floor((this.#surface.width || 600) / 3)));
      this.#map = await this.#pace.time(() => ask("memory", { unit: this.#unit, cells }));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return; // the unit was dropped after the last stats; the next stats omit it
    }
    this.#legendOf(this.#map);
    this.#again();
    this.#surface.paint();
  }

  #legendOf(map) {
    const total = totals(map);
    const shown = [...KINDS, "pinned"].map((kind) => ({ kind, value: total[kind] }));
    keyed(
      this.#legend,
      [...shown, { kind: "space" }],
      (item) => item.kind,
      ({ kind }) => {
        if (kind === "space")
          return {
            node: el("span", { class: "space" }),
            update() {
              say(this.node, fragmentation(map));
            },
          };
        const figure = el("b", {});
        const node = el("span", { class: `key ${kind}`, title: MEANING[kind] }, `${kind} `, figure);
        return { node, update: (item) => say(figure, bytes(item.value)) };
      },
    );
    say(this.#legend.lastElementChild, fragmentation(map));
    const told = shown.map(({ kind, value }) => `${kind} ${bytes(value)}`).join(", ");
    mark(this.#canvas, "aria-label", `memory of unit ${this.#unit} by address: ${told}. Arrow keys move through it.`);
  }

  #inside(cell) {
    return this.#map && cell >= 0 && cell < this.#map.live.length ? cell : null;
  }

  #describe(cell) {
    const part = partOf(this.#map, cell);
    const lines = [`${bytes(part.from)} to ${bytes(part.to)}`];
    for (const kind of [...KINDS, "pinned"]) if (part[kind]) lines.push(`${kind} ${bytes(part[kind])}`);
    return lines;
  }

  #draw(context, width, height) {
    const map = this.#map;
    if (!map) return;
    const colour = palette();
    const body = height - PIN_HEIGHT - 2;
    for (let cell = 0; cell < map.live.length; cell += 1) {
      const left = Math.round((width * cell) / map.live.length);
      const wide = Math.round((width * (cell + 1)) / map.live.length) - left;
      const part = partOf(map, cell);
      let bottom = body;
      for (const kind of KINDS) {
        const high = (part[kind] / (part.to - part.from)) * body;
        if (!high) continue;
        context.fillStyle = colour[kind];
        context.fillRect(left, bottom - high, wide, high);
        bottom -= high;
      }
      if (part.pinned) {
        context.fillStyle = colour.pinned;
        context.fillRect(left, height - PIN_HEIGHT, Math.max(1, wide), PIN_HEIGHT);
      }
      if (cell === this.#marked) {
        context.strokeStyle = colour.text;
        context.strokeRect(left + 0.5, 0.5, Math.max(2, wide - 1), height - 1);
      }
    }
    const backed = (width * map.backed_bytes) / map.capacity_bytes;
    hatch(context, backed, 0, width - backed, body, colour.line);
    context.strokeStyle = colour.line;
    context.strokeRect(0.5, 0.5, width - 1, body - 1);
  }
}

/** Returns the bytes of one cell by state. The last cell of an arena may be shorter than the others. */
export function partOf(map, cell) {
  const from = cell * map.cell_bytes;
  const to = Math.min(from + map.cell_bytes, map.capacity_bytes);
  const [live, reserved, retired, pinned] = ["live", "reserved", "retired", "pinned"].map((kind) => map[kind][cell]);
  const backed = Math.max(0, Math.min(to, map.backed_bytes) - from);
  return {
    from,
    to,
    live,
    reserved,
    retired,
    pinned,
    free: Math.max(0, backed - live - reserved - retired),
    unbacked: to - from - backed,
  };
}

function totals(map) {
  const sums = Object.fromEntries([...KINDS, "pinned"].map((kind) => [kind, 0]));
  for (let cell = 0; cell < map.live.length; cell += 1) {
    const part = partOf(map, cell);
    for (const kind of Object.keys(sums)) sums[kind] += part[kind];
  }
  return sums;
}

function fragmentation(map) {
  const held = many(map.extents, "extent");
  if (!map.free_bytes) return `${held}; no free space in backed memory`;
  const broken = percent(map.free_bytes - map.largest_free_bytes, map.free_bytes);
  const ranges = `${bytes(map.free_bytes)} free in ${many(map.fragments, "range")}`;
  return `${held}; ${ranges}, the largest ${bytes(map.largest_free_bytes)} (fragmentation ${broken})`;
}
