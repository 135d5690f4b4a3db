/**
 * Outputs that a page missed, written into their cells.
 *
 * A page that was reloaded in the middle of a run has lost the way from the kernel's display to the cell, and with it the
 * value or the error of the cell; a page that was closed before the notebook was saved has lost all of it. The kernel keeps
 * what the cell shows in the end until a page has saved it; where the cell does not show it, it is put there. A page that saw
 * everything finds the settled views already in the cell, and does nothing.
 */
import { NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { IOutput } from '@jupyterlab/nbformat';
import { ISharedCodeCell } from '@jupyter/ydoc';

import { isLive, liveRun, mended, withLastSeen, withoutDead } from './outputs.js';
import { OutputLike, Settled, SettledView } from './protocol.js';

/** Outputs that came in the ordinary way are in the cell by then. */
const ORDINARY_MS = 500;

/** The repairs of another page have reached a notebook shared by several pages by then. */
const SHARED_MS = 1500;

/** The cells that were run in this page, and when: their outputs came here in the ordinary way. */
const executed = new WeakMap<object, number>();
NotebookActions.executionScheduled.connect((_, { cell }) => executed.set(cell.model.sharedModel, Date.now()));

/** The reason why a page has missed the outputs of a cell: another page ran it, or this page did and did not hear the kernel. */
export type Missed = '' | 'elsewhere' | 'asleep';

/** Put the last view of a run, whose kernel is gone, in place of the live one; into its cell if `drawn` by the page itself. */
export function replaceLive(panel: NotebookPanel, view: SettledView, cell: string, drawn: boolean): void {
  for (const each of codeCells(panel)) {
    if (!end(each, view) && drawn && each.id === cell) {
      write(each, [...(each.getOutputs() as OutputLike[]), view.output]);
    }
  }
}

/** Put the last view of a run in place of a live one in this cell; false if there is none. */
function end(cell: ISharedCodeCell, view: SettledView): boolean {
  const outputs = cell.getOutputs() as OutputLike[];
  const found = outputs.some(output => isLive(output, view));
  if (found) {
    write(cell, outputs.map(output => (isLive(output, view) ? view.output : output)));
  }
  return found;
}

function codeCells(panel: NotebookPanel): ISharedCodeCell[] {
  return [...(panel.content.model?.sharedModel.cells ?? [])].filter((each): each is ISharedCodeCell => each.cell_type === 'code');
}

/** The runs whose live views are in the notebook. */
export function liveRuns(panel: NotebookPanel): string[] {
  return codeCells(panel).flatMap(cell => (cell.getOutputs() as OutputLike[]).map(liveRun).filter(run => run !== null));
}

/** The time of the file that the page shows, by the server's clock; null if unknown. */
export function fileMs(panel: NotebookPanel): number | null {
  const ms = Date.parse(panel.context.contentsModel?.last_modified ?? '');
  return Number.isNaN(ms) ? null : ms;
}

/** Let views of runs that no kernel knows show their saved state, and no error about a widget. */
export async function showSaved(panel: NotebookPanel, goesOn: (run: string) => boolean): Promise<void> {
  await panel.context.ready;
  for (const each of panel.isDisposed ? [] : (panel.content.model?.sharedModel.cells ?? [])) {
    if (each.cell_type === 'code') {
      const outputs = (each as ISharedCodeCell).getOutputs() as OutputLike[];
      const wanted = outputs.map(output => withoutDead(output, goesOn));
      if (wanted.some((output, index) => output !== outputs[index])) {
        write(each as ISharedCodeCell, wanted);
      }
    }
  }
}

/** Put the last known state of a run that is in progress into the file that is saved; the page itself does not change. */
export function saveLastSeen(panel: NotebookPanel, lastSeen: (run: string) => OutputLike | null): void {
  const model = panel.context.model;
  const toJSON = model.toJSON.bind(model);
  model.toJSON = () => {
    const content = toJSON() as unknown as { cells: { outputs?: OutputLike[] }[] };
    const cells = content.cells.map(cell =>
      cell.outputs ? { ...cell, outputs: cell.outputs.map(output => withLastSeen(output, lastSeen)) } : cell
    );
    return { ...content, cells } as unknown as ReturnType<typeof toJSON>;
  };
}

function write(cell: ISharedCodeCell, outputs: OutputLike[]): void {
  cell.setOutputs(outputs as unknown as IOutput[]);
}

/**
 * Bring the cell up to date.
 *
 * @param isFirst - Asks the kernel whether this page is the one that repairs. Another one shows the same, and does not count it as
 *   a change that is to be saved: the first one's page saves it.
 */
export async function repair(panel: NotebookPanel, settled: Settled, missed: Missed, isFirst: () => Promise<boolean>): Promise<void> {
  await panel.context.ready;
  await wait(ORDINARY_MS);
  const first = !missed || (await isFirst());
  if (!first) {
    await wait(SHARED_MS);
  }
  const cells = panel.isDisposed ? [] : codeCells(panel);
  const cell = cells.find(each => each.id === settled.cell);
  for (const copy of first ? cells.filter(each => each !== cell) : []) {
    settled.views.forEach(view => end(copy, view)); // made while the cell ran: what the kernel displays reaches only the cell itself
  }
  if (!cell || (missed && isNewer(executed.get(cell), settled, missed))) {
    return;
  }
  const outputs = cell.getOutputs() as OutputLike[];
  const wanted = mended(outputs, cell.execution_count, settled, missed !== '');
  if (wanted !== outputs) {
    const clean = !panel.context.model.dirty;
    write(cell, wanted);
    cell.execution_count = settled.count;
    cell.executionState = 'idle'; // a page that slept has not heard that either
    if (!first && clean) {
      panel.context.model.dirty = false;
    }
  }
}

/** Whether the cell was run in this page after that. */
function isNewer(executedMs: number | undefined, { asked_at_s }: Settled, missed: Missed): boolean {
  return executedMs !== undefined && (missed === 'elsewhere' || executedMs > (asked_at_s ?? 0) * 1000);
}

async function wait(time_ms: number): Promise<void> {
  await new Promise(resolve => setTimeout(resolve, time_ms));
}
