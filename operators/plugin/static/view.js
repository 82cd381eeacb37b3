// What both tabs have: the colours of the host, one sentence where there is something to say, links without a reload.

import { address } from "./api.js";

/** Make an element; `children` are elements and text. */
export function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

const style = (name) => element("link", { rel: "stylesheet", href: new URL(name, import.meta.url).href });

/** What a tab begins with: its style sheets, and a sentence that is read out when it changes: first that it loads. */
export class Note {
  constructor(root) {
    this.line = element("p", { className: "manycpu-note", hidden: true });
    this.line.setAttribute("role", "status");
    root.append(style("airflow.css"), style("../page/training.css"), this.line);
    this.say("Loading …");
  }

  /** Say a sentence; without one, nothing. */
  say(text = "") {
    if (this.line.textContent !== text) this.line.textContent = text;
    this.line.hidden = !text;
  }

  /** Say what is wrong, and what comes next. */
  tell(error, wait, what) {
    const rights = "it takes the right to read this DAG, its runs, tasks and XComs";
    if (error.status === 403) return this.say(`Airflow does not let you see ${what}: ${rights}.`);
    if (error.status === 404) return this.say(`Airflow has not found ${what}.`);
    const next = wait === null ? "" : ` The next try is in ${Math.round(wait / 1000)} s; what is shown may be old.`;
    return this.say(`Airflow does not answer (${error.message}).${next}`);
  }
}

/** A drawing in the host's colours, which follows them; the style sheet of the page knows them by `data-theme`. */
export class Drawing {
  #drawn = null;
  #host = new MutationObserver(() => this.#colour());

  constructor(root, mount) {
    this.root = root;
    this.mount = () => mount(root, { dark: isDark() });
    this.#host.observe(document.documentElement, { attributes: true, attributeFilter: ["class"] });
  }

  update(shown) {
    this.#drawn ??= this.mount();
    this.#drawn.update(shown);
  }

  /** Say how old it is by now, where it says so. */
  age(now) {
    this.#drawn?.age(now);
  }

  /** Show nothing. */
  clear() {
    this.#drawn?.destroy();
    this.#drawn = null;
  }

  destroy() {
    this.#host.disconnect();
    this.clear();
  }

  #colour() {
    this.root.dataset.theme = isDark() ? "dark" : "light";
  }
}

/** Make a link of one of Airflow's pages: an address, and what a plain click does instead of leaving the page. */
export function link(below, go) {
  return {
    href: address(below).href,
    onClick: (event) => {
      if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      go(`/${below}`);
    },
  };
}

/** Seconds since the epoch of what Airflow writes as a date; null where there is none. */
export const seconds = (date) => (date ? Date.parse(date) / 1000 : null);

const isDark = () => document.documentElement.classList.contains("dark");
