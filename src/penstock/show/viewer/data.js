// From the text in the page to a table of blocks, and what can be asked of it. Knows nothing of canvases.
/** @import { Ask, Columns, Find, Header, Lane, Numbers, Spans, Table, Tip, Unit } from "./types" */

const TYPES = { uint8: Uint8Array, int32: Int32Array, uint32: Uint32Array, float64: Float64Array };
export const [UPPER, LOWER] = [1, 2]; // the halves of an overlapped pair; 0 is a whole block

/** @type {(text: string, contents: Header["columns"]) => Promise<Columns>} */
export async function unpack(text, contents) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const columns = contents.map((c) => [c.name, new TYPES[c.type](buffer, c.offset, c.length)]);
  return Object.fromEntries(columns);
}

/** From durations and the gaps before them. @type {(lanes: number[][], gap: Numbers, duration: Numbers) => Spans} */
function layOut(lanes, gap, duration) {
  const [begin, end] = [new Float64Array(gap.length), new Float64Array(gap.length)];
  for (const [first, count] of lanes) {
    let free = 0;
    for (let at = first; at < first + count; at++) {
      begin[at] = free + gap[at];
      free = end[at] = begin[at] + duration[at];
    }
  }
  return { begin, end };
}

/** @type {(header: Header, columns: Columns) => Table} */
export function makeTable(header, columns) {
  const blocks = layOut(header.lanes.map((l) => [l.first, l.count]), columns.gap, columns.duration);
  const bar = layOut(header.lanes.map((l) => [l.first_bar, l.num_bars]), columns.bar_gap, columns.bar_duration);
  return { ...header, ...columns, ...blocks, bar };
}

/** @type {Ask<number>} */
export function laneOf(table, block) {
  return table.lanes.findLastIndex((lane) => lane.first <= block);
}

/** The first block that starts after a tick, or the end. @type {(table: Table, lane: Lane, tick: number) => number} */
export function firstAfter(table, lane, tick) {
  let [low, high] = [lane.first, lane.first + lane.count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (table.begin[middle] <= tick) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The bar, block or bubble at a tick of a lane, so far down in it: 0 is its top, 1 its foot. @type {Find} */
export function find(table, index, tick, down) {
  const lane = table.lanes[index];
  const bars = down > 1 - table.foot ? lane.num_bars : 0;
  for (let bar = lane.first_bar; bar < lane.first_bar + bars; bar++)
    if (table.bar.begin[bar] <= tick && tick < table.bar.end[bar]) return { tip: describeBar(table, index, bar) };
  const next = firstAfter(table, lane, tick);
  if (next > lane.first && tick < table.end[next - 1]) {
    const block = table.half[next - 1] === LOWER && down < 0.5 ? next - 2 : next - 1;
    return { block, tip: describe(table, block) };
  }
  return { tip: lane.begin <= tick && tick < lane.end ? describeBubble(table, index, next) : null };
}

/** As in files and messages: a slice is named unless it is the first. @type {Ask<string>} */
export function textOf(table, block) {
  const slice = table.slice[block] ? "." + table.slice[block] : "";
  return table.stage[block] + table.kinds[table.kind[block]].letter + table.microbatch[block] + slice;
}

/** Also behind the last block of a lane. @param {Table} table @param {number} index @param {number} block */
function idleBefore(table, index, block) {
  const lane = table.lanes[index];
  const first = table.half[block] === LOWER ? block - 1 : block; // the two of a pair wait together
  const since = first > lane.first ? table.end[first - 1] : lane.begin;
  const isBehind = first === lane.first + lane.count;
  const until = isBehind ? lane.end : table.begin[first];
  const reasons = [];
  const gap = first + index; // a lane has one gap more than blocks
  for (let at = table.idle_gap.indexOf(gap); table.idle_gap[at] === gap; at++)
    reasons.push(`${seconds(table, table.idle_ticks[at])} ${table.causes[table.idle_cause[at]]}`);
  const producer = isBehind ? -1 : table.producer[block];
  if (producer >= 0 && reasons.length)
    reasons.push(`the message of ${textOf(table, producer)} came last, after ${seconds(table, table.transfer[block])}`);
  return { since, until, isBehind, reasons };
}

/** Both ends have the unit of the axis, to be compared. @type {(table: Table, begin: number, end: number) => string} */
function span(table, begin, end) {
  const ends = [begin, end].map((tick) => seconds(table, tick, 6, table.end_ticks));
  return `${ends.join(" to ")}, takes ${seconds(table, end - begin)}`;
}

/** @type {Ask<Tip>} */
export function describe(table, block) {
  const [index, half] = [laneOf(table, block), table.half[block]];
  const slice = table.num_slices > 1 ? `, slice ${table.slice[block]}` : "";
  const { since, until, reasons } = idleBefore(table, index, block);
  const lines = [
    `${table.lanes[index].full_name}, stage ${table.stage[block]}, microbatch ${table.microbatch[block]}${slice}`,
    span(table, table.begin[block], table.end[block]),
    `memory of the rank: ${amount(table, table.held[block])}`,
  ];
  if (half) lines.push(`overlaps with ${textOf(table, half === UPPER ? block + 1 : block - 1)}`);
  const idle = until > since ? `${seconds(table, until - since)} idle before it:` : "no idle time before it";
  const title = `${textOf(table, block)} ${table.kinds[table.kind[block]].name}`;
  return { title, lines, more: [idle, ...reasons] };
}

/** @type {(table: Table, index: number, before: number) => Tip} */
function describeBubble(table, index, before) {
  const { since, until, isBehind, reasons } = idleBefore(table, index, before);
  const title = isBehind ? `bubble after ${textOf(table, before - 1)}` : `bubble before ${textOf(table, before)}`;
  return { title, lines: [table.lanes[index].full_name, span(table, since, until)], more: reasons };
}

/** @type {(table: Table, index: number, bar: number) => Tip} */
function describeBar(table, index, bar) {
  const { text, name } = table.bars[table.bar_name[bar]];
  const lines = [table.lanes[index].full_name, span(table, table.bar.begin[bar], table.bar.end[bar])];
  return { title: `${text} ${name}`, lines, more: [] };
}

/** @type {Unit[]} */
export const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
/** @type {Unit[]} */
export const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

/** @type {(units: Unit[], value: number) => Unit} */
export function unitFor(units, value) {
  return units.find(([size]) => Math.abs(value) >= 0.9995 * size) ?? units[units.length - 1];
}

/** @type {(table: Table, ticks: number, digits?: number, like?: number) => string} */
function seconds(table, ticks, digits = 4, like = ticks) {
  const [size, name] = unitFor(UNITS, like * table.tick_s || 1);
  return `${+((ticks * table.tick_s) / size).toPrecision(digits)} ${name}`;
}

/** @type {(table: Table, value: number) => string} */
function amount(table, value) {
  if (!table.is_bytes) return `${+value.toPrecision(4)} microbatch${value === 1 ? "" : "es"}`;
  const [size, name] = unitFor(BYTES, value);
  return `${+(value / size).toPrecision(3)} ${name}`;
}
