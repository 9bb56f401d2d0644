// Draws a table of blocks into a canvas: lanes above, one axis of time, memory below.

const [LEFT, RIGHT, TOP, AXIS, GAP] = [92, 128, 8, 30, 14]; // pixels around the lanes
const [MIN_LANE, MAX_LANE, MIN_NAMED, MIN_BLOCK, MIN_COLUMN] = [7, 52, 11, 1.5, 4]; // pixels
const [MIN_MEMORY, MAX_MEMORY, MEMORY_SHARE] = [80, 300, 0.24]; // pixels, and the share of the height
const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

// Where everything is: view = { from, to } in ticks, scroll in pixels, tallness in usual heights of a lane.
function makeFrame(table, canvas, view) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const room = height - TOP - GAP - AXIS;
  const lanesHeight = Math.max(room - Math.max(MIN_MEMORY, room * MEMORY_SHARE), MIN_LANE);
  const usual = Math.max(MIN_LANE, Math.min(MAX_LANE, lanesHeight / table.lanes.length));
  const lane = Math.min(usual * view.tallness, Math.max(usual, MAX_LANE));
  const shown = Math.min(lanesHeight, lane * table.lanes.length);
  const memoryHeight = Math.max(MIN_MEMORY, Math.min(MAX_MEMORY, room - shown));
  const inner = Math.max(width - LEFT - RIGHT, 50);
  const maxScroll = Math.max(lane * table.lanes.length - shown, 0);
  const scroll = Math.max(0, Math.min(view.scroll, maxScroll));
  const perTick = inner / (view.to - view.from);
  return {
    inset: lane > 20 ? 3 : lane > 10 ? 1 : 0.5,
    width, height, inner, lane, shown, scroll, maxScroll, perTick, memoryHeight,
    memoryTop: TOP + shown + GAP, axisTop: TOP + shown + GAP + memoryHeight,
    x: (tick) => LEFT + (tick - view.from) * perTick,
    y: (index) => TOP + index * lane - scroll,
    tick: (x) => view.from + (x - LEFT) / perTick,
    laneAt: (y) => (y < TOP || y >= TOP + shown ? -1 : Math.floor((y - TOP + scroll) / lane)),
  };
}

