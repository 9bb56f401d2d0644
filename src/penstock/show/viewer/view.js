// What a reader does with the page: move, zoom, point, keep a block, by mouse, finger and keyboard.

const ZOOM_PER_STEP = 1.25;

async function start(header, text) {
  const table = makeTable(header, await unpack(text, header.columns));
  const [root, dark] = [document.documentElement, window.matchMedia("(prefers-color-scheme: dark)")];
  const [canvas, tip] = [document.getElementById("canvas"), document.getElementById("tip")];
  const whole = { from: -0.004 * table.end_ticks, to: 1.006 * table.end_ticks };
  const state = { view: { ...whole, scroll: 0, tallness: 1 }, marked: -1, lane: -1, kept: false, showsCritical: false };
  let [frame, drag, asked] = [null, null, 0];

  // However often it is asked for, once per frame; what is scrolled too far comes back.
  function draw() {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => {
      const theme = root.dataset.theme ?? (dark.matches ? "dark" : "light");
      frame = drawAll(table, canvas, state, table.themes[theme]);
      state.view.scroll = frame.scroll;
    });
  }

  function place(from, ticks) {
    const span = clamp(ticks, 1e-6 * table.end_ticks, whole.to - whole.from);
    const begin = clamp(from, whole.from, whole.to - span);
    Object.assign(state.view, { from: begin, to: begin + span });
    draw();
  }

  // Zooms by a factor and keeps the moment under x where it is.
  function zoom(factor, x = LEFT + frame.inner / 2) {
    const [{ from, to }, at] = [state.view, frame.tick(x)];
    place(at - (at - from) / factor, (to - from) / factor);
  }

  function move(across, down = 0) {
    state.view.scroll += down;
    place(state.view.from + across / frame.perTick, state.view.to - state.view.from);
  }

  function fit() {
    Object.assign(state.view, whole, { scroll: 0, tallness: 1 });
    draw();
  }

  // Makes lanes taller and keeps the rank under y where it is.
  function heighten(factor, y = TOP + frame.shown / 2) {
    const lane = (y - TOP + frame.scroll) / frame.lane;
    state.view.tallness = Math.max(1, state.view.tallness * Math.min(factor, MAX_LANE / frame.lane));
    state.view.scroll = lane * makeFrame(table, canvas, state.view).lane - (y - TOP);
    draw();
  }

  function show(said, x, y) {
    tip.hidden = !said;
    if (!said) return;
    const parts = [said.title, said.lines.join("\n"), said.more.join("\n")];
    parts.forEach((part, at) => (tip.children[at].textContent = part));
    const left = x + 16 + tip.offsetWidth > canvas.clientWidth ? x - 16 - tip.offsetWidth : x + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${clamp(y + 16, 4, canvas.clientHeight - tip.offsetHeight - 4)}px`;
  }

  function letGo() {
    Object.assign(state, { marked: -1, lane: -1, kept: false });
    show(null);
    draw();
  }

  function pointAt(x, y, keeps = false) {
    const index = frame.laneAt(y);
    const isInside = index >= 0 && x >= LEFT && x <= LEFT + frame.inner;
    const down = (y - frame.y(index)) / frame.lane;
    const { block = -1, said } = isInside ? find(table, index, frame.tick(x), down) : {};
    Object.assign(state, { lane: index, marked: block, kept: keeps && block >= 0 });
    show(said, x, y);
    draw();
  }

  // Marks a block and brings it into sight, as a pointer would.
  function goTo(block) {
    const [index, { view }] = [laneOf(table, block), state];
    Object.assign(state, { marked: block, lane: index, kept: true });
    const [ticks, middle] = [view.to - view.from, (table.begin[block] + table.end[block]) / 2];
    if (middle < view.from || middle > view.to) place(middle - ticks / 2, ticks);
    const top = index * frame.lane - view.scroll;
    if (top < 0 || top + frame.lane > frame.shown) move(0, top - frame.shown / 2);
    draw();
    requestAnimationFrame(() => show(describe(table, block), frame.x(middle), frame.y(index) + frame.lane));
  }

  // To a neighbour in the lane, or to what another lane does at the same time.
  function step(blocks, lanes) {
    if (state.marked < 0) return goTo(table.lanes[Math.max(state.lane, 0)].first);
    const lane = table.lanes[clamp(laneOf(table, state.marked) + lanes, 0, table.lanes.length - 1)];
    const to = lanes ? firstAfter(table, lane, table.begin[state.marked]) - 1 : state.marked + blocks;
    goTo(clamp(to, lane.first, lane.first + lane.count - 1));
  }

  const turn = (lanes) => (state.kept ? step(0, lanes) : move(0, lanes * 3 * frame.lane));
  const KEYS = {
    ArrowLeft: () => move(-0.1 * frame.inner), ArrowRight: () => move(0.1 * frame.inner),
    ArrowUp: () => turn(-1), ArrowDown: () => turn(1), "[": () => step(-1, 0), "]": () => step(1, 0),
    "+": () => zoom(ZOOM_PER_STEP), "=": () => zoom(ZOOM_PER_STEP), "-": () => zoom(1 / ZOOM_PER_STEP),
    t: () => heighten(ZOOM_PER_STEP), l: () => heighten(1 / ZOOM_PER_STEP),
    "0": fit, Home: fit, Escape: letGo,
    c: () => {
      state.showsCritical = !state.showsCritical;
      document.querySelector("[data-key=c]").setAttribute("aria-pressed", state.showsCritical);
      draw();
    },
  };

  const HANDLERS = {
    wheel: (event) => {
      event.preventDefault();
      const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const pixels = (isSideways ? event.deltaX : event.deltaY) * (event.deltaMode ? 24 : 1);
      if (isSideways || event.shiftKey) move(pixels);
      else if (event.offsetX < LEFT) heighten(Math.exp(-pixels / 400), event.offsetY);
      else zoom(Math.exp(-pixels / 400), event.offsetX);
    },
    pointerdown: (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
    },
    pointermove: ({ offsetX: x, offsetY: y }) => {
      if (!drag) return state.kept ? undefined : pointAt(x, y);
      const [across, down] = [x - drag.x, y - drag.y];
      drag = { x, y, moved: drag.moved + Math.hypot(across, down) };
      if (drag.moved < 4) return;
      show(null);
      move(-across, -down);
    },
    pointerup: ({ offsetX: x, offsetY: y }) => {
      if (drag?.moved < 4) pointAt(x, y, true);
      drag = null;
    },
    pointerleave: () => state.kept || drag || letGo(),
    dblclick: fit,
  };
  for (const [name, handle] of Object.entries(HANDLERS)) canvas.addEventListener(name, handle, { passive: false });
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const button of document.querySelectorAll("button")) button.addEventListener("click", KEYS[button.dataset.key]);
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  draw();
}
