// Draws the rows of the timeline in the view [from, to] (ticks). What is narrower than a pixel is drawn as one pixel, and
// the search for the next slice jumps over the rest: a frame costs as much as there are pixels, however many events.
const canvas = by("timeline");
let rows = [], height = 0;
let readers = new Map(); // known once the first picture is drawn
const view = { from: 0, to: data.step };
const state = { selected: -1, matches: null, found: [] };
const GAP = 4, AXIS = 22, ARROWS = 120;
let left = 90;

const width = () => canvas.clientWidth;
const x = (time) => left + ((time - view.from) / (view.to - view.from)) * (width() - left);
const timeAt = (pixel) => view.from + ((pixel - left) / (width() - left)) * (view.to - view.from);

// The rows of the stage whose events are there.
function stand() {
  rows = allRows();
  height = AXIS;
  for (const own of rows) { own.top = height; height += own.height + GAP; }
}
stand();

function ticksShown(count) {
  const rough = ((view.to - view.from) * TICK) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough);
  const marks = [];
  for (let n = Math.ceil((view.from * TICK) / size); n * size <= view.to * TICK; n += 1) marks.push(n * size);
  return marks;
}

function drawGrid(context, top, bottom, labelled) {
  context.strokeStyle = palette.line;
  context.fillStyle = palette.soft;
  context.textAlign = "center";
  context.beginPath();
  for (const mark of ticksShown(Math.max(2, width() / 130))) {
    const at = Math.round(x(mark / TICK)) + 0.5;
    if (at < left) continue;
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    if (labelled) {
      const text = seconds(mark), half = (text.length * LETTER) / 2;
      context.fillText(text, Math.max(left + half, Math.min(at, width() - half)), 9);
    }
  }
  context.stroke();
  context.textAlign = "left";
}

const SHADES = ["forward", "backward", "optimizer", "recompute", "collective", "exposed"];
const COLLECTIVE = SHADES.indexOf("collective");
function drawRow(context, own) {
  const { start, end, shade } = own, scale = (width() - left) / (view.to - view.from), right = width();
  const inset = own.kind === "module" ? 1 : 0, colours = SHADES.map((name) => palette[name]), solid = inset ? 0.75 : 1;
  let colour = -1, alpha = -1; // as set: setting is slow
  for (let i = above(end, view.from); i < start.length && start[i] < view.to;) {
    const x0 = Math.max(left + (start[i] - view.from) * scale, left);
    const x1 = Math.min(left + (end[i] - view.from) * scale, right);
    const wanted = faded(own, i) ? 0.25 : solid;
    if (alpha !== wanted) context.globalAlpha = alpha = wanted;
    if (colour !== shade[i]) { colour = shade[i]; context.fillStyle = colours[colour]; }
    if (x1 - x0 < 1) {
      const pixel = Math.floor(x0);
      context.fillRect(pixel, own.top + inset, 1, own.height - inset);
      i = Math.max(i + 1, above(end, view.from + (pixel + 1 - left) / scale, i)); // the next that ends beyond this pixel
      continue;
    }
    const size = x1 - x0 - (x1 - x0 > 3 ? 1 : 0);
    context.fillRect(x0, own.top + inset, size, own.height - inset);
    if (size > 26 && own.height > 12) {
      const text = own.text === null ? titled(own.event[i]) : shortened(own.text[i], own.depth);
      context.globalAlpha = 1;
      colour = alpha = -1;
      label(context, text, x0 + 4, own.top + own.height / 2, size - 8, palette["bar-text"]);
    }
    i += 1;
  }
  context.globalAlpha = 1;
}

// A module under the one above it: of `h.11` both words, of `h.11.mlp` the last.
const shortened = (path, depth) => segments(path).slice(depth).join(".").split(".").slice(-2).join(".");
const faded = (own, i) => state.matches !== null && (own.kind !== "stream" || !state.matches[own.event[i]]);
const titled = (n) => data.names[column("name", n)];
const placeOf = (n) => rows.filter((own) => own.kind === "stream" && column("streams_of", n) & own.bit);

