/**
 * What crosses between kernel and page: the overview that `jupyter_distrib/kernel/sidebar/overview.py` makes, and the
 * requests of `jupyter_distrib/kernel/sidebar/bridge.py`.
 */

/** The version of the overview that this page understands. */
export const PROTOCOL = 4;
export const EVENTS = 'jupyter_distrib-events';
export const REQUEST = 'distrib_request';
export const REQUEST_COMM = 'jupyter_distrib-requests';

export interface Overview {
  protocol: number;
  session: string;
  label: string;
  pid: number;
  route: 'control' | 'comm';
  next: Next;
  strategies: string[];
  pools: Pool[];
  /** Newest first. */
  runs: Run[];
  /** The ranks that are being started. */
  doing: { op: string; pool: string } | null;
  trouble: { text: string; at_s: number } | null;
  /** The test of a connection; missing in kernels with an older version. */
  trial?: Trial | null;
  /** The part of this folder's settings file that waits for trust. */
  waits?: Waits | null;
  /** The live views under cells, in the order of the runs; missing in kernels with an older version. */
  views?: Shown[];
  /** The starts of ranks in progress; missing in kernels with an older version. */
  starts?: Start[];
}

/** A start of ranks, from the search for their pool on. */
export interface Start {
  pool: string;
  /** The cell that waits for the ranks, and its id; empty if none does or it is not known. */
  label: string;
  cell: string;
  /** The submitted run that waits for them; empty if none does. */
  run: string;
  began_at_s: number;
}

/** One execution of a cell. */
export interface Place {
  cell: string;
  /** The number of the execution, as shown beside the cell. */
  count: number;
  /** The session of the page that requested it, and the time by that page's clock; missing in kernels with an older version. */
  session?: string;
  asked_at_s?: number;
}

/** A live view, and the id of its widget. */
export interface Shown extends Place {
  /** The name of the view: the run, if it shows one. */
  run: string;
  /** The runs that it shows; missing in kernels with an older version. */
  runs?: string[];
  model: string;
}

/** The options that a bare `%%distributed` uses. */
export interface Next {
  pool: string;
  strategy: string;
  gpus: number | null;
  ranks: number | null;
  gpu_type: string | null;
  origins: string;
  line: string;
}

export interface Pool {
  name: string;
  kind: string;
  origin: string;
  /** Its address or hosts; empty if it has none. Missing in kernels with an older version. */
  where?: string;
  /** Whether a settings file defines it. */
  editable?: boolean;
  waits?: Waits | null;
  groups: WorkerGroup[];
  /** Whether it is known without asking its ranks' machines that it has no GPU. Missing in kernels with an older version. */
  no_gpu?: boolean;
  /** The machines that it has started on demand; empty if there are none. */
  machines?: string;
  node: Node | null;
}

/** The part of a settings file that waits until the user trusts it. */
export interface Waits {
  file: string;
  sets: string;
  /** The digest of the content, so that only the shown content is trusted. */
  digest: string;
}

export interface Trial {
  id: string;
  state: 'running' | 'good' | 'bad';
  text: string;
}

/** One option of a kind of pool, as a form asks for it. */
export interface FormField {
  name: string;
  meaning: string;
  /** The effect of leaving it out. */
  default: string;
  choices: string[];
  switch: boolean;
  /** Whether it is shown before the others. */
  main: boolean;
  /** An example of a value that is required; empty if it may be left out. */
  example: string;
}

export interface PoolKind {
  kind: string;
  about: string;
  fields: FormField[];
}

export interface SettingsFile {
  key: string;
  shown: string;
  /** The reason why it cannot be chosen; empty if it can. */
  problem: string;
}

/** Something on the kernel's machine that could be a pool. */
export interface FoundPool {
  kind: string;
  name: string;
  text: string;
  options: Record<string, string>;
}

export interface EditedPool {
  name: string;
  kind: string;
  values: Record<string, string>;
  file: string;
}

/** The content of a form; `before`: the values with which it was opened, for a pool that is being changed. */
export interface PoolDefinition {
  name: string;
  kind: string;
  file: string;
  values: Record<string, string>;
  before?: Record<string, string>;
}

export interface WorkerGroup {
  name: string;
  state: 'opening' | 'open' | 'closed';
  size: number;
  gpus: boolean;
  kept: string[];
  run: string | null;
  ranks: Worker[];
  /** The progress of the start, if it takes a while. */
  starting?: Starting | null;
}

