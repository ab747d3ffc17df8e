// What the page does besides what plotly.js does: one axis and one cursor for all charts, keys, and a voice for both.
"use strict";
(() => {
const CONFIG = {
  displaylogo: false, doubleClick: "reset", responsive: true, plotlyServerURL: "",
  modeBarButtonsToRemove: ["sendChartToCloud", "autoScale2d", "select2d", "lasso2d"], // nothing leaves the page
};
const KEY_STRIDE = 10; // points that PageUp and PageDown move by
const DRAG = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
const PRINTED_WIDTH = 320; // pixels: two charts beside each other on a page
const HOVER_DELAY = 100; // ms: plotly.js shows the label of a point within them
const { figures, images } = JSON.parse(document.getElementById("data").textContent);
const charts = [...document.querySelectorAll(".plot")];
const hidden = new Set();
let [axis, cursor, isZooming, speech] = ["steps", null, false, null];

function draw() {
  charts.forEach((chart, place) => {
    const { data, layout } = structuredClone(figures[axis][place]);
    for (const part of [...data, ...layout.shapes, ...layout.annotations]) part.visible = !hidden.has(part.run);
    Plotly.react(chart, data, { ...layout, dragmode: DRAG, uirevision: axis }, CONFIG);
  });
}

const shown = (chart) => chart.data.filter((trace) => trace.visible === true && trace.yaxis !== "y2");
const wholeRange = () => figures[axis][0].layout.xaxis.range;

// Show a part of the axis in all charts, each with the values that it has there.
async function zoomTo(from, to) {
  isZooming = true;
  await Promise.all(charts.map((chart) => {
    const { type, rangemode } = chart.layout.yaxis;
    const at = type === "log" ? Math.log10 : (value) => value;
    const values = shown(chart).flatMap(({ x, y }) => y.filter((value, i) => value !== null && x[i] >= from && x[i] <= to)).map(at);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (rangemode === "tozero") low = Math.min(0, low);
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    const fitted = values.length ? { "yaxis.range": [low && low - margin, high + margin] } : {};
    return Plotly.relayout(chart, { "xaxis.range": [from, to], ...fitted });
  }));
  isZooming = false;
}

function moveCursor(at) {
  cursor = at;
  for (const chart of charts) {
    if (at === null) Plotly.Fx.unhover(chart);
    else Plotly.Fx.hover(chart, { xval: at });
  }
}

// What stands at the cursor, as a sentence.
function describe(chart) {
  const values = [...chart.querySelectorAll(".hoverlayer .legendtitletext, .hoverlayer .legendtext")].map((text) => text.textContent);
  const marks = chart.layout.annotations.filter((mark) => mark.visible && mark.x === cursor).map((mark) => mark.spoken);
  return [`${chart.dataset.title}, ${values.join(", ")}`, ...marks].join("; ");
}

function press(chart, event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const [from, to] = chart.layout.xaxis.range;
  const isSeen = (at) => at !== null && at >= from && at <= to;
  const stops = [...new Set(shown(chart).flatMap((trace) => trace.x))].filter(isSeen).sort((a, b) => a - b);
  const last = stops.length - 1;
  const now = stops.findLastIndex((at) => cursor !== null && at <= cursor);
  const moves = {
    ArrowLeft: cursor === null ? last : now - 1, ArrowRight: now + 1, PageUp: now - KEY_STRIDE, PageDown: now + KEY_STRIDE,
    Home: 0, End: last,
  };
  if (event.key in moves && last >= 0) {
    moveCursor(stops[Math.min(Math.max(moves[event.key], 0), last)]);
    clearTimeout(speech);
    speech = setTimeout(() => { document.getElementById("spoken").textContent = describe(chart); }, HOVER_DELAY);
  } else if (event.key === "+" || event.key === "-") {
    const [low, high] = wholeRange();
    const centre = cursor ?? (from + to) / 2;
    const factor = event.key === "+" ? 0.5 : 2;
    zoomTo(Math.max(low, centre - (centre - from) * factor), Math.min(high, centre + (to - centre) * factor));
  } else if (event.key === "Escape") {
    zoomTo(...wholeRange());
  } else {
    return;
  }
  event.preventDefault();
}

function listen(chart) {
  chart.on("plotly_hover", ({ xvals }) => charts.filter((other) => other !== chart).forEach((other) => Plotly.Fx.hover(other, { xval: xvals[0] })));
  chart.on("plotly_unhover", () => moveCursor(null));
  chart.on("plotly_relayout", (event) => {
    if (!isZooming && Object.keys(event).some((key) => key.startsWith("xaxis.range"))) zoomTo(...chart.layout.xaxis.range);
  });
  chart.addEventListener("keydown", (event) => press(chart, event));
  chart.addEventListener("blur", () => moveCursor(null));
}

function begin() {
  document.querySelector(".toolbar").hidden = false;
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.checked = radio.value === axis; // a reloaded page remembers another
    radio.addEventListener("change", () => { axis = radio.value; moveCursor(null); draw(); });
  }
  for (const box of document.querySelectorAll("input[name=run]")) {
    box.checked = true;
    box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](Number(box.value)); draw(); });
  }
  for (const [when, width] of [["beforeprint", PRINTED_WIDTH], ["afterprint", null]]) {
    window.addEventListener(when, () => charts.forEach((chart) => Plotly.relayout(chart, { width, autosize: !width })));
  }
  draw();
  charts.forEach(listen);
}

// Sample images: a slider chooses the step.
function showImages(figure) {
  const set = images[figure.dataset.run][figure.dataset.images];
  const slider = figure.querySelector("input");
  if (!slider) return;
  slider.closest("label").hidden = false;
  slider.value = slider.max;
  slider.addEventListener("input", () => {
    const place = Number(slider.value);
    figure.querySelector("output").textContent = set.steps[place].toLocaleString("en");
    slider.setAttribute("aria-valuetext", `step ${set.steps[place]}`);
    figure.querySelector(".row").replaceChildren(...set.images[place].map((src, index) =>
      Object.assign(new Image(), { src, alt: `${figure.dataset.images}, sample ${index + 1}` })));
  });
}

document.querySelectorAll("figure[data-images]").forEach(showImages);
if (charts.length) begin();
document.documentElement.dataset.ready = Math.round(performance.now()); // ms from the request to charts that are drawn
})();
