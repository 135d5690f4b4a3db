// Every text of the view goes through here, so that a page with a translator can say it in the user's language. No DOM.

/** Where a page leaves its translator, with the methods of JupyterLab's (`__`, `_n`). */
const TRANSLATOR = Symbol.for("jupyter_distrib.translator");

/** The text in the user's language; `%1` stands for the first argument. */
export function t(text, ...args) {
  const translator = globalThis[TRANSLATOR];
  return translator ? translator.__(text, ...args) : filled(text, args);
}

/** The text for so many, in the user's language; `%1` stands for the number, `%2` for the first argument behind it. */
export function tn(one, many, count, ...args) {
  const translator = globalThis[TRANSLATOR];
  return translator ? translator._n(one, many, count, ...args) : filled(count === 1 ? one : many, [count, ...args]);
}

function filled(text, args) {
  return text.replace(/%(\d)/g, (_, number) => String(args[number - 1]));
}
