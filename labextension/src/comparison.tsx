/** Saved runs side by side in the main area: a chart for each metric, the differences, and the code. */
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Drawn } from './drawn.js';
import { Drawing } from './modules.js';
import { Comparison } from './protocol.js';
import * as view from './view.js';

export class ComparedRuns extends ReactWidget {
  constructor(
    private readonly comparison: Comparison,
    private readonly code: () => Promise<Drawing | null>,
    private readonly t: view.Say
  ) {
    super();
    this.addClass('jp-Distributed-compared');
  }

  /** The names of the lines in the charts. */
  private readonly runs = {
    name: (run: number): string => this.t('run %1', run)
  };

  protected render(): React.JSX.Element {
    const { comparison, t } = this;
    const [, ...runs] = comparison.head;
    return (
      <>
        <Drawn code={this.code} ranks={comparison.ranks} runs={this.runs} />
        {comparison.rows.length > 0 && (
          <table className="jp-Distributed-differences">
            <caption>{t('What differs')}</caption>
            <thead>
              <tr>
                <td />
                {runs.map(run => (
                  <th key={run} scope="col">
                    {t('Run %1', run)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {comparison.rows.map(([name, ...values]) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  {values.map((value, place) => (
                    <td key={place}>{value}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        )}
        {comparison.code.map((lines, place) => (
          <section key={place} aria-label={t('Code')}>
            <h3>{t('Code of %1 against %2', runs[place + 1] ?? '', runs[0] ?? '')}</h3>
            <pre tabIndex={0}>
              {lines.map((line, at) => (
                <div key={at} className={view.lineKind(line)}>
                  {line || ' '}
                </div>
              ))}
            </pre>
          </section>
        ))}
      </>
    );
  }
}