function drawAll(table, canvas, state, colours) {
  const ratio = window.devicePixelRatio || 1;
  const frame = makeFrame(table, canvas, state.view);
  const [width, height] = [Math.round(frame.width * ratio), Math.round(frame.height * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, frame.width, frame.height);
  drawAxis(pen, table, frame, state.view, colours);
  const namedEvery = Math.ceil(MIN_NAMED / frame.lane);
  const withNames = (draw) => clipped(pen, 0, TOP - 4, frame.width, frame.shown + 8, draw);
  withNames(() => table.lanes.forEach((lane, index) => {
    const top = frame.y(index);
    if (top + frame.lane < TOP || top > TOP + frame.shown) return;
    const strip = { lane, top: top + frame.inset, height: frame.lane - 2 * frame.inset };
    if (index % namedEvery === 0) drawNames(pen, strip, frame, colours, false);
    clipped(pen, LEFT, TOP, frame.inner, frame.shown, () => drawStrip(pen, table, strip, frame, state, colours));
  }));
  withNames(() => {
    if (state.lane < 0) return;
    const top = frame.y(state.lane) + frame.inset;
    drawNames(pen, { lane: table.lanes[state.lane], top, height: frame.lane - 2 * frame.inset }, frame, colours, true);
  });
  if (frame.maxScroll) drawScrollBar(pen, frame, colours);
  clipped(pen, LEFT, TOP, frame.inner, frame.shown, () => drawMarked(pen, table, frame, state, colours));
  drawMemory(pen, table, frame, state, colours);
  return frame;
}

function clipped(pen, x, y, width, height, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  draw();
  pen.restore();
}

function write(pen, text, x, y, { size = 12, colour, align = "left", bold = false }) {
  pen.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(text, x, y);
}

// The marked lane is named even where there is room for every other name only.
function drawNames(pen, { lane, top, height }, frame, colours, isMarked) {
  const [size, middle] = [Math.min(12.5, Math.max(9, height - 1)), top + height / 2];
  if (isMarked) {
    pen.fillStyle = colours.background;
    pen.fillRect(0, middle - size / 2 - 1, LEFT - 4, size + 2);
    pen.fillRect(LEFT + frame.inner + 6, middle - size / 2 - 1, RIGHT - 14, size + 2);
  }
  write(pen, lane.name, LEFT - 8, middle, { size, colour: colours.ink, align: "right", bold: isMarked });
  const figures = { size: Math.min(11, size), colour: lane.is_pale ? colours.faint : colours.ink };
  write(pen, lane.figures, LEFT + frame.inner + 8, middle, figures);
}

function drawScrollBar(pen, frame, colours) {
  const share = frame.shown / (frame.shown + frame.maxScroll);
  pen.fillStyle = colours.faint;
  pen.fillRect(frame.width - 6, TOP + frame.scroll * share, 4, frame.shown * share);
}

// Where the critical path is shown, all else is faint.
function drawStrip(pen, table, strip, frame, { view, showsCritical }, colours) {
  const { lane, top, height } = strip;
  pen.fillStyle = colours.bubble;
  pen.fillRect(frame.x(0), top, lane.end * frame.perTick, height);
  const isMerged = table.typical_ticks * frame.perTick < MIN_BLOCK;
  const alpha = lane.is_pale ? 0.55 : 1;
  for (const isCritical of showsCritical ? [0, 1] : [undefined]) {
    pen.globalAlpha = isCritical === 0 ? 0.25 * alpha : alpha;
    if (isMerged) drawMerged(pen, table, strip, frame, view, isCritical === 1);
    else drawBlocks(pen, table, strip, frame, view, colours, isCritical);
  }
  pen.globalAlpha = 1;
}

function boxOf(table, block, { top, height }, frame) {
  const half = table.half[block];
  const width = Math.max((table.end[block] - table.begin[block]) * frame.perTick, 0.5);
  return [frame.x(table.begin[block]), half === LOWER ? top + height / 2 : top, width, half ? height / 2 : height];
}

function visible(table, lane, view) {
  const first = Math.max(firstAfter(table, lane, view.from) - 2, lane.first);
  return [first, firstAfter(table, lane, view.to)];
}

function drawBlocks(pen, table, strip, frame, view, colours, isCritical) {
  const [first, last] = visible(table, strip.lane, view);
  const hasEdges = table.typical_ticks * frame.perTick > 5;
  for (let block = first; block < last; block++) {
    if (isCritical !== undefined && table.critical[block] !== isCritical) continue;
    const [x, y, width, height] = boxOf(table, block, strip, frame);
    const kind = kindOf(table, block);
    const shade = table.shade[block];
    pen.fillStyle = kind.colours[strip.lane.shades][shade];
    pen.fillRect(x, y, width, height);
    if (hasEdges) {
      pen.fillStyle = colours.background;
      pen.fillRect(x + width - 0.8, y, 0.8, height);
    }
    if (height >= 9) labelBlock(pen, table, block, [x, y, width, height], kind.inks[strip.lane.shades][shade], frame);
    if (table.half[block] === LOWER && hasEdges) {
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 1;
      pen.strokeRect(x, y - height, width - 0.5, 2 * height);
    }
  }
}

// The whole text where there is room for it, else the microbatch; in the middle of what can be seen.
function labelBlock(pen, table, block, [x, y, width, height], colour, frame) {
  const [left, right] = [Math.max(x, LEFT), Math.min(x + width, LEFT + frame.inner)];
  const largest = Math.min(12, height * 0.8);
  const sizeOf = (text) => Math.min(largest, (right - left - 3) / (0.62 * text.length));
  const [whole, number] = [textOf(table, block), numberOf(table, block)];
  const text = sizeOf(whole) === largest ? whole : number;
  if (sizeOf(text) < 8) return;
  write(pen, text, (left + right) / 2, y + height / 2 + 0.5, { size: sizeOf(text), colour, align: "center" });
}

// Blocks too narrow to be seen: columns of whole periods, each stacked by what its time went to.
function drawMerged(pen, table, { lane, top, height }, frame, view, criticalOnly) {
  const shades = lane.shades;
  const span = table.period_ticks * Math.max(1, Math.ceil(MIN_COLUMN / (table.period_ticks * frame.perTick)));
  const [first, last] = visible(table, lane, { from: view.from - span, to: view.to });
  const origin = Math.floor(view.from / span);
  const count = Math.ceil(view.to / span) - origin;
  const shares = Array.from({ length: table.kinds.length * shades }, () => new Float64Array(count));
  for (let block = first; block < last; block++) {
    if (criticalOnly && !table.critical[block]) continue;
    const share = shares[table.kind[block] * shades + table.shade[block]];
    const weight = table.half[block] ? 0.5 / span : 1 / span;
    for (let column = Math.floor(table.begin[block] / span); column * span < table.end[block]; column++) {
      const inside = Math.min(table.end[block], (column + 1) * span) - Math.max(table.begin[block], column * span);
      if (column >= origin && column < origin + count) share[column - origin] += inside * weight;
    }
  }
  const filled = new Float64Array(count);
  shares.forEach((share, category) => {
    pen.fillStyle = table.kinds[Math.floor(category / shades)].colours[shades][category % shades];
    let from = 0;
    for (let column = 1; column <= count; column++) {
      const isSame = column < count && Math.abs(share[column] - share[from]) < 1e-3 && Math.abs(filled[column] - filled[from]) < 1e-3;
      if (isSame) continue;
      const rise = share[from] * height;
      const [x, end] = [frame.x((origin + from) * span), frame.x(Math.min((origin + column) * span, lane.end))];
      if (rise > 0) pen.fillRect(x, top + height * (1 - filled[from]) - rise, end - x, rise);
      from = column;
    }
    for (let column = 0; column < count; column++) filled[column] += share[column];
  });
}

function stripOf(table, block, frame) {
  const index = laneOf(table, block);
  return { lane: table.lanes[index], top: frame.y(index) + frame.inset, height: frame.lane - 2 * frame.inset };
}

// The block under the pointer, and an arrow from the one that it waited for.
function drawMarked(pen, table, frame, state, colours) {
  const block = state.marked;
  if (block < 0) return;
  pen.strokeStyle = colours.ink;
  const box = boxOf(table, block, stripOf(table, block, frame), frame);
  pen.lineWidth = 2.5;
  pen.strokeRect(...box);
  const producer = table.producer[block];
  if (producer < 0) return;
  const [x, y, width, height] = boxOf(table, producer, stripOf(table, producer, frame), frame);
  pen.lineWidth = 1.5;
  pen.strokeRect(x, y, width, height);
  pen.beginPath();
  pen.moveTo(x + width, y + height / 2);
  pen.lineTo(box[0], box[1] + box[3] / 2);
  pen.stroke();
  pen.beginPath();
  pen.arc(box[0], box[1] + box[3] / 2, 3.5, 0, 7);
  pen.fillStyle = colours.ink;
  pen.fill();
}

function niceStep(rough) {
  const size = 10 ** Math.floor(Math.log10(rough));
  return size * ([1, 2, 5].find((factor) => factor * size >= rough) ?? 10);
}

function drawAxis(pen, table, frame, view, colours) {
  const [unit, name] = unitFor(table.end_ticks * table.tick_s);
  const perUnit = unit / table.tick_s;
  const step = niceStep(((view.to - view.from) / perUnit) * (90 / frame.inner));
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const y = frame.axisTop;
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  for (let at = Math.ceil(view.from / perUnit / step) * step; at <= view.to / perUnit + 1e-9; at += step) {
    const x = Math.round(frame.x(at * perUnit)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, y + 4);
    pen.stroke();
    write(pen, Math.abs(at).toFixed(places), x, y + 13, { colour: colours.ink, align: "center" });
  }
  write(pen, `time (${name})`, LEFT + frame.inner + 8, y + 13, { colour: colours.faint });
}

function drawMemory(pen, table, frame, state, colours) {
  const { memoryTop: top, memoryHeight: height } = frame;
  const highest = table.most_held || 1;
  const [unit, name] = table.is_bytes ? BYTES.find(([bytes]) => highest >= bytes) ?? BYTES[4] : [1, "activations"];
  const y = (value) => top + height - (value / highest) * (height - 14);
  const step = Math.max(niceStep(highest / unit / 5), table.is_bytes ? 0 : 1);
  for (let value = 0; value <= highest / unit + 1e-9; value += step) {
    pen.fillStyle = colours.line;
    pen.fillRect(LEFT, Math.round(y(value * unit)), frame.inner, 1);
    write(pen, digits(value, 6), LEFT - 8, y(value * unit), { size: 11, colour: colours.ink, align: "right" });
  }
  write(pen, `alive (${name})`, LEFT + 6, top + 2, { size: 11, colour: colours.faint });
  clipped(pen, LEFT, top, frame.inner, height + 1, () => {
    for (const lane of table.lanes) drawCurve(pen, table, frame, state, { lane, y, isMarked: false });
    if (state.lane >= 0) drawCurve(pen, table, frame, state, { lane: table.lanes[state.lane], y, isMarked: true });
  });
  write(pen, state.lane >= 0 ? table.lanes[state.lane].name : "all ranks", LEFT + frame.inner + 8, top + height / 2, {
    size: 11, colour: state.lane >= 0 ? colours.ink : colours.faint,
  });
}

// One line per lane; of the steps within one pixel, only the highest and the last are drawn.
function drawCurve(pen, table, frame, { view, lane: marked }, { lane, y, isMarked }) {
  const [first, last] = visible(table, lane, view);
  const isFirst = first === lane.first;
  let [at, most, level] = [frame.x(isFirst ? 0 : table.end[first - 1]), 0, isFirst ? 0 : table.kept[first - 1]];
  pen.strokeStyle = lane.colour[document.documentElement.dataset.shown];
  pen.lineWidth = isMarked ? 3 : 1.6;
  pen.globalAlpha = isMarked || marked < 0 ? 1 : 0.3;
  pen.beginPath();
  pen.moveTo(at, y(level));
  const step = (tick, value) => {
    const x = frame.x(tick);
    if (x - at >= 1) {
      pen.lineTo(at, y(most));
      pen.lineTo(at, y(level));
      pen.lineTo(x, y(level));
      [at, most] = [x, level];
    }
    [most, level] = [Math.max(most, value), value];
  };
  for (let block = first; block < last; block++) {
    const next = block + 1;
    const isHandedOn = next < lane.first + lane.count && table.begin[next] <= table.end[block];
    step(table.begin[block], table.held[block]);
    if (!isHandedOn) step(table.end[block], table.kept[block]);
  }
  step(lane.end + 2 / frame.perTick, level);
  pen.stroke();
  pen.globalAlpha = 1;
}
