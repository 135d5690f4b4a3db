/** The log of a run in the main area: the output of one rank or of all of them, in the same box as in the view of the run. */
import { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import { interleave } from '../../jupyter_distrib/kernel/views/static/lines.js';
import { Line, Output, noteSelection } from '../../jupyter_distrib/kernel/views/static/output.js';
import { Tools } from '../../jupyter_distrib/kernel/views/static/tools.js';
import { LogLine } from './protocol.js';
import * as view from './view.js';

const ALL = 'all';
/** The interval of looking for more while the log is followed. */
const FOLLOW_MS = 2000;
/** The number of lines that a page can show at once; the others are found by searching. */
const MOST_LINES = 5000;

export interface Loaded {
  lines: LogLine[];
  /** The number of bytes before these lines. */
  skippedBytes: number;
  path: string;
  /** The reason why there are none. */
  error: string;
}

export interface LogSource {
  run: string;
  /** `among` is the number of ranks whose logs are shown together: each gets its share of what is read at once. */
  load: (rank: number, whole: boolean, among: number) => Promise<Loaded>;
  ranks: number[];
  /** Whether the run goes on, so that more may come. */
  goesOn: () => boolean;
  t: view.Say;
}

export class Log extends Widget {
  constructor(private readonly source: LogSource) {
    super();
    const { t, ranks } = source;
    this.addClass('jp-Distributed-log');
    this.rank.setAttribute('aria-label', t('Rank'));
    for (const each of ranks.length > 1 ? [ALL, ...ranks.map(String)] : ranks.map(String)) {
      this.rank.add(new Option(each === ALL ? t('all ranks') : t('rank %1', each), each));
    }
    this.rank.addEventListener('change', () => void this.look(true));
    this.tools.root.prepend(this.rank);
    this.tools.button(t('Refresh'), t('Look for more'), () => void this.look(true));
    this.whole = this.tools.button(t('Earlier lines'), t('Show the whole log'), () => void this.showWhole());
    this.whole.hidden = true;
    this.note.className = 'jp-Distributed-quiet';
    this.tools.root.append(this.note);
    this.box = new Output(t('Log'), null, this.tools, MOST_LINES);
    this.node.append(this.box.root, this.none);
    this.none.className = 'jp-Distributed-quiet jp-Distributed-none';
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    document.addEventListener('selectionchange', noteSelection);
    this.timer = setInterval(() => {
      if (this.isVisible && this.tools.following && this.goesOn && !this.looking) {
        void this.look();
      }
    }, FOLLOW_MS);
    void this.look();
  }

  protected override onBeforeDetach(message: Message): void {
    document.removeEventListener('selectionchange', noteSelection);
    clearInterval(this.timer);
    super.onBeforeDetach(message);
  }

  private async showWhole(): Promise<void> {
    this.isWhole = true;
    await this.look(true);
  }

  /** Show the output so far; at once if the user has asked for it. */
  private async look(isAsked = false): Promise<void> {
    const { run, load, ranks, goesOn, t } = this.source;
    const [asked, whole] = [this.rank.value, this.isWhole];
    const wanted = asked === ALL ? ranks : [Number(asked)];
    this.goesOn = goesOn(); // once more after the end
    const logs: (Loaded & { rank: number })[] = [];
    const left = (): boolean => this.isDisposed || asked !== this.rank.value || whole !== this.isWhole;
    this.looking += 1;
    try {
      for (const rank of wanted) { // one after another: the kernel has a time for each answer, and Stop comes in between
        logs.push({ rank, ...(await load(rank, whole, wanted.length)) });
        if (left()) {
          return;
        }
      }
    } catch (error) {
      this.goesOn = true; // it is asked again
      this.none.textContent = error instanceof Error ? error.message : String(error);
      return;
    } finally {
      this.looking -= 1;
    }
    const skipped = logs.reduce((sum, log) => sum + log.skippedBytes, 0);
    const lines = logs.map(({ rank, lines }) => lines.map(({ text, spans }): Line => ({ rank, stream: '', text, spans })));
    this.whole.hidden = !skipped || whole;
    this.note.textContent = skipped ? t('%1 before this are in the files', view.size(skipped)) : '';
    this.note.title = logs.map(log => log.path).join('\n');
    if (isAsked) {
      this.box.paintAsked(interleave(lines), { run, ranks: wanted });
    } else if (!this.box.paint(interleave(lines), [], { run, ranks: wanted })) {
      this.goesOn = true;
    }
    const isEmpty = !lines.some(each => each.length);
    this.box.root.hidden = isEmpty && !this.goesOn && wanted.length === ranks.length; // with nothing to search or to choose
    this.none.textContent = logs.find(log => log.error)?.error ?? (isEmpty ? (this.goesOn ? t('Nothing has been printed yet.') : t('Nothing was printed.')) : '');
  }

  private readonly tools = new Tools();
  private readonly rank = document.createElement('select');
  private readonly note = document.createElement('span');
  private readonly none = document.createElement('div');
  private readonly whole: HTMLButtonElement;
  private readonly box: Output;
  private isWhole = false;
  /** Number of times that the kernel is being asked for the output. */
  private looking = 0;
  private goesOn = true;
  private timer: ReturnType<typeof setInterval> | undefined;
}
