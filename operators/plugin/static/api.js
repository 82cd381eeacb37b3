// Airflow's REST API, asked as the person who looks at the page: what Airflow does not let them see, they do not get.

const PATIENCE = 30_000; // milliseconds until an answer counts as none
const PAGE = 100; // entries: the most that Airflow gives at once, unless it is told otherwise

/** An answer that is none of those wanted; `status` is HTTP's. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(typeof detail === "string" ? detail : `HTTP ${status}`);
    this.status = status;
  }

  /** Whether asking again would be answered in the same way. */
  get lasting() {
    return [400, 403, 404, 405, 422].includes(this.status);
  }
}

/** Join names to a path: ids hold what addresses must not. Colon and plus stay, by which Airflow knows its tabs again. */
export const path = (...names) =>
  names.map((name) => encodeURIComponent(name).replaceAll("%3A", ":").replaceAll("%2B", "+")).join("/");

/** Find an address of this Airflow, which may be below a path. */
export const address = (below) => new URL(below, document.baseURI);

/** Ask for JSON. Without a login the browser leaves for it, and comes back. */
export async function ask(below, query, signal) {
  const url = address(`api/v2/${below}`);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const either = AbortSignal.any([signal, AbortSignal.timeout(PATIENCE)]);
  const answer = await fetch(url, { signal: either, headers: { Accept: "application/json" } });
  const body = await answer.json().catch(() => undefined);
  if (answer.ok && body !== undefined) return body;
  if (answer.status === 401 || body?.detail === "Invalid JWT token") logIn();
  throw new ApiError(answer.status, body?.detail);
}

/** Ask for a list, page after page; at most so many entries. */
export async function askAll(below, query, name, signal, most = 2000) {
  const found = [];
  for (;;) {
    const answer = await ask(below, { ...query, limit: PAGE, offset: found.length }, signal);
    found.push(...answer[name]);
    if (answer[name].length === 0 || found.length >= Math.min(most, answer.total_entries)) return found;
  }
}

function logIn() {
  const login = address("api/v2/auth/login");
  login.searchParams.set("next", location.pathname + location.search + location.hash);
  location.replace(login);
}
