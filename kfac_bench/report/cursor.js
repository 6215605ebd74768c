// The pointer and the keys on a chart: they show a point's numbers, zoom in, and zoom out.

const REACH = 40;  // largest distance in pixels from the pointer to the point that it shows
const DRAG = 6;  // pixels; a shorter drag is a click

class Cursor {
  constructor(chart, tip) {
    this.chart = chart;
    this.tip = tip;
    this.place = null;  // { curve, index }: the point that is shown, and its index in the hit
    this.from = null;  // [x, y] where the drag began; null: no drag
    const on = (name, action) => chart.plot.addEventListener(name, action.bind(this));
    on("pointerdown", this.startDrag);
    on("pointermove", this.move);
    on("pointerup", this.endDrag);
    on("pointercancel", this.dropDrag);
    on("pointerleave", () => this.goTo(null));
    on("blur", () => this.goTo(null));
    on("dblclick", () => chart.press({ whole: "" }));
    on("keydown", this.key);
  }

  goTo(place) {
    this.place = place;
    this.tell();
  }

  hit() {
    return this.place && this.chart.hits.find(({ curve }) => curve === this.place.curve);
  }

  // Mark the point and show its numbers.
  tell() {
    const { area, hits, task, y } = this.chart, hit = this.hit();
    area?.querySelector(".mark")?.remove();
    for (const { line } of hits) line.classList.remove("hot");
    this.tip.hidden = !hit;
    if (!hit) return;
    const { setting, run } = hit.curve, i = this.place.index;
    const [step, seconds, value] = run[y].map((column) => column[hit.indices[i]]);
    hit.line.classList.add("hot");
    const mark = { cx: hit.xs[i], cy: hit.ys[i], r: 5, class: `mark c${setting.colour}` };
    area.append(shape("circle", mark));
    this.say([setting.label, `${this.chart.nameOfY()} ${writeNumber(value)}`,
      `step ${step}, ${writeNumber(seconds)} s`, `seed ${run.seed}${run.median ? ", the median run" : ""}`]);
    this.moveTip(hit.xs[i], hit.ys[i]);
  }

  say(lines) {
    this.tip.replaceChildren(...lines.map((text) => {
      const line = document.createElement("span");
      line.textContent = text;
      return line;
    }));
  }

  // Move the tip beside the point, to the side with more room.
  moveTip(x, y) {
    const { width, height } = this.chart, { offsetWidth, offsetHeight } = this.tip;
    const left = x > width / 2 ? x - offsetWidth - 12 : x + 12;
    this.tip.style.left = `${Math.max(0, Math.min(left, width - offsetWidth))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y - 20, height - offsetHeight))}px`;
  }

  // Return the position of the pointer in pixels of the plot.
  at(event) {
    const frame = this.chart.plot.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  inside(x, y) {
    const { left, right, top, bottom } = this.chart.box;
    return x >= left - 1 && x <= right + 1 && y >= top - 1 && y <= bottom + 1;
  }

  // Return the indices of a curve's points that are inside the zoom.
  seen({ xs, ys }) {
    return [...xs.keys()].filter((i) => this.inside(xs[i], ys[i]));
  }

  move(event) {
    const [x, y] = this.at(event);
    if (this.from) return this.showDrag(x, y);
    let best = null, closest = REACH ** 2;
    for (const { curve, xs, ys } of this.chart.hits) {
      for (let index = 0; index < xs.length; index++) {
        const distance = (xs[index] - x) ** 2 + (ys[index] - y) ** 2;
        if (distance < closest && this.inside(xs[index], ys[index])) {
          closest = distance;
          best = { curve, index };
        }
      }
    }
    this.goTo(best);
  }

  startDrag(event) {
    const [x, y] = this.at(event);
    if (event.button !== 0 || !this.inside(x, y)) return;
    this.from = [x, y];
    this.chart.plot.setPointerCapture(event.pointerId);
  }

  // Return the pixel ranges of the dragged rectangle, low value first. A narrow rectangle has the
  // range of one axis, and a click has none.
  dragged(x, y) {
    const { left, right, top, bottom } = this.chart.box;
    const sorted = (one, other) => [Math.min(one, other), Math.max(one, other)];
    const xs = sorted(this.from[0], Math.max(left, Math.min(right, x)));
    const ys = sorted(this.from[1], Math.max(top, Math.min(bottom, y)));
    const wide = xs[1] - xs[0], high = ys[1] - ys[0];
    if (wide < DRAG && high < DRAG) return null;
    if (high < DRAG || high < wide / 8) return { xs };
    return wide < DRAG || wide < high / 8 ? { ys: ys.reverse() } : { xs, ys: ys.reverse() };
  }

  showDrag(x, y) {
    this.goTo(null);
    this.chart.area.querySelector(".drag")?.remove();
    const drag = this.dragged(x, y), { left, right, top, bottom } = this.chart.box;
    if (!drag) return;
    const [x0, x1] = drag.xs ?? [left, right], [y1, y0] = drag.ys ?? [bottom, top];
    const frame = { x: x0, y: y0, width: x1 - x0, height: y1 - y0, class: "drag" };
    this.chart.area.append(shape("rect", frame));
  }

  endDrag(event) {
    const drag = this.from && this.dragged(...this.at(event));
    this.dropDrag();
    if (drag) this.chart.zoomTo(drag.xs, drag.ys);
  }

  dropDrag() {
    this.from = null;
    this.chart.area.querySelector(".drag")?.remove();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const many = event.shiftKey ? 10 : 1;
    const actions = {
      ArrowRight: () => this.along(many), ArrowLeft: () => this.along(-many),
      ArrowDown: () => this.across(1), ArrowUp: () => this.across(-1),
      "+": () => this.magnify(), Escape: () => this.chart.press({ whole: "" }),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // Go `by` points along the same curve.
  along(by) {
    const hit = this.hit();
    if (!hit) return this.across(0);
    const seen = this.seen(hit), now = seen.indexOf(this.place.index) + by;
    const index = seen[Math.max(0, Math.min(now, seen.length - 1))];
    this.goTo({ curve: hit.curve, index });
  }

  // Go `by` curves on, to the point with the nearest x. At first, go to the first curve's middle.
  across(by) {
    const { curves, hits, box } = this.chart, now = this.hit();
    const order = curves.map((curve) => hits.find((hit) => hit.curve === curve))
      .filter((hit) => hit && this.seen(hit).length);
    if (!order.length) return;
    const x = now ? now.xs[this.place.index] : (box.left + box.right) / 2;
    const next = now ? order.indexOf(now) + by + order.length : 0;
    const { curve, xs, ys } = order[next % order.length];
    const closer = (a, b) => (Math.abs(xs[b] - x) < Math.abs(xs[a] - x) ? b : a);
    this.goTo({ curve, index: this.seen({ xs, ys }).reduce(closer) });
  }

  // Zoom in on both axes by a factor of two, around the point or around the middle.
  magnify() {
    const { left, right, top, bottom } = this.chart.box, hit = this.hit();
    const x = hit ? hit.xs[this.place.index] : (left + right) / 2;
    const y = hit ? hit.ys[this.place.index] : (top + bottom) / 2;
    const half = (middle, one, other) => [(middle + one) / 2, (middle + other) / 2];
    this.chart.zoomTo(half(x, left, right), half(y, bottom, top));
  }
}
