/** How a page that was loaded in mid-run keeps up with a view, over a kernel that is played. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Signal } from '@lumino/signaling';

import { Answer, Request } from '../protocol.js';
import { Asked, RemoteModel } from '../remote.js';

const SHOWN = { run: 'a-1', model: 'm-1', cell: 'c-1', count: 2 };

class Played {
  readonly iopubMessage = new Signal<this, unknown>(this);
  readonly kernel = this as unknown as Asked['kernel'];
  readonly requests: Request[] = [];
  answer!: (answer: Answer) => void;

  request(request: Request): Promise<Answer> {
    this.requests.push(request);
    return new Promise(resolve => (this.answer = resolve));
  }

  updates(comm_id: string, state: Record<string, unknown>): void {
    const content = { comm_id, data: { method: 'update', state, buffer_paths: [] } };
    this.iopubMessage.emit({ header: { msg_type: 'comm_msg' }, content });
  }
}

function looked(): [Played, RemoteModel, string[]] {
  const kernel = new Played();
  const model = new RemoteModel(kernel, SHOWN);
  const heard: string[] = [];
  model.on('change', () => heard.push('change'));
  model.on('change:rank_1', () => heard.push('rank 1'));
  return [kernel, model, heard];
}

test('the state is asked for, and what is told of this model changes it', async () => {
  const [kernel, model, heard] = looked();
  const loaded = model.load();
  kernel.answer({ ok: true, view: { head: 1, rank_0: 1 } });
  await loaded;
  assert.deepEqual(kernel.requests, [{ op: 'view', run: 'a-1' }]);
  kernel.updates('m-1', { rank_0: 2 });
  kernel.updates('m-2', { rank_0: 3 });
  assert.deepEqual([model.get('head'), model.get('rank_0'), heard], [1, 2, ['change']]);
  kernel.updates('m-1', { rank_1: 3 });
  assert.deepEqual(heard, ['change', 'change', 'rank 1']);
});

test('what is told while the state is on its way is not lost', async () => {
  const [kernel, model, heard] = looked();
  const loaded = model.load();
  kernel.updates('m-1', { rank_0: 2 });
  kernel.answer({ ok: true, view: { head: 1, rank_0: 1 } });
  await loaded;
  assert.deepEqual([model.get('head'), model.get('rank_0'), heard], [1, 2, []]);
});

test('a view that is over is not drawn', async () => {
  const [kernel, model] = looked();
  const loaded = model.load();
  kernel.answer({ ok: false, error: 'no cell shows the run a-1 live.' });
  await assert.rejects(loaded, /no cell shows/);
});

test('a view that is gone hears nothing any more', async () => {
  const [kernel, model, heard] = looked();
  const loaded = model.load();
  kernel.answer({ ok: true, view: { head: 1 } });
  await loaded;
  const call = (): number => heard.push('another');
  model.on('change', call);
  model.off('change', call);
  kernel.updates('m-1', { head: 2 });
  model.dispose();
  kernel.updates('m-1', { head: 3 });
  assert.deepEqual([model.get('head'), heard], [2, ['change']]);
});
