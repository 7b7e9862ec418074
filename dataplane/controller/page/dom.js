// Creates and updates elements. Names of partitions, samples and clients are untrusted, so no function accepts markup:
// text is inserted as text nodes, attributes one by one.

/** Creates an element with attributes (`class`, ...), listeners (`onclick: f`) and children (nodes or text). */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Sets the text of an element if it differs: an unchanged node is not repainted and keeps the selection. */
export function say(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets or removes an attribute if it differs. */
export function mark(node, name, value) {
  if (value === null || value === false || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

const kept = new WeakMap();

/**
 * Synchronizes the children of `parent` with `items`, in order. `make(item)` creates a view with `node` and
 * `update(item)` once. Later rounds only update it, so that focus, selection and open details are kept. `close()` of a
 * removed view is called if it exists.
 */
export function keyed(parent, items, key, make) {
  const before = kept.get(parent) ?? new Map();
  const wanted = new Map(items.map((item) => [key(item), item]));
  // Removes old views first, so that the remaining nodes need not move: a moved node loses its focus.
  for (const [name, view] of before) {
    if (wanted.has(name)) continue;
    view.close?.();
    view.node.remove();
  }
  const after = new Map();
  let place = parent.firstElementChild;
  for (const [name, item] of wanted) {
    const view = before.get(name) ?? make(item);
    after.set(name, view);
    view.update(item);
    if (view.node === place) place = place.nextElementSibling;
    else parent.insertBefore(view.node, place);
  }
  kept.set(parent, after);
}

/** Tracks which elements are visible or about to become visible; data of other elements is not fetched. */
export class Seen {
  #seen = new Set();
  #observer;

  constructor(onChange) {
    this.#observer = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          if (entry.isIntersecting) this.#seen.add(entry.target);
          else this.#seen.delete(entry.target);
        }
        if (entries.some((entry) => entry.isIntersecting)) onChange();
      },
      { rootMargin: "200px" },
    );
  }

  watch(node) {
    this.#observer.observe(node);
  }

  forget(node) {
    this.#observer.unobserve(node);
    this.#seen.delete(node);
  }

  has(node) {
    return this.#seen.has(node);
  }
}
