/** The parts of the widget's view that the sidebar uses as well (`jupyter_distrib/kernel/views/static`). */
declare module '*/static/output.js' {
  export interface Line {
    rank: number | null;
    stream: string;
    text: string;
    spans?: [number, number, string][];
    skipped?: number;
  }
  export class Output {
    constructor(label: string, rank: number | null, tools: import('*/static/tools.js').Tools | null, most: number);
    readonly root: HTMLElement;
    paint(finished: Line[], unfinished: Line[], state: { run: string; ranks: unknown[] }): boolean;
    paintAsked(finished: Line[], state: { run: string; ranks: unknown[] }): void;
  }
  export function noteSelection(): void;
}
declare module '*/static/tools.js' {
  export class Tools {
    constructor(open?: (() => void) | null);
    readonly root: HTMLElement;
    readonly following: boolean;
    button(name: string, title: string, act: () => void): HTMLButtonElement;
  }
}
declare module '*/static/lines.js' {
  export function interleave<T>(logs: T[][]): T[];
}
