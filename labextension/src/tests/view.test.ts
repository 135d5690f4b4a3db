/** What the sidebar says, under node's own test runner: `jlpm test`. */
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { isLive, isSettled, mended, withLastSeen, withoutDead } from '../outputs.js';
import { Gpu, Member, OutputLike, Overview, Pool, PROTOCOL, Run, Settled, SettledView } from '../protocol.js';
import * as view from '../view.js';

const filled = (text: string, ...args: (string | number)[]): string => text.replace(/%(\d)/g, (_, number: string) => String(args[Number(number) - 1]));
const t: view.Say = Object.assign(filled, { n: (one: string, many: string, count: number, ...args: (string | number)[]) => filled(count === 1 ? one : many, count, ...args) });

const member = (rank: number, state: string): Member => ({
  rank,
  state,
  device: 'cpu',
  rss_bytes: 1e9,
  cpu_percent: 50,
  gpu_memory_bytes: null,
  gpu_memory_total_bytes: null,
  gpu_percent: null,
  gpu_tensor_bytes: null,
  gpu_reserved_bytes: null,
  gpu_memory_of_all: false
});

const run = (more: Partial<Run> = {}): Run => ({
  run: 'a1b2c3-7',
  label: 'Cell In[5]',
  cell: 'c5',
  state: 'running',
  pool: 'local',
  strategy: 'ddp',
  ranks: 4,
  numbers: [0, 1, 2, 3],
  world_size: 4,
  gpus: true,
  detached: false,
  began_at_s: 1000,
  elapsed_s: null,
  stop_asked_at_s: null,
  stopping: '',
  peak_rss_bytes: 2e9,
  peak_gpu_memory_bytes: 31e9,
  stall: '',
  trouble: '',
  not_finite: {},
  place: 0,
  group: '',
  progress: { label: 'epoch', step: 3, total: 12, left_s: null },
  line: 'loss 0.3',
  members: [0, 1, 2, 3].map(rank => member(rank, 'running')),
  ...more
});

const gpu = (more: Partial<Gpu>): Gpu => ({ index: 2, number: '2', name: 'NVIDIA A100', memory_bytes: 80e9, used_bytes: 1e6, holder: '', ...more });

test('memory on a GPU is told with what the tensors take of it', () => {
  assert.equal(view.memoryOf(member(0, 'running'), t), '');
  const onGpu = { ...member(0, 'running'), gpu_memory_bytes: 9e9, gpu_tensor_bytes: 5e9, gpu_reserved_bytes: 8e9 };
  assert.equal(view.memoryOf(onGpu, t), "GPU memory of the rank's process, as the driver counts; tensors 5.0 GB, reserved for them 8.0 GB");
  assert.match(view.memoryOf({ ...onGpu, gpu_memory_of_all: true }, t), /all processes .* lists no processes here; tensors 5/);
});

test('sizes, clocks and ranks read as people write them', () => {
  assert.equal(view.size(31_400_000_000), '31.4 GB');
  assert.equal(view.size(166_326_272), '166 MB');
  assert.equal(view.clock(41), '0:41');
  assert.equal(view.clock(3723), '1:02:03');
  assert.equal(view.rankList([5, 0, 1, 2]), '0-2, 5');
});

