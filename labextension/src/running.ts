/** The entry in JupyterLab's list of what is running: the ranks of every open notebook, each to be shut down there. */
import { IRunningSessions } from '@jupyterlab/running';
import { LabIcon } from '@jupyterlab/ui-components';

import { icon } from './icon.js';
import { KernelLink } from './link.js';
import { Home } from './model.js';
import { Doer } from './panel.js';
import { WorkerGroup, Pool } from './protocol.js';
import * as view from './view.js';

export function running({ model, t }: Doer, activate: (home: Home) => void, agrees: (pool: Pool) => Promise<boolean>): IRunningSessions.IManager {
  const all = (): [Home, KernelLink, Pool, WorkerGroup][] =>
    model.links().flatMap(([home, link]) => (link.overview?.pools ?? []).flatMap(pool => pool.groups.map(group => [home, link, pool, group] as [Home, KernelLink, Pool, WorkerGroup])));
  const stop = (link: KernelLink, pool: Pool): void => void model.attempt(() => link.request({ op: 'stop_ranks', pool: pool.name }));
  return {
    name: t('Distributed ranks'),
    running: () =>
      all().map(([home, link, pool, group]) => ({
        open: () => activate(home),
        shutdown: () => void agrees(pool).then(yes => yes && stop(link, pool)),
        icon: (): LabIcon => icon,
        label: (): string => `${home.title.label}: ${view.groupText(group, t)}`,
        labelTitle: (): string => [t('pool %1', pool.name), view.keptText(group, t)].filter(Boolean).join(' · ')
      })),
    shutdownAll: () => all().forEach(([, link, pool]) => stop(link, pool)),
    refreshRunning: () => undefined,
    runningChanged: model.changed,
    shutdownLabel: t('Stop ranks'),
    shutdownAllLabel: t('Stop all ranks'),
    shutdownAllConfirmationText: t('End the ranks of all notebooks? What they keep is lost.')
  };
}
