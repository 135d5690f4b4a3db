// What charts of reported numbers show: for each metric the line of every rank, or the mean of many; scales, ticks, the best
// value, and where it became nan. Pure; `charts.js` draws.

import { means } from "./mean.js";
import { t, tn } from "./say.js";
import { digits, direction, notFiniteText, ownValue, rankList } from "./words.js";

const LEFT = new Set(["done", "failed", "lost"]); // ranks that report nothing more
const MANY = 8; // with more ranks than these, a chart has a mean and a band
export const BOX = { width: 300, height: 96, top: 6, bottom: 6, left: 4, right: 4 };

/** The names of numbers that change, in the order in which they were first reported. */
export function chartNames(state) {
  const changing = new Map();
  for (const { columns } of state.ranks) {
    for (const key of Object.keys(columns ?? {})) {
      if (!key.startsWith("=")) continue;
      const numbers = columns[key].filter((value) => typeof value === "number");
      changing.set(key.slice(1), changing.get(key.slice(1)) || numbers.some((value) => value !== numbers[0]));
    }
  }
  return [...changing].filter(([, changes]) => changes).map(([name]) => name);
}

/** How many numbers the kernel has not sent, in words. */
export function undrawn(state) {
  const count = Math.max(0, ...state.ranks.map(({ columns }) => columns?.left ?? 0));
  return count ? tn("%1 more metric is not drawn", "%1 more metrics are not drawn", count) : "";
}

/** `train/loss`, `val_loss`: the part of the training, and what is measured. */
const PART = /^(?:(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)[/_.-](.+)|(.+)[/_.-](train(?:ing)?|val(?:id(?:ation)?)?|eval|test))$/i;

/** `train` of `train/loss`. */
export function partOf(name) {
  const found = PART.exec(name);
  return found ? (found[1] ?? found[4]) : name;
}

/** The charts to draw: a title, and the names that it has a line for. `train/loss` and `val/loss` are one chart. */
export function chartGroups(names) {
  const groups = new Map();
  for (const name of names) {
    const found = PART.exec(name);
    const title = found ? (found[2] ?? found[3]) : name;
    groups.set(title, [...(groups.get(title) ?? []), name]);
  }
  return [...groups].map(([title, of]) => (of.length > 1 ? { title, names: of } : { title: of[0], names: of }));
}

/**
 * What to draw of one metric, or of some that belong together: a path for each rank, of many ranks the mean and a band from
 * the lowest to the highest; and how to get from pixels to numbers. `log`: a logarithmic scale; `smooth`: the weight of what
 * came before, 0 to 1; `time`: over seconds instead of steps; `zoom`: the part of the axis that is shown; `each`: a line for
 * each, however many they are.
 */
export function chartOf(state, names, { log = false, smooth = 0, time = false, zoom = null, each = false } = {}) {
  const inBox = ([x, y]) => (!zoom || (x >= zoom[0] && x <= zoom[1])) && (!log || y > 0);
  const all = [names].flat().map((name) => {
    const lines = state.ranks.map(({ rank, state: at, columns }) => ({ rank, ended: LEFT.has(at), points: pointsOf(columns, name, time) })).filter(({ points }) => points.length);
    const of = (points) => smoothed(points, smooth).filter(inBox);
    if (each || lines.length <= MANY) return { name, lines: lines.map((line) => ({ ...line, points: of(line.points) })).filter(({ points }) => points.length) };
    const found = means(lines);
    const [mean, low, high] = ["mean", "low", "high"].map((key) => of(found.map((each) => [each.at, each[key], each.step])));
    return { name, lines, mean, low, high };
  });
  const points = all.flatMap(({ lines, mean, low, high }) => (mean ? [...mean, ...low, ...high] : lines.flatMap((line) => line.points)));
  const odds = all.map(({ name, lines }) => oddOf(state, name, lines, time)).map((odd) => odd && { ...odd, at: zoom ? Math.min(zoom[1], Math.max(zoom[0], odd.at)) : odd.at });
  const of = (values) => [Math.min(...values), Math.max(...values)];
  const x = scale(...of([...points.map((point) => point[0]), ...odds.filter((odd) => odd && points.length).map(({ at }) => at)]), BOX.left, BOX.width - BOX.right);
  const y = scale(...of(points.map((point) => point[1])), BOX.height - BOX.bottom, BOX.top, log);
  const series = all.map(({ name, lines, mean, low, high }, index) => {
    const first = mean ?? lines[0]?.points ?? [];
    return {
      name,
      lines: lines.map((line) => ({ ...line, path: mean ? "" : pathOf(line.points, x, y) })),
      points: first,
      mean: mean ? pathOf(mean, x, y) : null,
      band: mean ? `${pathOf([...low, ...[...high].reverse()], x, y)}Z` : null,
      best: bestOf(name, first),
      odd: odds[index],
    };
  });
  const first = series.find(({ lines }) => lines.length) ?? series[0];
  return { name: first.name, x, y, series, lines: first.lines, first: first.lines[0]?.rank ?? null };
}

/** The best of the points, the first one of several that are; null if the name does not tell which is better. */
function bestOf(name, points) {
  const sign = direction(name);
  return sign && points.length ? points.reduce((best, point) => (sign * point[1] > sign * best[1] ? point : best)) : null;
}

/**
 * Where a metric was nan or infinite: `{at, text, word, ranks}`, `word` if the line that stands out has it now. Of several
 * ranks the earliest that still is.
 */
