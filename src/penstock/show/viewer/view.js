// What a reader does with the page: move, zoom, point, keep a block, by mouse, finger and keyboard.
import { describe, find, firstAfter, laneOf, makeTable, unpack } from "./data.js";
import { LEFT, MAX_LANE, TOP, clamp, drawAll, makeFrame } from "./draw.js";
/** @import { Frame, Header, State, Tip } from "./types" */

const ZOOM_PER_STEP = 1.25;

/** @type {(header: Header, text: string) => Promise<void>} */
export async function start(header, text) {
  const table = makeTable(header, await unpack(text, header.columns));
  const [root, dark] = [document.documentElement, window.matchMedia("(prefers-color-scheme: dark)")];
  const canvas = /** @type {HTMLCanvasElement} */ (document.getElementById("canvas"));
  const box = /** @type {HTMLElement} */ (document.getElementById("tip"));
  const whole = { from: -0.004 * table.end_ticks, to: 1.006 * table.end_ticks };
  const view = { ...whole, scroll: 0, tallness: 1 };
  const state = { view, marked: -1, lane: -1, kept: false, showsCritical: false };
  let frame = makeFrame(table, canvas, view);
  let drag = /** @type {{ x: number, y: number, moved: number } | null} */ (null);
  let asked = 0;

  // However often it is asked for, once per frame; what is scrolled too far comes back.
  function draw() {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => {
      const theme = root.dataset.theme ?? (dark.matches ? "dark" : "light");
      frame = drawAll(table, canvas, state, table.themes[theme]);
      view.scroll = frame.scroll;
    });
  }

  function place(/** @type {number} */ from, /** @type {number} */ ticks) {
    const span = clamp(ticks, 1e-6 * table.end_ticks, whole.to - whole.from);
    const begin = clamp(from, whole.from, whole.to - span);
    Object.assign(view, { from: begin, to: begin + span });
    draw();
  }

  // Keeps the time under x where it is.
  function zoom(/** @type {number} */ factor, x = LEFT + frame.inner / 2) {
    const at = frame.tick(x);
    place(at - (at - view.from) / factor, (view.to - view.from) / factor);
  }

  function move(/** @type {number} */ across, down = 0) {
    view.scroll += down;
    place(view.from + across / frame.perTick, view.to - view.from);
  }

  function fit() {
    Object.assign(view, whole, { scroll: 0, tallness: 1 });
    draw();
  }

  // Makes lanes taller and keeps the rank under y where it is.
  function heighten(/** @type {number} */ factor, y = TOP + frame.shown / 2) {
    const lane = (y - TOP + frame.scroll) / frame.lane;
    view.tallness = Math.max(1, view.tallness * Math.min(factor, MAX_LANE / frame.lane));
    view.scroll = lane * makeFrame(table, canvas, view).lane - (y - TOP);
    draw();
  }

  function show(/** @type {Tip | null} */ tip, x = 0, y = 0) {
    box.hidden = !tip;
    if (!tip) return;
    const parts = [tip.title, tip.lines.join("\n"), tip.more.join("\n")];
    parts.forEach((part, at) => (box.children[at].textContent = part));
    const left = x + 16 + box.offsetWidth > canvas.clientWidth ? x - 16 - box.offsetWidth : x + 16;
    box.style.left = `${Math.max(left, 4)}px`;
    box.style.top = `${clamp(y + 16, 4, canvas.clientHeight - box.offsetHeight - 4)}px`;
  }

  function release() {
    Object.assign(state, { marked: -1, lane: -1, kept: false });
    show(null);
    draw();
  }

  function pointAt(/** @type {number} */ x, /** @type {number} */ y, keeps = false) {
    const index = frame.laneAt(y);
    const isInside = index >= 0 && x >= LEFT && x <= LEFT + frame.inner;
    const down = (y - frame.y(index)) / frame.lane;
    const { block = -1, tip } = isInside ? find(table, index, frame.tick(x), down) : { tip: null };
    Object.assign(state, { lane: index, marked: block, kept: keeps && block >= 0 });
    show(tip, x, y);
    draw();
  }

  // Marks a block and brings it into sight, as a pointer would.
  function goTo(/** @type {number} */ block) {
    const index = laneOf(table, block);
    Object.assign(state, { marked: block, lane: index, kept: true });
    const [ticks, middle] = [view.to - view.from, (table.begin[block] + table.end[block]) / 2];
    if (middle < view.from || middle > view.to) place(middle - ticks / 2, ticks);
    const top = index * frame.lane - view.scroll;
    if (top < 0 || top + frame.lane > frame.shown) move(0, top - frame.shown / 2);
    draw();
    requestAnimationFrame(() => show(describe(table, block), frame.x(middle), frame.y(index) + frame.lane));
  }

  // To a neighbour in the lane, or to what another lane does at the same time.
  function step(/** @type {number} */ blocks, /** @type {number} */ lanes) {
    if (state.marked < 0) return goTo(table.lanes[Math.max(state.lane, 0)].first);
    const lane = table.lanes[clamp(laneOf(table, state.marked) + lanes, 0, table.lanes.length - 1)];
    const to = lanes ? firstAfter(table, lane, table.begin[state.marked]) - 1 : state.marked + blocks;
    goTo(clamp(to, lane.first, lane.first + lane.count - 1));
  }

  const turn = (/** @type {number} */ lanes) => (state.kept ? step(0, lanes) : move(0, lanes * 3 * frame.lane));
  /** @type {Record<string, () => void>} */
  const KEYS = {
    ArrowLeft: () => move(-0.1 * frame.inner), ArrowRight: () => move(0.1 * frame.inner),
    ArrowUp: () => turn(-1), ArrowDown: () => turn(1), "[": () => step(-1, 0), "]": () => step(1, 0),
    "+": () => zoom(ZOOM_PER_STEP), "=": () => zoom(ZOOM_PER_STEP), "-": () => zoom(1 / ZOOM_PER_STEP),
    t: () => heighten(ZOOM_PER_STEP), l: () => heighten(1 / ZOOM_PER_STEP),
    "0": fit, Home: fit, Escape: release,
    c: () => {
      state.showsCritical = !state.showsCritical;
      document.querySelector("[data-key=c]")?.setAttribute("aria-pressed", String(state.showsCritical));
      draw();
    },
  };

  canvas.onwheel = (event) => {
    event.preventDefault();
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = (isSideways ? event.deltaX : event.deltaY) * (event.deltaMode ? 24 : 1);
    if (isSideways || event.shiftKey) move(pixels);
    else if (event.offsetX < LEFT) heighten(Math.exp(-pixels / 400), event.offsetY);
    else zoom(Math.exp(-pixels / 400), event.offsetX);
  };
  canvas.onpointerdown = (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
  };
  canvas.onpointermove = ({ offsetX: x, offsetY: y }) => {
    if (!drag) return state.kept ? undefined : pointAt(x, y);
    const [across, down] = [x - drag.x, y - drag.y];
    drag = { x, y, moved: drag.moved + Math.hypot(across, down) };
    if (drag.moved < 4) return;
    show(null);
    move(-across, -down);
  };
  canvas.onpointerup = ({ offsetX: x, offsetY: y }) => {
    if (drag && drag.moved < 4) pointAt(x, y, true);
    drag = null;
  };
  canvas.onpointerleave = () => state.kept || drag || release();
  canvas.ondblclick = fit;
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const button of document.querySelectorAll("button")) button.onclick = KEYS[button.dataset.key ?? ""];
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  draw();
}