function drawMatches(context) {
  context.fillStyle = palette.accent;
  let last = -1;
  for (let k = above(state.foundEnds, view.from); k < state.found.length; k += 1) {
    const n = state.found[k];
    if (events.start[n] > view.to) break;
    const at = Math.max(left, Math.floor(x(events.start[n])));
    if (at === last) { k = Math.max(k, above(state.foundEnds, timeAt(at + 1), k) - 1); continue; }
    last = at;
    for (const own of placeOf(n)) context.fillRect(at, own.top - 3, 3, 3);
  }
}

function drawArrows(context) {
  const shown = [], first = above(events.end, view.from);
  if (state.selected >= 0) {
    for (const w of waitsOf(state.selected)) shown.push([w, state.selected]);
    for (const n of readers.get(state.selected) ?? []) shown.push([state.selected, n]);
  }
  for (let n = first, seen = 0; n < events.count && events.start[n] < view.to && seen < 40 * ARROWS; n += 1, seen += 1) {
    if (column("category", n) !== COLLECTIVE) continue;
    for (const reader of readers.get(n) ?? []) shown.push([n, reader]);
    if (shown.length > ARROWS) { shown.length = Math.min(shown.length, state.selected >= 0 ? 8 : 0); break; }
  }
  context.strokeStyle = context.fillStyle = palette.text;
  for (const [from, to] of shown) drawArrow(context, from, to);
}

function drawArrow(context, from, to) {
  const start = placeOf(from)[0], end = placeOf(to)[0];
  const x1 = x(events.end[from]), x2 = Math.max(x(events.start[to]), x1 + 1);
  if (x2 < left || x1 > width() || x1 < left - 400) return;
  const y1 = start.top + start.height / 2, y2 = end.top + (end.top > start.top ? 0 : end.height);
  context.beginPath();
  context.moveTo(x1, y1);
  context.bezierCurveTo(x1 + 14, y1, x2 - 14, y2, x2, y2);
  context.stroke();
  context.beginPath();
  context.arc(x2, y2, 2.5, 0, 7);
  context.fill();
}

function drawSelected(context) {
  if (state.selected < 0) return;
  context.strokeStyle = palette.text;
  context.lineWidth = 2;
  for (const own of placeOf(state.selected)) {
    const x0 = Math.max(x(events.start[state.selected]), left), x1 = Math.min(x(events.end[state.selected]), width() - 1);
    if (x1 >= x0) context.strokeRect(x0 - 1, own.top - 1, Math.max(x1 - x0, 2) + 1, own.height + 2);
  }
  context.lineWidth = 1;
}

function drawTimeline() {
  const context = prepared(canvas, height);
  drawGrid(context, 18, height, true);
  for (const own of rows) drawRow(context, own);
  if (state.found.length) drawMatches(context);
  drawArrows(context);
  drawSelected(context);
  context.clearRect(0, 0, left - 4, height);
  for (const own of rows) label(context, own.name, 0, own.top + own.height / 2, left - 6, palette.text);
}

function measure() {
  const names = rows.map((own) => own.name.length);
  left = Math.min(12 + Math.max(...names) * LETTER, width() / 3.2);
}

const drawings = []; // what shares the view
let queued = false;
function draw() {
  queued = false;
  const start = performance.now();
  for (const one of drawings) one();
  by("view-range").textContent = `${duration(view.from)} to ${duration(view.to)}`;
  timing.frames.push(performance.now() - start);
  if (timing.frames.length > 1000) timing.frames.shift();
}
function redraw() {
  if (!queued) { queued = true; requestAnimationFrame(draw); }
}

function show(from, to) {
  const least = Math.min(100, data.step); // ten nanoseconds
  const span = Math.min(Math.max(to - from, least), data.step);
  view.from = Math.min(Math.max(from, 0), data.step - span);
  view.to = view.from + span;
  redraw();
}
const zoom = (factor, around = (view.from + view.to) / 2) =>
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
const pan = (share) => show(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);
function goTo(n) {
  const span = Math.min(view.to - view.from, Math.max((events.end[n] - events.start[n]) * 12, data.step / 400));
  const middle = (events.start[n] + events.end[n]) / 2;
  show(middle - span / 2, middle + span / 2);
}
