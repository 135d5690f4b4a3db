/**
 * The end of long and of detached runs is told: as a notification, and in the title of a browser tab that is not seen. While
 * runs go on, the title says how long they still take.
 */
import { Notification } from '@jupyterlab/apputils';

import { Home, Model } from './model.js';
import { Run } from './protocol.js';
import { TabTitle } from './tabtitle.js';
import * as view from './view.js';

/** `afterS` is the minimum duration of a run whose end is reported, in seconds; 0 for detached runs only. */
export function tellOfEnds(model: Model, afterS: () => number, goTo: (home: Home, run: Run) => void, t: view.Say): void {
  const goingOn = new Set<string>();
  const title = new TabTitle(document);
  let [mark, left] = ['', ''];
  const setMark = (wanted: string): void => {
    mark = wanted;
    title.show(mark + left);
  };
  new MutationObserver(() => title.again()).observe(document.head, { childList: true, subtree: true });
  model.changed.connect(() => {
    for (const [home, link] of model.links()) {
      for (const run of link.overview?.runs ?? []) {
        if (run.elapsed_s === null) {
          goingOn.add(run.run);
        } else if (goingOn.delete(run.run)) {
          tell(home, run);
        }
      }
    }
    left = view.leftInTitle([model.overview, ...model.links().map(([, link]) => link.overview)], t);
    title.show(mark + left);
  });

  const tell = (home: Home, run: Run): void => {
    const told = view.endText(run, afterS(), t);
    if (!told) {
      return;
    }
    const actions = run.cell ? [{ label: t('Go to cell'), callback: () => goTo(home, run) }] : [];
    Notification.emit(told.text, told.good ? 'success' : 'error', { autoClose: told.good ? 8000 : false, actions });
    if (document.hidden) {
      setMark(told.good ? '✓ ' : '✗ ');
    }
  };

  document.addEventListener('visibilitychange', () => {
    if (!document.hidden) {
      setMark('');
    }
  });
}