export interface Starting {
  up: number;
  size: number;
  /** `the import of torch`; empty if it is not known. */
  waits_for: string;
}

export interface Worker {
  rank: number;
  state: string;
  pid: number;
  device: string;
  device_name: string;
  rss_bytes: number;
  /** The machine that it is on; empty if there is only one. */
  node?: string;
}

export interface Node {
  /** The time of the pool's answer, since the epoch by the kernel's clock. */
  at_s: number;
  name: string;
  cpus: number | null;
  memory_bytes: number | null;
  gpus: Gpu[];
  /** The machines of the pool; missing in kernels with an older version. */
  nodes?: Machine[];
  others: { holder: string; ranks: number; running: string }[];
  /** The resources for the next rank; empty if unknown. */
  next_rank?: string;
  waiting?: { holder: string; ranks: number; gpus: boolean; reason: string }[];
}

export interface Machine {
  name: string;
  cpus: number;
  /** Free amounts are null if unknown. */
  free_cpus: number | null;
  memory_bytes: number;
  gpus: number;
  free_gpus: number | null;
  gpu_type: string;
  /** The ranks of this notebook. */
  ranks: number[];
  /** The reason why it can run no ranks now; empty if it can. */
  state?: string;
  holders?: string[];
}

export interface Gpu {
  index: number;
  /** `3`, or `3:1` for a slice. */
  number: string;
  name: string;
  /** null where the driver does not report it. */
  memory_bytes: number | null;
  used_bytes: number | null;
  holder: string;
}

export type RunState = 'queued' | 'starting' | 'running' | 'stopping' | 'done' | 'failed' | 'lost' | 'interrupted' | 'refused';

export interface Run {
  run: string;
  label: string;
  /** Id of the notebook cell; empty if it is not known. */
  cell: string;
  state: RunState;
  pool: string;
  strategy: string;
  ranks: number;
  /** The numbers of those ranks. */
  numbers: number[];
  world_size: number;
  gpus: boolean;
  detached: boolean;
  began_at_s: number;
  elapsed_s: number | null;
  stop_asked_at_s: number | null;
  /** The stage of a stop. */
  stopping: '' | 'asked' | 'killed';
  peak_rss_bytes: number;
  peak_gpu_memory_bytes: number | null;
  stall: string;
  trouble: string;
  /** The metrics that are nan or infinite at their last report: `nan from step 31`. Missing in kernels with an older version. */
  not_finite?: Record<string, string>;
  /** The place in the queue, from 1; 0 if it does not wait. Missing in kernels with an older version. */
  place?: number;
  /** The name shared by the runs of one sweep, or by runs submitted by one cell; empty for others. */
  group?: string;
  progress: { label: string; step: number; total: number | null; left_s?: number | null } | null;
  line: string;
  members: Member[];
}

export interface Member {
  rank: number;
  state: string;
  device: string;
  rss_bytes: number;
  cpu_percent: number;
  gpu_memory_bytes: number | null;
  gpu_memory_total_bytes: number | null;
  gpu_percent: number | null;
  /** Memory of the rank's tensors, as its framework counts; null if unknown. */
  gpu_tensor_bytes: number | null;
  gpu_reserved_bytes: number | null;
  /** Whether the GPU memory counts all processes since the rank began. */
  gpu_memory_of_all: boolean;
}

/** The outputs of a cell after the end of its runs, as a notebook file holds them. */
export interface Settled extends Place {
  /** In the order of the runs. */
  views: SettledView[];
  /** The value or the error of the cell. */
  outcome: OutputLike[];
}

export interface SettledView {
  run: string;
  /** The id of the widget that was there; empty if there was none. */
  model: string;
  output: OutputLike;
}

export interface OutputLike {
  output_type?: string;
  data?: Record<string, unknown>;
  metadata?: Record<string, unknown>;
}

export interface Size {
  gpus?: number;
  ranks?: number;
  gpu_type?: string;
}

/** The choices for the next runs; anything left out stays unchanged. An empty size stands for the pool's default. */
export interface Pick {
  pool?: string;
  strategy?: string;
  size?: Size;
}

/** One row of the list of saved runs. */
export interface SavedRun {
  run: string;
  cell: string;
  notebook: string;
  began: string;
  ranks: string;
  strategy: string;
  state: string;
  metrics: string;
  time: string;
}

