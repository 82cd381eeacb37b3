// Poll while something is active and the tab is visible.

const MAX_INTERVAL_MS = 60_000; // between two polls after failures

/**
 * Call `look` at once, and then every `every` milliseconds while it returns true; never twice at the same time, and not
 * while the tab is hidden. A tab that becomes visible polls again, because an ended run may have been cleared.
 *
 * @param look gets a signal that aborts its requests; returns whether something is still active.
 * @param trouble gets the error that `look` threw, and the milliseconds until the next poll, or null if none follows.
 * @returns a function that stops polling.
 */
export function follow(look, trouble, every) {
  const stop = new AbortController();
  let timer, looking = false, failed = 0, last = -Infinity;

  async function turn() {
    clearTimeout(timer);
    if (looking || stop.signal.aborted || document.visibilityState === "hidden") return;
    const early = last + every - performance.now();
    if (early > 0) return plan(early);
    [looking, last] = [true, performance.now()];
    const wait = await once();
    looking = false;
    if (wait !== null) plan(wait);
  }

  async function once() {
    try {
      const active = await look(stop.signal);
      failed = 0;
      return active ? every : null;
    } catch (error) {
      if (stop.signal.aborted) return null;
      const wait = error.lasting ? null : Math.min(every * 2 ** failed++, MAX_INTERVAL_MS);
      trouble(error, wait);
      return wait;
    }
  }

  function plan(wait) {
    if (!stop.signal.aborted) timer = setTimeout(turn, wait);
  }

  document.addEventListener("visibilitychange", turn, { signal: stop.signal });
  turn();
  return () => {
    clearTimeout(timer);
    stop.abort();
  };
}
