// The whole step: every stage's forwards and backwards, in a view of its own. Without it the drawn picture stays.
const stagesCanvas = by("stages");
const whole = stagesCanvas ? wholeStep(JSON.parse(by("stages-data").textContent)) : null;
const STAGE_LEFT = 78;

function wholeStep(given) {
  const stages = given.stages.map((own) => {
    const count = own.start.length + (own.tail ? 1 : 0), start = new Float64Array(count), end = new Float64Array(count);
    let now = 0;
    own.start.forEach((step, n) => { now += step; start[n] = now; end[n] = now + own.duration[n]; });
    if (own.tail) { start[count - 1] = own.end - own.tail; end[count - 1] = own.end; }
    return { start, end, slot: own.slot };
  });
  const row = Math.max(9, Math.min(24, 720 / stages.length));
  return { ...given, stages, row, height: 24 + row * stages.length, from: 0, to: given.step, at: null };
}

// What a slot is: forward or backward of which micro-batch, through which part; the tail has no number.
function slotAt(stage, n) {
  const code = whole.stages[stage].slot[n];
  if (code === undefined) return { tail: true };
  const chunk = (code >> 1) % whole.chunks;
  return { backward: code % 2 === 1, chunk, batch: Math.floor((code >> 1) / whole.chunks), part: whole.numbers[stage][chunk] };
}
const wordsOf = (own) => (own.tail ? "once a step" : `${own.backward ? "backward" : "forward"} of micro-batch ${own.batch}`);
const numberOf = (own) => (own.tail ? "" : `${own.batch}${whole.chunks > 1 ? `.${own.chunk}` : ""}`);
const stagesWidth = () => stagesCanvas.clientWidth - STAGE_LEFT;
const stageX = (time) => STAGE_LEFT + ((time - whole.from) / (whole.to - whole.from)) * stagesWidth();
const stageTime = (pixel) => whole.from + ((pixel - STAGE_LEFT) / stagesWidth()) * (whole.to - whole.from);

function drawStages() {
  if (!whole) return;
  const context = prepared(stagesCanvas, whole.height);
  const scale = stagesWidth() / (whole.to - whole.from), colours = [palette.forward, palette.backward, palette.optimizer];
  whole.stages.forEach((own, stage) => {
    const top = 4 + whole.row * stage, bar = whole.row - 4;
    for (let n = above(own.end, whole.from); n < own.start.length && own.start[n] < whole.to;) {
      const slot = slotAt(stage, n), x0 = Math.max(stageX(own.start[n]), STAGE_LEFT);
      const x1 = Math.min(stageX(own.end[n]), stagesCanvas.clientWidth);
      context.fillStyle = colours[slot.tail ? 2 : Number(slot.backward)];
      if (x1 - x0 < 1) { // the next that ends beyond this pixel
        context.fillRect(Math.floor(x0), top, 1, bar);
        n = Math.max(n + 1, above(own.end, whole.from + (Math.floor(x0) + 1 - STAGE_LEFT) / scale, n));
        continue;
      }
      context.fillRect(x0, top, Math.max(1, x1 - x0 - (x1 - x0 > 3 ? 1 : 0)), bar);
      const text = numberOf(slot);
      if (bar > 11 && x1 - x0 > 8 + LETTER * text.length) {
        context.fillStyle = palette["bar-text"];
        context.textAlign = "center";
        context.fillText(text, (x0 + x1) / 2, top + bar / 2);
        context.textAlign = "left";
      }
      n += 1;
    }
    if (whole.row > 12 || stage % 4 === 0) label(context, `${whole.word} ${stage}`, 0, top + bar / 2, STAGE_LEFT - 6, palette.text);
  });
  drawStageAxis(context);
  drawStageWaits(context);
}

function drawStageAxis(context) {
  const span = (whole.to - whole.from) * TICK, rough = span / Math.max(2, stagesWidth() / 130);
  const power = 10 ** Math.floor(Math.log10(rough)), size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  context.fillStyle = palette.soft;
  context.textAlign = "center";
  for (let n = Math.ceil((whole.from * TICK) / size); n * size <= whole.to * TICK; n += 1) {
    const text = seconds(n * size), half = (text.length * LETTER) / 2, at = stageX((n * size) / TICK);
    context.fillText(text, Math.max(half, Math.min(at, stagesCanvas.clientWidth - half)), whole.height - 8);
  }
  context.textAlign = "left";
}

// The slot that this one waits for longest: forward of a part that it reads, backward of one that reads it.
function givenBy(slot) {
  if (slot.tail) return null;
  const others = slot.backward ? [...whole.reads.keys()].filter((part) => whole.reads[part].includes(slot.part)) : whole.reads[slot.part];
  const found = others.map((part) => {
    const stage = whole.numbers.findIndex((own) => own.includes(part)), chunk = whole.numbers[stage].indexOf(part);
    return { stage, n: whole.stages[stage].slot.indexOf((slot.batch * whole.chunks + chunk) * 2 + Number(slot.backward)) };
  }).filter((own) => own.n >= 0);
  return found.sort((a, b) => whole.stages[b.stage].end[b.n] - whole.stages[a.stage].end[a.n])[0] ?? null;
}

