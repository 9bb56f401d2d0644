// What a reader does with the page: move, zoom, point, keep a block, by mouse, finger and keyboard.

const ZOOM_PER_STEP = 1.25;
const COLOURS = ["background", "ink", "faint", "bubble", "line"];

async function start(header, text) {
  const table = makeTable(header, await unpack(text, header.columns));
  const [canvas, tip] = [document.getElementById("canvas"), document.getElementById("tip")];
  const whole = { from: -0.004 * table.end_ticks, to: 1.006 * table.end_ticks };
  const state = { view: { ...whole, scroll: 0, tallness: 1 }, marked: -1, lane: -1, kept: false, showsCritical: false };
  let [frame, drag, isWaiting] = [null, null, false];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function draw() {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      const root = document.documentElement;
      root.dataset.shown = root.dataset.theme ?? (dark.matches ? "dark" : "light");
      const style = getComputedStyle(root);
      const colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
      frame = drawAll(table, canvas, state, colours);
      state.view.scroll = frame.scroll;
    });
  }

  // Zooms by a factor and keeps the moment under x where it is.
  function zoom(factor, x) {
    const { view } = state;
    const at = frame.tick(x);
    const span = Math.min(Math.max((view.to - view.from) / factor, 1e-6 * table.end_ticks), whole.to - whole.from);
    place(at - ((at - view.from) / (view.to - view.from)) * span, span);
  }

  function place(from, span) {
    const begin = Math.max(whole.from, Math.min(from, whole.to - span));
    Object.assign(state.view, { from: begin, to: begin + span });
    draw();
  }

  const move = (pixels) => place(state.view.from + pixels / frame.perTick, state.view.to - state.view.from);

  function fit() {
    Object.assign(state.view, whole, { scroll: 0, tallness: 1 });
    draw();
  }

  function scroll(pixels) {
    state.view.scroll = Math.max(0, Math.min(state.view.scroll + pixels, frame.maxScroll));
    draw();
  }

  // Makes lanes taller and keeps the rank under y where it is.
  function heighten(factor, y) {
    const { view } = state;
    const lane = (y - TOP + view.scroll) / frame.lane;
    view.tallness = Math.max(1, Math.min(view.tallness * factor, (MAX_LANE / frame.lane) * view.tallness));
    const height = makeFrame(table, canvas, view).lane;
    view.scroll = Math.max(0, lane * height - (y - TOP));
    draw();
  }

  function toggleCritical() {
    state.showsCritical = !state.showsCritical;
    document.getElementById("critical").setAttribute("aria-pressed", String(state.showsCritical));
    draw();
  }

  function show(found, x, y) {
    tip.hidden = !found;
    if (!found) return;
    const entry = (name, line) => Object.assign(document.createElement("div"), { className: name, textContent: line });
    const title = document.createElement("b");
    title.textContent = found.title;
    tip.replaceChildren(title, ...found.lines.map((l) => entry("", l)), ...found.more.map((l) => entry("more", l)));
    const left = x + 16 + tip.offsetWidth > canvas.clientWidth ? x - 16 - tip.offsetWidth : x + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(Math.min(y + 16, canvas.clientHeight - tip.offsetHeight - 4), 4)}px`;
  }

  function letGo() {
    Object.assign(state, { marked: -1, lane: -1, kept: false });
    show(null);
    draw();
  }

  function pointAt(x, y) {
    const index = frame.laneAt(y);
    const lane = table.lanes[index];
    const isInside = lane && x >= LEFT && x <= LEFT + frame.inner;
    const isUpper = lane && y < frame.y(index) + frame.lane / 2;
    const found = isInside ? find(table, lane, frame.tick(x), isUpper) : null;
    Object.assign(state, { lane: lane ? index : -1, marked: found?.block ?? -1 });
    if (found?.block >= 0) show(describe(table, found.block), x, y);
    else if (found) show(describeBubble(table, found.before), x, y);
    else show(null);
    draw();
  }

  // Marks a block and brings it into sight, as a pointer would.
  function goTo(block) {
    const index = laneOf(table, block);
    Object.assign(state, { marked: block, lane: index, kept: true });
    const { view } = state;
    const [span, middle] = [view.to - view.from, (table.begin[block] + table.end[block]) / 2];
    if (middle < view.from || middle > view.to) place(middle - span / 2, span);
    const top = index * frame.lane;
    if (top < view.scroll || top + frame.lane > view.scroll + frame.shown) scroll(top - view.scroll - frame.shown / 2);
    draw();
    requestAnimationFrame(() => show(describe(table, block), frame.x(middle), frame.y(index) + frame.lane));
  }

  function neighbour(offset) {
    if (state.marked < 0) return goTo(table.lanes[Math.max(state.lane, 0)].first);
    const lane = table.lanes[laneOf(table, state.marked)];
    goTo(Math.max(lane.first, Math.min(state.marked + offset, lane.first + lane.count - 1)));
  }

  function otherLane(offset) {
    if (!state.kept || state.marked < 0) return scroll(offset * 3 * frame.lane);
    const index = Math.max(0, Math.min(laneOf(table, state.marked) + offset, table.lanes.length - 1));
    const lane = table.lanes[index];
    goTo(Math.max(lane.first, firstAfter(table, lane, table.begin[state.marked]) - 1));
  }

  const KEYS = {
    ArrowLeft: () => move(-0.1 * frame.inner), ArrowRight: () => move(0.1 * frame.inner),
    ArrowUp: () => otherLane(-1), ArrowDown: () => otherLane(1),
    "+": () => zoom(ZOOM_PER_STEP, LEFT + frame.inner / 2), "-": () => zoom(1 / ZOOM_PER_STEP, LEFT + frame.inner / 2),
    "=": () => KEYS["+"](), t: () => heighten(ZOOM_PER_STEP, TOP + frame.shown / 2),
    l: () => heighten(1 / ZOOM_PER_STEP, TOP + frame.shown / 2), "0": fit, Home: fit, c: toggleCritical, Escape: letGo,
    "[": () => neighbour(-1), "]": () => neighbour(1),
  };

  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = (isSideways ? event.deltaX : event.deltaY) * (event.deltaMode ? 24 : 1);
    if (isSideways || event.shiftKey) move(pixels);
    else if (event.offsetX < LEFT) heighten(Math.exp(-pixels / 400), event.offsetY);
    else zoom(Math.exp(-pixels / 400), event.offsetX);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return state.kept ? undefined : pointAt(event.offsetX, event.offsetY);
    const [across, down] = [event.offsetX - drag.x, event.offsetY - drag.y];
    drag = { x: event.offsetX, y: event.offsetY, moved: drag.moved + Math.abs(across) + Math.abs(down) };
    if (drag.moved < 4) return;
    canvas.classList.add("moving");
    show(null);
    move(-across);
    scroll(-down);
  });
  canvas.addEventListener("pointerup", (event) => {
    const isClick = drag && drag.moved < 4;
    drag = null;
    canvas.classList.remove("moving");
    if (!isClick) return;
    state.kept = false;
    pointAt(event.offsetX, event.offsetY);
    state.kept = state.marked >= 0;
  });
  canvas.addEventListener("pointerleave", () => state.kept || drag || letGo());
  canvas.addEventListener("dblclick", fit);
  document.getElementById("fit").addEventListener("click", fit);
  document.getElementById("critical").addEventListener("click", toggleCritical);
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  draw();
}