test('a pool of several machines tells of each, and has a GPU if one of them has', () => {
  const machine = { cpus: 4, free_cpus: 2, memory_bytes: 8e9, gpus: 0, free_gpus: 0, gpu_type: '', ranks: [] as number[] };
  const pool = (...gpus: number[]): Pool => ({
    name: 'lab',
    kind: 'ray',
    origin: '',
    groups: [],
    node: {
      at_s: 0,
      name: 'Ray at 10.0.0.7:6379',
      cpus: 8,
      memory_bytes: 16e9,
      gpus: [],
      nodes: gpus.map((count, index) => ({ ...machine, name: `10.0.0.${7 + index}`, gpus: count, free_gpus: 1, gpu_type: count ? 'A10' : '', ranks: [2 * index, 2 * index + 1] })),
      others: []
    }
  });
  assert.deepEqual(view.machineTexts(pool(0, 2), t), [
    '10.0.0.7 · 4 CPU cores, 2 free · 8.0 GB · ranks 0-1',
    '10.0.0.8 · 4 CPU cores, 2 free · 8.0 GB · 2 A10, 1 free · ranks 2-3'
  ]);
  const held = pool(0);
  Object.assign(held.node?.nodes?.[0] ?? {}, { state: 'drained', holders: ['ada: job 17 (train)'] });
  assert.match(view.machineTexts(held, t)[0] ?? '', /^10.0.0.7 · drained · .* · ada: job 17 \(train\)$/);
  Object.assign(held.node ?? {}, { next_rank: 'at once, on n1', waiting: [{ holder: 'b.ipynb', ranks: 2, gpus: true, reason: 'no GPU is free.' }] });
  assert.deepEqual(view.roomTexts(held, t), ['Next rank: at once, on n1', 'b.ipynb waits: no GPU is free.']);
  assert.deepEqual(view.roomTexts(pool(0), t), []);
  assert.deepEqual(view.roomTexts({ ...pool(0), machines: 'up for 2 h, 48.00 until now' }, t), ['Machines: up for 2 h, 48.00 until now']);
  assert.equal(view.hasNoGpu(pool(0, 2)), false);
  assert.equal(view.hasNoGpu(pool(0, 0)), true);
  const unasked: Pool = { ...pool(0), node: null };
  assert.equal(view.hasNoGpu(unasked), false);
  assert.equal(view.hasNoGpu({ ...unasked, no_gpu: true }), true);
  assert.equal(view.hasNoGpu({ ...pool(0, 2), no_gpu: true }), false);
  assert.deepEqual(view.autoTexts(pool(0, 2), t), { name: 'auto: all GPUs', note: '' });
  assert.deepEqual(view.autoTexts({ ...unasked, no_gpu: true }, t), { name: 'auto: 2 on CPU', note: '' });
  assert.match(view.autoTexts(unasked, t).note, /on each GPU.*none, 2 ranks on the CPU/);
  assert.deepEqual(view.gpuTypes(pool(0, 2)), ['A10']);
});

test('every state without content has a sentence, and an action where there is one', () => {
  for (const state of ['no-notebook', 'no-kernel', 'connecting', 'absent', 'lost', 'other-version'] as const) {
    assert.ok(view.explanation(state, 'a.ipynb', t)?.text.endsWith('.'));
  }
  assert.equal(view.explanation('absent', 'a.ipynb', t)?.act, 'load');
  assert.equal(view.explanation('ready', 'a.ipynb', t), null);
});

test('a GPU is free, mine, or busy with the name of who has it', () => {
  assert.deepEqual(view.gpuText(gpu({}), 'a.ipynb (kernel 7)', t), { state: 'free', text: 'free' });
  assert.equal(view.gpuText(gpu({ holder: 'a.ipynb (kernel 7) since 12:31' }), 'a.ipynb (kernel 7)', t).state, 'mine');
  assert.equal(view.gpuText(gpu({ holder: 'b.ipynb since 12:31' }), 'a.ipynb', t).text, 'busy: b.ipynb since 12:31');
  assert.equal(view.gpuText(gpu({ used_bytes: 31e9 }), 'a.ipynb', t).text, 'busy: another process holds 31.0 GB');
});

test('a run that goes on has its time, its progress and its last line', () => {
  const row = view.runRow(run(), 1041, t);
  assert.equal(row.time, '0:41');
  assert.equal(row.fraction, 0.25);
  assert.equal(row.detail, 'loss 0.3');
  assert.equal(row.facts, '4 GPU ranks · ddp · peak 31.0 GB');
  assert.equal(row.force, false);
});

test('a run that failed says why, and has no Stop', () => {
  const row = view.runRow(run({ state: 'failed', elapsed_s: 12, trouble: 'rank 2: ValueError: no' }), 2000, t);
  assert.deepEqual([row.tone, row.ended, row.time, row.detail], ['bad', true, '12 s', 'rank 2: ValueError: no']);
  const queued = view.runRow(run({ state: 'queued', elapsed_s: null, members: [] }), 2000, t);
  assert.deepEqual([queued.state, queued.tone], ['queued', 'active']);
  const refused = view.runRow(run({ state: 'refused', elapsed_s: 0 }), 2000, t);
  assert.deepEqual([refused.state, refused.tone], ['refused', 'bad']);
});

test('a stall is told', () => {
  assert.equal(view.runRow(run({ stall: 'rank 1 waits in all_reduce' }), 1041, t).detail, 'rank 1 waits in all_reduce');
});

