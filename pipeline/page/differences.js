// What was asked for that is not the same for all of several runs: the arguments of their program before all else.
import { exact, fieldsOf, known, listOf } from "./dom.js";

const OPTION = /^(--?[A-Za-z][^=\s]*)(?:=([^]*))?$/;
const ASSIGNED = /^([A-Za-z_][\w.-]*)=([^]*)$/; // as some programs take their options
const NOT_COMPARED = new Set(["args", "output", "job_name"]); // compared by themselves, or never the same
const LONGEST = 28; // characters of a value
const DIGEST = "digest of the ";

const written = (value) => (Array.isArray(value) ? value.map(exact).join(" ") : exact(value));

/** Read what a function was called with, where the program is a function. */
function calledWith(args) {
  try {
    return args.length === 1 ? JSON.parse(args[0]).arguments : undefined;
  } catch {
    return undefined;
  }
}

/** Read arguments as pairs: an option and the words up to the next one. */
function optionsOf(args) {
  const words = listOf(args).map(exact);
  const pairs = [];
  for (const word of words) {
    const [, name, value] = OPTION.exec(word) || ASSIGNED.exec(word) || [];
    if (name) pairs.push([name, value === undefined ? [] : [value]]);
    else if (pairs.length) pairs.at(-1)[1].push(word);
    else pairs.push(["args", [word]]);
  }
  return pairs.map(([name, values]) => [name, values.join(" ") || "yes"]);
}

/** List what a run was asked for, as pairs of a name and a text. */
function settingsOf({ run, target, digests }) {
  const { args, ...fields } = fieldsOf(run);
  const called = Object.entries(fieldsOf(calledWith(listOf(args))));
  const others = Object.entries(fields).filter(([name]) => !NOT_COMPARED.has(name));
  const places = Object.entries(fieldsOf(target)).map(([name, value]) => [`target.${name}`, value]);
  const copies = Object.entries(fieldsOf(digests)).map(([name, value]) => [
    DIGEST + name,
    exact(value).slice(0, 8),
  ]);
  const all = [...(called.length ? called : optionsOf(args)), ...others, ...places, ...copies];
  return new Map(all.filter(([, value]) => known(value)).map(([name, value]) => [name, written(value)]));
}

/** A digest says nothing more where the path is another one. */
const isSaid = (name, names) =>
  name.startsWith(DIGEST) && names.includes(name.slice(DIGEST.length).replace("code", "program"));

/** Find what differs: for each report its pairs of a name and a text; none where it says nothing of it. */
export function differences(reports) {
  const all = reports.map(settingsOf);
  const told = all.filter((settings) => settings.size);
  const names = [...new Set(told.flatMap((settings) => [...settings.keys()]))];
  const differ = names.filter((name) => told.some((each) => each.get(name) !== told[0].get(name)));
  const isDigest = (name) => name.startsWith(DIGEST);
  const shown = differ.filter((name) => !isSaid(name, differ)).sort((a, b) => isDigest(a) - isDigest(b));
  return all.map((settings) =>
    shown.filter((name) => settings.has(name)).map((name) => [bare(name), settings.get(name)]),
  );
}

const bare = (name) => name.replace(/^--?/, "");

/** Shorten a text: of a path the end says most. */
export function shortened(text) {
  if (text.length <= LONGEST) return text;
  return text.includes("/") ? `…${text.slice(1 - LONGEST)}` : `${text.slice(0, LONGEST - 1)}…`;
}
