/** Finds the view of a run among a cell's outputs, and determines the outputs that a cell should have. Pure. */
import { OutputLike, Settled, SettledView } from './protocol.js';

const WIDGET = 'application/vnd.jupyter.widget-view+json';

function mark(output: OutputLike): { run?: string; settled?: boolean } {
  return (output.metadata?.['jupyter_distrib'] ?? {});
}

/** The last view of the run is here. */
export function isSettled(output: OutputLike, run: string): boolean {
  return mark(output).run === run && mark(output).settled === true;
}

/** A view that was drawn while the run went on. */
export function isLive(output: OutputLike, { run, model }: Pick<SettledView, 'run' | 'model'>): boolean {
  const there = (output.data?.[WIDGET] ?? {}) as { model_id?: string };
  return (mark(output).run === run && mark(output).settled !== true) || (model !== '' && there.model_id === model);
}

/** The run whose live view this is; null for any other output. */
export function liveRun(output: OutputLike): string | null {
  return mark(output).settled === true ? null : (mark(output).run ?? null);
}

/** A dead live view in its saved form: without the widget, which no kernel has any more. Any other output unchanged. */
export function withoutDead(output: OutputLike, goesOn: (run: string) => boolean): OutputLike {
  const run = liveRun(output);
  if (run === null || goesOn(run) || !output.data || !(WIDGET in output.data)) {
    return output;
  }
  return { ...output, data: Object.fromEntries(Object.entries(output.data).filter(([kind]) => kind !== WIDGET)) };
}

/** A live view with the last known state of its run, for front ends that do not find the widget. Any other output unchanged. */
export function withLastSeen(output: OutputLike, lastSeen: (run: string) => OutputLike | null): OutputLike {
  const run = liveRun(output);
  const seen = run === null ? null : lastSeen(run);
  return seen ? { ...output, data: { ...output.data, ...seen.data } } : output;
}

/**
 * What a cell should show.
 *
 * @param outputs - What it shows.
 * @param count - The number beside it; null if the cell had not ended when that was written down.
 * @param missed - The page was not there when the cell ran, so what is not shown was lost; else the user has cleared it.
 * @returns The same array if nothing is to be written.
 */
export function mended(outputs: OutputLike[], count: number | null, settled: Settled, missed: boolean): OutputLike[] {
  const views = settled.views;
  const own = outputs.some(output => views.some(view => isSettled(output, view.run) || isLive(output, view)));
  // Outputs beside a number belong to that execution, others to the execution that was in progress.
  const before = own || count === settled.count ? outputs : count === null ? outputs.filter(output => !mark(output).run) : [];
  const kept = before.map(output => views.find(view => isLive(output, view))?.output ?? output);
  const lost = missed ? views.filter(view => !kept.some(output => isSettled(output, view.run))).map(view => view.output) : [];
  if (!lost.length && kept.every((output, index) => output === outputs[index]) && !(missed && count === null)) {
    return outputs;
  }
  const outcome = kept.filter(isOutcome);
  return [...kept.filter(output => !isOutcome(output)), ...lost, ...(outcome.length ? outcome : settled.outcome)];
}

function isOutcome(output: OutputLike): boolean {
  return output.output_type === 'execute_result' || output.output_type === 'error';
}
