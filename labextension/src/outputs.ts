/** Which of a cell's outputs is the view of a run. Pure. */
import { Settled } from './protocol.js';

export interface OutputLike {
  data?: Record<string, unknown>;
  metadata?: Record<string, unknown>;
}

const WIDGET = 'application/vnd.jupyter.widget-view+json';

function mark(output: OutputLike): { run?: string; settled?: boolean } {
  return (output.metadata?.['jupyter_distrib'] ?? {});
}

/** The last view of the run is here. */
export function isSettled(output: OutputLike, run: string): boolean {
  return mark(output).run === run && mark(output).settled === true;
}

/** A view that was drawn while the run went on. */
export function isLive(output: OutputLike, settled: Settled): boolean {
  const model = (output.data?.[WIDGET] ?? {}) as { model_id?: string };
  return mark(output).run === settled.run || (settled.model !== '' && model.model_id === settled.model);
}
