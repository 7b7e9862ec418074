// Pointing at pictures: one tooltip for all, by mouse, finger or keyboard. What it says is also announced to screen
// readers when it was asked for with the keyboard.

import { el, say } from "./dom.js";

const tip = el("div", { class: "tip", role: "presentation", hidden: true });
const told = el("div", { class: "unseen", "aria-live": "polite" });
document.body.append(tip, told);
let owner = null;

/**
 * Makes a canvas answer. `picture` has
 *   at(x, y): what is there, or null; describe(what): its lines, the first a title;
 *   step(what, dx, dy): its neighbour (what is null at first), for the arrow keys; place(what): {x, y} to show it at;
 *   mark(what): show which one is meant (null: none).
 * Returns what is to be called when there is a new picture below the pointer.
 */
export function pointable(canvas, picture) {
  let current = null;
  let at = null; // where the pointer is, if that is what shows

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

/** Takes the tooltip away if it is this canvas's. */
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
