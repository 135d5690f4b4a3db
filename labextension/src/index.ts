/**
 * The plugin: puts the panel, the commands, the status item and the Running entry in place, catches Stop of the widget
 * in the cell, and has views and outputs that a page has missed drawn and repaired. Everything it builds on is optional, so that it also comes up in
 * Notebook 7 and in other applications built from JupyterLab's parts.
 */
import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Clipboard, Dialog, ICommandPalette, InputDialog, MainAreaWidget, SessionContextDialogs, showDialog } from '@jupyterlab/apputils';
import { IConsoleTracker } from '@jupyterlab/console';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { caretUpIcon, copyIcon, listIcon, refreshIcon, runIcon, stopIcon } from '@jupyterlab/ui-components';
import { CommandRegistry } from '@lumino/commands';
import { ReadonlyJSONObject, ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { Widget } from '@lumino/widgets';

import { ComparedRuns } from './comparison.js';
import { icon } from './icon.js';
import { LiveViews } from './live.js';
import { Home, Model } from './model.js';
import { Drawing, drawingOf } from './modules.js';
import { Loaded, Log, LogSource } from './logview.js';
import { COMMANDS, DistributedPanel, Doer, sizeOf, StatusItem } from './panel.js';
import { KernelLink } from './link.js';
import { Answer, Page, Pool, Request, Run, SavedRun, Settled } from './protocol.js';
import { fileMs, liveRuns, repair, replaceLive, saveLastSeen, showSaved } from './repair.js';
import { tellOfEnds } from './notify.js';
import { pictures, RANK } from './picture.js';
import { running } from './running.js';
import { RunPage } from './runpage.js';
import { RunsTable } from './runstable.js';
import { showStarting } from './starting.js';
import * as view from './view.js';

const ID = 'jupyter-distrib:plugin';

interface Options {
  statusBar: boolean;
  repairOutputs: boolean;
  confirmStop: boolean;
  notifyAfter: number;
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Pools, ranks and runs of jupyter_distrib.',
  autoStart: true,
  optional: [INotebookTracker, IConsoleTracker, ICommandPalette, ILayoutRestorer, ISettingRegistry, ITranslator, IStatusBar, IRunningSessionManagers, IRenderMimeRegistry],
  activate
};

export default plugin;

function activate(
  app: JupyterFrontEnd,
  notebooks: INotebookTracker | null,
  consoles: IConsoleTracker | null,
  palette: ICommandPalette | null,
  restorer: ILayoutRestorer | null,
  registry: ISettingRegistry | null,
  translator: ITranslator | null,
  statusBar: IStatusBar | null,
  sessions: IRunningSessionManagers | null,
  rendermime: IRenderMimeRegistry | null
): void {
  rendermime?.addFactory(pictures, RANK);
  const t = (translator ?? nullTranslator).load('jupyter_distrib');
  const say: view.Say = Object.assign((text: string, ...args: (string | number)[]) => t.__(text, ...args), {
    n: (one: string, many: string, count: number, ...args: (string | number)[]) => t._n(one, many, count, ...args)
  });
  (globalThis as Record<symbol, unknown>)[Symbol.for('jupyter_distrib.translator')] = t; // for the views in cells
  const model = new Model(app, notebooks, consoles);
  const dialogs = new SessionContextDialogs({ translator: translator ?? nullTranslator });
  const doer: Doer = { model, commands: app.commands, t: say, chooseKernel: home => void dialogs.selectKernel(home.sessionContext) };
  const options: Options = { statusBar: true, repairOutputs: true, confirmStop: true, notifyAfter: 30 };

  const panel = new DistributedPanel(doer);
  const add = (): void => app.shell.add(panel, 'left', { rank: 350, type: 'Distributed' });
  add();
  restorer?.add(panel, panel.id);
  void app.restored.then(() => panel.reopen());

  addCommands(app, doer, options, () => {
    if (!panel.isAttached) {
      add();
    }
    app.shell.activateById(panel.id);
  });
  const category = say('Distributed');
  for (const command of Object.values(COMMANDS)) {
    palette?.addItem({ command, category });
  }
  app.contextMenu.addItem({ command: COMMANDS.insert, args: { here: true }, selector: '.jp-Notebook .jp-CodeCell', rank: 12 });
  model.changed.connect(() => app.commands.notifyCommandChanged());

  const item = new StatusItem(doer);
  statusBar?.registerStatusItem(ID, { item, align: 'left', rank: 4, isActive: () => options.statusBar && model.overview !== null, activeStateChanged: model.changed as never });
  sessions?.add(running(doer, home => app.shell.activateById(home.id), pool => agrees(doer, options, pool, say('Stop ranks'))));
  void registry?.load(ID).then(settings => {
    const read = (): void => {
      Object.assign(options, settings.composite);
      item.setHidden(!options.statusBar);
    };
    settings.changed.connect(read);
    read();
  });

  catchRequests(app, doer);
  showStarting(model, say);
  tellOfEnds(model, () => options.notifyAfter, (home, run) => goToCell(app, home, run.cell), say);
  repairOutputs(doer, options);
}

// ---------------------------------------------------------------------------------------------------- commands

function addCommands(app: JupyterFrontEnd, doer: Doer, options: Options, open: () => void): void {
  const { model, t } = doer;
  const ready = (): boolean => model.overview !== null;
  const poolOf = (args: ReadonlyPartialJSONObject): string => (typeof args['pool'] === 'string' ? args['pool'] : (model.overview?.next.pool ?? ''));
  const newest = (): Run | undefined => view.currentRuns(model.overview)[0] ?? model.overview?.runs[0];
  const isUp = (name: string): boolean => (model.overview?.pools.find(pool => pool.name === name)?.groups.length ?? 0) > 0;
  const agreed = (name: string, what: string): Promise<boolean> => agrees(doer, options, model.overview?.pools.find(pool => pool.name === name), what);
  const poolArgs = described({ pool: { type: 'string', description: 'The pool; without it, the one in use.' } });
  const put = (id: string, more: CommandRegistry.ICommandOptions): void => void app.commands.addCommand(id, { icon, describedBy: described({}), ...more });

  put(COMMANDS.open, {
    label: t('Show Pools, Ranks and Runs'),
    caption: t('Open the panel of jupyter_distrib'),
    execute: open
  });
  put(COMMANDS.load, {
    label: t('Load jupyter_distrib in This Kernel'),
    caption: t('Run %load_ext jupyter_distrib'),
    isEnabled: () => model.state === 'absent',
    execute: () => model.attempt(async () => model.link?.load())
  });
  put(COMMANDS.stop, {
    label: t('Stop the Distributed Run'),
    caption: t('Stop the run in progress; a second time kills its ranks'),
    icon: stopIcon,
    isEnabled: args => typeof args['run'] === 'string' || view.currentRuns(model.overview).length > 0,
    describedBy: described({ run: { type: 'string' }, force: { type: 'boolean' } }),
    execute: async args => {
      const link = model.link;
      const run = typeof args['run'] === 'string' ? args['run'] : (await chosen(doer, selectedCell(model)))?.run;
      const force = typeof args['force'] === 'boolean' ? args['force'] : link?.overview?.runs.some(each => each.run === run && each.state === 'stopping');
      if (run) {
        await stop(doer, link, run, force ?? false);
      }
    }
  });
  put(COMMANDS.stopAll, {
    label: t('Stop All Distributed Runs'),
    caption: t('Stop all runs and take waiting runs out of the queue; the ranks stay'),
    icon: stopIcon,
    isEnabled: () => view.currentRuns(model.overview).length > 0,
    describedBy: described({ runs: { type: 'array', items: { type: 'string' }, description: 'Only these; without them, all of this notebook.' } }),
    execute: async args => {
      const [link, only] = [model.link, args['runs']];
      const runs = view.currentRuns(model.overview).filter(({ run }) => !Array.isArray(only) || only.includes(run));
      const loss = t.n('%1 run ends; what it has not saved is lost.', '%1 runs end; what they have not saved is lost.', runs.length);
      if (runs.length && (runs.length === 1 || !options.confirmStop || (await confirm(t('Stop all runs'), loss, t)))) {
        // Queued runs go first: none of them must begin when the run in front of it has ended.
        for (const { run, stopping } of runs.reverse()) {
          await stop(doer, link, run, stopping !== '');
        }
      }
    }
  });
  put(COMMANDS.moveUp, {
    label: t('Move a Queued Run Up'),
    caption: t('Let the last queued run, or the given one, begin before the run in front of it'),
    icon: caretUpIcon,
    isEnabled: args => typeof args['run'] === 'string' || view.currentRuns(model.overview).some(run => (run.place ?? 0) > 1),
    describedBy: described({ run: { type: 'string' } }),
    execute: async args => {
      const last = [...view.currentRuns(model.overview)].sort((a, b) => (a.place ?? 0) - (b.place ?? 0)).at(-1);
      await model.ask({ op: 'move_up', run: text(args['run']) || (last?.run ?? '') });
    }
  });
  put(COMMANDS.start, {
    label: args => (isUp(poolOf(args)) ? t('Resize Ranks') : t('Start Ranks')),
    caption: t('Start ranks before a cell asks for them, as many as are chosen'),
    icon: runIcon,
    isEnabled: ready,
    describedBy: poolArgs,
    execute: async args => {
      const pool = poolOf(args);
      const op = isUp(pool) ? 'resize' : 'start';
      const next = model.overview?.next;
      const many = next?.pool === pool ? view.tooManyText(model.overview?.pools.find(each => each.name === pool), next.ranks, t) : '';
      const wanted = !many || (await confirm(op === 'start' ? t('Start ranks') : t('Resize'), many, t));
      if (next && wanted && (op === 'start' || (await agreed(pool, t('Resize'))))) {
        await model.ask({ op, pool, ...(next.pool === pool ? sizeOf(next) : {}) });
      }
    }
  });
  put(COMMANDS.restart, {
    label: t('Restart Ranks'),
    caption: t('New processes in place of the present ones'),
    isEnabled: args => isUp(poolOf(args)),
    describedBy: poolArgs,
    execute: async args => {
      if (await agreed(poolOf(args), t('Restart'))) {
        await model.ask({ op: 'restart', pool: poolOf(args) });
      }
    }
  });
  put(COMMANDS.stopRanks, {
    label: t('Stop Ranks'),
    caption: t('End the ranks and free their memory'),
    isEnabled: ready,
    describedBy: poolArgs,
    execute: async args => {
      if (await agreed(poolOf(args), t('Stop ranks'))) {
        await model.ask({ op: 'stop_ranks', pool: poolOf(args) });
      }
    }
  });
  put(COMMANDS.insert, {
    label: t('Insert the Magic Line'),
    caption: t('Put the line with the chosen options on top of the current cell'),
    isEnabled: ready,
    describedBy: described({ here: { type: 'boolean', description: 'Into the cell whose menu is open.' } }),
    execute: args => {
      const node = args['here'] === true ? app.contextMenuHitTest(each => each.classList.contains('jp-CodeCell')) : undefined;
      const home = model.home;
      const index = home instanceof NotebookPanel ? home.content.widgets.findIndex(cell => cell.node === node) : -1;
      if (home instanceof NotebookPanel && index >= 0) {
        home.content.activeCellIndex = index; // a click with the other button does not select it
      }
      insert(model);
    }
  });
  put(COMMANDS.copy, {
    label: t('Copy the Magic Line'),
    caption: t('Copy the line with the chosen options'),
    icon: copyIcon,
    isEnabled: ready,
    execute: () => Clipboard.copyToSystem(model.overview?.next.line ?? '')
  });
  put(COMMANDS.refresh, {
    label: t('Refresh Devices'),
    caption: t('Ask again who holds the devices'),
    icon: refreshIcon,
    isEnabled: ready,
    execute: () => model.ask({ op: 'refresh' })
  });
  put(COMMANDS.logs, {
    label: t('Show the Log of a Run'),
    caption: t('Everything that a rank wrote'),
    isEnabled: args => typeof args['run'] === 'string' || newest() !== undefined,
    describedBy: described({ run: { type: 'string', description: 'The run; without it, the newest.' } }),
    execute: args => showLog(app, doer, text(args['run']) || (newest()?.run ?? ''))
  });
  put(COMMANDS.compare, {
    label: t('Compare Saved Runs'),
    caption: t('Options, results, code and charts of saved runs side by side: the chosen ones, or the two newest'),
    isEnabled: ready,
    describedBy: described({ runs: { type: 'array', items: { type: 'string' }, description: 'Their numbers, as %distributed_runs lists them.' } }),
    execute: args => compare(app, doer, Array.isArray(args['runs']) ? args['runs'].map(String) : [])
  });
  put(COMMANDS.page, {
    label: t('Show the Page of a Run'),
    caption: t('Charts, ranks over time, log, configuration, code and notes of a run, in progress or saved'),
    isEnabled: args => typeof args['run'] === 'string' || newest() !== undefined,
    describedBy: described({ run: { type: 'string', description: 'Its id, or the number of a saved run; without it, the newest.' } }),
    execute: args => showRun(app, doer, text(args['run']) || (newest()?.run ?? ''))
  });
  put(COMMANDS.table, {
    label: t('Show Saved Runs as a Table'),
    caption: t('All saved runs, sorted by any parameter or metric, searched, opened and compared'),
    icon: listIcon,
    isEnabled: ready,
    execute: () => inTab(app, new RunsTable(doer), t('Saved runs'))
  });
  put(COMMANDS.cell, {
    label: t('Go to the Cell of a Run'),
    caption: t('Select the cell that started the run'),
    isEnabled: args => typeof args['cell'] === 'string' || newest() !== undefined,
    describedBy: described({ cell: { type: 'string', description: 'The id of the cell; without it, that of the newest run.' } }),
    execute: args => goToCell(app, model.home, text(args['cell']) || (newest()?.cell ?? ''))
  });
}

function selectedCell({ home }: Model): string {
  return home instanceof NotebookPanel ? (home.content.activeCell?.model.id ?? '') : '';
}

/** The run that a command without a run means: the user is asked if there are several. */
async function chosen({ model, t }: Doer, cell: string): Promise<Run | undefined> {
  const runs = view.stoppable(model.overview, cell);
  if (runs.length < 2) {
    return runs[0];
  }
  const items = runs.map((run, place) => t('%1: %2, %3 (run %4)', place + 1, run.label, view.runStateName(run.state, t), run.run));
  const { button, value } = await InputDialog.getItem({ title: t('Stop which run?'), items, okLabel: t('Stop') });
  return button.accept && value !== null ? runs[items.indexOf(value)] : undefined;
}

async function stop({ model, t }: Doer, link: KernelLink | null, run: string, force: boolean): Promise<void> {
  await model.attempt(async () => {
    if (link && !(await link.stop(run, force))) {
      throw new Error(t('This run is over: there is nothing to stop.'));
    }
  });
}

function text(value: unknown): string {
  return typeof value === 'string' ? value : '';
}

function described(properties: ReadonlyJSONObject): { args: ReadonlyJSONObject } {
  return { args: { type: 'object', properties } };
}

/** Whether a pool's ranks may end: the user is asked if something would be lost. */
async function agrees({ t }: Doer, options: Options, pool: Pool | undefined, what: string): Promise<boolean> {
  const loss = view.lossText(pool, t);
  return !loss || !options.confirmStop || (await confirm(what, loss, t));
}

async function confirm(what: string, loss: string, t: view.Say): Promise<boolean> {
  const result = await showDialog({
    title: t('%1?', what),
    body: loss,
    buttons: [Dialog.cancelButton({ label: t('Cancel') }), Dialog.warnButton({ label: what })],
    defaultButton: 0
  });
  return result.button.accept;
}

function insert(model: Model): void {
  const line = model.overview?.next.line;
  const home = model.home;
  if (!line || !home) {
    return;
  }
  if (home instanceof NotebookPanel) {
    const active = home.content.activeCell;
    if (active?.model.type === 'code') {
      active.model.sharedModel.setSource(view.withLine(active.model.sharedModel.getSource(), line));
    } else {
      home.content.model?.sharedModel.insertCell(home.content.activeCellIndex + 1, { cell_type: 'code', source: `${line}\n` });
      home.content.activeCellIndex += 1;
    }
  } else {
    const prompt = home.console.promptCell?.model.sharedModel;
    prompt?.setSource(view.withLine(prompt.getSource(), line));
  }
}

/** Where the log of a run comes from. */
function logOf(link: KernelLink | null, run: string, ranks: number[], t: view.Say): LogSource {
  const load = async (rank: number, whole: boolean, among: number): Promise<Loaded> => {
    const answer = await link?.request({ op: 'logs', run, rank, whole, among });
    return { lines: answer?.lines ?? [], skippedBytes: answer?.skipped_bytes ?? 0, path: answer?.path ?? '', error: answer?.error ?? '' };
  };
  const goesOn = (): boolean => link?.overview?.runs.find(each => each.run === run)?.elapsed_s === null;
  return { run, load, ranks, goesOn, t };
}

function showLog(app: JupyterFrontEnd, { model, t }: Doer, run: string, link = model.link): void {
  const found = link?.overview?.runs.find(each => each.run === run);
  const log = new MainAreaWidget({ content: new Log(logOf(link, run, found?.numbers ?? [0], t)) });
  log.title.label = t('Log of %1', found?.label ?? run);
  log.title.caption = run;
  log.title.icon = icon;
  log.title.closable = true;
  app.shell.add(log, 'main', { mode: 'split-bottom' });
}

/** Open the page of a run. The first answer is shown at once; for an unknown run, the panel shows an error. */
async function showRun(app: JupyterFrontEnd, doer: Doer, run: string, link = doer.model.link): Promise<void> {
  const { model, t } = doer;
  const first = (await model.attempt(async () => ask(link, { op: 'page', run, against: '' })))?.page;
  if (first) {
    const load = async (against: string): Promise<Page | undefined> => (await ask(link, { op: 'page', run, against })).page;
    const others = async (): Promise<SavedRun[]> => ((await ask(link, { op: 'history', words: '' })).saved ?? []).filter(each => each.run !== first.number);
    const log = (): Log => new Log(logOf(link, first.run, first.logged, t));
    inTab(app, new RunPage({ first, load, others, log, code: drawing(link), doer, link }), first.number ? t('Run %1', first.number) : first.label);
  }
}

function drawing(link: KernelLink | null): () => Promise<Drawing | null> {
  return () => (link ? drawingOf(link) : Promise.resolve(null));
}

/** The answer of this kernel. Rejects with the kernel's error. */
async function ask(link: KernelLink | null, request: Request): Promise<Answer> {
  const answer = await link?.request(request);
  if (!answer?.ok) {
    throw new Error(answer?.error ?? '');
  }
  return answer;
}

/** Compare these saved runs; without any, the two newest. For a single run, show its page. */
async function compare(app: JupyterFrontEnd, doer: Doer, given: string[]): Promise<void> {
  const { model, t } = doer;
  const newest = async (): Promise<string[]> => ((await model.ask({ op: 'history', words: '' }))?.saved ?? []).slice(0, 2).map(({ run }) => run).reverse();
  const runs = given.length ? given : await newest();
  if (runs.length === 1) {
    return showRun(app, doer, runs[0] ?? '');
  }
  const comparison = runs.length ? (await model.ask({ op: 'compare', runs }))?.comparison : undefined;
  if (comparison) {
    inTab(app, new ComparedRuns(comparison, drawing(model.link), t), t('Runs %1', runs.length > 4 ? `${runs[0]}, … ${runs.at(-1)}` : runs.join(', ')));
  }
}

/** Show this as a tab of the main area. */
function inTab(app: JupyterFrontEnd, content: Widget, title: string): void {
  const tab = new MainAreaWidget({ content });
  tab.title.label = title;
  tab.title.icon = icon;
  tab.title.closable = true;
  app.shell.add(tab, 'main');
}

function goToCell(app: JupyterFrontEnd, home: Home | null, id: string): void {
  if (home instanceof NotebookPanel) {
    const index = home.content.widgets.findIndex(cell => cell.model.id === id);
    const cell = home.content.widgets[index];
    if (cell) {
      app.shell.activateById(home.id);
      home.content.activeCellIndex = index;
      void home.content.scrollToCell(cell);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- cells

/** Requests of the widget in a cell: events that bubble up to the page; catching one means that it is handled. */
function catchRequests(app: JupyterFrontEnd, doer: Doer): void {
  const { model } = doer;
  const take = (name: string, act: (link: KernelLink, detail: { run: string; force?: boolean }) => unknown): void =>
    document.addEventListener(name, event => {
      const home = model.homeOf(event.target as Node);
      const link = home && model.linkOf(home);
      if (link) {
        event.preventDefault();
        act(link, (event as CustomEvent<{ run: string; force?: boolean }>).detail);
      }
    });
  take('jupyter-distrib:stop', (link, { run, force }) => void stop(doer, link, run, force ?? false));
  take('jupyter-distrib:log', (link, { run }) => showLog(app, doer, run, link));
  take('jupyter-distrib:open', (link, { run }) => void showRun(app, doer, run, link));
  take('jupyter-distrib:stacks', (link, { run }) => void link.request({ op: 'stacks', run }).catch(() => undefined));
}

function repairOutputs(doer: Doer, options: Options): void {
  const { model, t } = doer;
  const live = new LiveViews(model, () => options.repairOutputs);
  const seen = new WeakSet<KernelLink>();
  const told = new WeakMap<Home, Set<string>>();
  const mend = async (home: Home, settled: Settled): Promise<void> => {
    const runs = settled.views.map(each => each.run);
    const link = model.linkOf(home);
    told.set(home, new Set([...(told.get(home) ?? []), ...runs]));
    if (link?.askedFor(settled)) {
      void link.repairs(settled); // at once, before another page asks
    }
    if (options.repairOutputs && home instanceof NotebookPanel) {
      const missed = link?.missed(settled) ? 'elsewhere' : link?.sleptThrough(settled) ? 'asleep' : '';
      await repair(home, settled, missed, async () => (await link?.repairs(settled)) ?? true);
      unsaved.get(home)?.push(...runs);
    }
    live.end(home, runs);
  };
  /** Handle runs that ended while no page was open, while this one was being loaded, or while it slept. */
  const ask = async (home: Home, link: KernelLink): Promise<void> => {
    const shown = home instanceof NotebookPanel ? { live: [...liveRuns(home), ...live.runs(home)], loaded_ms: fileMs(home) } : { live: [], loaded_ms: null };
    const { settled } = await link.request({ op: 'settled', ...shown });
    const missed = (settled ?? []).filter(({ views }) => !views.every(({ run }) => told.get(home)?.has(run)));
    await Promise.all(missed.map(each => mend(home, each)));
  };
  const unsaved = tellOfSaving(model);
  const showAndSave = savedViews(doer);
  model.settled.connect((_, { home, settled }) => void mend(home, settled));
  model.awoke.connect((_, { home, link }) => {
    if (seen.has(link)) {
      ask(home, link).catch(() => undefined);
    }
  });
  model.broken.connect((_, { home, runs }) => {
    if (options.repairOutputs && home instanceof NotebookPanel) {
      const link = model.linkOf(home);
      const overview = link?.overview ?? null;
      const names = new Set([...runs.map(({ run }) => run), ...(overview?.views ?? []).map(({ run }) => run)]);
      for (const name of names) {
        const seen = view.runsOf(overview, name);
        if (seen.some(({ run }) => runs.some(each => each.run === run))) {
          const output = view.lastSeen(name, seen, link?.nowS() ?? Date.now() / 1000, t);
          replaceLive(home, { run: name, model: '', output }, seen[0]?.cell ?? '', live.has(home, name));
        }
      }
    }
  });
  model.changed.connect(() => {
    for (const [home, link] of model.links()) {
      if (link.overview && !seen.has(link)) {
        seen.add(link);
        ask(home, link).catch(() => undefined);
      }
      if (home instanceof NotebookPanel && options.repairOutputs) {
        showAndSave(home, link);
      }
    }
  });
}

/** Once for each kernel and notebook: views of runs that the kernel does not know show the saved state; others are saved. */
function savedViews({ model, t }: Doer): (home: NotebookPanel, link: KernelLink) => void {
  const looked = new WeakSet<KernelLink>();
  const saving = new WeakSet<NotebookPanel>();
  return (home, link) => {
    const goingOn = (name: string): Run[] => {
      const runs = view.runsOf(model.linkOf(home)?.overview ?? null, name);
      return runs.some(each => each.elapsed_s === null) ? runs : [];
    };
    const absent = link.state === 'absent' && link.kernel.status === 'idle';
    if ((link.overview || absent) && !looked.has(link)) {
      looked.add(link);
      void showSaved(home, name => goingOn(name).length > 0);
    }
    if (!saving.has(home)) {
      saving.add(home);
      saveLastSeen(home, name => {
        const seen = goingOn(name);
        return seen.length ? view.seenWhenSaved(name, seen, model.linkOf(home)?.nowS() ?? Date.now() / 1000, t) : null;
      });
    }
  };
}

/** Let each kernel forget the outputs that are in the notebook's file; returns the runs whose views will be there next. */
function tellOfSaving(model: Model): WeakMap<Home, string[]> {
  const unsaved = new WeakMap<Home, string[]>();
  model.changed.connect(() => {
    for (const [home] of model.links()) {
      if (home instanceof NotebookPanel && !unsaved.has(home)) {
        unsaved.set(home, []);
        home.context.saveState.connect((_, state) => {
          const runs = state === 'completed' ? unsaved.get(home)?.splice(0) : [];
          if (runs?.length) {
            void model.linkOf(home)?.request({ op: 'saved', runs, saved_ms: fileMs(home) }).catch(() => undefined);
          }
        });
      }
    }
  });
  return unsaved;
}