function drawStageWaits(context) {
  if (!whole.at) return;
  const middle = (stage) => 4 + whole.row * stage + (whole.row - 4) / 2, { stage, n } = whole.at, own = whole.stages[stage];
  const x0 = Math.max(stageX(own.start[n]), STAGE_LEFT), x1 = Math.min(stageX(own.end[n]), stagesCanvas.clientWidth);
  context.strokeStyle = palette.text;
  context.lineWidth = 2;
  if (x1 > x0) context.strokeRect(x0 - 1, 3 + whole.row * stage, x1 - x0 + 2, whole.row - 2);
  const giver = givenBy(slotAt(stage, n));
  if (giver) {
    context.beginPath();
    context.moveTo(Math.max(STAGE_LEFT, stageX(whole.stages[giver.stage].end[giver.n])), middle(giver.stage));
    context.lineTo(Math.max(STAGE_LEFT, x0), middle(stage));
    context.stroke();
  }
  context.lineWidth = 1;
}

function showStages(from, to) {
  const size = Math.min(whole.step, Math.max(to - from, whole.step / 1e5));
  whole.from = Math.max(0, Math.min(from, whole.step - size));
  whole.to = whole.from + size;
  redraw();
}
function zoomStages(factor, around = (whole.from + whole.to) / 2) {
  showStages(around - (around - whole.from) * factor, around + (whole.to - around) * factor);
}
const panStages = (share) => showStages(whole.from + share * (whole.to - whole.from), whole.to + share * (whole.to - whole.from));

function stageSlotAt(offsetX, offsetY) {
  const stage = Math.floor((offsetY - 2) / whole.row), own = whole.stages[stage];
  if (!own || offsetX < STAGE_LEFT) return null;
  const n = above(own.end, stageTime(offsetX));
  return n < own.start.length && own.start[n] <= stageTime(offsetX + 2) ? { stage, n } : null;
}

function selectSlot(found) {
  whole.at = found;
  const panel = by("stages-panel");
  panel.hidden = !found;
  if (found) {
    const own = whole.stages[found.stage], slot = slotAt(found.stage, found.n), giver = givenBy(slot);
    const idle = own.start[found.n] - (found.n ? own.end[found.n - 1] : 0);
    panel.replaceChildren(element("h3", `${whole.word} ${found.stage}: ${wordsOf(slot)}`), listed([
      ["part", slot.tail ? "" : whole.parts[slot.part]],
      ["time", `${duration(own.end[found.n] - own.start[found.n])}, from ${duration(own.start[found.n])}`],
      ["waits for", giver ? `${whole.word} ${giver.stage}, until ${duration(whole.stages[giver.stage].end[giver.n])}` : ""],
      ["idle before it", idle > 10 ? duration(idle) : ""],
    ]), operatorsOf(found));
  }
  redraw();
}

// To what the slot does, operator by operator.
function operatorsOf({ stage, n }) {
  const button = element("button", "its operators", "link"), own = whole.stages[stage];
  button.type = "button";
  button.addEventListener("click", () => {
    showStage(stage, own.start[n], own.end[n]);
    canvas.focus();
  });
  return button;
}

function stepSlot(by_) {
  const stage = whole.at ? whole.at.stage : 0, count = whole.stages[stage].start.length;
  const n = whole.at ? Math.min(Math.max(whole.at.n + by_, 0), count - 1) : 0, own = whole.stages[stage];
  if (own.end[n] < whole.from || own.start[n] > whole.to) {
    const half = (whole.to - whole.from) / 2, middle = (own.start[n] + own.end[n]) / 2;
    showStages(middle - half, middle + half);
  }
  selectSlot({ stage, n });
}

const stageKeys = {
  w: () => zoomStages(0.5), s: () => zoomStages(2), a: () => panStages(-0.25), d: () => panStages(0.25),
  0: () => showStages(0, whole.step), n: () => stepSlot(1), p: () => stepSlot(-1), Escape: () => selectSlot(null),
};

function startStages() {
  if (!whole) return;
  for (const id of ["stages", "stages-note", "stages-legend"]) by(id).hidden = false;
  by("stages-picture").classList.add("drawn");
  drawings.push(drawStages);
  let held = null, moved = 0;
  stagesCanvas.addEventListener("pointerdown", (pointer) => { held = { x: pointer.offsetX, from: whole.from, to: whole.to }; moved = 0; });
  stagesCanvas.addEventListener("pointermove", (pointer) => {
    const found = stageSlotAt(pointer.offsetX, pointer.offsetY);
    if (!held) { hover(pointer, found ? `${whole.word} ${found.stage}, ${wordsOf(slotAt(found.stage, found.n))}` : ""); return; }
    hover(pointer, "");
    moved = Math.max(moved, Math.abs(pointer.offsetX - held.x));
    const shift = ((held.x - pointer.offsetX) / stagesWidth()) * (held.to - held.from);
    showStages(held.from + shift, held.to + shift);
  });
  stagesCanvas.addEventListener("pointerup", (pointer) => {
    if (held && moved < 4) selectSlot(stageSlotAt(pointer.offsetX, pointer.offsetY));
    held = null;
  });
  for (const left of ["pointerleave", "pointercancel"]) stagesCanvas.addEventListener(left, (pointer) => { held = null; hover(pointer, ""); });
  stagesCanvas.addEventListener("wheel", (wheel) => {
    if (document.activeElement !== stagesCanvas && !wheel.ctrlKey) return; // else the page scrolls
    wheel.preventDefault();
    zoomStages(wheel.deltaY > 0 ? 1.25 : 0.8, stageTime(wheel.offsetX));
  }, { passive: false });
  stagesCanvas.addEventListener("keydown", (key) => {
    const name = key.key.length === 1 ? key.key.toLowerCase() : key.key;
    if (!(name in stageKeys) || key.ctrlKey || key.metaKey || key.altKey) return;
    key.preventDefault();
    stageKeys[name]();
  });
}