/** A saved run with the values by which it can be sorted. */
export interface TableRun extends SavedRun {
  began_at_s: number;
  elapsed_s: number;
  error: string;
  /** The last value of each metric, null if it is not finite, and the same as text. */
  values: Record<string, [number | null, string]>;
  /** Arguments, and values of a sweep. */
  parameters: Record<string, string>;
}

/** Saved runs side by side. */
export interface Comparison {
  /** `run`, and the numbers of the runs. */
  head: string[];
  rows: string[][];
  /** The numbers of each run, as a line in place of a rank's. */
  ranks: RankNumbers[];
  /** Of each run: arguments, and values of a sweep. */
  parameters: Record<string, string>[];
  /** For each run, the last value of each metric, if it is finite. */
  last: Record<string, number>[];
  /** For each run after the first, the difference of its code; for a single run, its code. */
  code: string[][];
}

/** The numbers that a rank has reported, as the view of a run gets them (`columns` in `kernel/views/state.py`). */
export interface RankNumbers {
  rank: number;
  state: string;
  columns: Record<string, unknown> | null;
}

/** Everything known about a run, in progress or saved. */
export interface Page {
  run: string;
  /** The number of the saved run; empty if it is not saved yet. */
  number: string;
  label: string;
  cell: string;
  state: string;
  goes_on: boolean;
  error: string;
  /** The lines of the traceback of a failed run; none from a kernel with an older version. */
  traceback?: string[];
  began_at_s: number;
  elapsed_s: number;
  head: [string, string][];
  ranks: RankNumbers[];
  /** For `Heat`; null if it is not known. */
  over_time: object | null;
  configuration: [string, string][];
  environment: [string, string][];
  code: string[];
  /** The difference of the code from that of the run that was named. */
  difference: string[];
  notes: string[];
  files: [string, string][];
  /** The ranks that may have a log. */
  logged: number[];
}

export type Request =
  | { op: 'page'; run: string; against: string }
  | { op: 'history' | 'history_table'; words: string }
  | { op: 'compare'; runs: string[] }
  | { op: 'overview' | 'drawing' | 'refresh' | 'dismiss' | 'unpick' }
  /** With a pool: its definition, and nothing is looked for. */
  | { op: 'pool_forms'; pool: string }
  | ({ op: 'try_pool'; id: string } & PoolDefinition)
  | { op: 'end_trial'; id: string }
  | ({ op: 'write_pool' } & PoolDefinition)
  | { op: 'trust_pool'; pool: string; digest: string }
  /** `live`: the runs that the page shows live; `loaded_ms`: the time of the file that it has loaded. */
  | { op: 'settled'; live: string[]; loaded_ms: number | null }
  | { op: 'saved'; runs: string[]; saved_ms: number | null }
  | { op: 'repair'; runs: string[]; page: string }
  | { op: 'stop'; run: string; force: boolean }
  | { op: 'view' | 'stacks' | 'move_up'; run: string }
  | ({ op: 'pick' } & Pick)
  | ({ op: 'start' | 'resize'; pool: string } & Size)
  | { op: 'restart' | 'stop_ranks'; pool: string }
  | { op: 'logs'; run: string; rank: number; whole: boolean; among: number };

/** A line of a log, and the parts of it that have a colour or a weight. */
export interface LogLine {
  text: string;
  spans: [number, number, string][];
}

export interface Answer {
  ok: boolean;
  error?: string;
  overview?: Overview;
  now_s?: number;
  settled?: Settled[];
  /** This page is the one that repairs the outputs that it has asked about. */
  granted?: boolean;
  /** The whole content of a view's model, with its code (`_esm`) and its style sheet (`_css`). */
  view?: Record<string, unknown>;
  lines?: LogLine[];
  saved?: SavedRun[];
  table?: TableRun[];
  /** The number of further runs that match. */
  more?: number;
  comparison?: Comparison;
  page?: Page;
  /** The code that draws charts in pages, and its style sheet. */
  drawing?: { script: string; style: string };
  kinds?: PoolKind[];
  files?: SettingsFile[];
  found?: FoundPool[];
  edited?: EditedPool;
  /** The errors, by the name of the field. */
  errors?: Record<string, string>;
  /** A sentence on what was done. */
  told?: string;
  skipped_bytes?: number;
  path?: string;
}

/** The states of a page's link to the kernel of the current notebook. */
export type LinkState = 'no-notebook' | 'no-kernel' | 'connecting' | 'absent' | 'ready' | 'lost' | 'other-version';
