/** A line in the cell that waits for ranks which take long to start. It is not part of the notebook. */
import type { CodeCell } from '@jupyterlab/cells';
import { NotebookPanel } from '@jupyterlab/notebook';

import { Model } from './model.js';
import * as view from './view.js';

export function showStarting(model: Model, t: view.Say): void {
  const node = document.createElement('div');
  node.className = 'jp-Distributed-starting';
  node.setAttribute('role', 'status');
  model.changed.connect(() => {
    for (const [home, link] of model.links()) {
      const starting = view.startingIn(link.overview, t);
      if (starting && home instanceof NotebookPanel) {
        const cell = home.content.widgets.find(each => each.model.id === starting.cell) as CodeCell | undefined;
        node.textContent = starting.text;
        cell?.outputArea?.node.append(node);
        return;
      }
    }
    node.remove();
  });
}
