/**
 * Live views of runs whose beginning a page has missed, because it was loaded in the middle of them.
 *
 * They are drawn by the code of the widget, which the kernel sends with the state (`remote.ts`), below the outputs of
 * their cells. Nothing of them is in the notebook: a dead view that was saved there is only hidden, until `repair.ts`
 * writes what has become of the run into the cell.
 */
import type { CodeCell } from '@jupyterlab/cells';
import { NotebookPanel } from '@jupyterlab/notebook';
import type { OutputArea } from '@jupyterlab/outputarea';
import { IDisposable } from '@lumino/disposable';

import { KernelLink } from './link.js';
import { Home, Model } from './model.js';
import { moduleOf } from './modules.js';
import { isLive, isSettled } from './outputs.js';
import { Shown } from './protocol.js';
import { RemoteModel } from './remote.js';

/** An anywidget module. */
interface Module {
  default: {
    initialize?(context: { model: RemoteModel }): void;
    render(context: { model: RemoteModel; el: HTMLElement }): () => void;
  };
}

const HIDDEN = 'jp-Distributed-replaced';

/** All views that this page draws by itself. */
export class LiveViews {
  /** `wanted` says whether the user wants missed outputs. */
  constructor(
    private readonly model: Model,
    private readonly wanted: () => boolean
  ) {
    model.changed.connect(() => this.update());
  }

  /** Whether this page draws the run. */
  has(home: Home, run: string): boolean {
    return this.views.get(home)?.get(run) !== undefined;
  }

  /** The runs that this page draws. */
  runs(home: Home): string[] {
    return [...(this.views.get(home)?.keys() ?? [])];
  }

  /** The cell shows the final views of these runs. */
  end(home: Home, runs: string[]): void {
    const views = this.views.get(home);
    for (const run of runs) {
      views?.get(run)?.dispose();
      views?.delete(run);
    }
    if (!views?.size) {
      this.views.delete(home);
    }
  }

  private update(): void {
    const links = new Map(this.model.links());
    for (const [home, views] of this.views) {
      const link = links.get(home);
      const gone = [...views].filter(([, view]) => view.link !== link || !link.overview);
      this.end(home, gone.map(([run]) => run));
    }
    for (const [home, link] of links) {
      if (home instanceof NotebookPanel && this.wanted()) {
        this.show(home, link);
      }
    }
  }

  private show(panel: NotebookPanel, link: KernelLink): void {
    const views = this.views.get(panel) ?? new Map<string, LiveView>();
    for (const shown of link.overview?.views ?? []) {
      if (link.missed(shown) && !views.has(shown.run)) {
        const view = new LiveView(link, shown);
        this.views.set(panel, views.set(shown.run, view));
        this.drawn = this.drawn.then(() => this.draw(panel, view)); // one after the other, so that they keep their order
      }
    }
    for (const view of views.values()) {
      // A cell that was never in sight has no output area yet.
      const cell = panel.content.widgets.find(each => each.model.id === view.shown.cell) as CodeCell | undefined;
      view.place(cell?.outputArea);
    }
  }

  private async draw(home: Home, view: LiveView): Promise<void> {
    try {
      await view.draw();
    } catch {
      this.end(home, [view.shown.run]); // a kernel that did not answer is asked again when it mentions the view again
      return;
    }
    this.update();
  }

  private readonly views = new Map<Home, Map<string, LiveView>>();
  private drawn = Promise.resolve();
}

/** One view, in the cell that started the run. */
class LiveView implements IDisposable {
  constructor(
    readonly link: KernelLink,
    readonly shown: Shown
  ) {
    this.model = new RemoteModel(link, shown);
    this.node.className = 'jp-OutputArea-child jp-Distributed-live';
    this.node.append(div('jp-OutputPrompt jp-OutputArea-prompt'), div('jp-OutputArea-output'));
  }

  get isDisposed(): boolean {
    return this.model.isDisposed;
  }

  /** Place the view below the outputs, in place of the dead one. */
  place(area: OutputArea | undefined): void {
    if (!area || !this.leave) {
      return;
    }
    const outputs = area.widgets.map(({ node }, index) => ({ node, output: area.model.get(index) }));
    const dead = outputs.find(({ output }) => output && isLive(output, this.shown));
    this.hide(dead?.node ?? null);
    if (outputs.some(({ output }) => output && isSettled(output, this.shown.run))) {
      this.node.remove();
    } else if (this.node.parentElement !== area.node) {
      area.node.append(this.node); // behind the children that the area counts
    }
  }

  dispose(): void {
    this.hide(null);
    this.leave?.();
    this.model.dispose();
    this.node.remove();
  }

  /** Rejects if the kernel does not answer. */
  async draw(): Promise<void> {
    await this.model.load();
    const module = await moduleOf<Module>(this.model.get('_esm') as string);
    if (this.isDisposed || !module) {
      return;
    }
    const view = module.default;
    const style = document.createElement('style');
    style.textContent = this.model.get('_css') as string;
    const el = this.node.lastElementChild as HTMLElement;
    el.append(style);
    view.initialize?.({ model: this.model });
    this.leave = view.render({ model: this.model, el });
  }

  private hide(node: HTMLElement | null): void {
    this.hidden?.classList.remove(HIDDEN);
    node?.classList.add(HIDDEN);
    this.hidden = node;
  }

  private readonly model: RemoteModel;
  private readonly node = div('');
  private leave: (() => void) | null = null;
  private hidden: HTMLElement | null = null;
}

function div(className: string): HTMLElement {
  const node = document.createElement('div');
  node.className = className;
  return node;
}
