// Draws a table of blocks into a canvas: lanes above, one axis of time, memory below.
import { BYTES, LOWER, UNITS, firstAfter, laneOf, textOf, unitFor } from "./data.js";
/** @import { Box, DrawCurve, DrawStrip, Frame, Lane, Pen, Scene, State, Strip } from "./types" */
/** @import { Style, Table, Theme, View } from "./types" */

export const [LEFT, TOP, MAX_LANE] = [92, 8, 52]; // pixels, as all that follows
const [RIGHT, AXIS, GAP, MIN_LANE, MIN_NAMED, MIN_BLOCK, MIN_COLUMN] = [128, 30, 14, 7, 11, 1.5, 4];
const [MIN_MEMORY, MAX_MEMORY, MEMORY_SHARE] = [80, 300, 0.24]; // the last one of the height
const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** @type {(value: number, low: number, high: number) => number} */
export const clamp = (value, low, high) => Math.max(low, Math.min(value, high));

/** Where everything is. @type {(table: Table, canvas: HTMLCanvasElement, view: View) => Frame} */
export function makeFrame(table, canvas, view) {
  const [width, height, count] = [canvas.clientWidth, canvas.clientHeight, table.lanes.length];
  const room = height - TOP - GAP - AXIS;
  const forLanes = Math.max(room - Math.max(MIN_MEMORY, room * MEMORY_SHARE), MIN_LANE);
  const lane = Math.min(clamp(forLanes / count, MIN_LANE, MAX_LANE) * view.tallness, MAX_LANE);
  const shown = Math.min(forLanes, lane * count);
  const memoryHeight = clamp(room - shown, MIN_MEMORY, MAX_MEMORY);
  const scroll = clamp(view.scroll, 0, lane * count - shown);
  const inner = Math.max(width - LEFT - RIGHT, 50);
  const perTick = inner / (view.to - view.from);
  return {
    inset: lane > 20 ? 3 : lane > 10 ? 1 : 0.5,
    width, height, inner, lane, shown, scroll, perTick, memoryHeight,
    memoryTop: TOP + shown + GAP, axisTop: TOP + shown + GAP + memoryHeight,
    x: (tick) => LEFT + (tick - view.from) * perTick,
    y: (index) => TOP + index * lane - scroll,
    tick: (x) => view.from + (x - LEFT) / perTick,
    laneAt: (y) => (y < TOP || y >= TOP + shown ? -1 : Math.floor((y - TOP + scroll) / lane)),
  };
}

/** @type {(table: Table, canvas: HTMLCanvasElement, state: State, colours: Theme) => Frame} */
export function drawAll(table, canvas, state, colours) {
  const frame = makeFrame(table, canvas, state.view);
  const [pen, ratio] = [/** @type {Pen} */ (canvas.getContext("2d")), window.devicePixelRatio || 1];
  const scene = { pen, table, frame, state, colours };
  // To set its size, also to what it is, clears a canvas.
  Object.assign(canvas, { width: Math.round(frame.width * ratio), height: Math.round(frame.height * ratio) });
  pen.scale(ratio, ratio);
  drawAxis(scene);
  const height = frame.lane - 2 * frame.inset;
  const strips = table.lanes.map((lane, index) => ({ lane, index, top: frame.y(index) + frame.inset, height }));
  const seen = strips.filter(({ top }) => top + height >= TOP && top <= TOP + frame.shown);
  clipped(pen, [LEFT, TOP, frame.inner, frame.shown], () => {
    for (const strip of seen) drawStrip(scene, strip);
    drawMarked(scene, strips);
  });
  clipped(pen, [0, TOP - 4, frame.width, frame.shown + 8], () => {
    const namedEvery = Math.ceil(MIN_NAMED / frame.lane);
    for (const strip of seen) if (strip.index % namedEvery === 0) drawNames(scene, strip, false);
    // Named even where there is room for every other name only.
    if (state.lane >= 0) drawNames(scene, strips[state.lane], true);
  });
  const share = frame.shown / (frame.lane * strips.length);
  if (share < 1) fill(pen, colours.faint, frame.width - 6, TOP + frame.scroll * share, 4, frame.shown * share);
  drawMemory(scene);
  return frame;
}

