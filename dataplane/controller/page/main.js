// Composes the page. Each round fetches the shared data and shows it, then lets each part fetch its own data.

import { ask } from "./api.js";
import { Attention } from "./attention.js";
import { say } from "./dom.js";
import { Flow } from "./flow.js";
import { Header } from "./header.js";
import { Lookup } from "./lookup.js";
import { Memory } from "./memory.js";
import { Partitions } from "./partitions.js";
import { Poll } from "./poll.js";
import { Timeline } from "./timeline.js";
import { Waits } from "./waits.js";

const header = new Header();
const attention = new Attention();
const flow = new Flow();
const lookup = new Lookup();
const waiting = new Waits();
const soon = () => poll.now(); // fetches parts immediately when they become visible
const partitions = new Partitions(soon);
const memory = new Memory(soon);
const timeline = new Timeline(soon);

async function round() {
  const [stats, waits] = await Promise.all([ask("stats"), ask("waits")]);
  const now = { stats, waits };
  waiting.refresh(now);
  lookup.refresh(now);
  const parts = [
    attention.refresh(now),
    flow.refresh(),
    partitions.refresh(now),
    memory.refresh(now),
    timeline.refresh(now),
  ];
  // Waits for all parts, even if one fails, so that rounds do not overlap.
  const ends = await Promise.allSettled(parts);
  header.refresh(now, attention, flow.rates);
  document.documentElement.dataset.ready = "";
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) throw failed.reason;
}

const poll = new Poll(round, (state) => header.connection(state));
const pause = document.getElementById("pause");
pause.addEventListener("click", () => {
  poll.paused = !poll.paused;
  pause.setAttribute("aria-pressed", String(poll.paused));
  say(pause, poll.paused ? "Resume" : "Pause");
});
document.getElementById("try-now").addEventListener("click", () => poll.now());
poll.now();
