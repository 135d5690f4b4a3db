/** A line in the cell that waits for ranks which take long to start. It is not part of the notebook. */
import type { CodeCell } from '@jupyterlab/cells';
import { NotebookPanel } from '@jupyterlab/notebook';

import { Model } from './model.js';
import * as view from './view.js';

/** The time between two looks at a start, during which the kernel may have nothing new to report. */
const LOOK_MS = 500;

export function showStarting(model: Model, t: view.Say): void {
  const node = document.createElement('div');
  node.className = 'jp-Distributed-starting';
  node.setAttribute('role', 'status');
  let timer: ReturnType<typeof setTimeout> | undefined;
  const show = (): void => {
    clearTimeout(timer);
    if (model.links().some(([, link]) => view.waitingCells(link.overview).length > 0)) {
      timer = setTimeout(show, LOOK_MS);
    }
    for (const [home, link] of model.links()) {
      const starting = view.startingIn(link.overview, link.nowS(), t);
      if (starting && home instanceof NotebookPanel) {
        const cell = home.content.widgets.find(each => each.model.id === starting.cell) as CodeCell | undefined;
        if (node.textContent !== starting.text) {
          node.textContent = starting.text;
        }
        if (cell?.outputArea && node.parentElement !== cell.outputArea.node) {
          cell.outputArea.node.append(node);
        }
        return;
      }
    }
    node.remove();
  };
  model.changed.connect(show);
}
