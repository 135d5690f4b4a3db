/**
 * One page's link to one kernel: it listens, and it sends requests.
 *
 * The kernel speaks on a comm with a fixed id that nobody opens; the page only looks at what passes on iopub. It asks
 * on the control channel, which is served while a cell runs. Nothing is sent to a kernel that has not spoken, so that
 * kernels without jupyter_distrib never see a message that they do not know, and nothing is polled. A kernel speaks
 * when it loads the extension and during long runs, and of everything else once a page has asked it something.
 */
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { JSONObject } from '@lumino/coreutils';
import { IDisposable } from '@lumino/disposable';
import { ISignal, Signal } from '@lumino/signaling';

import { Answer, EVENTS, LinkState, Overview, Place, PROTOCOL, REQUEST, REQUEST_COMM, Request, Run, Settled } from './protocol.js';

const ANSWER_MS = 5000;
const PROBES = 4;
/** After a restart a kernel says "idle" once more before it goes down; so an absence counts only after this time. */
const ABSENT_AFTER_MS = 1000;
const OVERTAKEN_S = 5;

interface News extends Answer {
  kind: 'overview' | 'settled' | 'answer' | 'closed';
  now_s: number;
}

export class KernelLink implements IDisposable {
  constructor(readonly kernel: Kernel.IKernelConnection) {
    kernel.iopubMessage.connect(this.onMessage, this);
    kernel.statusChanged.connect(this.onStatus, this);
    kernel.disposed.connect(this.onDisposed, this);
    kernel.connectionStatusChanged.connect(this.onConnection, this);
    this.onConnection(kernel, kernel.connectionStatus);
    this.probe();
  }

  get state(): LinkState {
    return this._state;
  }

  get overview(): Overview | null {
    return this._overview;
  }

  /** Something visible has changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get settled(): ISignal<this, Settled> {
    return this._settled;
  }

  /** The kernel has ended in the middle of these runs. */
  get broken(): ISignal<this, Run[]> {
    return this._broken;
  }

  /** This page hears the kernel again, after a time in which it did not: it slept, or the network was away. */
  get awoke(): ISignal<this, void> {
    return this._awoke;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** Seconds since the epoch by the kernel's clock. */
  nowS(): number {
    return Date.now() / 1000 + this._aheadS;
  }

  /** Whether the outputs of this execution do not reach this page by themselves: another page requested it, before this one looked. */
  missed(place: Place): boolean {
    return !this.askedFor(place) && (place.asked_at_s ?? 0) < this._since;
  }

  /** Whether this page may have missed outputs of its own execution, since it did not hear the kernel for a while after the request. */
  sleptThrough(place: Place): boolean {
    return this.askedFor(place) && (place.asked_at_s ?? Infinity) < this._deafUntil;
  }

  /** Whether this page has requested the execution. */
  askedFor({ session }: Place): boolean {
    return session === this.kernel.clientId;
  }

  /** Whether this page, of all open ones, is the one that repairs the outputs of a cell; an older kernel allows all of them. */
  async repairs({ views }: Settled): Promise<boolean> {
    const request: Request = { op: 'repair', runs: views.map(each => each.run), page: this.kernel.clientId };
    const answer = await this.request(request).catch(() => null);
    return answer?.granted ?? true;
  }

  dispose(): void {
    if (!this._isDisposed) {
      this._isDisposed = true;
      clearTimeout(this._probing);
      Signal.clearData(this);
    }
  }

  /** Ask the kernel. Rejects if it does not answer in time. */
  async request(request: Request): Promise<Answer> {
    const answer = this._overview?.route === 'comm' ? this.overComm(request) : this.overControl(request);
    const late = new Promise<never>((_, reject) => {
      setTimeout(() => reject(new Error('the kernel has not answered')), ANSWER_MS);
    });
    const told = await Promise.race([answer, late]);
    if (told.overview) {
      this._met = told.overview.session;
    }
    this.take(told);
    return told;
  }

  /** Ask a kernel that has spoken, so that it speaks again whenever something changes; anew if the answer gets lost. */
  private async meet(session: string): Promise<void> {
    this._met = session;
    for (let count = 0; count < PROBES && this._overview?.session === session && !this._isDisposed; count++) {
      try {
        await this.request({ op: 'overview' });
        return;
      } catch {
        // It is asked again.
      }
    }
    if (this._met === session) {
      this._met = '';
    }
  }

  /**
   * Stop a run by name. Where the kernel does not do it, the cell that waits for this run is interrupted, and no other.
   *
   * @returns False if the run is over. Rejects if the kernel does not answer and runs no such cell.
   */
  async stop(run: string, force: boolean): Promise<boolean> {
    const asked = this.request({ op: 'stop', run, force });
    const [answer] = await Promise.allSettled([asked]);
    if (answer.status === 'fulfilled' && answer.value.ok) {
      return true;
    }
    if (this.kernel.status === 'busy' && this._overview?.runs.some(each => each.run === run && each.elapsed_s === null && !each.detached)) {
      await this.kernel.interrupt();
      return true;
    }
    return (await asked).ok;
  }

  /** Load the extension as the user would. */
  async load(): Promise<void> {
    const code = '%load_ext jupyter_distrib';
    const reply = await answered(() => this.kernel.requestExecute({ code, silent: false, store_history: false }).done);
    if (reply.content.status !== 'ok') {
      const content = reply.content as { evalue?: string };
      throw new Error(content.evalue ?? code);
    }
    await this.request({ op: 'overview' }).catch(() => undefined); // what the kernel has said may have got lost
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
    const reply = await answered(() => this.kernel.sendControlMessage(message, true).done);
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
    this._comm.send({ ...request, id } as unknown as JSONObject);
    return answer;
  }

  /**
   * Ask whether the extension is there; again if the answer got lost, as it may while a page connects to a kernel that
   * has just started. A kernel that is busy is not asked again, and none is asked for ever.
   */
  private probe(): void {
    clearTimeout(this._probing);
    const generation = this._generation;
    const open = (): boolean => generation === this._generation && this._state === 'connecting' && !this._isDisposed;
    if (this._probes === PROBES) {
      this.enter('absent');
      return;
    }
    this._probes += 1;
    this._probing = setTimeout(() => {
      this._probing = undefined;
      if (open() && this.kernel.status === 'idle') {
        this.probe();
      }
    }, ANSWER_MS);
    this.askForComms(present => {
      if (open() && present) {
        void this.request({ op: 'overview' }).catch(() => undefined); // then the next probe shows it
      } else if (open()) {
        clearTimeout(this._probing);
        this._probing = setTimeout(() => open() && this.enter('absent'), ABSENT_AFTER_MS);
      }
    });
  }

  private askForComms(told: (present: boolean) => void): void {
    const message = KernelMessage.createMessage<KernelMessage.ICommInfoRequestMsg>({
      channel: 'shell',
      msgType: 'comm_info_request',
      session: this.kernel.clientId,
      username: this.kernel.username,
      content: { target_name: EVENTS }
    });
    try {
      // The reply is enough: the kernel may have reported that it is idle before this page could hear it.
      this.kernel.sendShellMessage(message, true).onReply = reply => {
        const content = reply.content as KernelMessage.ICommInfoReplyMsg['content'];
        told(content.status === 'ok' && EVENTS in content.comms);
      };
    } catch {
      // A dead kernel is known by its status.
    }
  }

  private onMessage(_: Kernel.IKernelConnection, message: KernelMessage.IIOPubMessage): void {
    if (!KernelMessage.isCommMsgMsg(message) || message.content.comm_id !== EVENTS || this._isDisposed) {
      return;
    }
    const news = message.content.data as unknown as News;
    switch (news.kind) {
      case 'overview':
        // A kernel that is restarted still reports its end when the page knows of it already.
        if (this._state !== 'connecting' || news.overview?.session !== this._gone) {
          this.take(news);
          if (this._overview !== null && this._met !== this._overview.session) {
            void this.meet(this._overview.session);
          }
        }
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
        this._met = '';
        this.enter('absent');
    }
  }

  private take(told: Answer): void {
    const atS = told.now_s ?? Date.now() / 1000;
    // An answer may overtake older news; a clock that is set back is a different case.
    if (told.overview && !this._isDisposed && !(atS < this._atS && atS > this._atS - OVERTAKEN_S)) {
      const known = told.overview.protocol === PROTOCOL;
      this._overview = known ? told.overview : null;
      this._atS = atS;
      this._aheadS = atS - Date.now() / 1000;
      this.enter(known ? 'ready' : 'other-version');
    }
  }

  private onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    switch (status) {
      case 'restarting':
      case 'autorestarting':
      case 'starting':
        this._generation += 1;
        clearTimeout(this._probing);
        this._probing = undefined;
        this._probes = 0;
        this._gone = this._overview?.session ?? this._gone;
        this.end('connecting');
        break;
      case 'dead':
      case 'terminating':
        this.end('lost');
        break;
      case 'idle':
        if (this._state === 'connecting' && this._probing === undefined) {
          this.probe();
        }
        break;
      default:
        break;
    }
  }

