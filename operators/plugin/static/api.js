// Requests to Airflow's REST API with the login of the person who reads the page, and so with that person's rights.

const REQUEST_TIMEOUT_MS = 30_000;
const PAGE_SIZE = 100; // entries: the default of Airflow's option [api] maximum_page_limit

/** A failed request; `status` is the HTTP status. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(typeof detail === "string" ? detail : `HTTP ${status}`);
    this.status = status;
  }

  /** Whether a retry would fail in the same way. */
  get lasting() {
    return [400, 403, 404, 405, 422].includes(this.status);
  }
}

/** Join names to a path, quoted. Colon and plus stay: Airflow compares URLs to mark the open tab. */
export const path = (...names) =>
  names.map((name) => encodeURIComponent(name).replaceAll("%3A", ":").replaceAll("%2B", "+")).join("/");

/** Return an absolute URL of this Airflow, whose base URL may have a path. */
export const address = (below) => new URL(below, document.baseURI);

/** Request JSON. Without a login the browser goes to the login page, which leads back. */
export async function ask(below, query, signal) {
  const url = address(`api/v2/${below}`);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const either = AbortSignal.any([signal, AbortSignal.timeout(REQUEST_TIMEOUT_MS)]);
  const answer = await fetch(url, { signal: either, headers: { Accept: "application/json" } });
  const body = await answer.json().catch(() => undefined);
  if (answer.ok && body !== undefined) return body;
  if (answer.status === 401 || body?.detail === "Invalid JWT token") logIn();
  throw new ApiError(answer.status, body?.detail);
}

/** Request a list page by page, up to `most` entries. */
export async function askAll(below, query, name, signal, most = 2000) {
  const found = [];
  for (;;) {
    const answer = await ask(below, { ...query, limit: PAGE_SIZE, offset: found.length }, signal);
    found.push(...answer[name]);
    if (answer[name].length === 0 || found.length >= Math.min(most, answer.total_entries)) return found;
  }
}

function logIn() {
  const login = address("api/v2/auth/login");
  login.searchParams.set("next", location.pathname + location.search + location.hash);
  location.replace(login);
}
