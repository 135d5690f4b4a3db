/**
 * The model of the widget of a run, or of a sweep, as a page has it that was loaded after the widget was made.
 *
 * JupyterLab's widget manager asks a kernel for its models on the channel which the running cell occupies. This one asks
 * for the state on the control channel, and hears what the kernel tells the widget, since that passes every page on iopub.
 */
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { IDisposable } from '@lumino/disposable';

import { Answer, Request, Shown } from './protocol.js';

type State = Record<string, unknown>;

interface Update {
  method?: string;
  state?: State;
}

/** A `KernelLink`, as far as it is used here. */
export interface Asked {
  readonly kernel: Pick<Kernel.IKernelConnection, 'iopubMessage'>;
  request(request: Request): Promise<Answer>;
}

/** As anywidget gives it to a view, as far as our views take it. */
export class RemoteModel implements IDisposable {
  constructor(
    private readonly link: Asked,
    readonly shown: Shown
  ) {
    link.kernel.iopubMessage.connect(this.onMessage, this);
  }

  /** Request the whole state. Rejects if the kernel does not answer, or no longer has the view. */
  async load(): Promise<void> {
    const { view, error } = await this.link.request({ op: 'view', run: this.shown.run });
    if (!view) {
      throw new Error(error ?? '');
    }
    // Updates that have come meanwhile are newer, or will come again.
    this.state = { ...view, ...this.state };
    this.loaded = true;
  }

  get(key: string): unknown {
    return this.state[key];
  }

  on(name: string, call: () => void): void {
    this.calls.push({ name, call });
  }

  off(name: string, call: () => void): void {
    this.calls = this.calls.filter(each => each.name !== name || each.call !== call);
  }

  send(request: Request): void {
    void this.link.request(request).catch(() => undefined);
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    this._isDisposed = true;
    this.link.kernel.iopubMessage.disconnect(this.onMessage, this);
  }

  private onMessage(_: unknown, message: KernelMessage.IIOPubMessage): void {
    if (!KernelMessage.isCommMsgMsg(message) || message.content.comm_id !== this.shown.model) {
      return;
    }
    const { method, state } = message.content.data as Update;
    if (method === 'update') {
      this.state = { ...this.state, ...state };
      if (this.loaded) {
        const names = new Set(['change', ...Object.keys(state ?? {}).map(key => `change:${key}`)]);
        this.calls.filter(({ name }) => names.has(name)).forEach(({ call }) => call());
      }
    }
  }

  private state: State = {};
  private loaded = false;
  private calls: { name: string; call: () => void }[] = [];
  private _isDisposed = false;
}
