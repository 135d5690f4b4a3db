// The colours and weights of what ranks print: words of a style (`terminal_stream.py`) as CSS. The sixteen colours of a
// terminal are variables of the style sheet, so that they suit the theme.

const WEIGHTS = { B: "font-weight: bold", I: "font-style: italic", U: "text-decoration: underline" };

/** The parts of a line, each with its CSS; spans that reach beyond the text, which may be cut, are cut too. */
export function partsOf({ text, spans = [] }) {
  const parts = [];
  let at = 0;
  for (const [start, end, style] of spans) {
    if (start > at) parts.push({ text: text.slice(at, start), css: "" });
    parts.push({ text: text.slice(start, end), css: cssOf(style) });
    at = end;
  }
  parts.push({ text: text.slice(at), css: "" });
  return parts.filter((part) => part.text);
}

function cssOf(style) {
  const words = style.split(" ");
  const colours = words.flatMap((word) => {
    if (word[0] === "f") return [`color: ${colourOf(word.slice(1))}`];
    if (word[0] !== "b") return [];
    const ground = `background-color: ${colourOf(word.slice(1))}`;
    return words.some((each) => each[0] === "f") ? [ground] : [ground, "color: var(--jd-ground)"];
  });
  return [...colours, ...words.filter((word) => word in WEIGHTS).map((word) => WEIGHTS[word])].join("; ");
}

function colourOf(word) {
  return /^#[0-9a-f]{6}$/.test(word) ? word : `var(--jd-ansi-${Number(word)})`;
}