test('the stages of a stop: asked, who holds on, killed', () => {
  const asked = run({ state: 'stopping', stopping: 'asked' });
  assert.equal(view.runRow(asked, 1040.1, t).detail, 'Asked all ranks to stop.');
  const some = [member(0, 'interrupted'), member(1, 'running')];
  assert.equal(view.stopStage(some, 'asked', t), 'Waiting for rank 1 to stop.');
  assert.equal(view.stopStage(some, 'killed', t), 'Rank 1 does not stop and is killed and replaced.');
  assert.equal(view.runRow(asked, 1041, t).force, true);
});

test('what ranks print is text and stays text', () => {
  const evil = '<img src=x onerror=alert(1)>';
  assert.equal(view.runRow(run({ line: evil }), 1041, t).detail, evil);
});

test('of a run whose kernel has ended, what was seen last stays', () => {
  const evil = run({ line: '<img src=x onerror=alert(1)>', members: [member(0, 'running')] });
  const output = view.lastSeen(evil.run, [evil], 1041, t);
  const data = output.data;
  const [text, html] = [String(data?.['text/plain']), String(data?.['text/html'])];
  for (const part of ['4 GPU ranks · ddp', '0:41', 'The kernel has ended', 'epoch 3/12', 'rank 0']) {
    assert.ok(text.includes(part) && html.includes(part), part);
  }
  assert.ok(!html.includes('<img'));
  const formula = String.raw`$\href{javascript:alert(1)}{x}$`;
  const shown = String(view.lastSeen('a', [run({ line: formula })], 1041, t).data?.['text/html']);
  assert.ok(shown.includes(`<pre>${formula}</pre>`), shown);
  assert.ok(!shown.replace(/<pre>.*?<\/pre>/gs, '').includes('href'));
  assert.ok(isSettled(output, evil.run));
  assert.match(String(view.lastSeen('a', [run({ detached: true })], 1041, t).data?.['text/plain']), /goes on: %distributed_attach a1b2c3-7/);
});

test('of the runs of a sweep whose kernel has ended, a line for each stays', () => {
  const runs = [run({ run: 'a-2', label: 'lr=2' }), run({ run: 'a-1', label: '<b>', state: 'done', elapsed_s: 3 }), run({ run: 'a-3' })];
  const overview = { runs, views: [{ run: 'a-1-runs', runs: ['a-1', 'a-2'] }] } as unknown as Overview;
  const seen = view.runsOf(overview, 'a-1-runs');
  assert.deepEqual(seen.map(each => each.run), ['a-1', 'a-2']);
  assert.deepEqual(view.runsOf(overview, 'a-3').map(each => each.run), ['a-3']);
  const output = view.lastSeen('a-1-runs', seen, 1041, t);
  assert.match(String(output.data?.['text/plain']), /in the middle of these runs[^]*\n<b> {2}done[^]*\nlr=2 {2}running/);
  assert.ok(!String(output.data?.['text/html']).includes('<b>'));
  assert.ok(isSettled(output, 'a-1-runs'));
});

test('states of ranks and names of GPUs go through the translator', () => {
  const french: view.Say = Object.assign((text: string) => `fr:${text}`, { n: (one: string) => `fr:${one}` });
  for (const state of ['waiting', 'starting', 'running', 'done', 'failed', 'lost', 'interrupted']) {
    assert.equal(view.stateName(state, french), `fr:${state}`);
  }
});

test('the status bar is short, and empty without ranks', () => {
  const pools: Pool[] = [{ name: 'local', kind: 'local', origin: 'built in', groups: [], node: null }];
  const overview = { pools, runs: [] } as unknown as Overview;
  assert.equal(view.statusText(overview, 0, t), '');
  assert.equal(view.statusText({ ...overview, runs: [run()] }, 1041, t), '4 GPU ranks · 0:41');
  const progress = { label: 'epoch', step: 8, total: 14, left_s: 22.4 };
  assert.equal(view.statusText({ ...overview, runs: [run({ progress })] }, 1041, t), '4 GPU ranks · 0:41 · 0:22 left');
  assert.equal(view.runRow(run({ progress }), 1041, t).progress, 'epoch 8/14, 0:22 left');
  const slower = run({ progress: { ...progress, left_s: 61 } });
  assert.equal(view.leftInTitle([null, overview, { ...overview, runs: [run({ progress }), slower] }], t), '1:01 left · ');
  assert.equal(view.leftInTitle([{ ...overview, runs: [run(), run({ progress, elapsed_s: 3 })] }], t), '');
  assert.equal(view.runRow(run({ progress, elapsed_s: 50, state: 'done' }), 1041, t).progress, 'epoch 8/14');
});