  private onConnection(_: Kernel.IKernelConnection, status: Kernel.ConnectionStatus): void {
    const connected = status === 'connected';
    if (connected && this._deaf && !this._isDisposed) {
      this._deafUntil = Date.now() / 1000;
      this._awoke.emit();
    }
    this._deaf = !connected && (this._deaf || this._connected);
    this._connected ||= connected;
  }

  private onDisposed(): void {
    this._overview = null;
    this.enter('lost');
  }

  private end(state: LinkState): void {
    const going = this._overview?.runs.filter(run => run.elapsed_s === null) ?? [];
    if (going.length && !this._isDisposed) {
      this._broken.emit(going);
    }
    this._overview = null;
    this.enter(state);
  }

  private enter(state: LinkState): void {
    this._state = state;
    if (!this._isDisposed) {
      this._changed.emit();
    }
  }

  /** The time since which this page has been listening, by its own clock. */
  private readonly _since = Date.now() / 1000;
  /** The time until which it did not hear the kernel, by its own clock. */
  private _deafUntil = 0;
  /** Whether it does not hear the kernel although it once did. */
  private _deaf = false;
  private _connected = false;
  private _state: LinkState = 'connecting';
  private _overview: Overview | null = null;
  private _aheadS = 0;
  /** The time of the overview, by the kernel's clock. */
  private _atS = 0;
  /** Grows with every start of the kernel. */
  private _generation = 0;
  /** The session of the kernel before it was restarted. */
  private _gone = '';
  /** The session of the kernel that knows of this page. */
  private _met = '';
  /** Number of requests to this start of the kernel. */
  private _probes = 0;
  private _probing: ReturnType<typeof setTimeout> | undefined;
  private _comm: Kernel.IComm | null = null;
  private _asked = 0;
  private _waiting = new Map<string, (answer: Answer) => void>();
  private _isDisposed = false;
  private _changed = new Signal<this, void>(this);
  private _settled = new Signal<this, Settled>(this);
  private _awoke = new Signal<this, void>(this);
  private _broken = new Signal<this, Run[]>(this);
}

/** What a kernel replies. JupyterLab's own words for a kernel that ends instead are about futures and messages. */
async function answered<T>(reply: () => Promise<T>): Promise<T> {
  try {
    return await reply();
  } catch {
    throw new Error('the kernel ended before it answered');
  }
}
