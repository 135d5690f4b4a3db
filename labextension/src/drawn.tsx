/** Parts of pages that the code of the run's view draws (`jupyter_distrib/kernel/views/static`). */
import * as React from 'react';

import { Drawing, Runs } from './modules.js';
import { RankNumbers } from './protocol.js';

type Code = () => Promise<Drawing | null>;

/** Charts of reported numbers, a line for each rank, or with `runs` for each run. */
export function Drawn({ code, ranks, runs }: { code: Code; ranks: RankNumbers[]; runs?: Runs }): React.JSX.Element {
  const state = React.useRef({ ranks });
  state.current = { ranks };
  return (
    <Painted
      className="jd-charts"
      code={code}
      make={({ Charts }, root) => {
        const charts = new Charts(root, () => charts.paint(state.current), runs ?? null);
        return () => charts.paint(state.current);
      }}
    />
  );
}

/** Ranks over time. */
export function OverTime({ code, over }: { code: Code; over: object | null }): React.JSX.Element {
  const now = React.useRef(over);
  now.current = over;
  return (
    <Painted
      className="jd-timeline"
      code={code}
      make={({ Heat }, root) => {
        const heat = new Heat(root);
        return () => heat.paint(now.current);
      }}
    />
  );
}

/** A node that other code paints: `make` is called once, and the function that it returns at each rendering. */
function Painted({ className, code, make }: { className: string; code: Code; make: (drawing: Drawing, root: HTMLElement) => () => void }): React.JSX.Element {
  const root = React.useRef<HTMLDivElement>(null);
  const paint = React.useRef<(() => void) | null>(null);
  React.useEffect(() => {
    let isOpen = true;
    const begin = (drawing: Drawing | null): void => {
      if (isOpen && drawing && root.current) {
        paint.current = make(drawing, root.current);
        paint.current();
      }
    };
    code().then(begin, () => undefined);
    return () => {
      isOpen = false;
    };
  }, []);
  React.useEffect(() => paint.current?.());
  return (
    <div className="jd-run">
      <div ref={root} className={className} />
    </div>
  );
}
