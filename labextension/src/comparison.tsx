/** Saved runs beside one another in the main area: a chart for each metric, what differs, and the code. */
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { Comparison } from './protocol.js';
import * as view from './view.js';

export class ComparedRuns extends ReactWidget {
  constructor(
    private readonly comparison: Comparison,
    private readonly t: view.Say
  ) {
    super();
    this.addClass('jp-Distributed-compared');
  }

  protected render(): React.JSX.Element {
    const { comparison, t } = this;
    const [, ...runs] = comparison.head;
    return (
      <>
        <div className="jp-Distributed-charts">
          {comparison.charts.map(chart => (
            <Chart key={chart.name} chart={chart} runs={runs} t={t} />
          ))}
        </div>
        {comparison.rows.length > 0 && (
          <table className="jp-Distributed-differences">
            <caption>{runs.length > 1 ? t('What differs') : t('What is known')}</caption>
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
            <h3>{runs.length > 1 ? t('Code of %1 against %2', runs[place + 1] ?? '', runs[0] ?? '') : t('Code')}</h3>
            <pre tabIndex={0}>
              {lines.map((line, at) => (
                <div key={at} className={runs.length > 1 ? view.lineKind(line) : ''}>
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

const WIDTH = 480;
const HEIGHT = 170;

function Chart({ chart, runs, t }: { chart: Comparison['charts'][number]; runs: string[]; t: view.Say }): React.JSX.Element {
  const drawn = view.chartOf(chart.lines, WIDTH, HEIGHT);
  const kind = (run: number): string => `jp-mod-line${runs.indexOf(String(run)) % 6}`;
  return (
    <figure>
      <figcaption>{chart.name}</figcaption>
      <div className="jp-Distributed-axes">
        <div className="jp-Distributed-ups" aria-hidden="true">
          {drawn.ups.map(text => (
            <span key={text}>{text}</span>
          ))}
        </div>
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${t('%1 over steps', chart.name)}: ${drawn.paths.map(({ run, last }) => `${t('run %1', run)} ${last}`).join(', ')}`}>
          {drawn.paths.map(({ run, path }) => (
            <path key={run} d={path} className={kind(run)} />
          ))}
          {drawn.paths.map(({ run, cross }) => cross && <path key={`nan ${run}`} d={`M${cross[0] - 5} ${cross[1] - 5}l10 10m0 -10l-10 10`} className="jp-mod-turned" />)}
        </svg>
        <div className="jp-Distributed-acrosses" aria-hidden="true">
          {drawn.steps.map((text, place) => (
            <span key={text}>{place ? text : t('step %1', text)}</span>
          ))}
        </div>
      </div>
      <ul className="jp-Distributed-legend">
        {drawn.paths.map(({ run, last }) => (
          <li key={run}>
            <svg viewBox="0 0 24 8" aria-hidden="true">
              <path d="M0 4H24" className={kind(run)} />
            </svg>
            {t('run %1', run)} <span className="jp-Distributed-number">{last}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
