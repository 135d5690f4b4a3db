/**
 * Outputs that a page missed, written into their cells.
 *
 * A page that was reloaded in the middle of a run has lost the way from the kernel's display to the cell, and with it the
 * value or the error of the cell. The kernel tells the page what the cell shows in the end; where the cell does not show
 * it, it is put there. A page that saw everything finds the settled view already in the cell, and does nothing.
 */
import { NotebookPanel } from '@jupyterlab/notebook';
import { IOutput } from '@jupyterlab/nbformat';
import { ISharedCodeCell } from '@jupyter/ydoc';

import { Settled } from './protocol.js';
import { isLive, isSettled, OutputLike } from './outputs.js';

/** What came on the ordinary way is in the cell by then. */
const ORDINARY_MS = 500;

/**
 * Bring the cell up to date.
 *
 * @param missed - The page was not there when the run began, so a cell without any view of it lacks one.
 * @returns Whether something was written.
 */
export async function repair(panel: NotebookPanel, settled: Settled, missed: boolean): Promise<boolean> {
  await new Promise(resolve => setTimeout(resolve, ORDINARY_MS));
  const cells = panel.isDisposed ? null : panel.content.model?.sharedModel.cells;
  const cell = cells?.find((each): each is ISharedCodeCell => each.id === settled.cell && each.cell_type === 'code');
  if (!cell) {
    return false;
  }
  const outputs = cell.getOutputs() as OutputLike[];
  if (outputs.some(output => isSettled(output, settled.run))) {
    return false;
  }
  const place = outputs.findIndex(output => isLive(output, settled));
  if (place < 0 && !missed) {
    return false;
  }
  // What stands before the view was written by the cell before the run began; what follows was lost.
  const kept = outputs.slice(0, place < 0 ? 0 : place);
  cell.setOutputs([...kept, ...settled.outputs] as unknown as IOutput[]);
  return true;
}