/** @type {(pen: Pen, colour: string, x: number, y: number, width: number, height: number) => void} */
function fill(pen, colour, x, y, width, height) {
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
}

/** @type {(pen: Pen, colour: string, width: number, points: number[][]) => void} */
function stroke(pen, colour, width, points) {
  Object.assign(pen, { strokeStyle: colour, lineWidth: width });
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
}

/** @type {(pen: Pen, colour: string, width: number, box: Box) => void} */
function outline(pen, colour, width, box) {
  Object.assign(pen, { strokeStyle: colour, lineWidth: width });
  pen.strokeRect(...box);
}

/** @type {(pen: Pen, box: Box, draw: () => void) => void} */
function clipped(pen, box, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(...box);
  pen.clip();
  draw();
  pen.restore();
}

/** @type {(pen: Pen, text: string | number, x: number, y: number, style: Style) => void} */
function write(pen, text, x, y, { size = 12, colour, align = "left", bold = false }) {
  const font = `${bold ? "600 " : ""}${size}px ${FONT}`;
  Object.assign(pen, { font, fillStyle: colour, textAlign: align, textBaseline: "middle" });
  pen.fillText(String(text), x, y);
}

/** @type {(scene: Scene, strip: Strip, isMarked: boolean) => void} */
function drawNames({ pen, frame, colours }, { lane, top, height }, isMarked) {
  const [size, middle] = [Math.min(12.5, Math.max(9, height - 1)), top + height / 2];
  fill(pen, colours.background, 0, middle - size / 2 - 1, LEFT - 4, size + 2);
  fill(pen, colours.background, LEFT + frame.inner + 6, middle - size / 2 - 1, RIGHT - 14, size + 2);
  write(pen, lane.name, LEFT - 8, middle, { size, colour: colours.ink, align: "right", bold: isMarked });
  const figures = { size: Math.min(11, size), colour: lane.is_pale ? colours.faint : colours.ink };
  write(pen, lane.figures, LEFT + frame.inner + 8, middle, figures);
}

/** Where the critical path is shown, all else is faint. @param {Scene} scene @param {Strip} strip */
function drawStrip(scene, strip) {
  const [{ pen, table, frame, state, colours }, { lane, top, height }] = [scene, strip];
  fill(pen, colours.bubble, frame.x(lane.begin), top, (lane.end - lane.begin) * frame.perTick, height);
  const alpha = lane.is_pale ? 0.55 : 1;
  const alphaOf = (/** @type {number} */ isCritical) => (state.showsCritical && !isCritical ? 0.25 * alpha : alpha);
  const draw = table.typical_ticks * frame.perTick < MIN_BLOCK ? drawMerged : drawBlocks;
  draw(scene, strip, alphaOf);
  pen.globalAlpha = alphaOf(0);
  drawBars(scene, strip);
  pen.globalAlpha = 1;
}

/** At the foot of the lane, over its blocks. @type {(scene: Scene, strip: Strip) => void} */
function drawBars({ pen, table, frame, colours }, { lane, top, height }) {
  const tall = Math.max(table.foot * height, 2);
  for (let bar = lane.first_bar; bar < lane.first_bar + lane.num_bars; bar++) {
    const width = Math.max((table.bar.end[bar] - table.bar.begin[bar]) * frame.perTick, 1);
    const [x, y, { colour }] = [frame.x(table.bar.begin[bar]), top + height - tall, table.bars[table.bar_name[bar]]];
    fill(pen, colours.background, x, y - 0.8, width, tall);
    fill(pen, colour === "ink" ? colours.ink : colour, x, y, width, tall);
  }
}

/** @type {(table: Table, block: number, strip: Strip, frame: Frame) => Box} */
function boxOf(table, block, { top, height }, frame) {
  const half = table.half[block];
  const width = Math.max((table.end[block] - table.begin[block]) * frame.perTick, 0.5);
  return [frame.x(table.begin[block]), half === LOWER ? top + height / 2 : top, width, half ? height / 2 : height];
}

