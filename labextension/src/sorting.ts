/** The columns of the table of saved runs, and the order of its rows. Pure. */
import { SavedRun, TableRun } from './protocol.js';
import { Say } from './view.js';

export interface Column {
  key: string;
  title: string;
  kind: 'fact' | 'parameter' | 'metric';
  text: (run: TableRun) => string;
  /** The value by which it is sorted; null where the run has none. */
  value: (run: TableRun) => number | string | null;
}

export interface Order {
  key: string;
  down: boolean;
}

/** The columns: identity of a run, all parameters and metrics, then other facts; columns without content are left out. */
export function columnsOf(runs: TableRun[], t: Say): Column[] {
  const fact = (key: keyof SavedRun, title: string, value?: Column['value']): Column => {
    const text = (run: TableRun): string => run[key];
    return { key, title, kind: 'fact', text, value: value ?? (run => text(run) || null) };
  };
  const names = (of: 'parameters' | 'values'): string[] => [...new Set(runs.flatMap(run => Object.keys(run[of])))];
  const found: Column[] = [
    fact('run', t('Run'), run => Number(run.run)),
    fact('cell', t('Cell')),
    fact('state', t('State')),
    fact('time', t('Time'), run => run.elapsed_s),
    ...names('parameters').map((name): Column => ({
      key: `parameter ${name}`,
      title: name,
      kind: 'parameter',
      text: run => run.parameters[name] ?? '',
      value: run => numberOr(run.parameters[name])
    })),
    ...names('values').map((name): Column => ({
      key: `metric ${name}`,
      title: name,
      kind: 'metric',
      text: run => run.values[name]?.[1] ?? '',
      value: run => run.values[name]?.[0] ?? null
    })),
    fact('began', t('Began'), run => run.began_at_s),
    fact('ranks', t('Ranks')),
    fact('strategy', t('Strategy')),
    fact('notebook', t('Notebook'))
  ];
  return found.filter(column => column.key === 'run' || runs.some(run => column.text(run)));
}

/** A parameter counts as a number if it is one: `1e-3` comes before `0.01`. */
function numberOr(text: string | undefined): number | string | null {
  return !text ? null : Number.isNaN(Number(text)) ? text : Number(text);
}

/** The runs in this order; runs without a value in the column come last in either direction. */
export function sorted(runs: TableRun[], { value }: Pick<Column, 'value'>, down: boolean): TableRun[] {
  const compared = (a: number | string, b: number | string): number =>
    typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  return [...runs].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    return a === null || b === null ? Number(a === null) - Number(b === null) : compared(a, b) * (down ? -1 : 1);
  });
}

/** The order after a click on the head of a column: reversed if the table was sorted by it already. */
export function clicked(before: Order, key: string): Order {
  return before.key === key ? { key, down: !before.down } : { key, down: false };
}
