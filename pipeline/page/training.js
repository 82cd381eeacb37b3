// The page of one training, and the history of many: mount(root, options) and mountHistory(root, options).
import { Curves } from "./curves.js";
import { ago, fieldsOf, fill, h, listOf } from "./dom.js";
import { ranksOf } from "./ranks.js";
import { asked, metricsOf, places } from "./places.js";
import { attempts, head, problems, rounds, steps } from "./sections.js";
export { mountHistory } from "./history.js";

const SECTIONS = [
  ["steps", (report, tasks) => steps(report, tasks)],
  ["ranks", ranksOf],
  ["attempts", attempts],
  ["rounds", rounds],
  ["metrics", metricsOf],
  ["places", places],
  ["asked", asked],
];

/** Draw a part; one that cannot be read says so, and the others are drawn. */
function safely(draw, ...given) {
  try {
    return draw(...given);
  } catch {
    return h("p", { class: "none" }, "This part of the report cannot be read.");
  }
}

/**
 * Draw one run.
 * @param {HTMLElement} root what it is drawn into
 * @param {{dark?: boolean, links?: {tasks?: object[]}}} options dark: null or missing follows the browser
 * @returns {{update: (documents: {report: object, tasks?: object[], now?: number}) => void, age: (now: number) => void,
 *   destroy: () => void}} now: seconds since the epoch, where a person looks for news; `age` says how old the report is by then
 */
export function mount(root, options = {}) {
  root.classList.add("manycpu");
  if (typeof options.dark === "boolean") root.dataset.theme = options.dark ? "dark" : "light";
  const curves = new Curves();
  const slots = new Map(
    ["head", "problems", ...SECTIONS.map(([name]) => name)].map((name) => [
      name,
      h("div", { class: `slot ${name}-slot` }),
    ]),
  );
  const [top, notices, ...rest] = slots.values();
  const page = h("main", { class: "training" }, top, notices, curves.element, rest);
  curves.element.hidden = true;
  root.replaceChildren(page);

  function update({ report: told, tasks: given, now } = {}) {
    const report = fieldsOf(told);
    const tasks = listOf(given || fieldsOf(options.links).tasks).map(fieldsOf);
    fill(slots.get("head"), safely(head, report, now));
    fill(slots.get("problems"), safely(problems, report));
    safely(() => curves.update([{ label: "", report }]));
    for (const [name, draw] of SECTIONS) fill(slots.get(name), safely(draw, report, tasks));
  }

  function age(now) {
    for (const told of root.querySelectorAll(".age")) told.textContent = ago(Number(told.dataset.since), now);
  }

  return { update, age, destroy: () => root.replaceChildren() };
}
