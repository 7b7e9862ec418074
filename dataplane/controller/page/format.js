// Formatting of figures, in the same style as `tq status`.

const grouped = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Formats 1234567 as "1,234,567". */
export function count(value) {
  return grouped.format(value);
}

/** Formats 1234567 as "1.2M", for narrow places. */
export function brief(value) {
  const steps = [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ];
  for (const [step, suffix] of steps) if (value >= step * 0.9995) return `${trim(value / step)}${suffix}`;
  return trim(value);
}

/** Formats bytes as "1.5 GiB". */
export function bytes(value) {
  let step = 0;
  while (value >= 1024 && step < UNITS.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${step === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[step]}`;
}

/** Formats seconds as "0.4 s", "12 s", "3 min 20 s" or "2 h 5 min". */
export function seconds(value) {
  if (value < 0.0995) return `${Math.max(0, value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
}

/** Formats a count with its noun: "1 sample", "2 samples". */
export function many(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Formats a share as "42%". "100%" means everything and "0%" nothing; the result does not exceed "100%". */
export function percent(part, whole) {
  if (!whole) return "0%";
  const value = Math.min(Math.round((100 * part) / whole), 100);
  if (value === 100 && part < whole) return "99%";
  if (value === 0 && part > 0) return "<1%";
  return `${value}%`;
}

/** Formats a Unix time as "14:03:07" in the local time zone. */
export function clock(time, withMillis = false) {
  const date = new Date(time * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const base = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withMillis ? `${base}.${String(date.getMilliseconds()).padStart(3, "0")}` : base;
}

/** Returns the name of a client, or the id of its session if it has no name. */
export function clientName(client, session) {
  return client || `session ${session}`;
}

/** Shortens a host that is a boot id to its first digits, which are distinctive enough. */
export function host(name) {
  return /^[0-9a-f]{8}-[0-9a-f-]{27}$/.test(name) ? name.slice(0, 8) : name;
}

/** Formats the first `most` names of a list. */
export function names(list, most = 4) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${list.length - most} more` : shown;
}

function trim(value) {
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toFixed(value >= 10 ? 1 : 2)));
}
