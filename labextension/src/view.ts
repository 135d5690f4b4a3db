/**
 * What the sidebar says, as pure functions of the kernel's overview: no DOM, no clock, tested by themselves.
 *
 * Every text goes through the translator `t`, which is JupyterLab's or, in tests, one that only fills in.
 */
import type { WorkerGroup, Gpu, LinkState, Member, Next, OutputLike, Overview, Pool, Run, Start, Starting } from './protocol.js';

/** JupyterLab's `trans.__`: `%1` stands for the first argument; with `n` (`trans._n`) for the number that is counted. */
export interface Say {
  (text: string, ...args: (string | number)[]): string;
  n: (one: string, many: string, count: number, ...args: (string | number)[]) => string;
}

export type Act = 'load' | 'open-notebook' | 'choose-kernel' | null;

/** Another user's process that uses less memory is the desktop or the driver. */
const FOREIGN_BYTES = 1e9;

export function size(bytes: number): string {
  for (const [unit, factor] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]] as const) {
    if (bytes >= factor) {
      return `${(bytes / factor).toFixed(bytes >= 100 * factor ? 0 : 1)} ${unit}`;
    }
  }
  return `${bytes} B`;
}

/** The parts of a rank's GPU memory, for a tooltip; empty without a GPU. */
export function memoryOf(member: Member, t: Say): string {
  if (member.gpu_memory_bytes === null) {
    return '';
  }
  const parts = [
    member.gpu_memory_of_all
      ? t('GPU memory that all processes have taken since the rank began: the driver lists no processes here')
      : t("GPU memory of the rank's process, as the driver counts")
  ];
  if (member.gpu_tensor_bytes !== null && member.gpu_reserved_bytes !== null) {
    parts.push(t('tensors %1, reserved for them %2', size(member.gpu_tensor_bytes), size(member.gpu_reserved_bytes)));
  }
  return parts.join('; ');
}

/** `0:41`, `12:05`, `1:02:03`. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number: number): string => String(number).padStart(2, '0');
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** The duration of an ended run: `0.3 s`, `41 s`, `3 min 20 s`, `2 h 5 min` (`duration` in `jupyter_distrib/system/formatting.py`). */
export function duration(seconds: number): string {
  if (seconds < 9.95) {
    return `${seconds.toFixed(1).replace(/\.0$/, '')} s`;
  }
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60)];
  if (whole < 120) {
    return `${whole} s`;
  }
  if (whole < 7200) {
    return `${minutes} min${whole % 60 ? ` ${whole % 60} s` : ''}`;
  }
  return `${hours} h${minutes % 60 ? ` ${minutes % 60} min` : ''}`;
}

/** `0-2, 5`. */
export function rankList(ranks: number[]): string {
  const runs: [number, number][] = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) {
      last[1] = rank;
    } else {
      runs.push([rank, rank]);
    }
  }
  return runs.map(([first, last]) => (last > first ? `${first}-${last}` : `${first}`)).join(', ');
}

/** The text in place of the panel's content, and what can be done about it; null when there is content. */
export function explanation(state: LinkState, name: string, t: Say): { text: string; act: Act } | null {
  switch (state) {
    case 'no-notebook':
      return { text: t('Open a notebook or a console: this panel shows the ranks of its kernel.'), act: 'open-notebook' };
    case 'no-kernel':
      return { text: t('%1 has no kernel. Start one to run cells on several ranks.', name), act: 'choose-kernel' };
    case 'connecting':
      return { text: t('Asking the kernel of %1. While it runs a cell that is not distributed, the answer waits.', name), act: null };
    case 'absent':
      return { text: t('jupyter_distrib is not loaded in the kernel of %1.', name), act: 'load' };
    case 'lost':
      return { text: t('The kernel of %1 is gone, and its ranks with it. Start a new one.', name), act: 'choose-kernel' };
    case 'other-version':
      return { text: t('The kernel of %1 has another version of jupyter_distrib than this page. Reload the page; if that does not help, restart the kernel, or update the package beside JupyterLab.', name), act: null };
    case 'ready':
      return null;
  }
}

