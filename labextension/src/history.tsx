/** The saved runs: a list that can be searched, and runs that are chosen to be compared. */
import * as React from 'react';

import { Button, COMMANDS, Doer } from './panel.js';
import { Answer } from './protocol.js';
import * as view from './view.js';

/** The time to wait for further typing before the kernel is asked. */
const TYPING_MS = 300;
/** The number of lines that can be told apart in a chart. */
export const MOST_COMPARED = 20;

export function History({ doer }: { doer: Doer }): React.JSX.Element {
  const { commands, t } = doer;
  const root = React.useRef<HTMLDivElement>(null);
  const [words, setWords] = React.useState('');
  const [chosen, setChosen] = React.useState<string[]>([]);
  const answer = useSaved(doer, 'history', words, useSeen(root));
  const list = answer && { runs: answer.saved ?? [], more: answer.more ?? 0 };
  const toggle = (run: string): void => setChosen(chosen.includes(run) ? chosen.filter(each => each !== run) : [...chosen, run]);
  const numbers = [...chosen].sort((a, b) => Number(a) - Number(b));
  return (
    <div ref={root} className="jp-Distributed-history">
      <div className="jp-Distributed-search">
        <input className="jp-mod-styled" type="search" aria-label={t('Search saved runs')} placeholder={t('Search')} title={t('In code, options, metrics and errors')} value={words} onChange={event => setWords(event.target.value)} />
        <Button name={chosen.length > 1 ? t('Compare') : t('Show')} title={t('Options, results, code and charts of the chosen runs: 1 to %1', MOST_COMPARED)} disabled={!chosen.length || chosen.length > MOST_COMPARED} onClick={() => void commands.execute(COMMANDS.compare, { runs: numbers })} />
        <Button name={t('Table')} title={t('All saved runs as a table that is sorted by any column')} onClick={() => void commands.execute(COMMANDS.table)} />
      </div>
      {list?.runs.length === 0 && <p className="jp-Distributed-quiet jp-Distributed-none">{words ? t('No saved run matches.') : t('No run has been saved yet.')}</p>}
      <ul className="jp-Distributed-list" aria-label={t('Saved runs')}>
        {list?.runs.map(run => (
          <li key={run.run}>
            <label className="jp-Distributed-saved">
              <input type="checkbox" checked={chosen.includes(run.run)} onChange={() => toggle(run.run)} />
              <span>
                <span className="jp-Distributed-row">
                  <span>
                    <Button name={run.run} title={t('Open the page of this run: charts, ranks over time, log, code')} onClick={() => void commands.execute(COMMANDS.page, { run: run.run })} /> {run.cell} <span className="jp-Distributed-state">{view.runStateName(run.state, t)}</span>
                  </span>
                  <span className="jp-Distributed-number">{run.time}</span>
                </span>
                <span className="jp-Distributed-quiet">{[run.notebook, run.began, run.strategy === 'none' ? '' : run.strategy, run.ranks && t('ranks %1', run.ranks)].filter(Boolean).join(' · ')}</span>
                <span className="jp-Distributed-quiet jp-Distributed-detail">{run.metrics}</span>
              </span>
            </label>
          </li>
        ))}
      </ul>
      {list !== null && list.more > 0 && <p className="jp-Distributed-quiet jp-Distributed-none">{t.n('%1 earlier run: search for its words', '%1 earlier runs: search for their words', list.more)}</p>}
    </div>
  );
}

/** The kernel's saved runs with these words, requested while the section is visible, and again when a run has ended; null until it has answered. */
export function useSaved({ model }: Doer, op: 'history' | 'history_table', words: string, isSeen: boolean): Answer | null {
  const [answer, setAnswer] = React.useState<Answer | null>(null);
  const ended = model.overview && `${model.overview.session} ${model.overview.runs.filter(run => run.elapsed_s !== null).length} ${model.overview.runs[0]?.run}`;
  React.useEffect(() => {
    if (!isSeen || !ended) {
      return;
    }
    const timer = setTimeout(() => void model.ask({ op, words }).then(found => (found?.saved ?? found?.table) && setAnswer(found)), TYPING_MS);
    return () => clearTimeout(timer);
  }, [isSeen, ended, op, words, model]);
  return answer;
}

/** Whether the node is visible; in a closed section it is not. */
export function useSeen(node: React.RefObject<HTMLElement>): boolean {
  const [isSeen, setSeen] = React.useState(false);
  React.useEffect(() => {
    const observer = new IntersectionObserver(entries => setSeen(entries.some(entry => entry.isIntersecting)));
    if (node.current) {
      observer.observe(node.current);
    }
    return () => observer.disconnect();
  }, [node]);
  return isSeen;
}
