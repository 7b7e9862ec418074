// Questions to the service. Every one has a deadline, and every failure is one of three errors, because the page does
// something different about each: log in again, say that the service is gone, or tell what it refused.

const DEADLINE_MS = 8000;
// A string or a number of JSON. An epoch, and a tag, may have more digits than this language's numbers: such are read
// as text. Strings are tokens, so that nothing in one is taken for a number.
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g;

/** Nobody answers, or nothing that can be read. */
export class ServiceGone extends Error {}

/** The service wants a token that this browser does not have (any more). */
export class LoginNeeded extends Error {}

/** The service answered that it cannot: `kind` is the error's name, the message its sentence. */
export class Refused extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

let skewMs = 0;

/** Now by the service's clock, unix seconds: whoever looks may have another time. */
export function serviceTime() {
  return (Date.now() + skewMs) / 1000;
}

let quickest = Infinity;

/** How long the quickest answer took: the way there and back, more or less. */
export function quickestMs() {
  return quickest;
}

/** The service just said that its clock is at this second: half a second has passed since, on average. */
export function learnTime(second) {
  const seen = second * 1000 + 500 - Date.now();
  if (Math.abs(seen - skewMs) > 1500) skewMs = Math.abs(seen) > 1500 ? seen : 0;
}

/** The answer of /api/`what`. `stop`: an AbortSignal of who asked. */
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
    throw new ServiceGone(late ? `no answer within ${DEADLINE_MS / 1000} s` : "nobody answers at this address");
  }
  if (response.status === 401) throw new LoginNeeded("the service wants its token");
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
