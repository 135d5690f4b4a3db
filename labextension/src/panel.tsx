/** The panel at the side. Texts come from `view.ts`; actions are commands or requests. */
import { CommandRegistry } from '@lumino/commands';
import { HTMLSelect, PanelWithToolbar, ReactWidget, SidePanel, ToolbarButton, refreshIcon, UseSignal } from '@jupyterlab/ui-components';
import { Message, MessageLoop } from '@lumino/messaging';
import { AccordionPanel, Widget } from '@lumino/widgets';
import * as React from 'react';

import { History } from './history.js';
import { icon } from './icon.js';
import { Home, Model } from './model.js';
import { PoolForm } from './poolform.js';
import { WorkerGroup, Next, Overview, Pool, Run, Size, Start } from './protocol.js';
import * as view from './view.js';

export interface Doer {
  model: Model;
  commands: CommandRegistry;
  t: view.Say;
  chooseKernel: (home: Home) => void;
}

/** Names of the commands; each is also in the palette. */
export const COMMANDS = {
  open: 'jupyter-distrib:open',
  load: 'jupyter-distrib:load',
  stop: 'jupyter-distrib:stop-run',
  stopAll: 'jupyter-distrib:stop-all-runs',
  moveUp: 'jupyter-distrib:move-up-run',
  start: 'jupyter-distrib:start-ranks',
  stopRanks: 'jupyter-distrib:stop-ranks',
  restart: 'jupyter-distrib:restart-ranks',
  insert: 'jupyter-distrib:insert-line',
  copy: 'jupyter-distrib:copy-line',
  logs: 'jupyter-distrib:show-log',
  cell: 'jupyter-distrib:go-to-cell',
  compare: 'jupyter-distrib:compare-runs',
  page: 'jupyter-distrib:show-run',
  table: 'jupyter-distrib:show-runs',
  refresh: 'jupyter-distrib:refresh'
} as const;

/** The height of sections until their needs are known; each scrolls by itself. */
const SIZES = [5, 3, 4, 3];
/** The number of sections that are open by default. */
const OPEN_AT_FIRST = 3;
/** The height of a section's title, in pixels. */
const TITLE_HEIGHT = 33;

export class DistributedPanel extends SidePanel {
  constructor(private readonly doer: Doer) {
    super();
    this.header.addWidget(new Part(doer, Head));
    const { t, commands } = doer;
    this.id = 'jupyter-distrib-panel';
    this.addClass('jp-Distributed');
    this.title.icon = icon;
    this.title.caption = t('Distributed: pools, ranks and runs of this notebook');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', t('Distributed'));
    const refresh = new ToolbarButton({
      icon: refreshIcon,
      tooltip: t('Ask again who holds the devices'),
      onClick: () => void commands.execute(COMMANDS.refresh)
    });
    for (const [label, content, button] of [
      [t('Next runs'), NextRuns, null],
      [t('Pools and ranks'), Pools, refresh],
      [t('Runs'), Runs, null],
      [t('History'), History, null]
    ] as const) {
      const section = new PanelWithToolbar();
      section.title.label = label;
      section.addClass('jp-Distributed-section');
      section.addWidget(new Part(doer, content));
      if (button) {
        section.toolbar.addItem('refresh', button);
      }
      this.addWidget(section);
    }
    this.open();
    this.content.node.addEventListener('pointerdown', event => (this.moved ||= (event.target as Element).matches('.lm-SplitPanel-handle')));
    this.node.addEventListener('pointerdown', () => (this.pressed = true));
    for (const name of ['pointerup', 'pointercancel']) {
      document.addEventListener(name, () => {
        if (this.pressed) {
          this.pressed = false;
          this.onChanged();
        }
      });
    }
    doer.model.changed.connect(this.onChanged, this);
    this.onChanged();
  }

  /**
   * Open all sections if all are closed. JupyterLab keeps which are open, and takes those for closed that were hidden
   * when it looked, as they are without a kernel.
   */
  reopen(): void {
    if (this.content.widgets.every(section => section.isHidden)) {
      this.open();
    }
  }

