/** The text before the title of the browser tab: how a run ended while nobody was looking, or how long a run will still take. */

export class TabTitle {
  constructor(private readonly page: Pick<Document, 'title'>) {}

  /** Put this before the title in place of an earlier text; an empty text restores the plain title. */
  show(prefix: string): void {
    const { title } = this.page;
    // JupyterLab writes the title anew whenever it saves the layout, without this text.
    const bare = this.prefix && title.startsWith(this.prefix) ? title.slice(this.prefix.length) : title;
    this.prefix = prefix;
    if (prefix + bare !== title) {
      this.page.title = prefix + bare;
    }
  }

  /** Put the text there again if it is gone. */
  again(): void {
    this.show(this.prefix);
  }

  private prefix = '';
}
