// The mean of what many ranks report, with the lowest and the highest value (`kernel/analysis/rank_mean.py`, which explains
// it and has the same numbers). No DOM; tested under node.

const NEARLY_ALL = 0.9;
const TAIL = 0.1;
const MOST_MEANS = 300;

/**
 * `{at, step, mean, low, high}` at each step that nearly all ranks have come to. `lines`: `{points, ended}` of each rank, a
 * point `[place on the axis, value, step]`; `ended`: the rank reports nothing more.
 */
export function means(lines) {
  const curves = lines.filter(({ points }) => points.length).map(({ points, ended }) => ({ points: ordered(points), ended }));
  return meanSteps(curves).map((step) => {
    const found = curves.map(({ points }) => pointAtStep(points, step)).filter((point) => point !== null);
    const values = found.map(([, value]) => value);
    return { at: meanOf(found.map(([x]) => x)), step, mean: meanOf(values), low: Math.min(...values), high: Math.max(...values) };
  });
}

function ordered(points) {
  return [...new Map(points.map((point) => [point[2], point])).values()].sort((a, b) => a[2] - b[2]);
}

function meanSteps(curves) {
  if (!curves.length) return [];
  const ascending = (numbers) => numbers.sort((a, b) => a - b);
  const [firsts, lasts] = [(points) => points[0][2], (points) => points[points.length - 1][2]].map((of) => ascending(curves.map(({ points }) => of(points))));
  const tail = TAIL * (lasts[lasts.length - 1] - firsts[0]);
  const over = ascending(curves.filter(({ ended }) => ended).map(({ points }) => points[points.length - 1][2] + tail));
  const reports = new Map();
  for (const { points } of curves) for (const [, , step] of points) reports.set(step, (reports.get(step) ?? 0) + 1);
  const there = ascending([...reports.keys()]).map((step) => ({ step, count: below(firsts, step, true) - below(lasts, step) }));
  const most = Math.max(...there.map(({ count }) => count));
  let passed = there.filter(({ step, count }) => count >= NEARLY_ALL * (curves.length - below(over, step)));
  if (!passed.length) passed = there.filter(({ count }) => count === most);
  let exact = passed.filter(({ step, count }) => reports.get(step) >= NEARLY_ALL * count);
  if (3 * exact.length < median(ascending(curves.map(({ points }) => points.length)))) exact = passed;
  const stride = Math.ceil(exact.length / MOST_MEANS);
  return ascending([...new Set([...exact.filter((_, place) => place % stride === 0), passed[passed.length - 1]].map(({ step }) => step))]);
}

/** How many of the ascending numbers are below a number (`with`: or equal to it). */
function below(numbers, number, withEqual = false) {
  let [from, to] = [0, numbers.length];
  while (from < to) {
    const middle = (from + to) >> 1;
    if (numbers[middle] < number || (withEqual && numbers[middle] === number)) from = middle + 1;
    else to = middle;
  }
  return from;
}

function median(numbers) {
  const middle = numbers.length >> 1;
  return numbers.length % 2 ? numbers[middle] : (numbers[middle - 1] + numbers[middle]) / 2;
}

/** The point of a rank at a step, interpolated between its reports; null before the first and after the last. */
function pointAtStep(points, step) {
  let [from, to] = [0, points.length];
  while (from < to) {
    const middle = (from + to) >> 1;
    if (points[middle][2] < step) from = middle + 1;
    else to = middle;
  }
  if (from === points.length || (from === 0 && step < points[0][2])) return null;
  const after = points[from];
  if (after[2] === step) return after;
  const before = points[from - 1];
  const share = (step - before[2]) / (after[2] - before[2]);
  return [0, 1].map((axis) => (1 - share) * before[axis] + share * after[axis]);
}

function meanOf(numbers) {
  return numbers.reduce((sum, number) => sum + number / numbers.length, 0);
}
