/** The saved runs as a table in the main area: sorted by any column, searched, opened and compared. */
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { MOST_COMPARED, useSaved, useSeen } from './history.js';
import { Button, COMMANDS, Doer } from './panel.js';
import { clicked, columnsOf, Order, sorted } from './sorting.js';
import * as view from './view.js';

export class RunsTable extends ReactWidget {
  constructor(private readonly doer: Doer) {
    super();
    this.addClass('jp-Distributed-compared');
    doer.model.changed.connect(this.update, this);
  }

  protected render(): React.JSX.Element {
    return <Table doer={this.doer} />;
  }
}

function Table({ doer }: { doer: Doer }): React.JSX.Element {
  const { commands, t } = doer;
  const root = React.useRef<HTMLDivElement>(null);
  const [words, setWords] = React.useState('');
  const [order, setOrder] = React.useState<Order>({ key: 'run', down: true });
  const [chosen, setChosen] = React.useState<string[]>([]);
  const answer = useSaved(doer, 'history_table', words, useSeen(root));
  const runs = answer?.table ?? [];
  const columns = columnsOf(runs, t);
  const by = columns.find(({ key }) => key === order.key) ?? columns[0];
  const rows = by ? sorted(runs, by, order.down) : runs;
  const toggle = (run: string): void => setChosen(chosen.includes(run) ? chosen.filter(each => each !== run) : [...chosen, run]);
  const open = (names: string[]): void => void commands.execute(COMMANDS.compare, { runs: names });
  const numbers = [...chosen].sort((a, b) => Number(a) - Number(b));
  return (
    <div ref={root}>
      <div className="jp-Distributed-search jp-Distributed-tablesearch">
        <input className="jp-mod-styled" type="search" aria-label={t('Search saved runs')} placeholder={t('Search')} title={t('In code, options, metrics and errors')} value={words} onChange={event => setWords(event.target.value)} />
        <Button name={t('Compare')} title={t('Options, results, code and charts of the chosen runs: 2 to %1', MOST_COMPARED)} disabled={chosen.length < 2 || chosen.length > MOST_COMPARED} onClick={() => open(numbers)} />
      </div>
      {answer && !runs.length && <p className="jp-Distributed-quiet">{words ? t('No saved run matches.') : t('No run has been saved yet.')}</p>}
      {runs.length > 0 && (
        <table className="jp-Distributed-differences jp-Distributed-runs">
          <caption className="jp-Distributed-hidden">{t('Saved runs')}</caption>
          <thead>
            <tr>
              <td />
              {columns.map(({ key, title, kind }) => (
                <th key={key} scope="col" className={`jp-mod-${kind}`} aria-sort={key !== by?.key ? undefined : order.down ? 'descending' : 'ascending'}>
                  <button type="button" title={t('Sort by %1', title)} onClick={() => setOrder(clicked(order, key))}>
                    {title}
                    <span aria-hidden="true">{key !== by?.key ? '' : order.down ? ' \u25be' : ' \u25b4'}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(run => (
              <tr key={run.run}>
                <td>
                  <input type="checkbox" aria-label={t('Choose run %1', run.run)} checked={chosen.includes(run.run)} onChange={() => toggle(run.run)} />
                </td>
                {columns.map(column => (
                  <td key={column.key} className={typeof column.value(run) === 'number' ? 'jp-Distributed-number' : ''} title={column.key === 'state' ? run.error : undefined}>
                    {column.key === 'run' ? <Button name={run.run} title={t('Open the page of this run: charts, ranks over time, log, code')} onClick={() => void commands.execute(COMMANDS.page, { run: run.run })} /> : column.key === 'state' ? view.runStateName(run.state, t) : column.text(run)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {(answer?.more ?? 0) > 0 && <p className="jp-Distributed-quiet">{t.n('%1 earlier run: search for its words', '%1 earlier runs: search for their words', answer?.more ?? 0)}</p>}
    </div>
  );
}
