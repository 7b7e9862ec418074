// The tooltip of the charts, for mouse, touch and keyboard. Its text is announced to screen readers when the user moves
// with the keyboard.

import { el, say } from "./dom.js";

const tip = el("div", { class: "tip", role: "presentation", hidden: true });
const told = el("div", { class: "unseen", "aria-live": "polite" });
document.body.append(tip, told);
let owner = null;

/**
 * Adds a tooltip to a canvas. `picture` has
 *   at(x, y): the item at a position, or null; describe(item): lines of text, the first is a title;
 *   step(item, dx, dy): the neighbour of an item (or of null), for the arrow keys; place(item): {x, y} of the tooltip;
 *   mark(item): highlights an item (null: none).
 * Returns a function to call after the chart changed, which updates the tooltip under the pointer.
 */
export function pointable(canvas, picture) {
  let current = null;
  let at = null; // position of the pointer, if the tooltip follows it

  function show(what, x, y, aloud) {
    current = what;
    picture.mark?.(what);
    if (what === null) return hide(canvas);
    const lines = picture.describe(what);
    owner = canvas;
    tip.replaceChildren(...lines.map((line, place) => el(place ? "div" : "strong", {}, line)));
    tip.hidden = false;
    const box = canvas.getBoundingClientRect();
    follow(box.left + x, box.top + y);
    if (aloud) say(told, lines.join(". "));
    return undefined;
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    at = [event.clientX - box.left, event.clientY - box.top];
    show(picture.at(...at), ...at, false);
  });
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") return show(null);
    if (!moves[event.key] || !picture.step || event.ctrlKey || event.altKey || event.metaKey) return undefined;
    event.preventDefault();
    const next = picture.step(current, ...moves[event.key]);
    if (next === null) return undefined;
    const { x, y } = picture.place(next);
    at = null;
    return show(next, x, y, true);
  });
  return () => {
    if (owner === canvas && current !== null && at) show(picture.at(...at), ...at, false);
  };
}

/** Hides the tooltip if it belongs to this canvas. */
export function hide(canvas) {
  if (owner !== canvas) return;
  owner = null;
  tip.hidden = true;
}

function follow(x, y) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = x + 14 + width > window.innerWidth ? x - width - 10 : x + 14;
  const top = y + 16 + height > window.innerHeight ? y - height - 10 : y + 16;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}
