// The colours of the pictures are those of the style sheet, so that light and dark are decided in one place. They are
// Okabe and Ito's, which people with any kind of colour blindness can tell apart.

const NAMES = [
  "text",
  "muted",
  "line",
  "card",
  "inset",
  "none",
  "full",
  "empty",
  "put",
  "claim",
  "get",
  "clear",
  "version",
  "leased",
  "claimed",
  "unclaimed",
  "live",
  "reserved",
  "retired",
  "pinned",
  "free",
  "unbacked",
];

export const LEVELS = 48;

let colours = null;
const listeners = new Set();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = null;
  for (const listener of listeners) listener();
});

/** The colours by name, as the style sheet has them now; `shades` by level. */
export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    colours.shades = shadesOf(colours);
    colours.font = getComputedStyle(document.body).fontFamily;
  }
  return colours;
}

/** `listener` is called when light turns to dark or back. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A colour between two that are written as #rrggbb: `share` 0 is the first, 1 the second. */
function between(first, second, share) {
  const [a, b] = [first, second].map((colour) => parseInt(colour.slice(1), 16));
  const mixed = [16, 8, 0].map((shift) => {
    const from = (a >> shift) & 255;
    return Math.round(from + (((b >> shift) & 255) - from) * share);
  });
  return `rgb(${mixed.join(" ")})`;
}

/** A share as one of `LEVELS` + 1 steps: 0 is nothing only, the last is all only. */
export function level(share) {
  if (share <= 0) return 0;
  return share >= 1 ? LEVELS : Math.max(1, Math.min(LEVELS - 1, Math.round(share * LEVELS)));
}

/** The shade of each level: nothing is hollow, anything is clearly more than nothing. */
function shadesOf({ empty, none, full }) {
  const shades = Array.from({ length: LEVELS }, (_, step) => between(none, full, 0.25 + (0.75 * (step + 1)) / LEVELS));
  return [empty, ...shades];
}