/** @type {(table: Table, lane: Lane, from: number, to: number) => [first: number, last: number]} */
function visible(table, lane, from, to) {
  return [Math.max(firstAfter(table, lane, from) - 2, lane.first), firstAfter(table, lane, to)];
}

/** @type {DrawStrip} */
function drawBlocks(scene, strip, alphaOf) {
  const { pen, table, frame, state: { view }, colours } = scene;
  const [first, last] = visible(table, strip.lane, view.from, view.to);
  const hasEdges = table.typical_ticks * frame.perTick > 5;
  for (let block = first; block < last; block++) {
    pen.globalAlpha = alphaOf(table.critical[block]);
    const box = boxOf(table, block, strip, frame);
    const [x, y, width, height] = box;
    const [kind, shades, shade] = [table.kinds[table.kind[block]], strip.lane.shades, table.shade[block]];
    fill(pen, kind.colours[shades][shade], ...box);
    if (hasEdges) fill(pen, colours.background, x + width - 0.8, y, 0.8, height);
    if (height >= 9) labelBlock(scene, block, box, kind.inks[shades][shade]);
    if (!hasEdges || table.half[block] !== LOWER) continue;
    outline(pen, colours.ink, 1, [x, y - height, width - 0.5, 2 * height]);
  }
}

/** In the middle of what can be seen. @type {(scene: Scene, block: number, box: Box, colour: string) => void} */
function labelBlock({ pen, table, frame }, block, [x, y, width, height], colour) {
  const [left, right] = [Math.max(x, LEFT), Math.min(x + width, LEFT + frame.inner)];
  const largest = Math.min(12, height * 0.8);
  const slice = table.num_slices > 1 ? "." + table.slice[block] : "";
  const [whole, number] = [textOf(table, block), table.microbatch[block] + slice];
  const room = (right - left - 3) / 0.62;
  const text = room >= largest * whole.length ? whole : number;
  const size = Math.min(largest, room / text.length);
  if (size >= 6.5) write(pen, text, (left + right) / 2, y + height / 2 + 0.5, { size, colour, align: "center" });
}

/** Blocks too narrow to be seen: columns of whole periods, stacked by what their time went to. @type {DrawStrip} */
function drawMerged({ pen, table, frame, state: { view } }, { lane, top, height }, alphaOf) {
  const shades = lane.shades;
  const span = table.period_ticks * Math.max(1, Math.ceil(MIN_COLUMN / (table.period_ticks * frame.perTick)));
  const [first, last] = visible(table, lane, view.from - span, view.to);
  const origin = Math.floor(view.from / span);
  const count = Math.ceil(view.to / span) - origin;
  const shares = Array.from({ length: 2 * table.kinds.length * shades }, () => new Float64Array(count));
  for (let block = first; block < last; block++) {
    const share = shares[2 * (table.kind[block] * shades + table.shade[block]) + table.critical[block]];
    const weight = table.half[block] ? 0.5 / span : 1 / span;
    for (let column = Math.floor(table.begin[block] / span); column * span < table.end[block]; column++) {
      const inside = Math.min(table.end[block], (column + 1) * span) - Math.max(table.begin[block], column * span);
      if (column >= origin && column < origin + count) share[column - origin] += inside * weight;
    }
  }
  const filled = new Float64Array(count);
  // Whole pixels, or seams would show.
  const edge = (/** @type {number} */ column) => Math.round(frame.x(Math.min((origin + column) * span, lane.end)));
  shares.forEach((share, category) => {
    const [shade, kind] = [(category >> 1) % shades, Math.floor(category / 2 / shades)];
    pen.globalAlpha = alphaOf(category % 2);
    share.forEach((part, column) => {
      filled[column] += part;
      const [x, y] = [edge(column), top + height * (1 - filled[column])];
      if (part) fill(pen, table.kinds[kind].colours[shades][shade], x, y, edge(column + 1) - x, part * height);
    });
  });
}

