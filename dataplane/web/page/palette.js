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

let colours = null;
const listeners = new Set();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = null;
  for (const listener of listeners) listener();
});

/** The colours by name, as the style sheet has them now. */
export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
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
export function between(first, second, share) {
  const [a, b] = [first, second].map((colour) => parseInt(colour.slice(1), 16));
  const mixed = [16, 8, 0].map((shift) => {
    const from = (a >> shift) & 255;
    return Math.round(from + (((b >> shift) & 255) - from) * share);
  });
  return `rgb(${mixed.join(" ")})`;
}

/** The shade of a cell that is produced to `share`: nothing is empty, anything is clearly more than nothing. */
export function shade(share) {
  const colour = palette();
  return share > 0 ? between(colour.none, colour.full, 0.25 + 0.75 * Math.min(1, share)) : colour.empty;
}
