/** The title of the browser tab: `jlpm test`. */
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { TabTitle } from '../tabtitle.js';

test('what stands before the title changes, comes back when JupyterLab writes the title, and goes without a trace', () => {
  const page = { title: 'a.ipynb - JupyterLab' };
  const title = new TabTitle(page);

  title.show('0:22 left · ');
  assert.equal(page.title, '0:22 left · a.ipynb - JupyterLab');
  title.show('✓ 0:21 left · ');
  assert.equal(page.title, '✓ 0:21 left · a.ipynb - JupyterLab');
  page.title = 'b.ipynb - JupyterLab';
  title.again();
  assert.equal(page.title, '✓ 0:21 left · b.ipynb - JupyterLab');
  title.show('');
  assert.equal(page.title, 'b.ipynb - JupyterLab');
  title.again();
  assert.equal(page.title, 'b.ipynb - JupyterLab');
});

test('a title is not written where nothing changes, since each time is news to who watches it', () => {
  let written = 0;
  const page = {
    get title() {
      return 'x';
    },
    set title(_: string) {
      written += 1;
    }
  };
  const title = new TabTitle(page);
  title.show('');
  title.again();
  assert.equal(written, 0);
});
