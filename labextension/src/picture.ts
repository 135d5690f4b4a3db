/**
 * Settled charts in cells: the image is named for screen readers, and its colours suit the theme.
 *
 * JupyterLab's renderer of images knows no alternative text. It stands in the output's metadata, where `nbconvert` reads it.
 */
import { IRenderMime, RenderedImage } from '@jupyterlab/rendermime';

/** In front of JupyterLab's own renderer, which has 90. */
export const RANK = 80;

class Picture extends RenderedImage {
  override async render(model: IRenderMime.IMimeModel): Promise<void> {
    await super.render(model);
    const about = model.metadata[this.mimeType] as { alt?: unknown } | undefined;
    const image = this.node.querySelector('img');
    if (image && typeof about?.alt === 'string') {
      image.alt = about.alt;
    }
    this.toggleClass('jp-Distributed-picture', 'jupyter_distrib' in model.metadata);
  }
}

export const pictures: IRenderMime.IRendererFactory = {
  safe: true,
  mimeTypes: ['image/png'],
  createRenderer: options => new Picture(options)
};
