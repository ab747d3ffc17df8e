// One chart as SVG: curves with their bands, marks of what happened, a cursor that keys and pointer move.

const SVG = "http://www.w3.org/2000/svg";
const TICK_TEXT = 7; // pixels of a digit in a tick's text
const MAX_DOTS = 60; // of a curve; more would hide it
const COLOURS = 6;
const PARTS_OF_A_STEP = ["input_sec", "compute_sec", "communication_sec", "other_sec"];
const GLYPH_WIDTH = 12;

function add(parent, name, attributes = {}, text = null) {
  const isDrawing = ["svg", "g", "path", "line", "rect", "text", "circle", "clipPath", "title"].includes(name);
  const made = isDrawing ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

class Chart {
  // figure: where it is drawn; plan: its title, scale and curves; data: the runs; view: what all charts share.
  constructor(figure, plan, data, view) {
    Object.assign(this, { figure, plan, data, view });
    this.lines = [];
    const keys = Object.keys(plan.curves);
    data.runs.forEach((run, runIndex) => {
      keys.forEach((key, curveIndex) => {
        if (run.curves[key]) this.lines.push(this.describeLine(run, runIndex, key, curveIndex));
      });
    });
    this.svg = add(figure, "svg", {
      class: "plot", tabindex: 0, role: "application", "aria-roledescription": "chart",
      "aria-label": `${plan.title}: ${keys.map((key) => plan.curves[key]).join(", ")}. Arrow keys read the values.`,
    });
    this.makeLegend();
  }

  describeLine(run, runIndex, key, curveIndex) {
    const isOne = this.data.runs.length === 1;
    const isEvaluation = key.startsWith("eval/");
    const alone = Object.keys(this.plan.curves).length === 1;
    const what = this.plan.curves[key];
    const part = key.split("/")[1];
    const ownColour = PARTS_OF_A_STEP.includes(part) ? part : curveIndex % COLOURS; // as in the bar of where the time went
    const colour = isOne ? ownColour : runIndex % COLOURS;
    const dash = isOne ? 0 : (Math.floor(runIndex / COLOURS) + (isEvaluation ? 0 : curveIndex)) % 4;
    const name = isOne ? what : alone ? run.name : `${run.name}, ${what}`;
    return { curve: run.curves[key], run: runIndex, name, colour, dash, isEvaluation };
  }

  makeLegend() {
    const legend = this.figure.querySelector(".legend");
    for (const line of this.lines) {
      const item = add(legend, "li");
      const swatch = add(item, "svg", { width: 18, height: 10, "aria-hidden": "true" });
      this.addStroke(swatch, line, "M1 5H17");
      if (line.isEvaluation) add(swatch, "circle", { class: `fill-${line.colour}`, cx: 9, cy: 5, r: 3 });
      item.append(`${line.name} `);
      line.shown = add(item, "b");
      line.item = item;
    }
  }

  addStroke(parent, line, path) {
    const weight = line.isEvaluation ? " strong" : "";
    return add(parent, "path", { class: `line stroke-${line.colour} dash-${line.dash}${weight}`, d: path });
  }

  // The lines of the runs that are not switched off.
  visible() {
    return this.lines.filter((line) => !this.view.hidden.has(line.run));
  }

  draw() {
    const width = Math.max(240, Math.round(this.figure.clientWidth - this.padding()));
    const height = width < 420 ? 210 : 240;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    for (const line of this.lines) line.item.hidden = this.view.hidden.has(line.run);
    const y = this.makeYAxis(height - 40, 16);
    const ticks = (y.isLog ? logTicks : linearTicks)(y.low, y.high, 5);
    const left = Math.max(...formatTicks(ticks, y.isLog).map((text) => text.length), 2) * TICK_TEXT + 12;
    const x = makeScale(...this.view.domain, left, width - 10, false);
    Object.assign(this, { x, y, height, width });
    this.drawAxes(ticks, left);
    const plot = this.addPlot(left);
    for (const line of this.visible()) this.drawLine(plot, line);
    this.drawMarks(plot);
    this.overlay = add(this.svg, "g");
    this.drawCursor();
  }

  padding() {
    const style = getComputedStyle(this.figure);
    return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  }

  // Where the curves may draw: they end at the axes.
  addPlot(left) {
    const name = `clip-${this.figure.dataset.chart}`;
    const clip = add(this.svg, "clipPath", { id: name });
    add(clip, "rect", { x: left, y: 2, width: this.width - 10 - left + (this.view.zoom ? 0 : 6), height: this.height - 42 + 4 });
    return add(this.svg, "g", { "clip-path": `url(#${name})` });
  }

  // The axis of the values that can be seen.
  makeYAxis(bottom, top) {
    const [from, to] = this.view.domain;
    const isLog = this.plan.scale === "log";
    let [low, high] = [Infinity, -Infinity];
    for (const { curve } of this.visible()) {
      const at = curve[this.view.axis];
      for (let place = 0; place < at.length; place += 1) {
        if (at[place] < from || at[place] > to || curve.mean[place] === null) continue;
        low = Math.min(low, (curve.low || curve.mean)[place]);
        high = Math.max(high, (curve.high || curve.mean)[place]);
      }
    }
    if (low > high) [low, high] = isLog ? [1, 10] : [0, 1];
    if (this.plan.scale === "zero") low = Math.min(0, low);
    if (isLog) {
      const margin = Math.max(1.1, (high / low) ** 0.04);
      return makeScale(low / margin, high * margin, bottom, top, true);
    }
    const margin = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
    return makeScale(this.plan.scale === "zero" && low === 0 ? 0 : low - margin, high + margin, bottom, top, false);
  }

  drawAxes(ticks, left) {
    const [bottom, right] = [this.height - 40, this.width - 10];
    const texts = formatTicks(ticks, this.y.isLog);
    for (const [place, tick] of ticks.entries()) {
      const at = this.y(tick);
      add(this.svg, "line", { class: "grid", x1: left, x2: right, y1: at, y2: at });
      add(this.svg, "text", { x: left - 7, y: at + 4, "text-anchor": "end" }, texts[place]);
    }
    const count = Math.min(Math.max(2, Math.floor((right - left) / 75)), 10);
    const [from, to] = this.view.domain;
    const isTime = this.view.axis === "elapsed";
    const { ticks: along, size, unit } = isTime ? timeTicks(from, to, count)
      : { ticks: linearTicks(from, to, count).filter(Number.isInteger), size: 1, unit: "" };
    const alongTexts = formatTicks(along.map((tick) => tick / size));
    for (const [place, tick] of along.entries()) {
      const at = this.x(tick);
      add(this.svg, "line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 });
      add(this.svg, "text", { x: Math.min(at, right - 6), y: bottom + 17, "text-anchor": "middle" }, alongTexts[place]);
    }
    add(this.svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    const title = isTime ? `time since the start (${unit})` : "step";
    add(this.svg, "text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, title);
  }

  drawLine(plot, line) {
    const { curve } = line;
    const at = curve[this.view.axis];
    const pauses = this.findPauses(line.run, at);
    let [path, isDrawing] = ["", false];
    for (let place = 0; place < at.length; place += 1) {
      const value = curve.mean[place];
      const px = this.x(at[place]).toFixed(1);
      isDrawing = isDrawing && !pauses.has(place);
      if (value !== null) path += `${isDrawing ? "L" : "M"}${px} ${this.y(value).toFixed(1)}${isDrawing ? "" : "h0"}`;
      isDrawing = value !== null;
    }
    if (curve.low) add(plot, "path", { class: `band fill-${line.colour}`, d: this.bandPath(curve, at, pauses) });
    const drawn = this.addStroke(plot, line, path || "M0 0");
    drawn.setAttribute("data-points", at.length);
    if (line.isEvaluation && at.length <= MAX_DOTS) this.drawDots(plot, line, at);
    for (const place of curve.crosses ? curve.crosses[this.view.axis] : []) {
      add(plot, "path", { class: `cross stroke-${line.colour}`, d: `M${this.x(place) - 4} 17l8 8m0-8l-8 8` });
    }
  }

  // The area between the smallest and the largest values, in as many pieces as there are gaps in the curve.
  bandPath(curve, at, pauses) {
    const pieces = [];
    let [above, below] = [[], []];
    for (let place = 0; place <= at.length; place += 1) {
      const isThere = place < at.length && curve.mean[place] !== null;
      if (above.length && (!isThere || pauses.has(place))) {
        pieces.push(`M${above.join("L")}L${below.reverse().join("L")}Z`);
        [above, below] = [[], []];
      }
      if (!isThere) continue;
      const px = this.x(at[place]).toFixed(1);
      above.push(`${px} ${this.y(curve.high[place]).toFixed(1)}`);
      below.push(`${px} ${this.y(curve.low[place]).toFixed(1)}`);
    }
    return pieces.join("");
  }

  // The first points after a restart, where the axis is time: nothing ran between them and the points before.
  findPauses(runIndex, at) {
    if (this.view.axis !== "elapsed") return new Set();
    const restarts = this.data.runs[runIndex].marks.filter((mark) => mark.kind === "restart");
    return new Set(restarts.map((mark) => at.findIndex((point) => point >= mark.elapsed)));
  }

  drawDots(plot, line, at) {
    line.curve.mean.forEach((value, place) => {
      if (value === null) return;
      add(plot, "circle", { class: `dot fill-${line.colour}`, cx: this.x(at[place]), cy: this.y(value), r: 3.4 });
    });
  }

  drawMarks(plot) {
    const bottom = this.height - 40;
    const isOne = this.data.runs.length === 1;
    const taken = new Map(); // pixel to the marks there: an end and the next start are often at the same step
    for (const { mark, runIndex } of this.view.marks()) {
      const px = Number(this.x(mark[this.view.axis]).toFixed(1));
      const before = taken.get(px) || 0;
      taken.set(px, before + 1);
      const line = add(plot, "path", { class: `mark ${mark.kind}`, d: `M${px} 16V${bottom}` });
      const glyph = add(plot, "path", { class: `glyph ${mark.kind}`, d: GLYPHS[mark.kind](px + before * GLYPH_WIDTH) });
      add(glyph, "title", {}, mark.text);
      if (isOne) continue;
      line.style.stroke = `var(--run-${runIndex % COLOURS})`;
      glyph.style.fill = `var(--run-${runIndex % COLOURS})`;
    }
  }

  // The point of each line that is nearest to the cursor.
  read() {
    if (this.view.cursor === null) return [];
    return this.visible().map((line) => {
      const at = line.curve[this.view.axis];
      const place = nearest(at, this.view.cursor);
      return { line, place, at: at[place], step: line.curve.step[place], value: line.curve.mean[place] };
    });
  }

  drawCursor() {
    this.overlay.replaceChildren();
    for (const line of this.lines) line.shown.textContent = "";
    const { cursor } = this.view;
    if (cursor === null || cursor < this.x.low || cursor > this.x.high) return;
    const [px, bottom] = [this.x(cursor), this.height - 40];
    add(this.overlay, "line", { class: "cursor", x1: px, x2: px, y1: 16, y2: bottom });
    for (const { line, at, step, value, place } of this.read()) {
      line.shown.textContent = this.describePoint(line, value, place) + (at === cursor ? "" : ` (step ${formatNumber(step)})`);
      if (value === null || at < this.x.low || at > this.x.high) continue;
      add(this.overlay, "circle", { class: `dot fill-${line.colour}`, cx: this.x(at), cy: this.y(value), r: 4.5 });
    }
    const text = this.view.describeCursor();
    const half = (text.length * TICK_TEXT) / 2 + 6;
    const centre = Math.min(Math.max(px, half), this.width - half);
    add(this.overlay, "rect", { class: "label-box", x: centre - half, y: bottom + 3, width: 2 * half, height: 20, rx: 4 });
    add(this.overlay, "text", { class: "label", x: centre, y: bottom + 17, "text-anchor": "middle" }, text);
  }

  describePoint(line, value, place) {
    const { low, high } = line.curve;
    const isSpread = low && value !== null && low[place] !== high[place];
    return formatNumber(value) + (isSpread ? ` [${formatNumber(low[place])} to ${formatNumber(high[place])}]` : "");
  }

  // What stands at the cursor, as a sentence.
  describe() {
    const values = this.read().map(({ line, place, value, step, at }) => {
      const where = at === this.view.cursor ? "" : ` at step ${formatNumber(step)}`;
      return `${line.name} ${this.describePoint(line, value, place)}${where}`;
    });
    const marks = this.view.marks().filter(({ mark }) => mark[this.view.axis] === this.view.cursor);
    const happened = marks.map(({ mark }) => `; ${mark.kind === "failure" ? "end" : mark.kind}: ${mark.text}`);
    return `${this.plan.title}, ${this.view.describeCursor()}: ${values.join(", ")}${happened.join("")}`;
  }

  // All places of the visible curves along the axis that are in view, rising.
  stops() {
    const [from, to] = this.view.domain;
    const places = this.visible().flatMap((line) => line.curve[this.view.axis]);
    return [...new Set(places)].filter((at) => at >= from && at <= to).sort((a, b) => a - b);
  }
}

const GLYPHS = {
  restart: (px) => `M${px - 5} 4h10l-5 9z`,
  warning: (px) => `M${px - 5} 13h10l-5 -9z`,
  end: (px) => `M${px - 4} 4h8v8h-8z`,
  failure: (px) => `M${px - 5} 8l5 -5l5 5l-5 5z`,
};