function oddOf(state, name, lines, time) {
  const found = state.ranks.map(({ rank, columns }) => ({ rank, columns, odd: ownValue(columns?.not_finite, name) })).filter(({ odd }) => odd);
  if (!found.length) return null;
  const worst = found.reduce((one, other) => (Number(other.odd[3]) - Number(one.odd[3]) || one.odd[1] - other.odd[1]) > 0 ? other : one);
  const text = notFiniteText(worst.odd);
  const alike = found.filter(({ odd }) => notFiniteText(odd) === text).map(({ rank }) => rank);
  const reporting = state.ranks.filter(({ columns }) => columns?.[`=${name}`]).length;
  const { step, at } = worst.columns;
  const place = time && at ? at[Math.max(0, step.findIndex((each) => each >= worst.odd[1]))] : worst.odd[1];
  const leads = lines.length > MANY ? alike.length === reporting : alike.includes(lines[0]?.rank ?? alike[0]);
  const who = alike.length === reporting ? "" : ` ${alike.length > 3 ? tn("on %1 rank", "on %1 ranks", alike.length) : t("on %1", rankList(alike))}`;
  return { at: place, text: text + who, word: leads && worst.odd[3] ? worst.odd[0] : "", line: alike[0] };
}

/** Where the line of each was nan or infinite, for charts in which each has its own: `{at, text, word, line}`. */
export function oddsOfEach(state, name, time) {
  return state.ranks.flatMap((rank) => (ownValue(rank.columns?.not_finite, name) ? [oddOf({ ranks: [rank] }, name, [], time)] : []));
}

/** The place of the cross: where the line was last before it became nan. */
export function crossOf({ x, y }, { odd, mean, lines, points }) {
  const own = mean ? points : (lines.find(({ rank }) => rank === odd.line)?.points ?? []);
  const before = own.filter(([place]) => place <= odd.at);
  const value = (before[before.length - 1] ?? own[0] ?? [0, y.low])[1];
  return [x.at(odd.at) / BOX.width, y.at(value) / BOX.height];
}

/** Three numbers of an axis: the first, one in the middle and the last; fewer if they are the same. */
export function ticks({ low, high, back }, from, to) {
  return low === high ? [low] : [low, back((from + to) / 2), high];
}

/** What a chart shows in a sentence: `loss fell from 2.3 to 0.13 in 153 steps, best 0.12 at step 140`. */
export function chartText(title, { series }) {
  const told = series.map(({ name, points, best, odd, mean, lines }) => {
    if (!points.length) return odd ? `${name} ${odd.text}` : "";
    const [from, to] = [points[0], points[points.length - 1]];
    const who = mean ? `, ${t("mean of %1", tn("%1 rank", "%1 ranks", lines.length))}` : lines.length > 1 ? `, ${t("rank %1", lines[0].rank)}` : "";
    const args = [name + who, digits(from[1], 3), digits(to[1], 3), tn("%1 step", "%1 steps", to[2] - from[2])];
    const way = to[1] < from[1] ? t("%1 fell from %2 to %3 in %4", ...args) : to[1] > from[1] ? t("%1 rose from %2 to %3 in %4", ...args) : t("%1 went from %2 to %3 in %4", ...args);
    return [way, best && best[1] !== to[1] ? t("best %1 at step %2", digits(best[1], 3), best[2]) : "", odd?.text].filter(Boolean).join(", ");
  });
  return `${series.length > 1 ? `${title}: ` : ""}${told.filter(Boolean).join("; ")}`;
}

/** Whether a line goes up and down more than it goes on, so that a smooth one says more. */
export function isNoisy(points) {
  if (points.length < 20) return false;
  const steps = points.slice(1).map(([, value], place) => value - points[place][1]);
  const turns = steps.slice(1).filter((step, place) => step * steps[place] < 0).length;
  return turns > 0.4 * steps.length;
}

/** Points whose values are means of what came before, of which each counts `weight` as much as the next one. */
export function smoothed(points, weight) {
  if (!weight) return points;
  let [sum, total] = [0, 0];
  return points.map(([x, value, step]) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [x, sum / total, step];
  });
}

/** The value of each rank at or before a place on the axis. */
export function valuesAt(series, place) {
  return series.lines.filter(({ points }) => points.length).map(({ rank, points }) => ({ rank, value: valueAt(points, place) }));
}

export function valueAt(points, place) {
  const before = points.filter(([x]) => x <= place);
  return (before[before.length - 1] ?? points[0])[1];
}

function pointsOf(columns, name, time) {
  const values = columns?.[`=${name}`] ?? [];
  const places = (time && columns?.at) || columns?.step;
  return values.map((value, index) => [places[index], value, columns.step[index]]).filter(([, value]) => typeof value === "number");
}

function scale(low, high, from, to, log = false) {
  const on = log ? Math.log : (value) => value;
  // Halved first: the range of two large numbers may not be a number.
  const range = on(high) / 2 - on(low) / 2;
  const at = (value) => (range ? from + ((on(value) / 2 - on(low) / 2) / range) * (to - from) : (from + to) / 2);
  const back = (pixel) => {
    const share = (pixel - from) / (to - from);
    return log ? Math.exp(on(low) + share * 2 * range) : low + 2 * share * (high / 2 - low / 2);
  };
  return { low, high, at, back };
}

function pathOf(points, x, y) {
  return `M${points.map(([step, value]) => `${x.at(step).toFixed(1)} ${y.at(value).toFixed(1)}`).join("L")}`;
}
