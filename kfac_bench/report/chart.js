// The curves of one task as SVG, with switches for both axes and a legend that hides settings. The
// large plot shows the metric or the loss. Each small plot shows one quantity, its `panel`. The
// switches of the x axis and the legend are for all plots of the task.
// Names come from event files and are not trusted, so they are set as text and never as markup.

const SVG = "http://www.w3.org/2000/svg";
const X = { steps: 0, seconds: 1 }, Y = 2;  // columns of a curve
const NARROWEST = 120;  // pixels; a narrower plot has no layout yet

function shape(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

class Chart {
  constructor(root, frame, task) {
    this.task = task;
    this.root = root;
    this.frame = frame;
    this.panel = frame.dataset.panel;
    this.hidden = new Set();  // indices of the settings that the legend hides
    this.plot = frame.querySelector(".plot");
    this.curves = task.settings.flatMap((setting, index) =>
      [...setting.runs].sort((a, b) => b.median - a.median).map((run) => ({ setting, index, run })));
    const values = (y) => this.curves.flatMap(({ run }) => run[y][Y]);
    const positive = (y) => values(y).every((value) => fits(value, true));
    this.empty = { metric: !values("metric").length, loss: !values("loss").length };
    this.x = "seconds";
    this.y = this.panel ?? (this.empty.metric && !this.empty.loss ? "loss" : "metric");
    // Losses and errors fall by factors. A share such as accuracy does not.
    this.log = { metric: positive("metric") && !task.higherIsBetter, loss: positive("loss") };
    if (this.panel) this.log[this.panel] = positive(this.panel) && !task.linear.includes(this.panel);
    this.zoom = { x: null, y: null };  // [low, high] of an axis; null: its usual range
    this.everything = false;  // whether the usual range includes values that hasRoom() leaves out
    this.hits = [];  // per curve on the plot: its line, and the pixels of its points
    this.cursor = new Cursor(this, frame.querySelector(".tip"));
    root.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button && this.hears(button)) this.press(button.dataset);
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // Whether a button is for this plot: not those of other plots, nor for a small plot its y axis.
  hears(button) {
    const { y, scale, whole } = button.dataset;
    return whole === undefined ? !(this.panel && (y || scale)) : this.frame.contains(button);
  }

  press({ x, y, scale, setting, whole }) {
    if (x) [this.x, this.zoom.x] = [x, null];
    if (y) [this.y, this.zoom.y] = [y, null];
    if (scale) [this.log[this.y], this.zoom.y] = [scale === "log", null];
    if (setting && !this.hidden.delete(Number(setting))) this.hidden.add(Number(setting));
    if (whole !== undefined) this.zoomOut();
    this.cursor.place = null;
    this.draw();
  }

  // Draw everything again from the data. So nothing on the plot can be out of date.
  draw() {
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
    if (this.width < NARROWEST) return;
    const log = this.log[this.y], goal = this.y === "metric" ? this.task.target : null;
    const shown = this.curves.filter(({ index }) => !this.hidden.has(index));
    const all = (column) => shown.flatMap(({ run }) => run[this.y][column]);
    const xRange = this.zoom.x ?? [0, extent(all(X[this.x]), false, 0.02)[1]];
    const values = all(Y), readable = values.filter((value) => this.hasRoom(value));
    const heights = this.everything ? values : readable;
    this.hides = readable.length < values.length;
    if (goal !== null) heights.push(goal);
    this.layOut(xRange, this.zoom.y ?? extent(heights, log, 0.12), log);
    this.svg = shape("svg", { width: this.width, height: this.height, "aria-hidden": true });
    this.drawAxes();
    this.drawArea(shown, goal);
    this.plot.querySelector("svg")?.remove();
    this.plot.prepend(this.svg);
    this.cursor.tell();
    this.showState();
  }

  // Whether the range includes a value. The values of a run that diverges are outside, and those
  // far from the target of an accuracy: otherwise the other values could not be read.
  hasRoom(value) {
    const worst = this.task.worst[this.y] ?? null;
    if (worst === null) return true;
    return this.y === "metric" && this.task.higherIsBetter ? value >= worst : value <= worst;
  }

  layOut(xRange, yRange, log) {
    const top = 30, bottom = this.height - (this.panel ? 24 : 44), right = this.width - 14;
    this.yTicks = (log ? logTicks : linearTicks)(...yRange, Math.max(2, (bottom - top) / 45));
    const digits = Math.max(...this.yTicks.map((tick) => writeNumber(tick).length), 1);
    const left = 14 + 7.5 * digits;
    this.box = { left, right, top, bottom };
    this.xScale = makeScale(...xRange, left, right, false);
    this.yScale = makeScale(...yRange, bottom, top, log);
    this.xTicks = linearTicks(...xRange, Math.max(2, (right - left) / 90));
  }

  drawAxes() {
    const { left, right, top, bottom } = this.box;
    const line = (x1, y1, x2, y2, name) =>
      this.svg.append(shape("line", { x1, y1, x2, y2, class: name }));
    const words = (x, y, anchor, text, name) =>
      this.svg.append(shape("text", { x, y, "text-anchor": anchor, class: name }, text));
    for (const tick of this.yTicks) {
      const y = this.yScale(tick);
      line(left, y, right, y, "grid");
      words(left - 8, y + 4, "end", writeNumber(tick), "tick");
    }
    for (const tick of this.xTicks) {
      const x = this.xScale(tick);
      line(x, top, x, bottom, "grid");
      words(x, bottom + 18, "middle", writeNumber(tick), "tick");
    }
    line(left, bottom, right, bottom, "base");
    words(4, 14, "start", this.nameOfY(), "axis y");
    if (this.panel) return;  // the large plot names the axis
    const nameOfX = this.x === "seconds" ? "training time (seconds)" : "training steps";
    words(right, bottom + 38, "end", nameOfX, "axis x");
  }

  nameOfY() {
    return this.task.names[this.y];
  }

  // Draw the curves in an svg inside the svg, which cuts off what is outside of the zoom.
  drawArea(shown, goal) {
    const { left: x, right, top: y, bottom } = this.box, width = right - x, height = bottom - y;
    this.area = shape("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` });
    this.svg.append(this.area);
    this.hits = [];
    for (const median of [false, true]) {  // median runs last, so they are on top
      for (const curve of shown) if (curve.run.median === median) this.drawCurve(curve);
    }
    if (goal !== null && fits(goal, this.yScale.log)) this.drawTarget(goal);
    if (this.y === "metric") shown.forEach((curve) => this.drawMet(curve));
    if (this.hits.every(({ xs }) => !xs.length)) {
      const middle = { x: x + width / 2, y: y + height / 2, class: "nothing" };
      this.area.append(shape("text", middle, "nothing to draw"));
    }
  }

  drawTarget(goal) {
    const { left, right, top, bottom } = this.box, y = this.yScale(goal);
    this.area.append(shape("line", { x1: left, y1: y, x2: right, y2: y, class: "target" }));
    // The label is beyond the line at its left end, because most runs meet the line at its right end.
    const above = this.task.higherIsBetter ? y - 18 > top : y + 18 > bottom;
    const place = { x: left + 6, y: above ? y - 6 : y + 15, class: "goal" };
    this.area.append(shape("text", place, `target ${writeNumber(goal)}`));
  }

  // Mark the point where a median run met the target.
  drawMet({ setting, run }) {
    if (!run.median || !run.met || !fits(run.met[Y], this.yScale.log)) return;
    const cx = this.xScale(run.met[X[this.x]]), cy = this.yScale(run.met[Y]);
    this.area.append(shape("circle", { cx, cy, r: 4.5, class: `met c${setting.colour}` }));
  }

  drawCurve(curve) {
    const { setting, run } = curve, points = run[this.y], xs = [], ys = [], indices = [];
    points[Y].forEach((value, i) => {
      if (!fits(value, this.yScale.log)) return;
      xs.push(this.xScale(points[X[this.x]][i]));
      ys.push(this.yScale(value));
      indices.push(i);
    });
    const path = xs.map((x, i) => `${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("L");
    const width = run.median ? 2 : 1;
    const line = shape("path", { class: `line c${setting.colour}${run.median ? " median" : ""}` });
    if (path) line.setAttribute("d", `M${path}`);
    if (setting.dashes.length) {
      line.setAttribute("stroke-dasharray", setting.dashes.map((dash) => dash * width).join(" "));
    }
    this.area.append(line);
    this.hits.push({ curve, line, xs, ys, indices });
  }

  showState() {
    const state = [this.x, this.y, this.log[this.y] ? "log" : "linear"];
    for (const button of this.root.querySelectorAll("button")) {
      if (!this.hears(button)) continue;
      const { x, y, scale, setting, whole } = button.dataset;
      if (whole !== undefined) {
        button.disabled = !this.isZoomed() && !this.hides;
        button.textContent = this.everything && !this.isZoomed() ? "usual range" : "whole range";
      } else if (setting) button.ariaPressed = String(!this.hidden.has(Number(setting)));
      else button.ariaPressed = String(state.includes(x ?? y ?? scale));
      if (y) button.disabled = this.empty[y];
    }
  }

  isZoomed() {
    return Boolean(this.zoom.x || this.zoom.y);
  }

  // Leave the zoom. Without a zoom, show all values, or again only those that can be read.
  zoomOut() {
    if (!this.isZoomed() && this.hides) this.everything = !this.everything;
    this.zoom = { x: null, y: null };
  }

  // Zoom to ranges of pixels; the pixel of the low value comes first. An axis without a range
  // stays as it is.
  zoomTo(xs, ys) {
    const ranges = { x: xs?.map(this.xScale.invert), y: ys?.map(this.yScale.invert) };
    for (const [axis, range] of Object.entries(ranges)) {
      // The data has six digits, so a smaller range would show nothing but rounding.
      const smallest = range && 1e-6 * Math.max(...range.map(Math.abs));
      if (range && range[1] - range[0] > smallest) this.zoom[axis] = range;
    }
    this.draw();
  }
}