  private open(): void {
    const content = this.content;
    if (content instanceof AccordionPanel) {
      content.widgets.forEach((_, index) => (index < OPEN_AT_FIRST ? content.expand(index) : content.collapse(index)));
      content.setRelativeSizes(SIZES);
    }
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.refreshWhenNew();
  }

  protected override onResize(message: Widget.ResizeMessage): void {
    super.onResize(message);
    this.shareSoon();
  }

  /** Sections are hidden while there is nothing to fill them. */
  private onChanged(): void {
    this.content.setHidden(this.doer.model.state !== 'ready');
    this.refreshWhenNew();
    this.shareSoon();
  }

  private shareSoon(): void {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.share());
  }

  /** Give each section the height that it needs, in proportion, until the user moves one of the edges between them. */
  private share(): void {
    const content = this.content;
    // A pressed element must stay in place, else it would not be clicked.
    if (this.moved || this.pressed || !this.isVisible || !(content instanceof AccordionPanel)) {
      return;
    }
    const natural = content.widgets.map(section => section.node.querySelector('.jp-Distributed-part')?.firstElementChild?.scrollHeight ?? 0);
    const shown = natural.map((height, index) => (content.widgets[index]?.isHidden ? 0 : height));
    const titles = TITLE_HEIGHT * natural.length;
    const filledIn = content.widgets.findIndex(section => section.node.querySelector('.jp-Distributed-form') !== null);
    // Where the window is too low for that, the panel as a whole is scrolled.
    const least = `${view.leastHeight(shown, filledIn) + titles}px`;
    if (content.node.style.minHeight !== least) {
      content.node.style.minHeight = least;
      MessageLoop.sendMessage(content, Widget.ResizeMessage.UnknownSize);
    }
    const needs = view.heights(shown, content.node.clientHeight - titles, filledIn);
    // One that needs more gets it; others do not move for less than a line.
    if (needs.some((need, index) => need > (this.needs[index] ?? 0) + 2 || need < (this.needs[index] ?? 0) - 20)) {
      this.needs = needs;
      content.setRelativeSizes(needs);
    }
  }

  /** Devices and their holders are requested when groups have come or gone and the section is visible; never on a clock. */
  private refreshWhenNew(): void {
    const overview = this.doer.model.overview;
    const now = overview && JSON.stringify([overview.session, overview.pools.map(pool => pool.groups.map(group => [group.name, group.state])), overview.runs[0]?.state]);
    if (now && now !== this.seen && this.isVisible) {
      this.seen = now;
      const again = (): void => void (this.seen = ''); // the next news asks again
      // Not with `ask`: the user, who has asked for nothing, is told of no error, and keeps one of a request of their own.
      void this.doer.model.request({ op: 'refresh' }).then(answer => answer.ok || again(), again);
    }
  }

  private seen = '';
  private needs: number[] = [];
  private moved = false;
  private pressed = false;
  private frame = 0;
}

type Shown = React.FunctionComponent<{ doer: Doer }>;

/** One section: painted anew when the model says so, and each second while a run's clock is to go on. */
class Part extends ReactWidget {
  constructor(private readonly doer: Doer, private readonly content: Shown) {
    super();
    this.addClass('jp-Distributed-part');
  }

  protected render(): React.JSX.Element {
    const Content = this.content;
    return <UseSignal signal={this.doer.model.changed}>{() => <Content doer={this.doer} />}</UseSignal>;
  }
}

// ---------------------------------------------------------------------------------------------------- head

function Head({ doer }: { doer: Doer }): React.JSX.Element {
  const { model, commands, t } = doer;
  const told = view.explanation(model.state, model.name, t);
  const trouble = model.error || model.overview?.trouble?.text || '';
  return (
    <div className="jp-Distributed-head">
      {model.home && (
        <div className="jp-Distributed-whose" title={model.overview?.label ?? ''}>
          {model.name}
        </div>
      )}
      {told && (
        <div className="jp-Distributed-told" role="status">
          <p>{told.text}</p>
          {told.act === 'load' && <Button name={t('Load it')} onClick={() => void commands.execute(COMMANDS.load)} main />}
          {told.act === 'choose-kernel' && <Button name={t('Choose a kernel')} onClick={() => model.home && doer.chooseKernel(model.home)} />}
        </div>
      )}
      {trouble && (
        <div className="jp-Distributed-trouble" role="alert">
          <p>{trouble}</p>
          <Button
            name={t('Dismiss')}
            onClick={() => {
              model.forgetError();
              if (model.overview?.trouble) {
                void model.ask({ op: 'dismiss' });
              }
            }}
          />
        </div>
      )}
    </div>
  );
}

