// Requests to the service. Every request has a deadline. Every failure is one of three errors, which the page handles
// differently: it loads again, so that the browser asks for the token, reports that the service is unavailable, or
// shows why the request was rejected.

const DEADLINE_MS = 8000;
// A string or a number in JSON. Epochs and tags may have more digits than a JavaScript number can represent; they are
// read as text. Strings are matched as a whole, so that digits in a string are not treated as a number.
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g;

/** The service did not answer, or its answer could not be parsed. */
export class ServiceGone extends Error {}

/** The service requires a token, and this browser has none, or one that is not valid. */
export class TokenNeeded extends Error {}

/** The service rejected the request: `kind` is the name of the error. */
export class Refused extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

let skewMs = 0;

/** Returns the current time of the service in Unix seconds; the clock of the browser may differ. */
export function serviceTime() {
  return (Date.now() + skewMs) / 1000;
}

let quickest = Infinity;

/** Returns the shortest response time so far, an estimate of the network round trip. */
export function quickestMs() {
  return quickest;
}

/** Updates the clock offset from a timestamp of the service, which is half a second old on average. */
export function learnTime(second) {
  const seen = second * 1000 + 500 - Date.now();
  if (Math.abs(seen - skewMs) > 1500) skewMs = Math.abs(seen) > 1500 ? seen : 0;
}

/** Fetches /api/`what`. `stop`: AbortSignal of the caller. */
export async function ask(what, parameters = {}, stop = null) {
  const query = new URLSearchParams(parameters).toString();
  const signals = [AbortSignal.timeout(DEADLINE_MS), ...(stop ? [stop] : [])];
  const began = performance.now();
  let response;
  let body;
  try {
    response = await fetch(`api/${what}${query ? `?${query}` : ""}`, {
      signal: AbortSignal.any(signals),
      cache: "no-store",
      credentials: "same-origin",
    });
    body = await response.text();
  } catch (error) {
    if (stop?.aborted) throw error;
    const late = error.name === "TimeoutError";
    throw new ServiceGone(late ? `no answer within ${DEADLINE_MS / 1000} s` : "no response from this address");
  }
  if (response.status === 401) throw new TokenNeeded("the service requires a token");
  quickest = Math.min(quickest, performance.now() - began);
  const answer = parse(body);
  if (response.ok && answer !== undefined) return answer;
  if (answer?.message && response.status < 500) throw new Refused(answer.error ?? "", answer.message);
  throw new ServiceGone(answer?.message ?? `the service answered with status ${response.status}`);
}

function parse(body) {
  try {
    return JSON.parse(body.replace(TOKEN, (token) => (/^-?\d{17,}$/.test(token) ? `"${token}"` : token)));
  } catch {
    return undefined;
  }
}