/** The block under the pointer, and what it waited for. @type {(scene: Scene, strips: Strip[]) => void} */
function drawMarked({ pen, table, frame, state: { marked }, colours }, strips) {
  if (marked < 0) return;
  const placed = (/** @type {number} */ block) => boxOf(table, block, strips[laneOf(table, block)], frame);
  const box = placed(marked);
  outline(pen, colours.ink, 2.5, box);
  if (table.producer[marked] < 0) return;
  const [x, y, width, height] = placed(table.producer[marked]);
  outline(pen, colours.ink, 1.5, [x, y, width, height]);
  const head = [box[0], box[1] + box[3] / 2];
  stroke(pen, colours.ink, 1.5, [[x + width, y + height / 2], head]);
  fill(pen, colours.ink, head[0] - 3, head[1] - 3, 6, 6);
}

function niceStep(/** @type {number} */ rough) {
  const size = 10 ** Math.floor(Math.log10(rough));
  return size * ([1, 2, 5].find((factor) => factor * size >= rough) ?? 10);
}

function drawAxis(/** @type {Scene} */ { pen, table, frame, state: { view }, colours }) {
  const [unit, name] = unitFor(UNITS, table.end_ticks * table.tick_s);
  const perUnit = unit / table.tick_s;
  const step = niceStep(((view.to - view.from) / perUnit) * (90 / frame.inner));
  const y = frame.axisTop;
  for (let at = Math.ceil(view.from / perUnit / step) * step; at <= view.to / perUnit + 1e-9; at += step) {
    const x = Math.round(frame.x(at * perUnit)) + 0.5;
    stroke(pen, colours.line, 1, [[x, TOP], [x, y + 4]]);
    write(pen, +at.toFixed(12), x, y + 13, { colour: colours.ink, align: "center" });
  }
  write(pen, `time (${name})`, LEFT + frame.inner + 8, y + 13, { colour: colours.faint });
}

function drawMemory(/** @type {Scene} */ scene) {
  const { pen, table, frame, state, colours } = scene;
  const { memoryTop: top, memoryHeight: height } = frame;
  const highest = table.most_held || 1;
  const [unit, name] = table.is_bytes ? unitFor(BYTES, highest) : [1, "microbatches"];
  const y = (/** @type {number} */ value) => top + height - (value / highest) * (height - 14);
  const step = Math.max(niceStep(highest / unit / 5), table.is_bytes ? 0 : 1);
  for (let value = 0; value <= highest / unit + 1e-9; value += step) {
    fill(pen, colours.line, LEFT, Math.round(y(value * unit)), frame.inner, 1);
    write(pen, +value.toFixed(6), LEFT - 8, y(value * unit), { size: 11, colour: colours.ink, align: "right" });
  }
  const marked = table.lanes[state.lane];
  write(pen, `alive (${name}), ${marked?.name ?? "all ranks"}`, LEFT + 6, top + 2, { size: 11, colour: colours.faint });
  clipped(pen, [LEFT, top, frame.inner, height + 1], () => {
    for (const lane of table.lanes) drawCurve(scene, lane, y, (marked ? 0.3 : 1) * (lane.is_pale ? 0.45 : 1));
    if (marked) drawCurve(scene, marked, y, 1, 3);
  });
}

/** Of the steps within one pixel, only the highest and the last are drawn. @type {DrawCurve} */
function drawCurve({ pen, table, frame, state: { view }, colours }, lane, y, alpha, width = 1.6) {
  const [first, last] = visible(table, lane, view.from, view.to);
  let [at, most, level] = [frame.x(0), 0, first > lane.first ? table.kept[first - 1] : 0];
  const points = [[at, y(level)]];
  const step = (/** @type {number} */ tick, /** @type {number} */ value) => {
    const x = frame.x(tick);
    if (x - at >= 1) {
      points.push([at, y(most)], [at, y(level)], [x, y(level)]);
      [at, most] = [x, level];
    }
    [most, level] = [Math.max(most, value), value];
  };
  for (let block = first; block < last; block++) {
    step(table.begin[block], table.held[block]);
    step(table.end[block], table.kept[block]);
  }
  step(lane.end + 2 / frame.perTick, level);
  pen.globalAlpha = alpha;
  stroke(pen, lane.colour[colours.name], width, points);
  pen.globalAlpha = 1;
}
