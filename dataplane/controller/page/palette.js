// The charts use the colours of the style sheet, which defines the light and dark themes. The colours are the palette
// of Okabe and Ito, which is distinguishable with any kind of colour blindness.

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

/** Returns the current colours of the style sheet by name; `shades` by level. */
export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    colours.shades = shadesOf(colours);
    colours.font = getComputedStyle(document.body).fontFamily;
  }
  return colours;
}

/** Calls `listener` when the theme changes. Returns a function that removes it. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Mixes two colours given as #rrggbb: `share` 0 is the first, 1 the second. */
function between(first, second, share) {
  const [a, b] = [first, second].map((colour) => parseInt(colour.slice(1), 16));
  const mixed = [16, 8, 0].map((shift) => {
    const from = (a >> shift) & 255;
    return Math.round(from + (((b >> shift) & 255) - from) * share);
  });
  return `rgb(${mixed.join(" ")})`;
}

/** Maps a share to one of `LEVELS` + 1 steps. Only a share of 0 maps to the first, only 1 to the last. */
export function level(share) {
  if (share <= 0) return 0;
  return share >= 1 ? LEVELS : Math.max(1, Math.min(LEVELS - 1, Math.round(share * LEVELS)));
}

/** Returns the shade of each level: level 0 is hollow, and level 1 is clearly distinct from it. */
function shadesOf({ empty, none, full }) {
  const shades = Array.from({ length: LEVELS }, (_, step) => between(none, full, 0.25 + (0.75 * (step + 1)) / LEVELS));
  return [empty, ...shades];
}
