// Tables that readers sort by a click on a column's head: ascending, descending, original order.
// The last lines of this file start the page.

// Return [kind, value] of a cell. In both directions, numbers come before texts, missed targets
// after them, and cells without a value last.
function rankOf(cell) {
  const key = cell.dataset.key;
  if (key === undefined) return [1, cell.textContent.trim()];
  if (key === "none") return [3, 0];
  return /^-?inf$/.test(key) ? [2, 0] : [0, Number(key)];
}

function compareCells(one, other, sign) {
  const [kind, value] = rankOf(one), [otherKind, otherValue] = rankOf(other);
  if (kind !== otherKind) return kind - otherKind;
  if (kind === 1) return sign * value.localeCompare(otherValue, "en", { numeric: true });
  return sign * (value - otherValue);
}

function makeSortable(table) {
  const body = table.tBodies[0], original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" }[head.ariaSort] ?? "ascending";
      for (const other of heads) other.ariaSort = other === head ? next : "none";
      const sign = next === "descending" ? -1 : 1;
      const rows = [...original];
      if (next !== "none") {
        rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], sign));
      }
      body.append(...rows);
    });
  });
}

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
const charts = JSON.parse(document.getElementById("data").textContent);
for (const root of document.querySelectorAll(".chart")) {
  const task = charts[Number(root.dataset.chart)];
  for (const frame of root.querySelectorAll(".frame")) new Chart(root, frame, task);
}
