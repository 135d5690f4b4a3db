/** How a page finds its kernel and keeps up with it, over a kernel that is played. */
import assert from 'node:assert/strict';
import { mock, test, TestContext } from 'node:test';

import { Kernel, KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import { KernelLink } from '../link.js';
import { EVENTS, PROTOCOL } from '../protocol.js';

type Told = Record<string, unknown>;

/** The side of the kernel: what it was asked, and what it says. */
class Played {
  readonly clientId = 'page';
  readonly username = 'user';
  readonly iopubMessage = new Signal<this, unknown>(this);
  readonly statusChanged = new Signal<this, string>(this);
  readonly disposed = new Signal<this, void>(this);
  readonly connectionStatusChanged = new Signal<this, string>(this);
  connectionStatus = 'connecting';
  status = 'idle';
  probes: { onReply: (reply: unknown) => void }[] = [];
  requests: Told[] = [];
  answer: Told = { ok: true };
  answers = true;
  ends = false;
  interrupts = 0;

  sendShellMessage(): object {
    const future = { onReply: (): void => undefined };
    this.probes.push(future);
    return future;
  }

  sendControlMessage(message: KernelMessage.IMessage): object {
    this.requests.push(message.content as Told);
    if (this.ends) {
      return { done: Promise.reject(new Error('Canceled future for distrib_request message before replies were done')) };
    }
    return { done: this.answers ? Promise.resolve({ content: this.answer }) : new Promise(() => undefined) };
  }

  interrupt(): Promise<void> {
    this.interrupts += 1;
    return Promise.resolve();
  }

  says(...statuses: string[]): void {
    for (const status of statuses) {
      this.status = status;
      this.statusChanged.emit(status);
    }
  }

  connects(...statuses: string[]): void {
    statuses.forEach(status => this.connectionStatusChanged.emit(status));
  }

  tells(session: string, now_s = 1, runs: Told[] = [], protocol = PROTOCOL): void {
    const data = { kind: 'overview', overview: { protocol, session, route: 'control', runs }, now_s };
    this.iopubMessage.emit({ header: { msg_type: 'comm_msg' }, content: { comm_id: EVENTS, data } });
  }

  replies(comms: Told): void {
    this.probes.at(-1)?.onReply({ content: { status: 'ok', comms } });
  }
}

function linked(context: TestContext): [Played, KernelLink] {
  mock.timers.enable({ apis: ['setTimeout'] });
  const kernel = new Played();
  const link = new KernelLink(kernel as unknown as Kernel.IKernelConnection);
  context.after(() => {
    link.dispose();
    mock.timers.reset();
  });
  return [kernel, link];
}

const settle = (): Promise<void> => new Promise(resolve => setImmediate(resolve));

test('a kernel that has the extension is asked what it holds', async context => {
  const [kernel, link] = linked(context);
  kernel.answer = { ok: true, overview: { protocol: PROTOCOL, session: 'a' }, now_s: 1 };
  kernel.replies({ [EVENTS]: {} });
  await settle();
  assert.equal(link.state, 'ready');
  assert.deepEqual(kernel.requests, [{ op: 'overview' }]);
});

test('a kernel that loads the extension later is asked once, so that it goes on speaking', async context => {
  const [kernel, link] = linked(context);
  kernel.replies({});
  mock.timers.tick(1000);
  kernel.answers = false; // the first request gets lost
  kernel.tells('a', 1);
  kernel.answer = { ok: true, overview: { protocol: PROTOCOL, session: 'a' }, now_s: 2 };
  kernel.answers = true;
  mock.timers.tick(5000);
  await settle();
  kernel.tells('a', 3);
  assert.equal(link.state, 'ready');
  assert.deepEqual(kernel.requests, [{ op: 'overview' }, { op: 'overview' }]);
  kernel.tells('b', 4);
  assert.equal(kernel.requests.length, 3, 'another session of the kernel does not know of this page');
});

test('a kernel without the extension is asked once', context => {
  const [kernel, link] = linked(context);
  kernel.replies({});
  kernel.says('busy', 'idle');
  assert.equal(link.state, 'connecting');
  mock.timers.tick(1000);
  assert.equal(link.state, 'absent');
  assert.equal(kernel.probes.length, 1);
  assert.equal(kernel.requests.length, 0);
});

test('a question whose answer got lost is put again when the kernel is idle, and not for ever', context => {
  const [kernel, link] = linked(context);
  kernel.says('busy');
  mock.timers.tick(60_000);
  assert.equal(kernel.probes.length, 1);
  kernel.says('idle');
  assert.equal(kernel.probes.length, 2);
  for (let count = 0; count < 10; count++) {
    mock.timers.tick(5000);
  }
  assert.equal(kernel.probes.length, 4);
  assert.equal(link.state, 'absent');
});

test('a kernel that is restarted is found again, whatever the old one still says', context => {
  const [kernel, link] = linked(context);
  kernel.tells('old');
  assert.equal(link.state, 'ready');
  kernel.says('restarting', 'idle');
  kernel.tells('old');
  assert.equal(link.state, 'connecting');
  kernel.says('unknown', 'busy', 'idle');
  mock.timers.tick(5000); // the first question went down with the old kernel
  kernel.replies({});
  mock.timers.tick(1000);
  assert.equal(link.state, 'absent');
  kernel.tells('new');
  assert.equal(link.state, 'ready');
  assert.equal(link.overview?.session, 'new');
});

test('an answer is not undone by news of what was before', async context => {
  const [kernel, link] = linked(context);
  kernel.tells('a', 1);
  kernel.answer = { ok: true, overview: { protocol: PROTOCOL, session: 'a', next: { strategy: 'ddp' } }, now_s: 3 };
  await link.request({ op: 'pick', strategy: 'ddp' });
  kernel.tells('a', 2);
  assert.equal(link.overview?.next.strategy, 'ddp');
});

test('a kernel of another version is not taken for what it is not', context => {
  const [kernel, link] = linked(context);
  kernel.tells('a', 1, [], PROTOCOL + 1);
  assert.equal(link.state, 'other-version');
  assert.equal(link.overview, null);
  kernel.says('restarting');
  kernel.tells('b', 2);
  assert.equal(link.state, 'ready');
});

test('a kernel that ends in the middle of runs says of which', context => {
  const [kernel, link] = linked(context);
  const broken: string[][] = [];
  link.broken.connect((_, runs) => broken.push(runs.map(run => run.run)));
  const runs = [RUN, { ...RUN, run: 'a-0', elapsed_s: 3 }];
  kernel.tells('a', 1, runs);
  kernel.says('autorestarting', 'restarting', 'starting');
  kernel.tells('b', 2, runs);
  kernel.says('terminating', 'dead');
  assert.deepEqual(broken, [['a-1'], ['a-1']]);
});

test('a page has missed what another one asked for before this one looked', context => {
  const [, link] = linked(context);
  const place = { cell: 'c', count: 1, session: 'another', asked_at_s: Date.now() / 1000 - 1 };
  assert.equal(link.missed(place), true);
  assert.equal(link.missed({ ...place, session: 'page' }), false);
  assert.equal(link.missed({ ...place, asked_at_s: Date.now() / 1000 + 1 }), false);
});

const RUN = { run: 'a-1', elapsed_s: null, detached: false };

test('a run that the kernel does not know is over: whatever else runs goes on', async context => {
  const [kernel, link] = linked(context);
  kernel.tells('b', 1, [{ ...RUN, run: 'b-1' }]);
  kernel.says('busy');
  kernel.answer = { ok: false, error: 'there is no run a-1' };
  assert.equal(await link.stop('a-1', false), false);
  assert.equal(kernel.interrupts, 0);
});

for (const [what, run, status, interrupts] of [
  ['the cell of the run is interrupted', RUN, 'busy', 1],
  ['a cell that the run left behind is not interrupted', { ...RUN, detached: true }, 'busy', 0],
  ['the cell after the run is not interrupted', { ...RUN, elapsed_s: 3 }, 'busy', 0],
  ['an idle kernel is not interrupted', RUN, 'idle', 0]
] as const) {
  test(`if nothing answers a stop, ${what}`, async context => {
    const [kernel, link] = linked(context);
    kernel.tells('a', 1, [run]);
    kernel.says(status);
    kernel.answers = false;
    const stopped = link.stop('a-1', false);
    mock.timers.tick(5000);
    await (interrupts ? stopped : assert.rejects(stopped, /has not answered/));
    assert.equal(kernel.interrupts, interrupts);
  });
}

test('a page that did not hear its kernel for a while knows what it may have missed', context => {
  const [kernel, link] = linked(context);
  let awoke = 0;
  link.awoke.connect(() => (awoke += 1));
  kernel.connects('connecting', 'connected');
  const own = { cell: 'c', count: 1, session: 'page', asked_at_s: Date.now() / 1000 - 1 };
  assert.equal(awoke, 0, 'it was never connected before');
  assert.ok(!link.sleptThrough(own));
  kernel.connects('connecting', 'disconnected', 'connecting', 'connected');
  assert.equal(awoke, 1);
  assert.ok(link.sleptThrough(own));
  assert.ok(!link.sleptThrough({ ...own, asked_at_s: Date.now() / 1000 + 1 }));
  assert.ok(!link.sleptThrough({ ...own, session: 'another page' }));
});

test('a kernel that ends instead of answering is named, and not its futures and messages', async context => {
  const [kernel, link] = linked(context);
  kernel.tells('session');
  kernel.ends = true;
  await assert.rejects(link.request({ op: 'refresh' }), { message: 'the kernel ended before it answered' });
});