test('of several runs the status bar counts, and Stop means those that run', () => {
  const runs = ['queued', 'queued', 'queued', 'running', 'running'].map((state, place) => run({ run: `r-${5 - place}`, state: state as never, cell: `c${place % 3}` }));
  const busy = { runs, pools: [] } as unknown as Overview;
  assert.equal(view.statusText(busy, 1041, t), '2 running, 3 queued');
  assert.equal(view.statusText({ ...busy, runs: runs.slice(0, 4) }, 1041, t), '4 GPU ranks · 0:41, 3 queued');
  assert.equal(view.statusText({ ...busy, runs: runs.slice(0, 3) }, 1041, t), '3 queued');
  const named = (cell: string): string[] => view.stoppable(busy, cell).map(each => each.run);
  assert.deepEqual(named(''), ['r-1', 'r-2'], 'in the order of their starts');
  assert.deepEqual(named('c1'), ['r-1'], 'of the selected cell the one that runs, not the one that waits');
  assert.deepEqual(named('c2'), ['r-3'], 'a cell whose run waits');
  assert.deepEqual(named('elsewhere'), ['r-1', 'r-2']);
});

test('runs are listed as they go: running, waiting by place, over; a sweep is one thing', () => {
  const point = (name: string, state: string, more: Partial<Run> = {}): Run => run({ run: name, label: `lr=${name}`, state: state as never, group: 'Sweep of In[5]', elapsed_s: ['done', 'failed'].includes(state) ? 3 : null, ...more });
  const alone = run({ run: 'a-1', state: 'done', elapsed_s: 3 });
  const listed = view.inOrder([point('p3', 'queued', { place: 2 }), point('p2', 'queued', { place: 1 }), point('p1', 'running'), point('p0', 'done'), alone, run({ run: 'a-2' })]);
  assert.deepEqual(listed.map(({ title, runs }) => [title, ...runs.map(each => each.run)]), [['Sweep of In[5]', 'p1', 'p2', 'p3', 'p0'], ['', 'a-2'], ['', 'a-1']]);
  const sweep = listed[0]?.runs ?? [];
  assert.deepEqual(view.groupRow(sweep, t), { tone: 'active', text: '1 running, 2 queued, 1 done', done: 1 });
  assert.equal(view.groupRow([point('p0', 'done'), point('p1', 'failed')], t).tone, 'bad');
  const named = (label: string, group: string): string => view.titleInGroup(run({ label, group }));
  assert.equal(named('Cell In[5], lr=0.1, width=8', 'Sweep of Cell In[5]'), 'lr=0.1, width=8');
  assert.equal(named('train(0.1, 8)', 'Runs of Cell In[5]'), 'train(0.1, 8)');
  assert.equal(view.runRow(point('p2', 'queued', { place: 1 }), 0, t).state, 'queued, place 1');
});

test('a run whose loss is nan at the end says so, alone and in its group', () => {
  const odd = run({ state: 'done', elapsed_s: 9, not_finite: { loss: 'nan from step 31 on rank 3' } });
  const row = view.runRow(odd, 1009, t);
  assert.deepEqual([row.tone, row.state, row.detail], ['bad', 'done, nan', 'loss nan from step 31 on rank 3']);
  assert.deepEqual(view.endText({ ...odd, detached: true }, 0, t), { text: 'Cell In[5]: done, nan after 9 s\nloss nan from step 31 on rank 3', good: false });
  assert.deepEqual(view.groupRow([odd, run({ state: 'done', elapsed_s: 9 })], t), { tone: 'bad', text: '2 done, 1 with nan or inf', done: 2 });
  assert.deepEqual(view.runRow(run({ not_finite: { loss: 'inf from step 2' } }), 1009, t).tone, 'active');
});