// ---------------------------------------------------------------------------------------------------- next runs

function NextRuns({ doer }: { doer: Doer }): React.JSX.Element | null {
  const { model, commands, t } = doer;
  const overview = model.overview;
  if (!overview) {
    return null;
  }
  const next = overview.next;
  const pool = overview.pools.find(each => each.name === next.pool);
  const size = view.picked(next);
  const types = view.gpuTypes(pool);
  const noGpu = view.hasNoGpu(pool);
  const auto = view.autoTexts(pool, t);
  const resize = (size: (now: Next) => Size): void => model.pick(now => ({ size: size(now) }));
  return (
    <div className="jp-Distributed-next">
      <Choice label={t('Pool')} value={next.pool} options={overview.pools.map(each => [each.name, each.kind === each.name ? each.name : `${each.name} (${each.kind})`])} onPick={pool => model.pick(() => ({ pool }))} />
      <Choice label={t('Strategy')} value={next.strategy} options={overview.strategies.map(name => [name, name])} onPick={strategy => model.pick(() => ({ strategy }))} />
      <Choice
        label={t('Ranks')}
        value={size.kind}
        options={[
          ['auto', auto.name],
          ['gpus', t('with one GPU each')],
          ['ranks', t('on the CPU')]
        ]}
        onPick={kind => resize(now => (kind === 'auto' ? {} : { [kind]: view.picked(now).count }))}
      />
      {size.kind === 'auto' && auto.note && <p className="jp-Distributed-note">{auto.note}</p>}
      {size.kind !== 'auto' && <Count key={`${size.kind}${size.count}`} label={t('Number')} t={t} value={size.count} onPick={count => resize(now => ({ ...sizeOf(now), [now.gpus ? 'gpus' : 'ranks']: count }))} />}
      {size.kind === 'gpus' && types.length > 0 && (
        <Choice label={t('GPU type')} value={next.gpu_type ?? ''} options={[['', t('any type')], ...types.map(type => [type, type] as [string, string])]} onPick={type => resize(now => ({ gpus: view.picked(now).count, ...(type ? { gpu_type: type } : {}) }))} />
      )}
      {size.kind === 'gpus' && noGpu && <p className="jp-Distributed-note">{t('This pool has no GPU: such runs get CPU ranks (gloo), and say so.')}</p>}
      {next.origins && <p className="jp-Distributed-note">{t('Now: %1.', next.origins)}</p>}
      {view.isPicked(next) && (
        <div className="jp-Distributed-buttons">
          <Button name={t("The notebook's own default")} title={t('Forget what was picked here')} onClick={() => void model.ask({ op: 'unpick' })} />
        </div>
      )}
      <div className="jp-Distributed-line">
        <code>{words(next.line)}</code>
        <span className="jp-Distributed-buttons">
          <Button name={t('Insert')} title={t('Put this line on top of the current cell, so that the notebook itself has it')} onClick={() => void commands.execute(COMMANDS.insert)} />
          <Button name={t('Copy')} title={t('Copy this line')} onClick={() => void commands.execute(COMMANDS.copy)} />
        </span>
      </div>
    </div>
  );
}

/** The words of a line, none of which is broken at its hyphens. */
function words(line: string): React.ReactNode[] {
  return line.split(' ').flatMap((word, place) => [place ? ' ' : '', <span key={place}>{word}</span>]);
}

export function sizeOf(next: Next): Size {
  return {
    ...(next.gpus ? { gpus: next.gpus } : {}),
    ...(next.ranks ? { ranks: next.ranks } : {}),
    ...(next.gpus && next.gpu_type ? { gpu_type: next.gpu_type } : {})
  };
}

