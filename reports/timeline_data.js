// The events as typed columns, and the rows that are drawn: modules nested, each stream, exposed communication.
const data = JSON.parse(by("data").textContent);
const events = decoded(data);
const DEPTH = 3; // rows of modules

function decoded(given) {
  const count = given.start.length, start = new Float64Array(count), end = new Float64Array(count);
  let now = 0;
  for (let n = 0; n < count; n += 1) {
    now += given.start[n];
    start[n] = now;
    end[n] = now + given.duration[n];
  }
  return { count, start, end };
}

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
    for (let n = 0; n < events.count; n += 1) count += (bits[n] >> s) & 1;
    const made = row("stream", name, 26, count);
    for (let n = 0; n < events.count; n += 1) {
      if ((bits[n] >> s) & 1) add(made, events.start[n], events.end[n], n, category[n]);
    }
    return made;
  });
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
    let open = -1, phase = -1;
    for (let i = 0; i < compute.count; i += 1) {
      const n = compute.event[i], own = number[data.module[n]];
      if (own >= 0 && own === open && data.phase[n] === phase) made.end[made.count - 1] = compute.end[i];
      else if (own >= 0) {
        add(made, compute.start[i], compute.end[i], n, data.phase[n]);
        made.text.push(names[data.module[n]]);
      }
      open = own;
      phase = data.phase[n];
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
      if (until > from) add(made, from, Math.min(until, to), own.event[k], 4);
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
  data.waits.forEach((waits, n) => {
    for (const w of waits) {
      if (!readers.has(w)) readers.set(w, []);
      readers.get(w).push(n);
    }
  });
  return readers;
}