test('the form of the sidebar has its own height, and lists share the rest', () => {
  assert.deepEqual(view.heights([190, 400, 800, 300], 850), [190, 220, 220, 220]);
  assert.deepEqual(view.heights([190, 80, 800, 0], 850), [190, 80, 580, 0]);
  assert.deepEqual(view.heights([190, 80, 100, 90], 850), [190, 80, 100, 480]);
  assert.deepEqual(view.heights([190, 0, 0, 0], 850), [850, 0, 0, 0]);
  assert.deepEqual(view.heights([0, 80, 900, 0], 500), [0, 80, 420, 0]);
  assert.equal(view.leastHeight([190, 80, 900, 0]), 190 + 80 + 140);
  assert.equal(view.leastHeight([190, 900, 900, 0], 1), 190 + 280 + 140);
  assert.deepEqual(view.heights([190, 900, 900, 0], 610, 1), [190, 280, 140, 0]);
  assert.deepEqual(view.heights([190, 900, 900, 0], 1190, 1), [190, 500, 500, 0]);
});

test('what a stop of ranks would lose is named', () => {
  const group = { name: 'c', state: 'open' as const, size: 2, gpus: false, kept: ['model'], run: 'r', ranks: [] };
  const pool: Pool = { name: 'local', kind: 'local', origin: '', groups: [group], node: null };
  assert.match(view.lossText(pool, t), /cell that runs.*lost: model/);
  assert.equal(view.lossText({ ...pool, groups: [] }, t), '');
});

test('a magic line goes on top of a cell, or in place of the one that is there', () => {
  assert.equal(view.withLine('x = 1', '%%distributed --ranks 3'), '%%distributed --ranks 3\nx = 1');
  assert.equal(view.withLine('%%distributed\nx = 1', '%%distributed --ranks 3'), '%%distributed --ranks 3\nx = 1');
  assert.equal(view.withLine('%%distrib --gpus 2\nx', '%%distributed'), '%%distributed\nx');
  assert.equal(view.withLine('\n  \n%%distributed\nx', '%%distributed --ranks 3'), '\n  \n%%distributed --ranks 3\nx');
  assert.equal(view.withLine('# a\n%%distributed\nx', '%%distributed --ranks 3'), '# a\n%%distributed --ranks 3\nx');
  assert.equal(view.withLine('# distributed:\n%%time\nx', '%%distributed --ranks 3'), '# distributed: --ranks 3\n%%time\nx');
  assert.equal(view.withLine('# a\nx', '%%distributed'), '%%distributed\n# a\nx');
  assert.equal(view.withLine('%%distributedly', '%%distributed'), '%%distributed\n%%distributedly');
  assert.equal(view.withLine('', '%%distributed'), '%%distributed\n');
});

test('what a magic line says beside the picks stays', () => {
  const line = '%%distributed --ranks 3 --strategy ddp';
  for (const [before, after] of [
    ['%%distributed --keep model --timeout 60', `${line} --keep model --timeout 60`],
    ['%%distributed --gpus 2 --keep=a,b --gpu-type "A 10" --pool=x --detach', `${line} --keep=a,b --detach`],
    ["%%distributed --env 'A=it is --gpus 3' --strategy 'none' # --ranks 1", `${line} --env 'A=it is --gpus 3' # --ranks 1`],
    ['# distributed: --gpus 8 --keep model', '# distributed: --ranks 3 --strategy ddp --keep model'],
    ['%%distrib --ranks', line],
    ['#distributed:--ranks 2 --check', '# distributed: --ranks 3 --strategy ddp --check'],
    ['#distributed:', '# distributed: --ranks 3 --strategy ddp'],
    ['# distributed: as it should be', `${line}\n# distributed: as it should be`]
  ]) {
    assert.equal(view.withLine(`${before}\nx = 1`, line), `${after}\nx = 1`);
  }
  assert.equal(view.withLine('# distributed: --gpus 8', '%%distributed'), '# distributed:');
});

const print = { output_type: 'stream' };
const value = { output_type: 'execute_result', data: { 'text/plain': '1' } };
const shown = (run: string, settled: boolean): OutputLike => ({ output_type: 'display_data', data: {}, metadata: { jupyter_distrib: { run, settled } } });
const settledView = (run: string): SettledView => ({ run, model: `model of ${run}`, output: shown(run, true) });
const settled: Settled = { cell: 'c', count: 7, views: [settledView('r-1'), settledView('r-2')], outcome: [value] };
const [first, second] = settled.views.map(each => each.output) as [OutputLike, OutputLike];