// ---------------------------------------------------------------------------------------------------- pools

function Pools({ doer }: { doer: Doer }): React.JSX.Element | null {
  const { model, t } = doer;
  const overview = model.overview;
  useSeconds(Boolean(overview?.starts?.length));
  const [form, setForm] = React.useState<{ pool: string } | null>(null);
  const [told, setTold] = React.useState('');
  const session = overview?.session ?? '';
  React.useEffect(() => setForm(null), [model.home]); // the form was for another notebook; a restart of the kernel keeps it
  React.useEffect(() => setTold(''), [session]);
  React.useEffect(() => model.repaint(), [form, told]);
  if (form) {
    const close = (done: string): void => {
      setForm(null);
      setTold(done);
    };
    return <PoolForm key={form.pool} pool={form.pool} overview={overview} ask={request => model.request(request)} close={close} resized={() => model.repaint()} t={t} />;
  }
  if (!overview) {
    return null;
  }
  const open = (pool: string): void => {
    setTold('');
    setForm({ pool });
  };
  const waits = overview.pools.some(pool => pool.waits) ? null : overview.waits;
  return (
    <div>
      {told && (
        <p className="jp-Distributed-result jp-mod-good" role="status">
          {told}
        </p>
      )}
      {waits && (
        <div className="jp-Distributed-waits">
          <p className="jp-Distributed-note">{t('%1 is not trusted yet. It sets: %2.', waits.file, waits.sets)}</p>
          <Button name={t('Trust this file')} title={t('Follow %1 until it changes', waits.file)} onClick={() => void model.ask({ op: 'trust_pool', pool: '', digest: waits.digest })} />
        </div>
      )}
      <ul className="jp-Distributed-list">
        {overview.pools.map(pool => (
          <PoolItem key={pool.name} doer={doer} overview={overview} pool={pool} edit={() => open(pool.name)} />
        ))}
      </ul>
      {overview.trial !== undefined && (
        <div className="jp-Distributed-buttons jp-Distributed-add">
          <Button name={t('Add pool')} title={t('Define a pool: this machine, hosts, or a cluster')} onClick={() => open('')} />
        </div>
      )}
    </div>
  );
}

