// What Python puts into the page (`page.py`, `block_table.py`), and what the scripts make of it; times are in ticks.
// For readers and type checkers, no part of a page: `tsc --noEmit --strict --allowJs --checkJs --target es2023 *.js`

export type Numbers = Uint8Array | Int32Array | Uint32Array | Float64Array;
export type Box = [left: number, top: number, width: number, height: number];
export type Pen = CanvasRenderingContext2D;

export interface Lane {
  name: string; full_name: string; figures: string; is_pale: boolean;
  first: number; count: number; first_bar: number; num_bars: number; // its blocks and bars in the columns
  begin: number; end: number; // of the makespan
  shades: number; // how many stages the rank holds
  colour: Record<string, string>; // of its curve, by theme
}

export interface Theme { name: string; background: string; ink: string; faint: string; bubble: string; line: string }

export interface Header {
  tick_s: number; end_ticks: number; period_ticks: number; typical_ticks: number;
  num_slices: number; is_bytes: boolean; most_held: number; foot: number;
  kinds: { letter: string; name: string; colours: Record<string, string[]>; inks: Record<string, string[]> }[];
  bars: { text: string; name: string; colour: string }[];
  themes: Record<string, Theme>; causes: string[]; lanes: Lane[];
  columns: { name: string; type: "uint8" | "int32" | "uint32" | "float64"; offset: number; length: number }[];
}

// One entry per block, per bar, or per idle time and cause.
export interface Columns {
  gap: Numbers; duration: Numbers; kind: Numbers; half: Numbers; shade: Numbers; stage: Numbers; microbatch: Numbers;
  slice: Numbers; producer: Numbers; transfer: Numbers; held: Numbers; kept: Numbers; critical: Numbers;
  bar_gap: Numbers; bar_duration: Numbers; bar_name: Numbers;
  idle_gap: Numbers; idle_cause: Numbers; idle_ticks: Numbers;
}

export interface Spans { begin: Float64Array; end: Float64Array }
export type Table = Omit<Header, "columns"> & Columns & Spans & { bar: Spans };

export interface Tip { title: string; lines: string[]; more: string[] }
export interface View { from: number; to: number; scroll: number; tallness: number } // scroll in pixels
export interface State { view: View; marked: number; lane: number; kept: boolean; showsCritical: boolean }
export interface Strip { lane: Lane; index: number; top: number; height: number }

export interface Frame {
  inset: number; width: number; height: number; inner: number; lane: number; shown: number; scroll: number;
  perTick: number; memoryHeight: number; memoryTop: number; axisTop: number; // pixels
  x(tick: number): number; y(index: number): number; tick(x: number): number; laneAt(y: number): number;
}

export type Unit = [size: number, name: string];
export interface Style { colour: string; size?: number; align?: CanvasTextAlign; bold?: boolean }
export interface Scene { pen: Pen; table: Table; frame: Frame; state: State; colours: Theme }

export type Ask<Answer> = (table: Table, block: number) => Answer;
export type Find = (table: Table, index: number, tick: number, down: number) => { block?: number; tip: Tip | null };
export type DrawStrip = (scene: Scene, strip: Strip, alphaOf: (isCritical: number) => number) => void;
export type DrawCurve = (scene: Scene, lane: Lane, y: (value: number) => number, alpha: number, width?: number) => void;
