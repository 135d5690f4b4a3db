/** What a form for a pool holds: `jlpm test`. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { definition, filled, ofKind, opened, parted, trialOf, typed, unused } from '../formstate.js';
import { FormField, PoolKind, SettingsFile } from '../protocol.js';

const field = (name: string, main = false): FormField => ({ name, meaning: '', default: '', choices: [], switch: false, main, example: '' });
const local: PoolKind = { kind: 'local', about: '', fields: [field('ranks', true), field('python')] };
const ssh: PoolKind = { kind: 'ssh', about: '', fields: [field('hosts', true), field('ranks', true), field('idle')] };
const kinds = [local, ssh];
const files: SettingsFile[] = [
  { key: 'user', shown: 'pools.toml', problem: 'it is read-only' },
  { key: 'project', shown: 'jupyter_distrib.toml', problem: '' }
];

test('a new form begins with the first kind and a file that can be written', () => {
  const form = opened(kinds, files);
  assert.deepEqual([form.kind, form.file, form.before], ['local', 'project', null]);
  assert.equal(opened(kinds, files.slice(0, 1)).file, 'user');
});

test('the form of a pool tells with which values it was opened, whatever is typed', () => {
  const edited = { name: 'lab', kind: 'ssh', file: 'user', values: { hosts: 'a' } };
  const form = typed(opened(kinds, files, edited), 'hosts', 'a,b');
  assert.deepEqual(definition(form), { name: 'lab', kind: 'ssh', file: 'user', values: { hosts: 'a,b' }, before: { hosts: 'a' } });
  assert.ok(!('before' in definition(opened(kinds, files))));
});

test('an empty field is no value, and what is typed takes away what was wrong in its field', () => {
  const form = { ...opened(kinds, files), values: { ranks: '0', python: 'x' }, errors: { ranks: 'no', name: 'no' } };
  assert.deepEqual(typed(form, 'ranks', ''), { ...form, values: { python: 'x' }, errors: { name: 'no' } });
  assert.deepEqual(typed(form, 'name', 'lab'), { ...form, name: 'lab', errors: { ranks: 'no' } });
});

test('another kind keeps what it also asks for', () => {
  const form = { ...opened(kinds, files), values: { ranks: '2', python: 'x' }, errors: { python: 'no' } };
  assert.deepEqual(ofKind(form, ssh), { ...form, kind: 'ssh', values: { ranks: '2' }, errors: {} });
});

test('what was found fills the form, under a name that no pool has', () => {
  const form = filled(opened(kinds, files), { kind: 'ssh', name: 'gpu', text: '', options: { hosts: 'gpu' } }, ['gpu', 'gpu-2']);
  assert.deepEqual([form.name, form.kind, form.values], ['gpu-3', 'ssh', { hosts: 'gpu' }]);
  assert.equal(unused('a', ['b']), 'a');
});

test('a field that is filled in or wrong is not among those behind a click', () => {
  const names = (parts: [FormField[], FormField[]]): string[][] => parts.map(part => part.map(each => each.name));
  const { fields } = ssh;
  assert.deepEqual(names(parted(fields, {}, {})), [['hosts', 'ranks'], ['idle']]);
  assert.deepEqual(names(parted(fields, { idle: '5' }, {})), [['hosts', 'ranks', 'idle'], []]);
  assert.deepEqual(names(parted(fields, {}, { idle: 'wrong' })), [['hosts', 'ranks', 'idle'], []]);
});

test('the test of another page is not shown', () => {
  const trial = { id: 'a', state: 'good', text: '' } as const;
  assert.equal(trialOf(trial, 'a'), trial);
  assert.equal(trialOf(trial, 'b'), null);
  assert.equal(trialOf(undefined, ''), null);
});
