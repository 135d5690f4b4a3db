/**
 * Whose ranks are shown: those of the current notebook or console. The links of all open ones stay alive, so that
 * switching between them shows at once what is true, and a settled output finds its notebook wherever that is.
 */
import { JupyterFrontEnd } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { ConsolePanel, IConsoleTracker } from '@jupyterlab/console';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISignal, Signal } from '@lumino/signaling';

import { KernelLink } from './link.js';
import { Answer, LinkState, Next, Overview, Pick, Request, Run, Settled } from './protocol.js';

export type Home = NotebookPanel | ConsolePanel;

export class Model {
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly notebooks: INotebookTracker | null,
    private readonly consoles: IConsoleTracker | null
  ) {
    for (const tracker of [notebooks, consoles]) {
      tracker?.widgetAdded.connect((_: unknown, home: Home) => this.adopt(home));
      tracker?.currentChanged.connect(() => this.choose());
      tracker?.forEach(home => this.adopt(home));
    }
    app.shell.currentChanged?.connect(() => this.choose());
    this.choose();
  }

  /** The notebook or console that is shown. */
  get home(): Home | null {
    return this._home;
  }

  get name(): string {
    return this._home?.title.label ?? '';
  }

  get link(): KernelLink | null {
    const link = this._home && this._links.get(this._home);
    return link && !link.isDisposed ? link : null;
  }

  get state(): LinkState {
    return !this._home ? 'no-notebook' : (this.link?.state ?? 'no-kernel');
  }

  get overview(): Overview | null {
    return this.link?.overview ?? null;
  }

  /** A sentence on the user's last request, if it failed. */
  get error(): string {
    return this._error;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** The final outputs of a cell of this notebook. */
  get settled(): ISignal<this, { home: Home; settled: Settled }> {
    return this._settled;
  }

  /** This notebook's page hears its kernel again. */
  get awoke(): ISignal<this, { home: Home; link: KernelLink }> {
    return this._awoke;
  }

  /** The kernel of this notebook has ended in the middle of these runs. */
  get broken(): ISignal<this, { home: Home; runs: Run[] }> {
    return this._broken;
  }

  /** Whether the notebook that is shown has this cell. */
  hasCell(id: string): boolean {
    return this._home instanceof NotebookPanel && this._home.content.widgets.some(cell => cell.model.id === id);
  }

  nowS(): number {
    return this.link?.nowS() ?? Date.now() / 1000;
  }

  linkOf(home: Home): KernelLink | null {
    return this._links.get(home) ?? null;
  }

  /** The open notebook or console that has this node of the page in it. */
  homeOf(node: Node): Home | null {
    return [...this._links.keys()].find(home => home.node.contains(node)) ?? null;
  }

  /** Every link, with its notebook or console. */
  links(): [Home, KernelLink][] {
    return [...this._links];
  }

  /** Ask the kernel; the panel shows an error. */
  async ask(request: Request): Promise<Answer | null> {
    return this.attempt(async () => {
      const answer = await this.link?.request(request);
      if (answer && !answer.ok) {
        throw new Error(answer.error ?? '');
      }
      return answer ?? null;
    });
  }

  /** Choose options for the next runs. One choice is made after another, on top of the kernel's state by then. */
  pick(change: (next: Next) => Pick): void {
    this._picking = this._picking.then(async () => {
      const next = this.overview?.next;
      if (next) {
        await this.ask({ op: 'pick', ...change(next) });
      }
    });
  }

  async attempt<T>(what: () => Promise<T>): Promise<T | null> {
    this._error = '';
    try {
      return await what();
    } catch (error) {
      this._error = error instanceof Error ? error.message : String(error);
      return null;
    } finally {
      this._changed.emit();
    }
  }

  /** Ask the kernel; rejects if it does not answer. */
  async request(request: Request): Promise<Answer> {
    if (!this.link) {
      throw new Error('the kernel has not answered');
    }
    return this.link.request(request);
  }

  /** Let the panel be measured anew, after something in it has opened or closed. */
  repaint(): void {
    this._changed.emit();
  }

  forgetError(): void {
    this._error = '';
    this._changed.emit();
  }

  private choose(): void {
    const current = this.app.shell.currentWidget;
    const focused = [...this._links.keys(), ...this.open()].find(home => home === current);
    const home = focused ?? (this._home && !this._home.isDisposed ? this._home : (this.notebooks?.currentWidget ?? this.consoles?.currentWidget ?? null));
    if (home !== this._home) {
      this._home = home;
      this._error = '';
    }
    this._changed.emit();
  }

  private open(): Home[] {
    return [this.notebooks?.currentWidget, this.consoles?.currentWidget].filter(home => home !== null && home !== undefined);
  }

  private adopt(home: Home): void {
    const context = home.sessionContext;
    context.kernelChanged.connect(() => this.connect(home, context));
    home.disposed.connect(() => {
      this._links.get(home)?.dispose();
      this._links.delete(home);
      if (this._home === home) {
        this._home = null;
      }
      this.choose();
    });
    this.connect(home, context);
    this.choose();
  }

  private connect(home: Home, context: ISessionContext): void {
    const kernel = context.session?.kernel;
    const before = this._links.get(home);
    if (before && before.kernel === kernel) {
      return;
    }
    before?.dispose();
    this._links.delete(home);
    if (kernel) {
      const link = new KernelLink(kernel);
      this._links.set(home, link);
      link.changed.connect(() => this._changed.emit());
      link.settled.connect((_, settled) => this._settled.emit({ home, settled }));
      link.awoke.connect(() => this._awoke.emit({ home, link }));
      link.broken.connect((_, runs) => this._broken.emit({ home, runs }));
    }
    this._changed.emit();
  }

  private _home: Home | null = null;
  private _error = '';
  private _picking = Promise.resolve();
  private readonly _links = new Map<Home, KernelLink>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _settled = new Signal<this, { home: Home; settled: Settled }>(this);
  private readonly _awoke = new Signal<this, { home: Home; link: KernelLink }>(this);
  private readonly _broken = new Signal<this, { home: Home; runs: Run[] }>(this);
}
