"use strict";
// From the text in the page to a table of blocks, and what can be asked of it. Knows nothing of canvases.

const TYPES = { uint8: Uint8Array, int32: Int32Array, uint32: Uint32Array, float64: Float64Array };
const [UPPER, LOWER] = [1, 2]; // the halves of an overlapped pair; 0 is a whole block

async function unpack(text, contents) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  return Object.fromEntries(contents.map((c) => [c.name, new TYPES[c.type](buffer, c.offset, c.length)]));
}

// Times are in ticks from here on: start and end of every block, from gaps and durations.
function makeTable(header, columns) {
  const count = columns.gap.length;
  const [begin, end] = [new Float64Array(count), new Float64Array(count)];
  for (const lane of header.lanes) {
    let free = 0;
    for (let block = lane.first; block < lane.first + lane.count; block++) {
      begin[block] = free + columns.gap[block];
      free = end[block] = begin[block] + columns.duration[block];
    }
  }
  return { ...header, ...columns, begin, end };
}

function laneOf(table, block) {
  let [low, high] = [0, table.lanes.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (table.lanes[middle].first <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The first block of a lane that starts after this moment; one behind the last if none does.
function firstAfter(table, lane, tick) {
  let [low, high] = [lane.first, lane.first + lane.count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (table.begin[middle] <= tick) low = middle + 1;
    else high = middle;
  }
  return low;
}

// What lies at a moment of a lane: { block } or, in a bubble, { before }, the block that ends it; null at the end.
function find(table, lane, tick, isUpperHalf) {
  const next = firstAfter(table, lane, tick);
  let block = next - 1;
  if (block >= lane.first && tick < table.end[block]) {
    if (table.half[block] === LOWER && isUpperHalf) block--;
    return { block };
  }
  return next < lane.first + lane.count ? { before: next } : null;
}

function kindOf(table, block) {
  return table.kinds[table.kind[block]];
}

function numberOf(table, block) {
  const part = table.num_slices > 1 ? "." + table.slice[block] : "";
  return table.microbatch[block] + part;
}

// As in files and messages: a slice is named unless it is the first.
function textOf(table, block) {
  const part = table.slice[block] ? "." + table.slice[block] : "";
  return table.stage[block] + kindOf(table, block).letter + table.microbatch[block] + part;
}

// When the lane was done with what stands before this block; the two of a pair wait together.
function freeSince(table, block) {
  const first = table.half[block] === LOWER ? block - 1 : block;
  return first > table.lanes[laneOf(table, first)].first ? table.end[first - 1] : 0;
}

// The idle time before a block, in ticks, and in words what it was spent on.
function idleBefore(table, block) {
  const [since, until] = [freeSince(table, block), table.begin[block]];
  if (until - since <= 0) return { ticks: 0, since, reasons: [] };
  const reasons = [];
  const producer = table.producer[block];
  let at = since;
  const add = (moment, reason) => {
    if (moment - at > 0) reasons.push(`${seconds(table, moment - at)} ${reason}`);
    at = Math.max(at, moment);
  };
  if (producer >= 0) {
    const made = Math.min(table.end[producer], until);
    const lane = table.lanes[laneOf(table, producer)];
    add(made, `until ${textOf(table, producer)} on ${lane.full_name} was done`);
    add(Math.min(table.end[producer] + table.transfer[block], until), "for its message to arrive");
  }
  add(until, "with nothing missing: preparing to run");
  return { ticks: until - since, since, reasons };
}

function describe(table, block) {
  const kind = kindOf(table, block);
  const idle = idleBefore(table, block);
  const part = table.num_slices > 1 ? `, slice ${table.slice[block]}` : "";
  const lane = table.lanes[laneOf(table, block)];
  const lines = [
    `${lane.full_name}, stage ${table.stage[block]}, microbatch ${table.microbatch[block]}${part}`,
    `${moment(table, table.begin[block])} to ${moment(table, table.end[block])}, ` +
      `takes ${seconds(table, table.end[block] - table.begin[block])}`,
    `memory of the rank: ${amount(table, table.held[block])}`,
  ];
  const half = table.half[block];
  if (half) lines.push(`overlaps with ${textOf(table, half === UPPER ? block + 1 : block - 1)}`);
  return { title: `${textOf(table, block)} ${kind.name}`, lines, more: describeIdle(table, idle) };
}

function describeIdle(table, idle) {
  if (!idle.ticks) return ["no idle time before it"];
  return [`${seconds(table, idle.ticks)} idle before it:`, ...idle.reasons];
}

function describeBubble(table, before) {
  const idle = idleBefore(table, before);
  const span = `${moment(table, idle.since)} to ${moment(table, table.begin[before])}`;
  const lane = table.lanes[laneOf(table, before)];
  return { title: `bubble before ${textOf(table, before)}`, lines: [`${lane.full_name}, ${span}`], more: describeIdle(table, idle) };
}

// Figures: seconds in their natural unit, with as many digits as a reader can use.

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

function unitFor(duration) {
  return UNITS.find(([size]) => Math.abs(duration) >= 0.9995 * size) ?? (duration ? UNITS[3] : UNITS[0]);
}

function digits(value, count) {
  return Number(value.toPrecision(count)).toString();
}

function seconds(table, ticks) {
  const [size, name] = unitFor(ticks * table.tick_s);
  return `${digits((ticks * table.tick_s) / size, 4)} ${name}`;
}

// A moment in the unit of the axis, so that moments can be compared.
function moment(table, ticks) {
  const [size, name] = unitFor(table.end_ticks * table.tick_s);
  return `${digits((ticks * table.tick_s) / size, 6)} ${name}`;
}

const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

function amount(table, value) {
  if (!table.is_bytes) return `${value} activation${value === 1 ? "" : "s"}`;
  const [size, name] = BYTES.find(([bytes]) => value >= 0.9995 * bytes) ?? BYTES[4];
  return `${digits(value / size, 3)} ${name}`;
}