export function ranksText(count: number, gpus: boolean, t: Say): string {
  return gpus ? t.n('%1 GPU rank', '%1 GPU ranks', count) : t.n('%1 CPU rank', '%1 CPU ranks', count);
}

/** `2 CPU ranks, idle`, and the values that they keep. */
export function groupText(group: WorkerGroup, t: Say): string {
  if (group.state === 'opening') {
    return group.starting ? startingText(group.starting, t) : t('starting…');
  }
  const what = ranksText(group.size, group.gpus, t);
  return group.run ? t('%1, running', what) : t('%1, idle', what);
}

/** `Starting 20 ranks: 12 up, waiting for the import of torch`. */
export function startingText({ up, size, waits_for: waitsFor }: Starting, t: Say): string {
  const what = t.n('Starting %1 rank', 'Starting %1 ranks', size);
  const far = t('%1 up', up);
  return waitsFor ? t('%1: %2, waiting for %3', what, far, waitsFor) : t('%1: %2', what, far);
}

/** The seconds of a start after which its cell says so: ranks that are there sooner are not worth a line that comes and goes. */
export const SHORT_START_S = 0.5;

/** The text in the cell that waits for ranks; null if none does. */
export function startingIn(overview: Overview | null, nowS: number, t: Say): { cell: string; text: string } | null {
  const start = overview?.starts?.find(each => each.cell && !each.run);
  if (!start || nowS - start.began_at_s < SHORT_START_S) {
    return null;
  }
  const group = overview?.pools.find(pool => pool.name === start.pool)?.groups.find(each => each.state === 'opening');
  const what = group?.starting ? startingText(group.starting, t) : t('Starting ranks on %1', start.pool);
  return { cell: start.cell, text: `${what} · ${clock(nowS - start.began_at_s)}` };
}

/** The start of ranks in a pool: `Starting ranks for Cell In[5] · 0:03`; empty if there is none. */
export function poolStartText(overview: Overview, pool: string, nowS: number, t: Say): string {
  const start = overview.starts?.find(each => each.pool === pool);
  const what = start?.label ? t('Starting ranks for %1', start.label) : t('Starting ranks');
  return start ? `${what} · ${clock(nowS - start.began_at_s)}` : '';
}

/** The cells that wait for their ranks, and have no run yet. */
export function waitingCells(overview: Overview | null): Start[] {
  return (overview?.starts ?? []).filter(each => each.label && !each.run);
}

/** A question before many more ranks are started than there are cores; empty if there is none. */
export function tooManyText(pool: Pool | undefined, ranks: number | null, t: Say): string {
  const cores = pool?.node?.cpus ?? null;
  return ranks !== null && cores !== null && ranks > Math.max(8, 4 * cores) ? t.n('%2 ranks on %1 CPU core: they will be slow, and may not fit into memory.', '%2 ranks on %1 CPU cores: they will be slow, and may not fit into memory.', cores, ranks) : '';
}

/** The notification at the end of a run, if there is one: for long and for detached runs. */
export function endText(run: Run, afterS: number, t: Say): { text: string; good: boolean } | null {
  if (run.elapsed_s === null || !(run.detached || (afterS > 0 && run.elapsed_s >= afterS))) {
    return null;
  }
  const row = runRow(run, 0, t);
  const what = t('%1: %2 after %3', row.title, row.state, row.time);
  return { text: row.detail ? `${what}\n${row.detail}` : what, good: row.tone === 'good' };
}

/** Whether something was chosen in the sidebar and can be undone. */
export function isPicked(next: Next): boolean {
  return next.origins.includes('sidebar');
}

export function keptText(group: WorkerGroup, t: Say): string {
  return group.kept.length ? t('keep %1', group.kept.join(', ')) : '';
}

