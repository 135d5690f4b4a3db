/** Code that the kernel sends for its views, so that both have the same version. */
import { KernelLink } from './link.js';

const modules = new Map<string, Promise<unknown>>();

/** This code, as anywidget loads it; once, as long as it is the same. Null where pages may not do that. */
export function moduleOf<Module>(source: string): Promise<Module | null> {
  let module = modules.get(source);
  if (!module) {
    const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
    module = (import(/* webpackIgnore: true */ url) as Promise<unknown>).catch(() => null);
    modules.set(source, module);
  }
  return module as Promise<Module | null>;
}

/** `jupyter_distrib/kernel/views/static`: `charts.js` and `heat.js`. */
export interface Drawing {
  Charts: new (root: HTMLElement, later: () => void, runs?: Runs | null) => { paint(state: { ranks: unknown[] }): void };
  Heat: new (root: HTMLElement) => { paint(over: object | null): void };
}

/** The names of the lines in charts where each line stands for a run. */
export interface Runs {
  name: (rank: number) => string;
}

const drawings = new WeakMap<KernelLink, Promise<Drawing | null>>();

/** The module that draws charts and tables of ranks; null where pages may not load it. It is requested once. */
export function drawingOf(link: KernelLink): Promise<Drawing | null> {
  let drawing = drawings.get(link);
  if (!drawing) {
    drawing = link.request({ op: 'drawing' }).then(async ({ drawing: code }) => {
      if (!code) {
        return null;
      }
      const style = document.createElement('style');
      style.textContent = code.style;
      document.head.append(style);
      return moduleOf<Drawing>(code.script);
    });
    drawing.catch(() => drawings.delete(link)); // the next call requests it again
    drawings.set(link, drawing);
  }
  return drawing;
}
