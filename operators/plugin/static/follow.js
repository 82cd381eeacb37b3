// Look again and again while something goes on, and somebody sees it.

const LONGEST = 60_000; // milliseconds between two looks, however often they have failed

/**
 * Call `look` at once, and then every so often while it returns true; never twice at the same time, and not while the
 * tab is hidden. A tab that is shown again looks again, for an ended run may have been cleared.
 *
 * @param look gets a signal that ends its requests; returns whether something goes on.
 * @param trouble gets what `look` threw, and the milliseconds until the next time, or null where there is none.
 * @returns a function that ends it.
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
      const goesOn = await look(stop.signal);
      failed = 0;
      return goesOn ? every : null;
    } catch (error) {
      if (stop.signal.aborted) return null;
      const wait = error.lasting ? null : Math.min(every * 2 ** failed++, LONGEST);
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
