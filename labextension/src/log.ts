/** What of a log is shown: pure functions. */

/** Lines that tell of trouble, whatever wrote them. */
const ERRORS = /\b(error|exception|traceback|warning|fatal|failed)\b|Error:/i;

export interface Filter {
  search: string;
  errors: boolean;
}

export function filtered(text: string, { search, errors }: Filter): string {
  if (!search && !errors) {
    return text;
  }
  const wanted = search.toLowerCase();
  return text
    .split('\n')
    .filter(line => (!errors || ERRORS.test(line)) && line.toLowerCase().includes(wanted))
    .join('\n');
}

/** The logs of several ranks below one another, each line with its rank. */
export function together(texts: { rank: number; text: string }[]): string {
  const lines = ({ rank, text }: { rank: number; text: string }): string =>
    text
      .replace(/\n$/, '')
      .split('\n')
      .map(line => `[${rank}] ${line}`)
      .join('\n');
  return texts
    .filter(({ text }) => text)
    .map(lines)
    .join('\n');
}