test('an output is known by its mark or by the model of its widget', () => {
  const live = shown('r-1', false);
  assert.ok(isLive(live, settledView('r-1')));
  assert.ok(!isSettled(live, 'r-1'));
  assert.ok(isSettled(first, 'r-1'));
  assert.ok(!isLive(first, settledView('r-1')));
  assert.ok(isLive({ data: { 'application/vnd.jupyter.widget-view+json': { model_id: 'model of r-1' } } }, settledView('r-1')));
  assert.ok(!isLive({ data: { 'text/plain': 'x' } }, settledView('r-1')));
});

test('a view that no kernel has is shown as it was saved, and a file holds what was seen last', () => {
  const widget = { 'application/vnd.jupyter.widget-view+json': { model_id: 'm' } };
  const live = { ...shown('r-1', false), data: { ...widget, 'text/html': 'first' } };
  assert.deepEqual(withoutDead(live, () => false).data, { 'text/html': 'first' });
  for (const [output, goesOn] of [[live, true], [first, false], [print, false]] as [OutputLike, boolean][]) {
    assert.equal(withoutDead(output, () => goesOn), output);
  }
  const last = withLastSeen(live, name => view.seenWhenSaved(name, [run({ run: name })], 1041, t));
  assert.deepEqual(Object.keys(last.data ?? {}), ['application/vnd.jupyter.widget-view+json', 'text/html', 'text/plain']);
  assert.match(String(last.data?.['text/plain']), /seen last at \d+:\d+.* on .*\b1970\./);
  assert.deepEqual(last.metadata, live.metadata);
  assert.equal(withLastSeen(live, () => null), live);
  assert.equal(withLastSeen(first, () => last), first);
});

test('a page that was not there gets all views of the cell and its outcome, and keeps what it has', () => {
  assert.deepEqual(mended([], null, settled, true), [first, second, value]);
  assert.deepEqual(mended([print, first], null, settled, true), [print, first, second, value]);
  assert.deepEqual(mended([print, shown('r-1', false)], null, settled, true), [print, first, second, value]);
  assert.deepEqual(mended([first, second], null, settled, true), [first, second, value]);
});

test('what an earlier execution of the cell has left gives way', () => {
  assert.deepEqual(mended([print, shown('old', true), value], 3, settled, true), [first, second, value]);
  assert.deepEqual(mended([shown('old', false)], null, settled, true), [first, second, value]);
});

test('a page that saw all of it has nothing written, and gets nothing back that was cleared', () => {
  for (const outputs of [[first, print, second, value], [], [second, value]]) {
    assert.equal(mended(outputs, 7, settled, false), outputs);
  }
  assert.deepEqual(mended([first, shown('r-2', false), print], null, settled, false), [first, second, print, value]);
});

test('the view of a detached run takes its place before the value of the cell', () => {
  const detached = { ...settled, views: settled.views.slice(0, 1), outcome: [] };
  assert.deepEqual(mended([shown('r-1', false), value], 7, detached, false), [first, value]);
  assert.deepEqual(mended([value], 7, detached, true), [first, value]);
});

test('the overview that the kernel really makes has the shape that is written down here', () => {
  const golden = JSON.parse(readFileSync(new URL('../../../tests/kernel/sidebar/golden_overview.json', import.meta.url), 'utf-8')) as Overview;
  assert.equal(golden.protocol, PROTOCOL);
  const [first] = golden.runs;
  assert.ok(first);
  assert.deepEqual(Object.keys(first).sort(), Object.keys(run()).sort());
  assert.deepEqual(Object.keys(first.members[0] ?? member(0, '')).sort(), Object.keys(member(0, '')).sort());
  assert.equal(view.runRow(first, first.began_at_s + 5, t).time, '0:05');
  assert.ok(golden.next.line.startsWith('%%distributed'));
});

// ---------------------------------------------------------------------------------------------------- starts, ends, logs

const starting = (more = {}) => ({ up: 12, size: 20, waits_for: '', ...more });
const opening = (more: Partial<Overview> = {}): Overview => {
  const group = { name: 'g', state: 'opening', size: 0, gpus: false, kept: [], run: null, ranks: [], starting: starting() };
  const start = { pool: 'local', label: 'Cell In[5]', cell: 'c5', run: '', began_at_s: 1000 };
  return { pools: [{ name: 'local', groups: [group] }], runs: [], starts: [start], ...more } as unknown as Overview;
};

