// Tables: a click on a head sorts, a field above a long one filters; on a phone each cell carries its column's name.
const FACTORS = {
  s: 1, ms: 1e-3, us: 1e-6, "µs": 1e-6, ns: 1e-9, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, "%": 1, x: 1, "": 1,
};
const LONG = 12; // rows from which a table has a filter

// `-1.2 ms` as -0.0012; null where a cell is no quantity.
function quantity(text) {
  const found = /^([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([^\s(]*)$/i.exec(text.trim());
  return found && found[2] in FACTORS ? Number(found[1].replaceAll(",", "")) * FACTORS[found[2]] : null;
}

function sortBy(table, column, head) {
  const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
  const lines = [...body.rows].map((line, n) => [line.cells[column].textContent, line, n]);
  const numbers = lines.every(([text]) => text === "" || quantity(text) !== null);
  const compare = (a, b) => (numbers ? (quantity(a) ?? -Infinity) - (quantity(b) ?? -Infinity) : a.localeCompare(b, "en", { numeric: true }));
  lines.sort((a, b) => (up ? 1 : -1) * compare(a[0], b[0]) || a[2] - b[2]);
  body.append(...lines.map((line) => line[1]));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}

function filterField(table, name) {
  const label = document.createElement("label"), field = document.createElement("input");
  label.className = "filter";
  label.append("Filter ", field);
  field.type = "search";
  field.setAttribute("aria-label", `Filter: ${name}`);
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    for (const line of table.tBodies[0].rows) line.hidden = !line.textContent.toLowerCase().includes(wanted);
  });
  return label;
}

for (const table of document.querySelectorAll("table.data")) {
  const heads = [...table.tHead.rows[0].cells], names = heads.map((head) => head.textContent);
  if (table.tBodies[0].rows.length > 1) {
    heads.forEach((head, column) => {
      if (!names[column]) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = names[column];
      button.addEventListener("click", () => sortBy(table, column, head));
      head.replaceChildren(button);
    });
  }
  if (table.tBodies[0].rows.length > LONG) table.parentElement.before(filterField(table, table.caption.textContent));
  for (const line of table.tBodies[0].rows) [...line.cells].forEach((cell, n) => { cell.dataset.label = names[n]; });
}