/** `GPU 2: busy`, with who holds it. `mine` is this kernel's label. */
export function gpuText(gpu: Gpu, mine: string, t: Say): { state: 'free' | 'mine' | 'busy'; text: string } {
  if (gpu.holder.startsWith(mine)) {
    return { state: 'mine', text: t('this notebook') };
  }
  if (gpu.holder) {
    return { state: 'busy', text: t('busy: %1', gpu.holder) };
  }
  if (gpu.used_bytes !== null && gpu.used_bytes >= FOREIGN_BYTES) {
    return { state: 'busy', text: t('busy: another process holds %1', size(gpu.used_bytes)) };
  }
  return { state: 'free', text: t('free') };
}

export function nodeText(pool: Pool, t: Say): string {
  const node = pool.node;
  if (!node) {
    return '';
  }
  const parts = [node.name, node.cpus ? t.n('%1 CPU core', '%1 CPU cores', node.cpus) : '', node.memory_bytes ? size(node.memory_bytes) : ''];
  return parts.filter(Boolean).join(' · ');
}

/** The machines of a pool that is made of several: `10.0.0.7 · 4 CPU cores, 2 free · 8 GB · 2 A10, 1 free · ranks 0-1`. */
export function machineTexts(pool: Pool, t: Say): string[] {
  const free = (text: string, count: number | null): string => (count === null ? text : t('%1, %2 free', text, count));
  const machines = pool.node?.nodes ?? [];
  return machines
    .filter(machine => machine.name !== pool.node?.name)
    .map(machine =>
      [
        machine.name,
        machine.state ?? '',
        machine.cpus ? free(t.n('%1 CPU core', '%1 CPU cores', machine.cpus), machine.free_cpus) : '',
        machine.memory_bytes ? size(machine.memory_bytes) : '',
        machine.gpus ? free(`${machine.gpus} ${machine.gpu_type || 'GPU'}`, machine.free_gpus) : '',
        machine.ranks.length ? t.n('rank %2', 'ranks %2', machine.ranks.length, rankList(machine.ranks)) : '',
        ...(machine.holders ?? [])
      ]
        .filter(Boolean)
        .join(' · ')
    );
}

/** Its machines on demand, what the next rank takes, and who waits for room: `Next rank: at once, on the CPU`. */
export function roomTexts(pool: Pool, t: Say): string[] {
  const next = pool.node?.next_rank ? [t('Next rank: %1', pool.node.next_rank)] : [];
  const machines = pool.machines ? [t('Machines: %1', pool.machines)] : [];
  return [...machines, ...next, ...(pool.node?.waiting ?? []).map(each => t('%1 waits: %2', each.holder, each.reason))];
}

/** Whether the pool is known to have no GPU. */
export function hasNoGpu(pool: Pool | undefined): boolean {
  const node = pool?.node;
  return node ? node.gpus.length === 0 && !node.nodes?.some(machine => machine.gpus) : (pool?.no_gpu ?? false);
}

/** The ranks of runs without a number, as far as that is known, and a sentence where it is not. */
export function autoTexts(pool: Pool | undefined, t: Say): { name: string; note: string } {
  if (hasNoGpu(pool)) {
    return { name: t('auto: 2 on CPU'), note: '' };
  }
  return pool?.node ? { name: t('auto: all GPUs'), note: '' } : { name: t('auto'), note: t('One rank on each GPU of the pool; if it has none, 2 ranks on the CPU.') };
}

/** GPU types that can be requested, each by the shortest words that distinguish it from the others. */
export function gpuTypes(pool: Pool | undefined): string[] {
  const node = pool?.node;
  const there = node?.gpus.length ? node.gpus.map(gpu => gpu.name) : (node?.nodes ?? []).flatMap(machine => machine.gpu_type.split(', '));
  const names = [...new Set(there.filter(Boolean))];
  return names.map(name => name.replace(/^(NVIDIA|AMD|Tesla|GeForce)\s+/i, '').trim() || name);
}

// ---------------------------------------------------------------------------------------------------- runs

