import { LabIcon } from '@jupyterlab/ui-components';

const svgstr = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16">
  <g class="jp-icon3 jp-icon-selectable" fill="#616161">
    <path d="M8 4.2 3.6 11.4h8.8z" fill="none" class="jp-icon3-stroke" stroke="#616161" stroke-width="1.1"/>
    <circle cx="8" cy="3.4" r="2.3"/>
    <circle cx="3.2" cy="12" r="2.3"/>
    <circle cx="12.8" cy="12" r="2.3"/>
  </g>
</svg>`;

/** Three ranks that know one another. */
export const icon = new LabIcon({ name: 'jupyter-distrib:icon', svgstr });
