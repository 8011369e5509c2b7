// Pointer, touch, keys and search; a click opens the panel of what it hits.
const moves = {
  in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.25), right: () => pan(0.25), all: () => show(0, data.step),
  next: () => step(1), previous: () => step(-1),
};
const keys = {
  "+": "in", "=": "in", w: "in", "-": "out", s: "out", ArrowLeft: "left", a: "left", ArrowRight: "right", d: "right",
  0: "all", n: "next", p: "previous",
};
const panel = by("panel");
const tooltip = by("tooltip");

// The slice of a row under a pointer: its event, or a module's text.
function sliceAt(offsetX, offsetY) {
  if (offsetX < left) return null;
  const own = rows.find((one) => offsetY >= one.top && offsetY <= one.top + one.height + GAP / 2);
  if (!own) return null;
  const from = timeAt(offsetX - 2), to = timeAt(offsetX + 2), i = above(own.end, from);
  if (i >= own.start.length || own.start[i] > to) return null;
  const exact = above(own.end, timeAt(offsetX), i);
  return { own, i: exact < own.start.length && own.start[exact] <= timeAt(offsetX) ? exact : i };
}

function brief(found) {
  const { own, i } = found, n = own.event[i], from = own.start[i], took = own.end[i] - own.start[i];
  if (own.kind === "module") return `${own.text[i]}, ${data.categories[own.shade[i]]}\n${duration(took)}`;
  if (own.kind === "exposed") return `exposed: ${titled(n)}\nfor ${duration(took)}`;
  const module = data.modules[column("module", n)];
  return `${titled(n)}${module ? `\n${module}` : ""}\n${duration(took)}, from ${duration(from)}`;
}

function hover(pointer, text) {
  tooltip.hidden = !text;
  if (!text) return;
  tooltip.textContent = text;
  const box = tooltip.getBoundingClientRect(), below = pointer.clientY + 34; // under the row, which stays in sight
  tooltip.style.left = `${Math.max(4, Math.min(pointer.clientX + 12, innerWidth - box.width - 8))}px`;
  tooltip.style.top = `${below + box.height > innerHeight ? Math.max(4, pointer.clientY - box.height - 34) : below}px`;
}

function listed(pairs) {
  const list = element("dl", "", "facts");
  for (const [name, value] of pairs) {
    if (value) list.append(element("dt", name), element("dd", value));
  }
  return list;
}

function bullets(title, lines) {
  if (!lines.length) return [];
  const list = element("ul");
  list.append(...lines.map((line) => element("li", line)));
  return [element("h4", title), list];
}

function select(n, focus = false) {
  state.selected = n;
  const record = data.records[column("record", n)], module = data.modules[column("module", n)], size = column("bytes", n);
  const facts = [
    ["module", module], ["time", `${duration(events.end[n] - events.start[n])}, from ${duration(events.start[n])}`],
    ["on", placeOf(n).map((own) => own.name).join(" and ")],
    ["phase", data.categories[column("phase", n)]], ["bytes", size ? bytes(size) : ""],
    ["why", data.reasons[column("reason", n)]],
  ];
  panel.replaceChildren(element("h3", titled(n)), listed(facts), ...(record ? explained(record) : []));
  const waits = waitsOf(n), after = readers.get(n) ?? [];
  panel.append(...related("waits for", waits), ...related("is waited for by", after));
  panel.hidden = false;
  if (focus) panel.focus();
  redraw();
}

function explained(record) {
  const repeats = record.times > 1 ? `${record.decided}; the same in ${record.times} equal blocks` : record.decided;
  const facts = [
    ["operator", record.operator], ["strategy", record.strategy], ["result", record.result], ["decided by", repeats],
    ...record.parts, ["model", record.source], ["emitted", record.emitted],
  ];
  const why = record.others.length
    ? `${record.why} Another choice here, all others staying, would change the sum of costs by`
    : "";
  const more = record.more ? [`and ${record.more} more expensive ones`] : [];
  return [
    element("h4", "Its operator"), listed(facts), ...bullets("Communicated before it", record.before),
    ...bullets(why, [...record.others, ...more]),
    ...bullets("Not offered here", record.not),
  ];
}

function related(title, numbers) {
  if (!numbers.length) return [];
  const list = element("ul");
  for (const n of numbers.slice(0, 8)) {
    const item = element("li"), button = element("button", `${titled(n)}, at ${duration(events.start[n])}`, "link");
    button.type = "button";
    button.addEventListener("click", () => { goTo(n); select(n, true); });
    item.append(button);
    list.append(item);
  }
  return [element("h4", title), list];
}

function selectModule(found) {
  const { own, i } = found, name = own.text[i];
  let busy = 0, count = 0;
  const compute = rows.find((one) => one.kind === "stream");
  for (let k = above(compute.end, own.start[i]); k < compute.start.length && compute.start[k] < own.end[i]; k += 1) {
    busy += compute.end[k] - compute.start[k];
    count += 1;
  }
  const took = own.end[i] - own.start[i];
  state.selected = -1;
  panel.replaceChildren(element("h3", name), listed([
    ["phase", data.categories[own.shade[i]]], ["time", `${duration(took)}, from ${duration(own.start[i])}`],
    ["computing", `${duration(busy)} in ${count} operators`], ["else", duration(took - busy)],
  ]));
  panel.hidden = false;
  show(own.start[i] - took * 0.05, own.end[i] + took * 0.05);
}

