// The page: what all charts share, and what the reader does.

const KEY_STRIDE = 10; // points that PageUp and PageDown move by
const MIN_DRAG = 6; // pixels: less is a click
const MARK_NAMES = { restart: "started again", warning: "warning", end: "end", failure: "end by an error" };

class View {
  constructor(data) {
    Object.assign(this, { data, axis: "step", hidden: new Set(), cursor: null, zoom: null });
  }

  // The part of the axis that is shown.
  get domain() {
    return this.zoom || this.whole;
  }

  get whole() {
    const all = this.data.runs.flatMap((run) => Object.values(run.curves).map((curve) => curve[this.axis]));
    const low = Math.min(0, ...all.map((at) => at[0]));
    const high = Math.max(...all.map((at) => at[at.length - 1]));
    return [low, high > low ? high : low + 1];
  }

  marks() {
    return this.data.runs.flatMap((run, place) =>
      this.hidden.has(place) ? [] : run.marks.filter((mark) => mark[this.axis] !== null).map((mark) => ({ mark, runIndex: place })));
  }

  describeCursor() {
    return this.axis === "step" ? `step ${formatNumber(Math.round(this.cursor))}` : formatSeconds(this.cursor);
  }
}

class Page {
  constructor(data) {
    this.view = new View(data);
    this.charts = [...document.querySelectorAll("figure.chart")].map(
      (figure) => new Chart(figure, data.charts[figure.dataset.chart], data, this.view));
    this.spoken = document.getElementById("spoken");
    this.whole = document.getElementById("whole");
    if (this.charts.length) this.begin();
  }

  begin() {
    document.querySelector(".toolbar").hidden = false;
    for (const chart of this.charts) this.listen(chart);
    for (const radio of document.querySelectorAll("input[name=axis]")) {
      radio.checked = radio.value === this.view.axis; // a reloaded page remembers another
      radio.addEventListener("change", () => this.change({ axis: radio.value, zoom: null, cursor: null }));
    }
    for (const box of document.querySelectorAll("input[name=run]")) {
      box.checked = true;
      box.addEventListener("change", () => {
        this.view.hidden[box.checked ? "delete" : "add"](Number(box.value));
        this.change({});
      });
    }
    this.whole.addEventListener("click", () => this.change({ zoom: null }));
    new ResizeObserver(() => this.draw()).observe(document.querySelector(".charts"));
    window.addEventListener("beforeprint", () => this.change({ cursor: null }));
    this.explainMarks();
    this.draw();
  }

  // Below the charts: what the marks mean, as far as there are any.
  explainMarks() {
    const list = document.querySelector("ul.marks");
    const kinds = new Set(this.view.marks().map(({ mark }) => mark.kind));
    list.hidden = !kinds.size;
    for (const kind of Object.keys(MARK_NAMES).filter((name) => kinds.has(name))) {
      const item = add(list, "li");
      const swatch = add(item, "svg", { width: 14, height: 16, "aria-hidden": "true" });
      add(swatch, "path", { class: `glyph ${kind}`, d: GLYPHS[kind](7) });
      item.append(MARK_NAMES[kind]);
    }
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }

  change(values) {
    Object.assign(this.view, values);
    this.whole.disabled = this.view.zoom === null;
    this.draw();
  }

  moveCursor(at) {
    this.view.cursor = at;
    for (const chart of this.charts) chart.drawCursor();
  }

  listen(chart) {
    const { svg } = chart;
    let dragFrom = null;
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      const at = chart.x.invert(((event.clientX - box.left) / box.width) * chart.width);
      return Math.min(Math.max(at, chart.x.low), chart.x.high);
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      dragFrom = { pixel: event.clientX, at: place(event) };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const stops = chart.stops();
      if (stops.length) this.moveCursor(stops[nearest(stops, place(event))]);
      if (dragFrom) this.showSelection(chart, dragFrom.at, place(event));
    });
    svg.addEventListener("pointerup", (event) => {
      if (dragFrom && Math.abs(event.clientX - dragFrom.pixel) >= MIN_DRAG) {
        this.zoomTo(...[dragFrom.at, place(event)].sort((a, b) => a - b));
      }
      dragFrom = null;
    });
    svg.addEventListener("pointercancel", () => { dragFrom = null; });
    svg.addEventListener("pointerleave", () => {
      if (!dragFrom && document.activeElement !== svg) this.moveCursor(null);
    });
    svg.addEventListener("dblclick", () => this.change({ zoom: null }));
    svg.addEventListener("keydown", (event) => this.press(chart, event));
    svg.addEventListener("blur", () => this.moveCursor(null));
  }

  showSelection(chart, from, to) {
    const [left, right] = [chart.x(Math.min(from, to)), chart.x(Math.max(from, to))];
    add(chart.overlay, "rect", { class: "selection", x: left, y: 16, width: right - left, height: chart.height - 56 });
  }

  // Show a part of the axis that holds at least two points of some curve.
  zoomTo(from, to) {
    const isEnough = this.charts.some((chart) => chart.stops().filter((at) => at >= from && at <= to).length > 1);
    this.change(isEnough ? { zoom: [from, to] } : {});
  }

  press(chart, event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const stops = chart.stops();
    const last = stops.length - 1;
    const now = this.view.cursor === null ? null : nearest(stops, this.view.cursor);
    const go = (by) => (now === null ? (by < 0 ? last : 0) : Math.min(Math.max(now + by, 0), last));
    const moves = {
      ArrowLeft: () => go(-1), ArrowRight: () => go(1), PageUp: () => go(-KEY_STRIDE), PageDown: () => go(KEY_STRIDE),
      Home: () => 0, End: () => last,
    };
    if (moves[event.key] && last >= 0) {
      this.moveCursor(stops[moves[event.key]()]);
      this.spoken.textContent = chart.describe();
    } else if (event.key === "+" || event.key === "-") {
      this.scaleBy(event.key === "+" ? 0.5 : 2);
    } else if (event.key === "Escape") {
      this.change({ zoom: null });
    } else {
      return;
    }
    event.preventDefault();
  }

  // Enlarge or shrink around the cursor.
  scaleBy(factor) {
    const [from, to] = this.view.domain;
    const [low, high] = this.view.whole;
    const centre = this.view.cursor ?? (from + to) / 2;
    const zoom = [Math.max(low, centre - (centre - from) * factor), Math.min(high, centre + (to - centre) * factor)];
    if (zoom[0] <= low && zoom[1] >= high) this.change({ zoom: null });
    else this.zoomTo(...zoom);
  }
}

// Sample images: a slider chooses the step.
function showImages(data) {
  for (const figure of document.querySelectorAll("figure[data-images]")) {
    const set = data.images[figure.dataset.run][figure.dataset.images];
    const slider = figure.querySelector("input");
    if (!slider) continue;
    slider.closest("label").hidden = false;
    slider.value = slider.max;
    slider.addEventListener("input", () => {
      const place = Number(slider.value);
      figure.querySelector("output").textContent = set.steps[place].toLocaleString("en");
      slider.setAttribute("aria-valuetext", `step ${set.steps[place]}`);
      const row = figure.querySelector(".row");
      row.replaceChildren();
      set.images[place].forEach((source, index) =>
        add(row, "img", { src: source, alt: `${figure.dataset.images}, sample ${index + 1}` }));
    });
  }
}

const data = JSON.parse(document.getElementById("data").textContent);
showImages(data);
window.report = new Page(data);
document.documentElement.dataset.ready = Math.round(performance.now()); // ms from the request to charts that are drawn
