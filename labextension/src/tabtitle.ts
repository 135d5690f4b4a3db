/** What stands before the title of the browser tab: how a run has ended that nobody saw end, or how long one still takes. */

export class TabTitle {
  constructor(private readonly page: Pick<Document, 'title'>) {}

  /** Put this before the title in place of what stood there before; empty text leaves the title as it is by itself. */
  show(prefix: string): void {
    const { title } = this.page;
    // JupyterLab writes the title anew whenever it saves the layout, without what was put before it.
    const bare = this.prefix && title.startsWith(this.prefix) ? title.slice(this.prefix.length) : title;
    this.prefix = prefix;
    if (prefix + bare !== title) {
      this.page.title = prefix + bare;
    }
  }

  /** Put it there again if it is gone. */
  again(): void {
    this.show(this.prefix);
  }

  private prefix = '';
}