function step(by) {
  const candidates = state.found.length ? state.found : null;
  const at = state.selected;
  let next = candidates
    ? candidates[(candidates.indexOf(at) + by + candidates.length) % candidates.length]
    : Math.min(Math.max(at < 0 ? Math.max(0, above(events.end, view.from) - 1) + (by > 0 ? 0 : 1) : at + by, 0), events.count - 1);
  if (next === undefined || events.count === 0) return;
  if (events.end[next] < view.from || events.start[next] > view.to || candidates) goTo(next);
  select(next);
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  state.matches = null;
  state.found = [];
  if (wanted) {
    const has = (texts) => texts.map((one) => one.toLowerCase().includes(wanted));
    const [names, modules, reasons] = [has(data.names), has(data.modules), has(data.reasons)];
    const kinds = data.records.map((record) => `${record.operator} ${record.strategy}`.toLowerCase().includes(wanted));
    state.matches = new Uint8Array(events.count);
    for (let n = 0; n < events.count; n += 1) {
      const e = events.of[n];
      const own = names[data.name[e]] || modules[data.module[e]] || reasons[data.reason[e]] || kinds[data.record[e]];
      if (own) { state.matches[n] = 1; state.found.push(n); }
    }
  }
  state.foundEnds = Float64Array.from(state.found, (n) => events.end[n]);
  const took = state.found.reduce((sum, n) => sum + events.end[n] - events.start[n], 0);
  by("search-count").textContent = wanted ? `${state.found.length} found, ${duration(took)}` : "";
  redraw();
}

// One pointer pans, two zoom; a pointer that stays where it was is a click.
function listen(target, read, click) {
  const down = new Map();
  let moved = 0, grabbed = null;
  const grab = () => {
    const at = [...down.values()];
    grabbed = at.length ? { at, times: at.map(timeAt), from: view.from, to: view.to } : null;
  };
  target.addEventListener("pointerdown", (pointer) => {
    target.setPointerCapture(pointer.pointerId);
    down.set(pointer.pointerId, pointer.offsetX);
    if (down.size === 1) moved = 0;
    grab();
  });
  const up = (pointer) => {
    const was = down.delete(pointer.pointerId);
    if (was && pointer.type === "pointerup" && moved < 4 && down.size === 0) click(pointer);
    grab();
  };
  target.addEventListener("pointerup", up);
  target.addEventListener("pointercancel", up);
  target.addEventListener("pointerleave", (pointer) => hover(pointer, ""));
  target.addEventListener("pointermove", (pointer) => {
    if (!grabbed || !down.has(pointer.pointerId)) { hover(pointer, read(pointer)); return; }
    moved += Math.abs(pointer.offsetX - down.get(pointer.pointerId));
    down.set(pointer.pointerId, pointer.offsetX);
    hover(pointer, "");
    const now = [...down.values()], room = width() - left;
    if (now.length === 1) {
      const shift = ((grabbed.at[0] - now[0]) / room) * (grabbed.to - grabbed.from);
      show(grabbed.from + shift, grabbed.to + shift);
    } else {
      const [t0, t1] = grabbed.times, [p0, p1] = now;
      const perPixel = Math.abs((t1 - t0) / (Math.abs(p1 - p0) < 4 ? 4 : p1 - p0));
      const from = t0 - (p0 - left) * perPixel;
      show(from, from + room * perPixel);
    }
  });
  target.addEventListener("wheel", (wheel) => {
    if (document.activeElement !== target && !wheel.ctrlKey) return; // else the page scrolls, as a reader expects
    wheel.preventDefault();
    if (Math.abs(wheel.deltaX) > Math.abs(wheel.deltaY)) pan(wheel.deltaX / 800);
    else zoom(wheel.deltaY > 0 ? 1.25 : 0.8, timeAt(wheel.offsetX));
  }, { passive: false });
  target.addEventListener("keydown", (key) => {
    const name = key.key.length === 1 ? key.key.toLowerCase() : key.key;
    if (key.key === "Escape") { closePanel(); return; }
    if (!(name in keys) || key.ctrlKey || key.metaKey || key.altKey) return;
    key.preventDefault();
    hover(null, "");
    moves[keys[name]]();
  });
}

function closePanel() {
  panel.hidden = true;
  state.selected = -1;
  redraw();
}

// Another stage's operators, in the view [from, to].
const stageField = by("stage");
function showStage(stage, from, to) {
  if (stageField) stageField.value = stage;
  events = eventsOf(stage);
  stand();
  measure();
  closePanel();
  readers = arrows();
  search(by("search").value);
  show(from, to);
}

function startTimeline() {
  if (stageField) stageField.addEventListener("change", () => showStage(Number(stageField.value), view.from, view.to));
  listen(canvas, (pointer) => {
    const found = sliceAt(pointer.offsetX, pointer.offsetY);
    return found ? brief(found) : "";
  }, (pointer) => {
    const found = sliceAt(pointer.offsetX, pointer.offsetY);
    if (!found) closePanel();
    else if (found.own.kind === "module") selectModule(found);
    else select(found.own.event[found.i]);
  });
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => moves[button.dataset.view]());
  const field = by("search");
  field.addEventListener("input", () => search(field.value));
  field.addEventListener("keydown", (key) => {
    if (key.key === "Enter") { key.preventDefault(); step(key.shiftKey ? -1 : 1); }
    if (key.key === "Escape") { field.value = ""; search(""); }
  });
}
