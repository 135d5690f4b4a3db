/** The page of one run in the main area: in progress, ended or saved. */
import { ReactWidget } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';
import * as React from 'react';

import { Drawn, OverTime } from './drawn.js';
import { KernelLink } from './link.js';
import { Log } from './logview.js';
import { Drawing } from './modules.js';
import { Button, Choice, COMMANDS, Doer } from './panel.js';
import { Page, SavedRun } from './protocol.js';
import * as view from './view.js';

/** The interval of asking for news of a run, of few ranks and of many. */
const ASK_MS = 2000;
const ASK_OF_MANY_MS = 5000;
const MANY = 16;

export interface PageSource {
  /** The state of the run when the page was opened. */
  first: Page;
  /** The present state, with the difference of its code from that of another run. */
  load: (against: string) => Promise<Page | undefined>;
  /** The runs that it can be compared with. */
  others: () => Promise<SavedRun[]>;
  log: () => Log;
  /** The module that draws its charts. */
  code: () => Promise<Drawing | null>;
  doer: Doer;
  link: KernelLink | null;
}

export class RunPage extends ReactWidget {
  constructor(private readonly source: PageSource) {
    super();
    this.addClass('jp-Distributed-compared');
  }

  protected render(): React.JSX.Element {
    return <RunDetails source={this.source} isVisible={() => this.isVisible} />;
  }
}

function RunDetails({ source, isVisible }: { source: PageSource; isVisible: () => boolean }): React.JSX.Element {
  const { t } = source.doer;
  const [page, setPage] = React.useState(source.first);
  const [against, setAgainst] = React.useState('');
  const [error, setError] = React.useState('');
  React.useEffect(() => {
    let isOpen = true;
    const show = (found: Page | undefined, trouble: string): void => {
      if (isOpen) {
        setPage(before => found ?? before);
        setError(trouble);
      }
    };
    const look = (): void =>
      void source.load(against).then(
        found => show(found, ''),
        (reason: unknown) => show(undefined, reason instanceof Error ? reason.message : String(reason))
      );
    if (against !== '' || page.difference.length) {
      look();
    }
    const timer = page.goes_on ? setInterval(() => isVisible() && look(), page.ranks.length > MANY ? ASK_OF_MANY_MS : ASK_MS) : undefined;
    return () => {
      isOpen = false;
      clearInterval(timer);
    };
  }, [source, against, page.goes_on]);
  return (
    <>
      <Head source={source} page={page} />
      {error && <p className="jp-Distributed-quiet">{error}</p>}
      {page.traceback && page.traceback.length > 0 && (
        <Part name={t('Traceback')}>
          <pre tabIndex={0}>
            {page.traceback.map((line, place) => (
              <div key={place}>{line || ' '}</div>
            ))}
          </pre>
        </Part>
      )}
      {page.ranks.some(rank => rank.columns) && (
        <Part name={t('Reported numbers')}>
          <Drawn code={source.code} ranks={page.ranks} />
        </Part>
      )}
      {page.over_time && (
        <Part name={t('Ranks over time')}>
          <OverTime code={source.code} over={page.over_time} />
        </Part>
      )}
      <Part name={t('Log')}>
        <LogOf make={source.log} />
      </Part>
      <Pairs name={t('Configuration')} pairs={page.configuration} />
      <Code source={source} page={page} against={against} onPick={setAgainst} />
      <Pairs name={t('Environment')} pairs={page.environment} />
      {page.notes.length > 0 && (
        <Part name={t('Notes')}>
          <ul>
            {page.notes.map((note, place) => (
              <li key={place}>{note}</li>
            ))}
          </ul>
        </Part>
      )}
      <Pairs name={t('Files')} pairs={page.files} />
    </>
  );
}

function Part({ name, children }: { name: string; children: React.ReactNode }): React.JSX.Element {
  return (
    <section aria-label={name}>
      <h3>{name}</h3>
      {children}
    </section>
  );
}

function Head({ source, page }: { source: PageSource; page: Page }): React.JSX.Element {
  const { t, commands, model } = source.doer;
  const nowS = source.link?.nowS() ?? Date.now() / 1000;
  const time = page.goes_on ? view.clock(nowS - page.began_at_s) : view.duration(page.elapsed_s);
  const tone = page.goes_on ? 'active' : page.state === 'done' ? 'good' : page.state === 'interrupted' ? 'quiet' : 'bad';
  const stop = (): void => void source.link?.stop(page.run, page.state === 'stopping').catch(() => undefined);
  return (
    <div className="jp-Distributed-pagehead">
      <h2>
        <span aria-hidden="true" className={`jp-Distributed-dot jp-mod-${tone}`} /> {page.label}{' '}
        <span className={`jp-Distributed-pagestate jp-mod-${tone}`}>{view.runStateName(page.state, t)}</span> <span className="jp-Distributed-quiet">{[time, page.number ? t('run %1', page.number) : page.run].join(' · ')}</span>
      </h2>
      <div className="jp-Distributed-buttons">
        {page.goes_on && <Button name={page.state === 'stopping' ? t('Kill') : t('Stop')} title={t('Stop this run; its ranks stay')} onClick={stop} />}
        {page.cell && model.hasCell(page.cell) && <Button name={t('Go to cell')} onClick={() => void commands.execute(COMMANDS.cell, { cell: page.cell })} />}
      </div>
      {page.error && <p className="jp-Distributed-pageerror">{page.error}</p>}
      <dl>
        {page.head.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

/** The log, in the same box as in a tab of its own. */
function LogOf({ make }: { make: () => Log }): React.JSX.Element {
  const root = React.useRef<HTMLDivElement>(null);
  React.useEffect(() => {
    const log = make();
    if (root.current?.isConnected) {
      Widget.attach(log, root.current);
    }
    return () => log.dispose();
  }, [make]);
  return <div ref={root} className="jp-Distributed-pagelog" />;
}

function Pairs({ name, pairs }: { name: string; pairs: [string, string][] }): React.JSX.Element | null {
  return pairs.length === 0 ? null : (
    <table className="jp-Distributed-differences">
      <caption>{name}</caption>
      <tbody>
        {pairs.map(([key, text]) => (
          <tr key={key}>
            <th scope="row">{key}</th>
            <td>{text}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** The code, or its difference from that of another run. */
function Code({ source, page, against, onPick }: { source: PageSource; page: Page; against: string; onPick: (run: string) => void }): React.JSX.Element | null {
  const { t } = source.doer;
  const [others, setOthers] = React.useState<SavedRun[]>([]);
  React.useEffect(() => void source.others().then(setOthers, () => undefined), [source]);
  const lines = against && page.difference.length ? page.difference : page.code;
  const options = others.map((run): [string, string] => [run.run, t('difference to %1: %2', run.run, [run.cell, run.began].join(' · '))]);
  return !page.code.length ? null : (
    <Part name={t('Code')}>
      {options.length > 0 && <Choice label={t('Show')} value={against} options={[['', t('all of it')], ...options]} onPick={onPick} />}
      <pre tabIndex={0}>
        {lines.map((line, place) => (
          <div key={place} className={lines === page.difference ? view.lineKind(line) : ''}>
            {line || ' '}
          </div>
        ))}
      </pre>
    </Part>
  );
}