function PoolItem({ doer, overview, pool, edit }: { doer: Doer; overview: Overview; pool: Pool; edit: () => void }): React.JSX.Element {
  const { commands, model, t } = doer;
  const waits = pool.waits;
  const starts = view.poolStartText(overview, pool.name, model.nowS(), t);
  const starting = starts !== '' || overview.doing?.pool === pool.name;
  const up = pool.groups.length > 0;
  const used = overview.next.pool === pool.name;
  const node = pool.node;
  return (
    <li className={`jp-Distributed-pool ${used ? 'jp-mod-used' : ''}`}>
      <div className="jp-Distributed-row">
        <strong>{pool.name}</strong>
        <span className="jp-Distributed-quiet">{used ? t('in use') : pool.kind === pool.name ? '' : pool.kind}</span>
      </div>
      {pool.where && <div className="jp-Distributed-quiet">{pool.where}</div>}
      {waits && <div className="jp-Distributed-note">{t('Not trusted yet: %1 sets %2.', waits.file, waits.sets)}</div>}
      {node && <div className="jp-Distributed-quiet">{view.nodeText(pool, t)}</div>}
      {[...view.machineTexts(pool, t), ...view.roomTexts(pool, t)].map(text => (
        <div key={text} className="jp-Distributed-quiet">
          {text}
        </div>
      ))}
      {starts && (
        <div>
          <Dot tone="active" /> {starts}
        </div>
      )}
      {pool.groups
        .filter(group => !starts || group.state !== 'opening' || group.starting)
        .map(group => (
          <GroupItem key={group.name} group={group} t={t} />
        ))}
      {!up && used && !starting && <div className="jp-Distributed-quiet">{t('No ranks are up; the next run starts them.')}</div>}
      <div className="jp-Distributed-buttons">
        {waits && <Button name={t('Trust this file')} title={t('Follow %1 until it changes', waits.file)} onClick={() => void model.ask({ op: 'trust_pool', pool: pool.name, digest: waits.digest })} />}
        {!used && !waits && <Button name={t('Use this')} title={t('Cells that name no pool run here')} onClick={() => model.pick(() => ({ pool: pool.name }))} />}
        {!starting && !waits && <Button name={up ? t('Resize') : t('Start')} title={up ? t('New ranks as picked above') : t('Start ranks before a cell asks for them')} onClick={() => void commands.execute(COMMANDS.start, { pool: pool.name })} />}
        {up && !starting && <Button name={t('Restart')} title={t('New processes in place of these')} onClick={() => void commands.execute(COMMANDS.restart, { pool: pool.name })} />}
        {(up || starting) && <Button name={t('Stop ranks')} title={t('End the ranks and free their memory')} onClick={() => void commands.execute(COMMANDS.stopRanks, { pool: pool.name })} />}
        {pool.editable && <Button name={t('Edit')} title={t('Change its options in %1', pool.origin)} onClick={edit} />}
      </div>
      {node && node.gpus.length > 0 && (
        <table className="jp-Distributed-table">
          <caption className="jp-Distributed-hidden">{t('GPUs of %1', pool.name)}</caption>
          <tbody>
            {node.gpus.map(gpu => {
              const held = view.gpuText(gpu, overview.label, t);
              return (
                <tr key={gpu.number}>
                  <th scope="row">{t('GPU %1', gpu.number)}</th>
                  <td>
                    {gpu.name}
                    {gpu.used_bytes !== null && gpu.memory_bytes !== null && (
                      <Meter label={t('Memory of GPU %1', gpu.number)} value={gpu.used_bytes / gpu.memory_bytes} text={`${view.size(gpu.used_bytes)} / ${view.size(gpu.memory_bytes)}`} />
                    )}
                    <span className={`jp-Distributed-held jp-mod-${held.state}`}>{held.text}</span>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      )}
      {view.hasNoGpu(pool) && used && <div className="jp-Distributed-quiet">{t('No GPU here: ranks run on the CPU.')}</div>}
      {node?.others.map(other => (
        <div key={other.holder} className="jp-Distributed-quiet">
          {t.n('%2 has %1 rank, %3', '%2 has %1 ranks, %3', other.ranks, other.holder, other.running ? t('running %1', other.running) : t('idle'))}
        </div>
      ))}
    </li>
  );
}

function GroupItem({ group, t }: { group: WorkerGroup; t: view.Say }): React.JSX.Element {
  return (
    <details className="jp-Distributed-group">
      <summary>
        <Dot tone={group.run ? 'active' : 'good'} /> {view.groupText(group, t)}
        {group.kept.length > 0 && <span className="jp-Distributed-quiet"> · {view.keptText(group, t)}</span>}
      </summary>
      <table className="jp-Distributed-table">
        <tbody>
          {group.ranks.map(rank => (
            <tr key={rank.rank}>
              <th scope="row">{t('rank %1', rank.rank)}</th>
              <td>{[rank.device_name || rank.device, rank.node].filter(Boolean).join(' · ')}</td>
              <td className="jp-Distributed-number">{view.size(rank.rss_bytes)}</td>
              <td className="jp-Distributed-number jp-Distributed-quiet">{t('pid %1', rank.pid)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

// ---------------------------------------------------------------------------------------------------- runs

function Runs({ doer }: { doer: Doer }): React.JSX.Element | null {
  const { model, t } = doer;
  const overview = model.overview;
  const waiting = view.waitingCells(overview);
  useSeconds(waiting.length > 0 || view.currentRuns(overview).length > 0);
  if (!overview) {
    return null;
  }
  if (!overview.runs.length && !waiting.length) {
    return <p className="jp-Distributed-quiet jp-Distributed-none">{t('Nothing has run yet. Put the line above on top of a cell and run it.')}</p>;
  }
  const starts = view.startsIn(overview.runs, model.nowS());
  const queue = view.queueText(overview, t);
  return (
    <div>
      {queue && (
        <div className="jp-Distributed-row jp-Distributed-queue">
          <span>{queue}</span>
          <Button name={t('Stop all')} title={t('Stop all runs and take waiting runs out of the queue; the ranks stay')} onClick={() => void doer.commands.execute(COMMANDS.stopAll)} />
        </div>
      )}
      <ul className="jp-Distributed-list" aria-label={t('The last 20 runs')}>
        {waiting.map(start => (
          <WaitingCell key={start.began_at_s} doer={doer} start={start} />
        ))}
        {view.inOrder(overview.runs).map(({ runs: [first, ...others], ...group }) =>
          first === undefined ? null : others.length === 0 ? <RunItem key={first.run} doer={doer} run={first} starts={starts} /> : <RunGroup key={first.run} doer={doer} runs={[first, ...others]} title={group.title} starts={starts} />
        )}
      </ul>
    </div>
  );
}

/** A cell that waits for its ranks, and becomes a run when they are up. */
function WaitingCell({ doer: { model, commands, t }, start }: { doer: Doer; start: Start }): React.JSX.Element {
  return (
    <li className="jp-Distributed-run jp-mod-active">
      <div className="jp-Distributed-row">
        <span>
          <Dot tone="active" /> <strong>{start.label}</strong> <span className="jp-Distributed-state">{t('waits for ranks')}</span>
        </span>
        <span className="jp-Distributed-number">{view.clock(model.nowS() - start.began_at_s)}</span>
      </div>
      <div className="jp-Distributed-buttons">
        <Button name={t('Stop')} title={t('Interrupt the cell, and end the ranks that are starting')} onClick={() => void model.home?.sessionContext.session?.kernel?.interrupt()} main />
        {model.hasCell(start.cell) && <Button name={t('Go to cell')} onClick={() => void commands.execute(COMMANDS.cell, { cell: start.cell })} />}
      </div>
    </li>
  );
}

/** The runs of a sweep or of one cell, as one entry: their number by state, a line for each, and Stop for the remaining ones. */
function RunGroup({ doer, runs, title, starts }: { doer: Doer; runs: Run[]; title: string; starts: Map<string, number> }): React.JSX.Element {
  const { model, commands, t } = doer;
  const left = runs.filter(run => run.elapsed_s === null);
  const { tone, text, done } = view.groupRow(runs, t);
  const cell = runs[0]?.cell ?? '';
  const stopAll = (): void => void commands.execute(COMMANDS.stopAll, { runs: left.map(run => run.run) });
  return (
    <li className={`jp-Distributed-run jp-mod-${tone}`}>
      <div className="jp-Distributed-row">
        <span>
          <Dot tone={tone} /> <strong>{title}</strong>
        </span>
        <span className="jp-Distributed-number">{t('%1 of %2', done, runs.length)}</span>
      </div>
      <div className="jp-Distributed-quiet">{text}</div>
      {left.length > 0 && <Meter label={t('Runs of %1 that have ended', title)} value={done / runs.length} text="" progress />}
      <details className="jp-Distributed-group" open={left.length > 0}>
        <summary>{t.n('%1 run', '%1 runs', runs.length)}</summary>
        <ul className="jp-Distributed-points" aria-label={t('Runs of %1', title)}>
          {runs.map(run => {
            const row = view.runRow(run, model.nowS(), t);
            const starting = view.startsText(starts.get(run.run), t);
            return (
              <li key={run.run} data-run={run.run}>
                <Dot tone={row.tone} /> <span className="jp-Distributed-point" title={[row.title, row.detail].filter(Boolean).join('\n')}>{view.titleInGroup(run)}</span>
                <span className="jp-Distributed-number" title={[row.state, starting].filter(Boolean).join(', ')}>
                  {run.state === 'running' && row.progress ? row.progress : run.place ? t('place %1', run.place) : row.state}
                </span>
                <MoveUp doer={doer} run={run} />
                {!row.ended && <Button name={row.force ? t('Kill') : t('Stop')} title={t('Stop this run; its ranks stay')} onClick={() => void commands.execute(COMMANDS.stop, { run: run.run, force: row.force })} />}
                <OpenRun doer={doer} run={run} />
              </li>
            );
          })}
        </ul>
      </details>
      <div className="jp-Distributed-buttons">
        {left.length > 0 && <Button name={t('Stop all')} title={t('Stop these runs and take waiting runs out of the queue; the ranks stay')} onClick={stopAll} main />}
        {model.hasCell(cell) && <Button name={t('Go to cell')} onClick={() => void commands.execute(COMMANDS.cell, { cell })} />}
      </div>
    </li>
  );
}

/** The button of a run that has begun, which opens its page. */
function OpenRun({ doer: { commands, t }, run }: { doer: Doer; run: Run }): React.JSX.Element | null {
  return run.place ? null : <Button name={t('Open')} title={t('Open the page of this run: charts, ranks over time, log, code')} onClick={() => void commands.execute(COMMANDS.page, { run: run.run })} />;
}

/** The button of a run that waits behind another run. */
function MoveUp({ doer: { commands, t }, run }: { doer: Doer; run: Run }): React.JSX.Element | null {
  const name = t('Move %1 up', run.label);
  return (run.place ?? 0) < 2 ? null : (
    <button type="button" className="jp-Distributed-button" aria-label={name} title={t('Let it begin before the run in front of it')} onClick={() => void commands.execute(COMMANDS.moveUp, { run: run.run })}>
      ↑
    </button>
  );
}

function RunItem({ doer, run, starts }: { doer: Doer; run: Run; starts: Map<string, number> }): React.JSX.Element {
  const { model, commands, t } = doer;
  const row = view.runRow(run, model.nowS(), t);
  const starting = view.startsText(starts.get(run.run), t);
  return (
    <li className={`jp-Distributed-run jp-mod-${row.tone}`} data-run={run.run}>
      <div className="jp-Distributed-row">
        <span>
          <Dot tone={row.tone} /> <strong>{row.title}</strong> <span className="jp-Distributed-state">{row.state}</span>
        </span>
        <span className="jp-Distributed-number">{row.time}</span>
      </div>
      <div className="jp-Distributed-quiet">{[row.facts, starting].filter(Boolean).join(' · ')}</div>
      {row.fraction !== null && <Meter label={t('Progress of %1', row.title)} value={row.fraction} text={row.progress} progress />}
      {row.detail && (
        <div className="jp-Distributed-detail" role={row.force ? 'status' : undefined}>
          {row.detail}
        </div>
      )}
      <div className="jp-Distributed-buttons">
        {!row.ended && <Button name={row.force ? t('Kill') : t('Stop')} title={row.force ? t('Kill the ranks that have not stopped') : t('Stop this run; its ranks stay')} onClick={() => void commands.execute(COMMANDS.stop, { run: run.run, force: row.force })} main />}
        <MoveUp doer={doer} run={run} />
        <OpenRun doer={doer} run={run} />
        {!run.place && <Button name={t('Log')} title={t('Everything that the ranks wrote')} onClick={() => void commands.execute(COMMANDS.logs, { run: run.run })} />}
        {model.hasCell(run.cell) && <Button name={t('Go to cell')} onClick={() => void commands.execute(COMMANDS.cell, { cell: run.cell })} />}
      </div>
      {run.members.length > 0 && (
        <details className="jp-Distributed-group">
          <summary>{t.n('%1 rank', '%1 ranks', run.members.length)}</summary>
          <table className="jp-Distributed-table">
            <tbody>
              {run.members.map(member => (
                <tr key={member.rank}>
                  <th scope="row">{t('rank %1', member.rank)}</th>
                  <td>{view.stateName(member.state, t)}</td>
                  <td>{member.device}</td>
                  <td className="jp-Distributed-number" title={view.memoryOf(member, t)}>
                    {view.size(member.gpu_memory_bytes ?? member.rss_bytes)}
                  </td>
                  <td className="jp-Distributed-number">{Math.round(member.gpu_percent ?? member.cpu_percent)} %</td>
                </tr>
              ))}
            </tbody>
          </table>
        </details>
      )}
    </li>
  );
}

// ---------------------------------------------------------------------------------------------------- pieces

export function Button({ name, onClick, title, main, disabled }: { name: string; onClick: () => void; title?: string; main?: boolean; disabled?: boolean }): React.JSX.Element {
  return (
    <button type="button" disabled={disabled} className={`jp-Distributed-button ${main ? 'jp-mod-main' : ''}`} title={title} onClick={onClick}>
      {name}
    </button>
  );
}

/** Draw the component anew every second while time passes in it. */
function useSeconds(passes: boolean): void {
  const [, tick] = React.useState(0);
  React.useEffect(() => {
    const timer = passes ? setInterval(() => tick(count => count + 1), 1000) : undefined;
    return () => clearInterval(timer);
  }, [passes]);
}

function Dot({ tone }: { tone: string }): React.JSX.Element {
  return <span aria-hidden="true" className={`jp-Distributed-dot jp-mod-${tone}`} />;
}

export function Choice({ label, value, options, onPick }: { label: string; value: string; options: [string, string][]; onPick: (value: string) => void }): React.JSX.Element {
  return (
    <label className="jp-Distributed-field">
      <span>{label}</span>
      <HTMLSelect aria-label={label} value={value} onChange={event => onPick(event.target.value)}>
        {options.map(([key, name]) => (
          <option key={key} value={key}>
            {name}
          </option>
        ))}
      </HTMLSelect>
    </label>
  );
}

/** A number that counts when the field is left or Enter is pressed, not at every digit. */
function Count({ label, value, onPick, t }: { label: string; value: number; onPick: (value: number) => void; t: view.Say }): React.JSX.Element {
  const [text, setText] = React.useState(String(value));
  const [refused, setRefused] = React.useState(false);
  const done = (): void => {
    const number = Number(text);
    const fits = Number.isInteger(number) && number >= 1 && number <= 1000;
    if (!fits) {
      setRefused(true);
      setText(String(value));
    } else if (number !== value) {
      onPick(number);
    }
  };
  return (
    <>
    <label className="jp-Distributed-field">
      <span>{label}</span>
      <input
        className="jp-mod-styled"
        type="number"
        aria-label={label}
        min={1}
        max={1000}
        value={text}
        onChange={event => {
          setRefused(false); // not when the field is left: the element that was pressed would move away
          setText(event.target.value);
        }}
        onBlur={done}
        onKeyDown={event => event.key === 'Enter' && done()}
      />
    </label>
      {refused && (
        <p className="jp-Distributed-note" role="alert">
          {t('The number of ranks is 1 to 1000.')}
        </p>
      )}
    </>
  );
}

function Meter({ label, value, text, progress }: { label: string; value: number; text: string; progress?: boolean }): React.JSX.Element {
  const percent = Math.round(100 * Math.max(0, Math.min(1, value)));
  return (
    <div className="jp-Distributed-meter">
      <div role={progress ? 'progressbar' : 'meter'} aria-label={label} aria-valuenow={percent} aria-valuemin={0} aria-valuemax={100} aria-valuetext={text}>
        <div style={{ width: `${percent}%` }} />
      </div>
      <span>{text}</span>
    </div>
  );
}

/** The item at the bottom of the window. */
export class StatusItem extends ReactWidget {
  constructor(private readonly doer: Doer) {
    super();
    this.addClass('jp-Distributed-status');
  }

  protected render(): React.JSX.Element {
    return <UseSignal signal={this.doer.model.changed}>{() => <StatusText doer={this.doer} />}</UseSignal>;
  }
}

function StatusText({ doer }: { doer: Doer }): React.JSX.Element | null {
  const { model, commands, t } = doer;
  useSeconds(Boolean(model.overview?.starts?.length) || view.currentRuns(model.overview).length > 0);
  const text = view.statusText(model.overview, model.nowS(), t);
  return text ? (
    <button type="button" className="jp-Distributed-statusbutton" title={t('Ranks of this notebook; click for the panel')} onClick={() => void commands.execute(COMMANDS.open)}>
      {text}
    </button>
  ) : null;
}

export function isPanel(widget: Widget): widget is DistributedPanel {
  return widget instanceof DistributedPanel;
}