test('a start that takes long says how far it is and what it waits for, in its cell', () => {
  assert.equal(view.startingText(starting(), t), 'Starting 20 ranks: 12 up');
  assert.equal(view.startingText(starting({ up: 0, size: 1, waits_for: 'the import of torch' }), t), 'Starting 1 rank: 0 up, waiting for the import of torch');
  assert.deepEqual(view.startingIn(opening(), 1003, t), { cell: 'c5', text: 'Starting 20 ranks: 12 up · 0:03' });
  assert.equal(view.startingIn(opening(), 1000.2, t), null);
  assert.equal(view.startingIn(opening({ starts: [] }), 1003, t), null);
});

test('a start says for which cell it is and since when, before the pool is found and in every place', () => {
  const overview = opening({ pools: [] });
  assert.deepEqual(view.startingIn(overview, 1002, t), { cell: 'c5', text: 'Starting ranks on local · 0:02' });
  assert.equal(view.poolStartText(overview, 'local', 1002, t), 'Starting ranks for Cell In[5] · 0:02');
  assert.equal(view.poolStartText(overview, 'other', 1002, t), '');
  assert.equal(view.statusText(overview, 1002, t), 'starting ranks · 0:02');
  assert.deepEqual(view.waitingCells(overview).map(each => each.label), ['Cell In[5]']);
  const [start] = overview.starts ?? [];
  assert.ok(start);
  const submitted = opening({ starts: [{ ...start, run: 'r-1' }] });
  assert.deepEqual(view.waitingCells(submitted), []);
  assert.equal(view.startingIn(submitted, 1002, t), null);
});

test('many more ranks than cores are asked for first', () => {
  const pool = { node: { cpus: 2 } } as Pool;
  assert.match(view.tooManyText(pool, 999, t), /999 ranks on 2 CPU cores/);
  assert.equal(view.tooManyText(pool, 8, t), '');
  assert.equal(view.tooManyText({ node: null } as unknown as Pool, 999, t), '');
  assert.equal(view.tooManyText(pool, null, t), '');
});

test('the end of long runs is told, and that of detached ones always', () => {
  const ended = { state: 'done', elapsed_s: 31 } as const;
  assert.deepEqual(view.endText(run(ended), 30, t), { text: 'Cell In[5]: done after 31 s', good: true });
  assert.equal(view.endText(run({ ...ended, elapsed_s: 29 }), 30, t), null);
  assert.equal(view.endText(run(ended), 0, t), null);
  assert.equal(view.endText(run(), 30, t), null);
  const failed = view.endText(run({ state: 'failed', elapsed_s: 1, detached: true, trouble: "rank 2: KeyError: 'lr'" }), 0, t);
  assert.deepEqual(failed, { text: "Cell In[5]: failed after 1 s\nrank 2: KeyError: 'lr'", good: false });
});

test('a queued run is likely to begin when those before it have ended, if that is known', () => {
  const queued = (id: string, place: number, more: Partial<Run> = {}): Run => run({ run: id, state: 'queued', place, members: [], progress: null, group: 'g', ...more });
  const going = run({ run: 'a', began_at_s: 1000, progress: null, group: 'g' });
  const done = run({ run: 'd', state: 'done', elapsed_s: 60, group: 'g' });
  const other = run({ run: 'o', state: 'done', elapsed_s: 6000, group: 'another' });
  const starts = (...runs: Run[]): [string, number][] => [...view.startsIn(runs, 1010)];
  assert.deepEqual(starts(queued('c', 2), queued('b', 1), going, done, other), [['b', 50], ['c', 110]]);
  assert.deepEqual(starts(queued('b', 1), run({ ...going, progress: { label: '', step: 1, total: 2, left_s: 7 } })), [['b', 7]]);
  assert.deepEqual(starts(queued('b', 1), going, run({ ...going, run: 'a2', began_at_s: 960 }), done), [['b', 10]], 'what ends first makes room');
  assert.deepEqual(starts(queued('b', 1), going), []);
  assert.deepEqual(starts(queued('b', 1), going, { ...done, pool: 'another' }), []);
  assert.deepEqual([0.2, 45, 200, 7300, undefined].map(seconds => view.startsText(seconds, t)), ['starts soon', 'starts in about 45 s', 'starts in about 3 min', 'starts in about 2 h', '']);
  assert.equal(view.queueText({ runs: [queued('c', 2), queued('b', 1), going, done] } as unknown as Overview, t), '1 running, 2 queued');
  assert.equal(view.queueText({ runs: [going, done] } as unknown as Overview, t), '');
});
