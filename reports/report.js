"use strict";
// The timeline and the memory curve share one view [from, to] in seconds; everything is drawn on two canvases.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const timeline = document.getElementById("timeline");
  const memory = document.getElementById("memory");
  const tooltip = document.getElementById("tooltip");
  const ROW = 30, GAP = 6, AXIS = 24, MEMORY_HEIGHT = 150;
  const view = { from: 0, to: data.step_seconds };
  const rows = data.streams.map((_, stream) => data.events.filter((event) => event[0] === stream));
  let left = 90; // where time 0 stands, in CSS pixels: as wide as the longest stream name

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const width = (canvas) => canvas.clientWidth;
  const x = (time) => left + ((time - view.from) / (view.to - view.from)) * (width(timeline) - left);
  const time = (pixel) => view.from + ((pixel - left) / (width(timeline) - left)) * (view.to - view.from);

  function seconds(value) {
    if (value === 0) return "0 s";
    const [unit, factor] = [["s", 1], ["ms", 1e3], ["us", 1e6]].find((item) => Math.abs(value) * item[1] >= 1) ?? ["ns", 1e9];
    return `${Number((value * factor).toPrecision(4))} ${unit}`;
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${unit ? value.toFixed(value < 10 ? 2 : 1) : value} ${units[unit]}`;
  }

  function prepare(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width(canvas) * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  function ticks(from, to, count) {
    const rough = (to - from) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const size = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= rough);
    const marks = [];
    for (let index = Math.ceil(from / size); index * size <= to; index += 1) marks.push(index * size);
    return marks;
  }

  function drawGrid(context, height) {
    context.fillStyle = colour("soft");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.textAlign = "center";
    for (const mark of ticks(view.from, view.to, Math.max(2, width(timeline) / 130))) {
      const at = Math.round(x(mark)) + 0.5;
      if (at < left) continue;
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, height - AXIS);
      context.stroke();
      const text = seconds(mark);
      context.fillText(text, Math.min(at, width(timeline) - context.measureText(text).width / 2), height - AXIS / 2);
    }
  }

  function firstEndingAfter(events, moment) {
    let low = 0, high = events.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events[middle][1] + events[middle][2] <= moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  function drawRow(context, events, top, palette) {
    let painted = left - 1; // the right edge of what is painted: events narrower than a pixel are merged
    for (let index = firstEndingAfter(events, view.from); index < events.length; index += 1) {
      const [, start, duration, name, category] = events[index];
      if (start > view.to) break;
      const begin = Math.max(x(start), left), end = Math.min(x(start + duration), width(timeline));
      if (end - begin < 1 && begin < painted) continue;
      const size = Math.max(end - begin - (end - begin > 3 ? 1 : 0), 1);
      context.fillStyle = palette[category];
      context.fillRect(begin, top, size, ROW);
      painted = begin + 1;
      if (size > 34) label(context, data.names[name], begin + 4, top + ROW / 2, size - 8);
    }
  }

  function label(context, text, at, middle, room) {
    const letters = Math.floor(room / 6.2);
    if (letters < 4) return;
    context.fillStyle = colour("bar-text");
    context.textAlign = "left";
    context.fillText(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, at, middle);
  }

  function drawTimeline() {
    const height = data.streams.length * (ROW + GAP) + AXIS;
    const context = prepare(timeline, height);
    left = Math.min(16 + Math.max(...data.streams.map((name) => context.measureText(name).width)), width(timeline) / 3);
    drawGrid(context, height);
    const palette = data.categories.map(colour);
    rows.forEach((events, stream) => {
      const top = stream * (ROW + GAP);
      context.fillStyle = colour("text");
      context.textAlign = "left";
      context.fillText(data.streams[stream], 0, top + ROW / 2, left - 8);
      drawRow(context, events, top, palette);
    });
  }

  function drawMemory() {
    const context = prepare(memory, MEMORY_HEIGHT), bottom = MEMORY_HEIGHT - AXIS, top = 16;
    drawGrid(context, MEMORY_HEIGHT);
    const most = Math.max(1, ...data.memory.map((point) => point[1]));
    const y = (value) => bottom - (value / most) * (bottom - top);
    context.fillStyle = colour("text");
    context.textAlign = "left";
    context.fillText("memory", 0, top + 4, left - 8);
    context.fillStyle = colour("soft");
    context.fillText(bytes(most), 0, top + 20, left - 8);
    context.save();
    context.beginPath();
    context.rect(left, 0, width(memory) - left, bottom);
    context.clip();
    context.beginPath();
    context.moveTo(x(0), bottom);
    let level = 0;
    for (const [at, value] of data.memory) { context.lineTo(x(at), y(level)); context.lineTo(x(at), y(value)); level = value; }
    context.lineTo(x(data.step_seconds), y(level));
    context.lineTo(x(data.step_seconds), bottom);
    context.globalAlpha = 0.25;
    context.fillStyle = colour("memory");
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour("memory");
    context.lineWidth = 1.5;
    context.stroke();
    context.restore();
  }

  let queued = false;
  function draw() {
    queued = false;
    drawTimeline();
    drawMemory();
    document.getElementById("view-range").textContent = `${seconds(view.from)} to ${seconds(view.to)}`;
  }
  function redraw() {
    if (!queued) { queued = true; requestAnimationFrame(draw); }
  }

  function show(from, to) {
    const least = data.step_seconds * 1e-6;
    const span = Math.min(Math.max(to - from, least), data.step_seconds);
    view.from = Math.min(Math.max(from, 0), data.step_seconds - span);
    view.to = view.from + span;
    redraw();
  }
  const zoom = (factor, around = (view.from + view.to) / 2) =>
    show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = (share) => show(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);
  const moves = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.25), right: () => pan(0.25), all: () => show(0, data.step_seconds),
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };

  function eventAt(pointer) {
    const stream = Math.floor(pointer.offsetY / (ROW + GAP));
    if (pointer.offsetX < left || pointer.offsetY % (ROW + GAP) > ROW || !rows[stream]) return null;
    const moment = time(pointer.offsetX), events = rows[stream];
    const event = events[firstEndingAfter(events, moment)];
    return event && event[1] <= moment ? event : null;
  }

  function describe(event) {
    const [, start, duration, name, , detail] = event;
    const more = detail < 0 ? "" : `\n${data.details[detail]}`;
    return `${data.names[name]}\n${seconds(duration)}, from ${seconds(start)}${more}`;
  }

  function memoryAt(moment) {
    let level = 0;
    for (const [at, value] of data.memory) { if (at > moment) break; level = value; }
    return `${bytes(level)} at ${seconds(moment)}`;
  }

  function hover(pointer, text) {
    tooltip.hidden = !text;
    if (!text) return;
    tooltip.textContent = text;
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = `${Math.max(4, Math.min(pointer.clientX + 12, innerWidth - box.width - 8))}px`;
    tooltip.style.top = `${Math.max(4, Math.min(pointer.clientY + 14, innerHeight - box.height - 8))}px`;
  }

  function listen(canvas, read) {
    let grabbed = null;
    canvas.addEventListener("pointerdown", (pointer) => {
      grabbed = { at: pointer.clientX, from: view.from, to: view.to };
      canvas.setPointerCapture(pointer.pointerId);
    });
    canvas.addEventListener("pointerup", () => { grabbed = null; });
    canvas.addEventListener("pointercancel", () => { grabbed = null; });
    canvas.addEventListener("pointerleave", (pointer) => hover(pointer, ""));
    canvas.addEventListener("pointermove", (pointer) => {
      if (!grabbed) { hover(pointer, read(pointer)); return; }
      const shift = ((grabbed.at - pointer.clientX) / (width(canvas) - left)) * (grabbed.to - grabbed.from);
      show(grabbed.from + shift, grabbed.to + shift);
    });
    canvas.addEventListener("wheel", (wheel) => {
      if (document.activeElement !== canvas && !wheel.ctrlKey) return; // else the page scrolls, as a reader expects
      wheel.preventDefault();
      zoom(wheel.deltaY > 0 ? 1.25 : 0.8, time(wheel.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", (key) => {
      if (!(key.key in keys) || key.ctrlKey || key.metaKey || key.altKey) return;
      key.preventDefault();
      moves[keys[key.key]]();
    });
  }

  listen(timeline, (pointer) => { const event = eventAt(pointer); return event ? describe(event) : ""; });
  listen(memory, (pointer) => (pointer.offsetX < left ? "" : memoryAt(time(pointer.offsetX))));
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", moves[button.dataset.view]);
  new ResizeObserver(redraw).observe(timeline);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { for (const item of document.querySelectorAll("details")) item.open = true; });
  draw();
})();
