// Parts of both tabs: the colours of Airflow, a note of one sentence, and links that do not reload the page.

import { address } from "./api.js";

/** Make an element; `children` are elements and text. */
export function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

const style = (name) => element("link", { rel: "stylesheet", href: new URL(name, import.meta.url).href });

/** The top of a tab: its style sheets, and a note, which screen readers read when it changes; first: loading. */
export class Note {
  constructor(root) {
    this.line = element("p", { className: "manycpu-note", hidden: true });
    this.line.setAttribute("role", "status");
    root.append(style("airflow.css"), style("../page/training.css"), this.line);
    this.say("Loading …");
  }

  /** Show a sentence; hide the note if it is empty. */
  say(text = "") {
    if (this.line.textContent !== text) this.line.textContent = text;
    this.line.hidden = !text;
  }

  /** Show an error, and when the next try is. */
  tell(error, wait, what) {
    const rights = "you need the right to read this DAG, its runs, tasks and XComs";
    if (error.status === 403) return this.say(`Airflow does not let you see ${what}: ${rights}.`);
    if (error.status === 404) return this.say(`Airflow has not found ${what}.`);
    const next = wait === null ? "" : ` The next try is in ${Math.round(wait / 1000)} s; what is shown may be old.`;
    return this.say(`Airflow does not answer (${error.message}).${next}`);
  }
}

/** A drawing that follows the light or dark theme of Airflow; the style sheet reads it from `data-theme`. */
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

  /** Update the shown age of the data. */
  age(now) {
    this.#drawn?.age(now);
  }

  /** Remove the drawing. */
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

/** Make a link to a page of Airflow: its URL, and a handler by which a plain click does not reload the page. */
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

/** Convert a date of Airflow to seconds since the epoch; null if there is none. */
export const seconds = (date) => (date ? Date.parse(date) / 1000 : null);

const isDark = () => document.documentElement.classList.contains("dark");
