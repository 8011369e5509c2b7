// Numbers and colours as a reader sees them.
const began = performance.now();
const timing = { first: 0, frames: [] }; // milliseconds of script until the first picture, and for each one
window.autoshardTiming = timing;
const TICK = 1e-10; // seconds
const by = (id) => document.getElementById(id);

function seconds(value) {
  if (Math.abs(value) < 1e-13) return "0 s";
  const [unit, factor] = [["s", 1], ["ms", 1e3], ["µs", 1e6]].find((item) => Math.abs(value) * item[1] >= 1) ?? ["ns", 1e9];
  return `${Number((value * factor).toPrecision(4))} ${unit}`;
}
const duration = (ticks) => seconds(ticks * TICK);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? Number(value.toPrecision(4)) : value} ${units[unit]}`;
}

let palette = {};
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  palette = new Proxy({}, {
    get(known, name) { return known[name] ??= style.getPropertyValue(`--${name}`).trim(); },
  });
}

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// The first place in an ascending array whose number is above `value`.
function above(numbers, value, low = 0) {
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

// A canvas as large as its place, sharp on any screen; sized again only where that changed.
function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.style.height = `${height}px`;
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.lineWidth = 1;
  return context;
}

const LETTER = 6.4; // width of a letter of the canvas' font, in pixels, on average
function label(context, text, at, middle, room, colour) {
  const letters = Math.floor(room / LETTER);
  if (letters < 3) return;
  context.fillStyle = colour;
  context.fillText(text.length > letters ? `${text.slice(0, letters - 1)}…` : text, at, middle);
}
