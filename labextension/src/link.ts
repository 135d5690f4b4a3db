/**
 * One page's link to one kernel: it listens, and it asks.
 *
 * The kernel speaks on a comm with a fixed id that nobody opens; the page only looks at what passes on iopub. It asks
 * on the control channel, which is served while a cell runs. Nothing is sent to a kernel that has not spoken, so that
 * kernels without jupyter_distrib never see a message that they do not know, and nothing is polled.
 */
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { IDisposable } from '@lumino/disposable';
import { ISignal, Signal } from '@lumino/signaling';

import { Answer, EVENTS, LinkState, Overview, REQUEST, REQUEST_COMM, Request, Settled } from './protocol.js';

const ANSWER_MS = 5000;
/** After a restart a kernel says "idle" once more before it goes down; so an absence counts only after this time. */
const ABSENT_AFTER_MS = 1000;

interface News extends Answer {
  kind: 'overview' | 'settled' | 'answer' | 'closed';
  now_s: number;
}

export class KernelLink implements IDisposable {
  constructor(readonly kernel: Kernel.IKernelConnection) {
    kernel.iopubMessage.connect(this.onMessage, this);
    kernel.statusChanged.connect(this.onStatus, this);
    kernel.disposed.connect(this.onDisposed, this);
    void this.probe();
  }

  get state(): LinkState {
    return this._state;
  }

  get overview(): Overview | null {
    return this._overview;
  }

  /** Something that is shown has changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get settled(): ISignal<this, Settled> {
    return this._settled;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** Seconds since the epoch by the kernel's clock. */
  nowS(): number {
    return Date.now() / 1000 + this._aheadS;
  }

  dispose(): void {
    if (!this._isDisposed) {
      this._isDisposed = true;
      Signal.clearData(this);
    }
  }

  /** Ask the kernel. Rejects if it does not answer in time. */
  async request(request: Request): Promise<Answer> {
    const answer = this._overview?.route === 'comm' ? this.overComm(request) : this.overControl(request);
    const late = new Promise<never>((_, reject) => {
      setTimeout(() => reject(new Error('the kernel has not answered')), ANSWER_MS);
    });
    return Promise.race([answer, late]);
  }

  /** Stop a run by name; if the kernel does not answer, interrupt whatever it runs. */
  async stop(run: string, force: boolean): Promise<void> {
    try {
      const answer = await this.request({ op: 'stop', run, force });
      if (answer.ok) {
        return;
      }
    } catch {
      // The interrupt below is the answer.
    }
    await this.kernel.interrupt();
  }

  /** Load the extension as the user would. */
  async load(): Promise<void> {
    const code = '%load_ext jupyter_distrib';
    const reply = await this.kernel.requestExecute({ code, silent: false, store_history: false }).done;
    if (reply.content.status !== 'ok') {
      const content = reply.content as { evalue?: string };
      throw new Error(content.evalue ?? code);
    }
  }

  private async overControl(request: Request): Promise<Answer> {
    const message = KernelMessage.createMessage({
      channel: 'control',
      // A type of our own: the kernel has a handler for it once the extension is loaded.
      msgType: REQUEST as 'interrupt_request',
      session: this.kernel.clientId,
      username: this.kernel.username,
      content: request as unknown as KernelMessage.IInterruptRequestMsg['content']
    });
    const reply = await this.kernel.sendControlMessage(message, true).done;
    return reply?.content as unknown as Answer;
  }

  /** For kernels without a table of control handlers. */
  private overComm(request: Request): Promise<Answer> {
    if (!this._comm || this._comm.isDisposed) {
      this._comm = this.kernel.createComm(REQUEST_COMM);
      this._comm.open();
    }
    const id = String(++this._asked);
    const answer = new Promise<Answer>(resolve => this._waiting.set(id, resolve));
    this._comm.send({ ...request, id });
    return answer;
  }

  private async probe(): Promise<void> {
    const generation = this._generation;
    // The answer makes the kernel busy and idle again, which must not lead to the next question.
    if (this._probed === generation) {
      return;
    }
    this._probed = generation;
    try {
      const reply = await this.kernel.requestCommInfo({ target_name: EVENTS });
      if (this._isDisposed || generation !== this._generation || this._state === 'ready') {
        return;
      }
      if (reply.content.status === 'ok' && EVENTS in reply.content.comms) {
        this.take(await this.overControl({ op: 'overview' }));
      } else {
        this._probing = setTimeout(() => {
          if (generation === this._generation && this._state === 'connecting') {
            this.enter('absent');
          }
        }, ABSENT_AFTER_MS);
      }
    } catch {
      // A kernel that goes down while it is asked says so by its status.
    }
  }

  private onMessage(_: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void {
    if (!KernelMessage.isCommMsgMsg(message) || message.content.comm_id !== EVENTS || this._isDisposed) {
      return;
    }
    const news = message.content.data as unknown as News;
    switch (news.kind) {
      case 'overview':
        this.take(news);
        break;
      case 'settled':
        this._settled.emit(news.settled as unknown as Settled);
        break;
      case 'answer': {
        const answer = (news as unknown as { answer: Answer & { to: string } }).answer;
        this._waiting.get(answer.to)?.(answer);
        this._waiting.delete(answer.to);
        break;
      }
      case 'closed':
        this._overview = null;
        this.enter('absent');
    }
  }

  private take(told: Answer): void {
    if (told.overview && !this._isDisposed) {
      this._overview = told.overview;
      this._aheadS = (told.now_s ?? Date.now() / 1000) - Date.now() / 1000;
      this.enter('ready');
    }
  }

  private onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    switch (status) {
      case 'restarting':
      case 'autorestarting':
      case 'starting':
        this._generation += 1;
        clearTimeout(this._probing);
        this._overview = null;
        this.enter('connecting');
        break;
      case 'dead':
      case 'terminating':
        this._overview = null;
        this.enter('lost');
        break;
      case 'idle':
        if (this._state === 'connecting') {
          void this.probe();
        }
        break;
      default:
        break;
    }
  }

  private onDisposed(): void {
    this._overview = null;
    this.enter('lost');
  }

  private enter(state: LinkState): void {
    this._state = state;
    if (!this._isDisposed) {
      this._changed.emit();
    }
  }

  private _state: LinkState = 'connecting';
  private _overview: Overview | null = null;
  private _aheadS = 0;
  /** Grows with every start of the kernel. */
  private _generation = 0;
  /** The start that was asked about. */
  private _probed = -1;
  private _probing: ReturnType<typeof setTimeout> | undefined;
  private _comm: Kernel.IComm | null = null;
  private _asked = 0;
  private _waiting = new Map<string, (answer: Answer) => void>();
  private _isDisposed = false;
  private _changed = new Signal<this, void>(this);
  private _settled = new Signal<this, Settled>(this);
}
