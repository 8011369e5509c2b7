// Memory stacked by kind, in the same view as the timeline; a click lists the tensors that are alive there.
const memoryCanvas = by("memory");
const stack = memoryCanvas ? stacked(data.memory) : null; // none of a step of stages
const MEMORY_HEIGHT = 190, BLOCK = 64, LISTED = 25;

function stacked(given) {
  const starts = new Float64Array(given.starts.length), steps = starts.length, kinds = given.kinds.length;
  let now = 0;
  for (let n = 0; n < steps; n += 1) { now += given.starts[n]; starts[n] = now; }
  const first = new Int32Array(given.name.length);
  const change = Array.from({ length: kinds }, () => new Float64Array(steps + 1));
  now = 0;
  for (let s = 0; s < first.length; s += 1) {
    now += given.first[s];
    first[s] = now;
    change[given.kind[s]][now] += given.bytes[s];
    change[given.kind[s]][now + given.length[s] + 1] -= given.bytes[s];
  }
  const total = new Float64Array(steps);
  const levels = change.map((own) => {
    const level = new Float64Array(steps);
    let sum = 0;
    for (let n = 0; n < steps; n += 1) { sum += own[n]; level[n] = Math.max(0, sum); total[n] += level[n]; }
    return level;
  });
  const largest = []; // the step with most bytes in each block of steps
  for (let block = 0; block * 64 < steps; block += 1) largest.push(most(total, block * 64, Math.min(steps, block * 64 + 64)));
  return { starts, first, levels, total, largest };
}

function most(total, from, to) {
  let best = from;
  for (let n = from + 1; n < to; n += 1) if (total[n] > total[best]) best = n;
  return best;
}

// The step with most bytes among [from, to].
function largestStep(from, to) {
  let best = from;
  for (let n = from; n <= to;) {
    if (n % BLOCK === 0 && n + BLOCK <= to) {
      const own = stack.largest[n / BLOCK];
      if (stack.total[own] > stack.total[best]) best = own;
      n += BLOCK;
    } else {
      if (stack.total[n] > stack.total[best]) best = n;
      n += 1;
    }
  }
  return best;
}

// The step shown at a time span: of those that begin in it, or last into it, the one with most bytes.
function stepAt(from, to) {
  const last = Math.max(0, above(stack.starts, to) - 1), first = Math.max(0, above(stack.starts, from) - 1);
  return largestStep(Math.min(first, last), last);
}

function ceiling() {
  const { limit, peak } = data.memory;
  return limit !== null && limit < 2 * peak ? Math.max(limit, peak) * 1.04 : peak * 1.08;
}

function drawMemory() {
  const context = prepared(memoryCanvas, MEMORY_HEIGHT), bottom = MEMORY_HEIGHT - 6, top = 18, top_bytes = ceiling() || 1;
  const y = (value) => bottom - (value / top_bytes) * (bottom - top);
  drawGrid(context, top, bottom, false);
  const columns = Math.max(1, Math.floor(width() - left)), steps = new Int32Array(columns);
  for (let c = 0; c < columns; c += 1) steps[c] = stepAt(timeAt(left + c), timeAt(left + c + 1));
  const below = new Float64Array(columns);
  data.memory.kinds.forEach((kind, k) => {
    const level = stack.levels[k];
    context.beginPath();
    edge(context, below, columns, -1, y);
    let any = false;
    for (let c = 0; c < columns; c += 1) {
      any ||= level[steps[c]] > 0;
      below[c] += level[steps[c]];
    }
    edge(context, below, columns, 1, y);
    if (!any) return;
    context.fillStyle = palette[`kind-${kind}`];
    context.fill();
  });
  drawLimit(context, y, top);
  label(context, "memory", 0, top + 4, left - 6, palette.text);
  label(context, bytes(data.memory.peak), 0, Math.max(y(data.memory.peak), top + 20), left - 6, palette.soft);
}

// A line of steps over all columns, forward or backward; a level that lasts is one line.
function edge(context, levels, columns, way, y) {
  const first = way > 0 ? 0 : columns - 1, last = columns - 1 - first;
  for (let c = first; c !== last + way; c += way) {
    const before = c === first || levels[c - way] !== levels[c], after = c === last || levels[c + way] !== levels[c];
    if (before) context.lineTo(left + c + (way < 0), y(levels[c]));
    if (after) context.lineTo(left + c + (way > 0), y(levels[c]));
  }
}

function drawLimit(context, y, top) {
  const { limit, peak } = data.memory;
  if (limit === null) return;
  const scaled = limit < 2 * peak, at = scaled ? y(limit) : top - 6;
  context.strokeStyle = context.fillStyle = palette.bad;
  context.setLineDash(scaled ? [] : [4, 4]);
  context.beginPath();
  context.moveTo(left, at);
  context.lineTo(width(), at);
  context.stroke();
  context.setLineDash([]);
  const text = `limit ${bytes(limit)}${scaled ? "" : ", not to scale"}`;
  context.textAlign = "right";
  context.fillText(text, width() - 2, at + (at > 16 ? -8 : 10));
  context.textAlign = "left";
}

function alive(step) {
  const found = [];
  for (let s = 0; s < stack.first.length && stack.first[s] <= step; s += 1) {
    if (stack.first[s] + data.memory.length[s] >= step) found.push(s);
  }
  return found.sort((a, b) => data.memory.bytes[b] - data.memory.bytes[a]);
}

function showAlive(moment) {
  const step = stepAt(moment, moment), found = alive(step), total = stack.total[step] || 1;
  const table = element("table"), head = element("tr"), body = element("tbody");
  for (const name of ["tensor", "kind", "size", "share"]) head.append(element("th", name));
  for (const s of found.slice(0, LISTED)) {
    const size = data.memory.bytes[s], line = element("tr");
    line.append(
      element("td", data.memory.names[data.memory.name[s]]), element("td", data.memory.kind_words[data.memory.kind[s]]),
      element("td", bytes(size), "number"), element("td", `${((100 * size) / total).toFixed(1)}%`, "number"),
    );
    body.append(line);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  const rest = found.slice(LISTED).reduce((sum, s) => sum + data.memory.bytes[s], 0);
  const own = by("alive");
  own.replaceChildren(
    element("h3", `${bytes(stack.total[step])} alive at ${duration(moment)}`), table,
    ...(rest ? [element("p", `and ${found.length - LISTED} smaller ones, ${bytes(rest)}`, "note")] : []),
  );
  own.hidden = false;
}

function memoryBrief(moment) {
  const step = stepAt(moment, moment);
  const parts = data.memory.kind_words.map((words, k) => [stack.levels[k][step], words]).filter((part) => part[0] > 0);
  parts.sort((a, b) => b[0] - a[0]);
  return [`${bytes(stack.total[step])} at ${duration(moment)}`, ...parts.map((part) => `${bytes(part[0])} ${part[1]}`)].join("\n");
}

function startMemory() {
  listen(
    memoryCanvas, (pointer) => (pointer.offsetX < left ? "" : memoryBrief(timeAt(pointer.offsetX))),
    (pointer) => { if (pointer.offsetX >= left) showAlive(timeAt(pointer.offsetX)); },
  );
  by("show-peak").addEventListener("click", () => {
    const at = stack.starts[largestStep(0, stack.starts.length - 1)];
    show(at - (view.to - view.from) / 2, at + (view.to - view.from) / 2);
    showAlive(at);
  });
}
