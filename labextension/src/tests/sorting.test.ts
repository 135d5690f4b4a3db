/** The table of saved runs: its columns and its order. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { TableRun } from '../protocol.js';
import { clicked, columnsOf, sorted } from '../sorting.js';
import { Say } from '../view.js';

const t: Say = Object.assign((text: string) => text, { n: (one: string) => one });
const run = (number: number, more: Partial<TableRun> = {}): TableRun => ({
  run: String(number), cell: 'Cell In[1]', notebook: '', began: '14:02', ranks: '0-1', strategy: '', state: 'done', metrics: '', time: '3 s',
  began_at_s: 1000 + number, elapsed_s: 3, error: '', values: {}, parameters: {}, ...more
}); // prettier-ignore

const RUNS = [
  run(9, { parameters: { lr: '0.01' }, values: { loss: [0.5, '0.5'] } }),
  run(10, { parameters: { lr: '1e-3' }, values: { loss: [null, 'nan from step 3'], acc: [0.9, '0.9'] } }),
  run(11, { parameters: { opt: 'adam' }, values: { loss: [0.05, '0.05'] } })
];
const by = (key: string, down = false): string[] => {
  const column = columnsOf(RUNS, t).find(each => each.key === key);
  assert.ok(column);
  return sorted(RUNS, column, down).map(each => each.run);
};

test('parameters and metrics of any run have a column, and what no run has none', () => {
  assert.deepEqual(columnsOf(RUNS, t).map(({ key }) => key), [
    'run', 'cell', 'state', 'time', 'parameter lr', 'parameter opt', 'metric loss', 'metric acc', 'began', 'ranks'
  ]); // prettier-ignore
  assert.deepEqual(columnsOf([], t).map(({ key }) => key), ['run']);
});

test('numbers are sorted as numbers, and runs without one come last both ways', () => {
  assert.deepEqual(by('run'), ['9', '10', '11']);
  assert.deepEqual(by('parameter lr'), ['10', '9', '11']);
  assert.deepEqual(by('parameter lr', true), ['9', '10', '11']);
  assert.deepEqual(by('metric loss'), ['11', '9', '10'], 'nan is last');
  assert.deepEqual(by('metric loss', true), ['9', '11', '10']);
  assert.deepEqual(by('began', true), ['11', '10', '9']);
});

test('a second click on a column turns the order round', () => {
  assert.deepEqual(clicked({ key: 'run', down: true }, 'metric loss'), { key: 'metric loss', down: false });
  assert.deepEqual(clicked({ key: 'metric loss', down: false }, 'metric loss'), { key: 'metric loss', down: true });
});
