/** The entry in JupyterLab's list of what is running: the ranks of every open notebook, each to be shut down there. */
import { IRunningSessions } from '@jupyterlab/running';
import { LabIcon } from '@jupyterlab/ui-components';

import { icon } from './icon.js';
import { KernelLink } from './link.js';
import { Home } from './model.js';
import { Doer } from './panel.js';
import { Crew, Pool } from './protocol.js';
import * as view from './view.js';

export function running({ model, t }: Doer, activate: (home: Home) => void, agrees: (pool: Pool) => Promise<boolean>): IRunningSessions.IManager {
  const all = (): [Home, KernelLink, Pool, Crew][] =>
    model.links().flatMap(([home, link]) => (link.overview?.pools ?? []).flatMap(pool => pool.crews.map(crew => [home, link, pool, crew] as [Home, KernelLink, Pool, Crew])));
  const stop = (link: KernelLink, pool: Pool): void => void model.attempt(() => link.request({ op: 'stop_ranks', pool: pool.name }));
  return {
    name: t('Distributed ranks'),
    running: () =>
      all().map(([home, link, pool, crew]) => ({
        open: () => activate(home),
        shutdown: () => void agrees(pool).then(yes => yes && stop(link, pool)),
        icon: (): LabIcon => icon,
        label: (): string => `${home.title.label}: ${view.crewText(crew, t)}`,
        labelTitle: (): string => [t('pool %1', pool.name), view.keptText(crew, t)].filter(Boolean).join(' · ')
      })),
    shutdownAll: () => all().forEach(([, link, pool]) => stop(link, pool)),
    refreshRunning: () => undefined,
    runningChanged: model.changed,
    shutdownLabel: t('Stop ranks'),
    shutdownAllLabel: t('Stop all ranks'),
    shutdownAllConfirmationText: t('End the ranks of all notebooks? What they keep is lost.')
  };
}