export interface RunRow {
  title: string;
  /** In one word. */
  state: string;
  tone: 'active' | 'good' | 'bad' | 'quiet';
  /** Ranks, strategy, pool, memory. */
  facts: string;
  time: string;
  /** The current activity, or the error. */
  detail: string;
  /** Between 0 and 1; null if unknown. */
  fraction: number | null;
  progress: string;
  ended: boolean;
  /** A second press of Stop kills the ranks. */
  force: boolean;
}

export function runRow(run: Run, nowS: number, t: Say): RunRow {
  const ended = run.elapsed_s !== null;
  const total = run.progress?.total ?? null;
  const step = run.progress?.step ?? 0;
  return {
    title: run.label,
    state: stateText(run, t),
    tone: ended ? (run.state === 'done' && !isOdd(run) ? 'good' : run.state === 'interrupted' ? 'quiet' : 'bad') : 'active',
    facts: facts(run, t),
    time: run.elapsed_s === null ? clock(nowS - run.began_at_s) : duration(run.elapsed_s),
    detail: detail(run, t),
    fraction: ended || !total ? null : Math.max(0, Math.min(1, step / total)),
    progress: run.progress ? [`${run.progress.label} ${step}${total === null ? '' : `/${total}`}`.trim(), ended ? '' : leftText(run, t)].filter(Boolean).join(', ') : '',
    ended,
    force: run.stopping !== ''
  };
}

