/** The log of a run in the main area: what one rank or all of them wrote. */
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { filtered, together } from './log.js';
import { Button, Choice } from './panel.js';
import * as view from './view.js';

const ALL = 'all';
/** The interval of looking for more while the log is followed. */
const FOLLOW_MS = 2000;

export interface LogSource {
  load: (rank: number) => Promise<{ text: string; note: string }>;
  ranks: number[];
  /** Whether the run goes on, so that more may come. */
  goesOn: () => boolean;
  copy: (text: string) => void;
  t: view.Say;
}

export class Log extends ReactWidget {
  constructor(private readonly source: LogSource) {
    super();
    this.addClass('jp-Distributed-log');
  }

  protected render(): React.JSX.Element {
    return <LogView {...this.source} />;
  }
}

function LogView({ load, ranks, goesOn, copy, t }: LogSource): React.JSX.Element {
  const [rank, setRank] = React.useState(String(ranks[0] ?? 0));
  const [shown, setShown] = React.useState({ text: '', note: '' });
  const [filter, setFilter] = React.useState({ search: '', errors: false });
  const [wrap, setWrap] = React.useState(false);
  const [follow, setFollow] = React.useState(false);
  const end = React.useRef<HTMLPreElement>(null);
  const show = React.useCallback(
    async (of: string): Promise<void> => {
      if (of !== ALL) {
        setShown(await load(Number(of)));
        return;
      }
      const logs = await Promise.all(ranks.map(async each => ({ rank: each, ...(await load(each)) })));
      setShown({ text: together(logs), note: '' });
    },
    [load, ranks]
  );
  React.useEffect(() => void show(rank), [rank, show]);
  React.useEffect(() => {
    const timer = follow ? setInterval(() => goesOn() && void show(rank), FOLLOW_MS) : undefined;
    return () => clearInterval(timer);
  }, [follow, rank, show, goesOn]);
  React.useEffect(() => {
    if (follow && end.current) {
      end.current.scrollTop = end.current.scrollHeight;
    }
  }, [follow, shown]);
  const text = filtered(shown.text, filter);
  const none = shown.text ? t('No line is like that.') : t('This rank has written nothing.');
  return (
    <>
      <div className="jp-Distributed-logbar">
        <Choice label={t('Rank')} value={rank} options={[...(ranks.length > 1 ? [[ALL, t('all')] as [string, string]] : []), ...ranks.map(each => [String(each), String(each)] as [string, string])]} onPick={setRank} />
        <input className="jp-mod-styled" type="search" aria-label={t('Search')} placeholder={t('Search')} value={filter.search} onChange={event => setFilter({ ...filter, search: event.target.value })} />
        <Check label={t('Errors only')} checked={filter.errors} onPick={errors => setFilter({ ...filter, errors })} />
        <Check label={t('Wrap')} checked={wrap} onPick={setWrap} />
        <Check label={t('Follow')} checked={follow} onPick={setFollow} />
        <Button name={t('Copy')} onClick={() => copy(text)} />
        <Button name={t('Refresh')} onClick={() => void show(rank)} />
        <span className="jp-Distributed-quiet">{shown.note}</span>
      </div>
      <pre tabIndex={0} ref={end} className={wrap ? 'jp-mod-wrapped' : ''}>
        {text || none}
      </pre>
    </>
  );
}

function Check({ label, checked, onPick }: { label: string; checked: boolean; onPick: (checked: boolean) => void }): React.JSX.Element {
  return (
    <label className="jp-Distributed-check">
      <input type="checkbox" checked={checked} onChange={event => onPick(event.target.checked)} />
      {label}
    </label>
  );
}
