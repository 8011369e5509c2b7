// The events as typed columns, and the rows that are drawn: modules nested, each stream, exposed communication.
const data = JSON.parse(by("data").textContent);
const DEPTH = 3; // rows of modules
const parts = decoded(data);
let events = eventsOf(0); // of the stage that is shown

// Each segment's events in its own time; `first` is where they begin in the columns.
function decoded(given) {
  const count = given.start.length, start = new Float64Array(count), first = [];
  let n = 0;
  for (const size of given.segments) {
    first.push(n);
    for (let now = 0, end = n + size; n < end; n += 1) { now += given.start[n]; start[n] = now; }
  }
  return { start, first };
}

// All that a stage does, in order of start: `of` is the place of each in the columns.
function eventsOf(stage) {
  const { start: times, segment } = data.stages[stage];
  const count = segment.reduce((sum, own) => sum + data.segments[own], 0);
  const start = new Float64Array(count), end = new Float64Array(count), of = new Int32Array(count), slot = new Int32Array(count);
  let at = 0, n = 0;
  segment.forEach((own, k) => {
    at += times[k];
    for (let from = parts.first[own], e = from; e < from + data.segments[own]; e += 1, n += 1) {
      start[n] = at + parts.start[e];
      end[n] = start[n] + data.duration[e];
      of[n] = e;
      slot[n] = k;
    }
  });
  return { count, start, end, of, slot };
}
const column = (name, n) => data[name][events.of[n]];
const waitsOf = (n) => column("waits", n).map((e) => n + e - events.of[n]);

// A row: slices in order of start that do not overlap. `event` is that of each, `text` a module's path.
function row(kind, name, height, room) {
  return {
    kind, name, height, top: 0, count: 0, start: new Float64Array(room), end: new Float64Array(room),
    event: new Int32Array(room), shade: new Uint8Array(room), text: kind === "module" ? [] : null,
  };
}
function add(target, start, end, event, shade) {
  const at = target.count++;
  target.start[at] = start;
  target.end[at] = end;
  target.event[at] = event;
  target.shade[at] = shade;
}
function trimmed(own) {
  for (const name of ["start", "end", "event", "shade"]) own[name] = own[name].subarray(0, own.count);
  return own;
}

function streamRows() {
  const { streams_of: bits, category } = data;
  return data.streams.map((name, s) => {
    let count = 0;
    for (let n = 0; n < events.count; n += 1) count += (bits[events.of[n]] >> s) & 1;
    const made = row("stream", name, 26, count);
    made.bit = 1 << s;
    for (let n = 0; n < events.count; n += 1) {
      if ((bits[events.of[n]] >> s) & 1) add(made, events.start[n], events.end[n], n, category[events.of[n]]);
    }
    return made;
  }).filter((own, s) => s === 0 || own.count || data.stages.length === 1); // other stages have other lanes
}

// Modules nested: neighbours on the compute stream in the same module, at one depth, are one slice.
function moduleRows(compute) {
  const paths = data.modules.map((path) => (path ? segments(path) : []));
  const rows = [];
  for (let depth = 0; depth < DEPTH; depth += 1) {
    const made = row("module", "", 15, compute.count), known = new Map();
    made.depth = depth;
    const names = paths.map((path) => (path.length > depth ? path.slice(0, depth + 1).join(".") : ""));
    const number = names.map((name) => { if (name && !known.has(name)) known.set(name, known.size); return name ? known.get(name) : -1; });
    let open = -1, phase = -1, last = -1;
    for (let i = 0; i < compute.count; i += 1) {
      const n = compute.event[i], own = number[column("module", n)], slot = events.slot[n];
      if (own >= 0 && own === open && column("phase", n) === phase && slot === last) made.end[made.count - 1] = compute.end[i];
      else if (own >= 0) {
        add(made, compute.start[i], compute.end[i], n, column("phase", n));
        made.text.push(names[column("module", n)]);
      }
      open = own;
      phase = column("phase", n);
      last = slot;
    }
    if (made.count) rows.push(trimmed(made));
  }
  if (rows.length) rows[0].name = "modules";
  return rows;
}

// `model.layers.0.mlp.up` as [model.layers.0, mlp, up]: a number belongs to the name before it, lone leading names too.
function segments(path) {
  const found = [];
  let numbered = false;
  for (const word of path.split(".")) {
    const isNumber = /^\d+$/.test(word);
    if (found.length && (isNumber || (found.length === 1 && !numbered))) found[found.length - 1] += `.${word}`;
    else found.push(word);
    numbered ||= isNumber;
  }
  return numbered ? found : path.split(".");
}

// Communicating and computing nothing: what of the merged communication no computation covers.
function exposedRow(compute, talks) {
  const room = talks.reduce((sum, talk) => sum + talk.count, 0) + compute.count;
  const made = row("exposed", "not hidden", 8, room), at = talks.map(() => 0);
  let covered = -1;
  for (;;) { // collectives of all streams, in order of start
    let next = -1;
    for (let s = 0; s < talks.length; s += 1) {
      if (at[s] < talks[s].count && (next < 0 || talks[s].start[at[s]] < talks[next].start[at[next]])) next = s;
    }
    if (next < 0) return trimmed(made);
    const own = talks[next], k = at[next]++, to = own.end[k];
    let from = Math.max(own.start[k], covered);
    covered = Math.max(covered, to);
    for (let i = above(compute.end, from); from < to; i += 1) {
      const until = i < compute.count ? compute.start[i] : Infinity;
      if (until > from) add(made, from, Math.min(until, to), own.event[k], 5);
      from = Math.max(from, i < compute.count ? compute.end[i] : to);
    }
  }
}

function allRows() {
  const streams = streamRows(), [compute, ...talks] = streams;
  const rows = [...moduleRows(compute), compute, ...talks];
  if (talks.length) rows.push(exposedRow(compute, talks));
  return rows;
}

// Who waits for a collective, and for whom each waits, by event.
function arrows() {
  const readers = new Map();
  for (let n = 0; n < events.count; n += 1) {
    for (const w of waitsOf(n)) {
      if (!readers.has(w)) readers.set(w, []);
      readers.get(w).push(n);
    }
  }
  return readers;
}