/** Runs as the panel lists them: running ones, queued ones in their order, and ended ones, newest first; the runs of a sweep or of one cell are together. */
export function inOrder(runs: Run[]): { title: string; runs: Run[] }[] {
  const groups = new Map<string, Run[]>();
  for (const run of runs) {
    const key = run.group ? `group ${run.group}` : run.run;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  const weight = (run: Run): number => (run.elapsed_s !== null ? 2e6 : isWaiting(run) ? 1e6 + (run.place ?? 0) : 0);
  const first = (group: Run[]): number => Math.min(...group.map(weight));
  return [...groups.values()]
    .map(group => ({ title: group.length > 1 ? (group[0]?.group ?? '') : '', runs: group.length > 1 ? [...group].reverse().sort((a, b) => weight(a) - weight(b)) : group }))
    .sort((a, b) => first(a.runs) - first(b.runs));
}

/**
 * In how many seconds each queued run is likely to begin, by its id. A run lasts as long as those of its group, or else of its pool,
 * that are done did on average; one that tells of its progress ends when that says. Runs for which that is not known are left out.
 */
export function startsIn(runs: Run[], nowS: number): Map<string, number> {
  const found = new Map<string, number>();
  const typical = (run: Run): number | null => {
    const done = runs.filter(each => each.state === 'done' && each.elapsed_s !== null && each.pool === run.pool);
    const alike = done.filter(each => run.group && each.group === run.group);
    const times = (alike.length ? alike : done).map(each => each.elapsed_s ?? 0);
    return times.length ? times.reduce((sum, each) => sum + each, 0) / times.length : null;
  };
  for (const pool of new Set(runs.map(run => run.pool))) {
    const going = runs.filter(run => run.pool === pool && run.elapsed_s === null);
    const ends: (number | null)[] = going.filter(run => !isWaiting(run)).map(run => {
      const whole = typical(run);
      return run.progress?.left_s ?? (whole === null ? null : Math.max(0, whole - (nowS - run.began_at_s)));
    });
    for (const run of going.filter(isWaiting).sort((a, b) => (a.place ?? 0) - (b.place ?? 0))) {
      const known = ends.filter(end => end !== null).sort((a, b) => a - b);
      const [next] = known;
      if (next === undefined || known.length < ends.length) {
        break; // later runs begin after one whose start is unknown
      }
      found.set(run.run, next);
      const whole = typical(run);
      ends.splice(ends.indexOf(next), 1, whole === null ? null : next + whole);
    }
  }
  return found;
}

/** `starts in about 3 min`; empty if unknown. */
export function startsText(seconds: number | undefined, t: Say): string {
  return seconds === undefined ? '' : seconds < 1 ? t('starts soon') : t('starts in about %1', seconds < 60 ? t('%1 s', Math.round(seconds)) : seconds < 5400 ? t('%1 min', Math.round(seconds / 60)) : t('%1 h', Math.round(seconds / 3600)));
}

/** `2 running, 3 queued`; empty for fewer than two runs. */
export function queueText(overview: Overview | null, t: Say): string {
  const current = currentRuns(overview);
  const waiting = current.filter(isWaiting).length;
  const texts = [current.length > waiting ? t('%1 running', current.length - waiting) : '', waiting ? t('%1 queued', waiting) : ''];
  return current.length < 2 ? '' : texts.filter(Boolean).join(', ');
}

/** The text that distinguishes a run below the title of its group: without the cell, which the title names. */
export function titleInGroup({ label, group }: Run): string {
  const cell = (group ?? '').replace(/^Sweep of /, '');
  return group && label.startsWith(`${cell}, `) ? label.slice(cell.length + 2) : label;
}

/** A group of runs in a line: the number of runs in each state. */
export function groupRow(runs: Run[], t: Say): { tone: RunRow['tone']; text: string; done: number } {
  const counts = new Map<string, number>();
  for (const run of runs) {
    counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
  }
  const left = runs.some(run => run.elapsed_s === null);
  const odd = runs.filter(isOdd).length;
  const bad = odd > 0 || runs.some(run => ['failed', 'lost', 'refused'].includes(run.state));
  const texts = [...counts].map(([state, count]) => `${count} ${runStateName(state, t)}`);
  return {
    tone: left ? 'active' : bad ? 'bad' : counts.has('done') ? 'good' : 'quiet',
    text: [...texts, odd ? t('%1 with nan or inf', odd) : ''].filter(Boolean).join(', '),
    done: runs.filter(run => run.elapsed_s !== null).length
  };
}

/** `0:22 left`; empty if unknown. */
function leftText(run: Run, t: Say): string {
  const left = run.progress?.left_s ?? null;
  return left === null ? '' : t('%1 left', clock(left));
}

/** The state of a run. */
export function runStateName(state: string, t: Say): string {
  switch (state) {
    case 'queued':
      return t('queued');
    case 'starting':
      return t('starting');
    case 'running':
      return t('running');
    case 'stopping':
      return t('stopping');
    case 'done':
      return t('done');
    case 'failed':
      return t('failed');
    case 'lost':
      return t('lost');
    case 'interrupted':
      return t('interrupted');
    case 'refused':
      return t('refused');
    default:
      return state;
  }
}

/** The state of one rank. */
export function stateName(state: string, t: Say): string {
  switch (state) {
    case 'waiting':
      return t('waiting');
    case 'starting':
      return t('starting');
    case 'running':
      return t('running');
    case 'done':
      return t('done');
    case 'failed':
      return t('failed');
    case 'lost':
      return t('lost');
    case 'interrupted':
      return t('interrupted');
    default:
      return state;
  }
}

function facts(run: Run, t: Say): string {
  const some = run.ranks < run.world_size ? t.n('%2 of %1 rank', '%2 of %1 ranks', run.world_size, run.ranks) : ranksText(run.ranks, run.gpus, t);
  const memory = run.peak_gpu_memory_bytes ?? run.peak_rss_bytes;
  const parts = [some, run.strategy === 'none' ? '' : run.strategy, run.pool === 'local' ? '' : run.pool];
  parts.push(memory ? t('peak %1', size(memory)) : '', run.detached ? t('detached') : '');
  return parts.filter(Boolean).join(' · ');
}

function detail(run: Run, t: Say): string {
  if (run.elapsed_s === null && run.stopping) {
    return stopStage(run.members, run.stopping, t);
  }
  const odd = Object.entries(run.not_finite ?? {}).map(([name, text]) => `${name} ${text}`);
  return run.trouble || run.stall || odd.join(', ') || (run.elapsed_s === null ? run.line : '');
}

/** Whether a number that it reported is nan or infinite at the end. */
function isOdd(run: Run): boolean {
  return Object.keys(run.not_finite ?? {}).length > 0;
}

/** `queued, place 2`, `done, nan`. */
function stateText(run: Run, t: Say): string {
  const state = runStateName(run.state, t);
  const [word] = Object.values(run.not_finite ?? {}).map(text => text.split(' ')[0] ?? '');
  return run.place ? t('%1, place %2', state, run.place) : word && ['done', 'running'].includes(run.state) ? `${state}, ${word}` : state;
}

/** The stage of a stop: requested, then the ranks that still run, then that they are killed. */
export function stopStage(members: Member[], stage: 'asked' | 'killed', t: Say): string {
  const left = members.filter(each => !['done', 'failed', 'lost', 'interrupted'].includes(each.state)).map(each => each.rank);
  if (!left.length) {
    return t('All ranks have stopped.');
  }
  const who = rankList(left);
  if (stage === 'asked') {
    return left.length === members.length ? t('Asked all ranks to stop.') : t.n('Waiting for rank %2 to stop.', 'Waiting for ranks %2 to stop.', left.length, who);
  }
  return t.n('Rank %2 does not stop and is killed and replaced.', 'Ranks %2 do not stop and are killed and replaced.', left.length, who);
}

/** Whether a run waits for its turn or for ranks. */
function isWaiting(run: Run): boolean {
  return run.state === 'queued';
}

/** The runs that have not ended, running ones first, each kind in the order of their starts. */
export function currentRuns(overview: Overview | null): Run[] {
  const current = (overview?.runs ?? []).filter(run => run.elapsed_s === null).reverse();
  return [...current.filter(run => !isWaiting(run)), ...current.filter(isWaiting)];
}

/**
 * The runs that Stop can mean when nobody names one; it asks if they are several. Those of the selected cell, else all that
 * run, else those that wait.
 */
export function stoppable(overview: Overview | null, cell: string): Run[] {
  const current = currentRuns(overview);
  const own = current.filter(run => cell && run.cell === cell);
  const among = own.length ? own : current;
  const running = among.filter(run => !isWaiting(run));
  return running.length ? running : among;
}

/** The runs that a live view shows, from its name: the name of its run if it shows one. */
export function runsOf(overview: Overview | null, name: string): Run[] {
  const runs = overview?.views?.find(each => each.run === name)?.runs ?? [name];
  return (overview?.runs ?? []).filter(each => runs.includes(each.run)).reverse();
}

/** The output that replaces a live view whose kernel has ended in the middle of its runs, as a notebook file holds it. */
export function lastSeen(name: string, runs: Run[], nowS: number, t: Say): OutputLike {
  const detached = runs.find(run => run.detached && run.elapsed_s === null);
  const went = detached
    ? t('The kernel has ended. The run goes on: %distributed_attach %1 shows it.', detached.run)
    : runs.length > 1
      ? t('The kernel has ended, or was restarted, in the middle of these runs. This is the last known state.')
      : t('The kernel has ended, or was restarted, in the middle of this run. This is the last known state.');
  return seen(name, runs, nowS, went, t);
}

/** The output for the runs of a view in a notebook file that is saved in the middle of them. */
export function seenWhenSaved(name: string, runs: Run[], nowS: number, t: Say): OutputLike {
  const now = new Date(1000 * nowS);
  const time = now.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  const day = now.toLocaleDateString([], { dateStyle: 'medium' }); // the file may be opened on another one
  const went =
    runs.length > 1
      ? t('The runs were going on when the notebook was saved. They were seen last at %1 on %2.', time, day)
      : t('The run was going on when the notebook was saved. It was seen last at %1 on %2.', time, day);
  return seen(name, runs, nowS, went, t);
}

function seen(name: string, runs: Run[], nowS: number, went: string, t: Say): OutputLike {
  const [only] = runs;
  const row = only && runs.length === 1 ? runRow(only, nowS, t) : null;
  const lines = row ? [`${row.facts} · ${row.time}`, went, row.progress, row.detail].filter(Boolean) : [went];
  const ranks = (run: Run): string[][] => run.members.map(({ rank, state, device }) => [t('rank %1', rank), stateName(state, t), device]);
  const told = (run: Run): string[] => [run.label, runStateName(run.state, t), runRow(run, nowS, t).progress, run.line];
  const rows = row && only ? ranks(only) : runs.map(told);
  const cells = (tag: string, texts: string[]): string => texts.map(text => `<${tag}>${escape(text)}</${tag}>`).join('');
  const table = rows.length ? `<table>${rows.map(texts => `<tr>${cells('td', texts)}</tr>`).join('')}</table>` : '';
  return {
    output_type: 'display_data',
    data: {
      'text/plain': [...lines, ...rows.map(texts => texts.filter(Boolean).join('  '))].join('\n'),
      'text/html': `<div>${cells('pre', lines)}${table}</div>` // front ends typeset formulas everywhere but in <pre>
    },
    metadata: { jupyter_distrib: { run: name, settled: true } }
  };
}

function escape(text: string): string {
  return text.replace(/[&<>"']/g, found => `&#${found.charCodeAt(0)};`);
}

// ---------------------------------------------------------------------------------------------------- in few words

/** For the status bar; empty if there is nothing to say. */
export function statusText(overview: Overview | null, nowS: number, t: Say): string {
  if (!overview) {
    return '';
  }
  const current = currentRuns(overview);
  const [run] = current;
  if (run) {
    const waiting = current.filter(isWaiting).length;
    const running = current.length - waiting;
    const state = run.state === 'stopping' ? t('stopping') : clock(nowS - run.began_at_s);
    const left = leftText(run, t);
    const first = running > 1 ? t('%1 running', running) : running ? `${ranksText(run.ranks, run.gpus, t)} · ${state}${left && ` · ${left}`}` : '';
    return [first, waiting ? t('%1 queued', waiting) : ''].filter(Boolean).join(', ');
  }
  const [start] = overview.starts ?? [];
  if (start) {
    return t('starting ranks · %1', clock(nowS - start.began_at_s));
  }
  const groups = overview.pools.flatMap(pool => pool.groups).filter(group => group.state === 'open');
  const count = groups.reduce((sum, group) => sum + group.size, 0);
  return count ? t('%1 idle', ranksText(count, groups.some(group => group.gpus), t)) : '';
}

/** The time left for the runs of the first of these kernels for which it is known, as the beginning of a title: `0:22 left · `. */
export function leftInTitle(overviews: (Overview | null)[], t: Say): string {
  for (const overview of overviews) {
    const known = currentRuns(overview).flatMap(run => run.progress?.left_s ?? []);
    if (known.length) {
      return t('%1 left · ', clock(Math.max(...known)));
    }
  }
  return '';
}

/** The values that would be lost if the ranks of a pool end; empty if there are none. */
export function lossText(pool: Pool | undefined, t: Say): string {
  const groups = pool?.groups ?? [];
  const kept = groups.flatMap(group => group.kept);
  const parts = [];
  if (groups.some(group => group.run)) {
    parts.push(t('The cell that runs on them is ended.'));
  }
  if (kept.length) {
    parts.push(t('What they keep is lost: %1.', kept.join(', ')));
  }
  return parts.join(' ');
}

/** The number of ranks, as in the panel's two fields. */
export function picked(next: Next): { kind: 'auto' | 'gpus' | 'ranks'; count: number } {
  if (next.gpus) {
    return { kind: 'gpus', count: next.gpus };
  }
  return next.ranks ? { kind: 'ranks', count: next.ranks } : { kind: 'auto', count: 2 };
}

/** A magic or the comment that stands for one; other words after the colon make it an ordinary comment. */
const MAGIC = /^(%%distrib(?:uted)?(?=\s|$)|#\s*distributed:(?=\s*(?:--|$)))(.*)$/;
/** Split into words as a shell does. */
const WORD = /(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*')+/g;
const PICKED = ['--gpus', '--ranks', '--gpu-type', '--strategy', '--pool'];

/** The cell's text with this magic line at its beginning; other options of an existing line stay. */
export function withLine(source: string, line: string): string {
  const lines = source.split('\n');
  const first = lines.findIndex(each => each.trim());
  const belowComments = lines.findIndex(each => each.trim() && !each.startsWith('#'));
  const index = MAGIC.test(lines[first]?.trim() ?? '') ? first : belowComments;
  const found = MAGIC.exec(lines[index]?.trim() ?? '');
  if (!found) {
    return source ? `${line}\n${source}` : `${line}\n`;
  }
  const [, name = '', options = ''] = found;
  const [magic = '', ...picks] = line.split(' ');
  lines[index] = [name.startsWith('#') ? '# distributed:' : magic, ...picks, ...others(options)].join(' ');
  return lines.join('\n');
}

/** The words of a magic line without those that the panel sets; a comment ends it. */
function others(options: string): string[] {
  const words = options.match(WORD) ?? [];
  const comment = words.findIndex(word => word.startsWith('#'));
  const end = comment < 0 ? words.length : comment;
  const isPicked = (word: string | undefined): boolean => word !== undefined && PICKED.includes(word);
  return words.filter((word, at) => at >= end || !(isPicked(word.split('=')[0]) || isPicked(words[at - 1])));
}

// ---------------------------------------------------------------------------------------------------- saved runs

/** The style of a line of a difference. */
export function lineKind(line: string): string {
  if (/^(---|\+\+\+|@@) /.test(line)) {
    return 'jp-mod-place';
  }
  return line.startsWith('+') ? 'jp-mod-added' : line.startsWith('-') ? 'jp-mod-removed' : '';
}

// ---------------------------------------------------------------------------------------------------- layout

/** The part of a list, and of the form of a pool with its buttons, in which it can be scrolled. */
const LEAST_HEIGHT = 140;
const LEAST_FORM_HEIGHT = 280;

/** The least height of all sections together: that of the first form, and for the others a part; `filledIn` has the form of a pool. */
export function leastHeight(natural: number[], filledIn = -1): number {
  return natural.reduce((sum, need, place) => sum + (place === 0 ? need : Math.min(need, least(place, filledIn))), 0);
}

function least(place: number, filledIn: number): number {
  return place === filledIn ? LEAST_FORM_HEIGHT : LEAST_HEIGHT;
}

/**
 * The heights of sections: the form, which is the first one, has its own, and lists share what is left. A list that needs less
 * than its share leaves the rest to others. A section without content has none.
 */
export function heights(natural: number[], room: number, filledIn = -1): number[] {
  const found = natural.map((need, place) => (place === 0 ? Math.min(need, Math.max(0, room)) : 0));
  let left = room - (found[0] ?? 0);
  let open = natural.map((_, place) => place).filter(place => place > 0 && (natural[place] ?? 0) > 0);
  while (open.length) {
    const share = left / open.length;
    const settled = open.filter(place => (natural[place] ?? 0) <= share || least(place, filledIn) > share);
    for (const place of settled.length ? settled : open) {
      found[place] = settled.length ? Math.min(natural[place] ?? 0, Math.max(share, least(place, filledIn))) : share;
      left -= found[place] ?? 0;
    }
    if (!settled.length) {
      break;
    }
    open = open.filter(place => !settled.includes(place));
  }
  const last = natural.reduce((found, need, place) => (need > 0 ? place : found), -1);
  const spare = room - found.reduce((sum, each) => sum + each, 0);
  if (spare > 0 && last >= 0) {
    found[last] = (found[last] ?? 0) + spare;
  }
  return found;
}
