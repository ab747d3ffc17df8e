// Axes: where ticks stand, and how numbers and times are written. Pure functions.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

// A linear or logarithmic map from values to pixels.
function makeScale(low, high, from, to, isLog) {
  const at = isLog ? Math.log10 : (value) => value;
  const [a, b] = [at(low), at(high)];
  const scale = (value) => from + ((at(value) - a) / (b - a)) * (to - from);
  scale.invert = (pixel) => {
    const value = a + ((pixel - from) / (to - from)) * (b - a);
    return isLog ? 10 ** value : value;
  };
  return Object.assign(scale, { low, high, isLog });
}

// About `count` round values between low and high.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) ticks.push(place * step);
  return ticks;
}

// Powers of ten, with 2 and 5 times them where there is room.
function logTicks(low, high, count) {
  const ticks = [];
  const decades = Math.log10(high) - Math.log10(low);
  const factors = decades * 3 <= count * 1.5 ? [1, 2, 5] : [1];
  const stride = factors.length > 1 ? 1 : Math.max(1, Math.ceil(decades / count));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += stride) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

// Ticks at round seconds, minutes, hours or days, and the unit they are written in.
function timeTicks(low, high, count) {
  const [size, unit] = UNITS.find(([seconds]) => high - low >= 2 * seconds) || UNITS[3];
  return { ticks: linearTicks(low / size, high / size, count).map((tick) => tick * size), size, unit };
}

// A number for people: four significant digits, thousands set apart.
function formatNumber(value) {
  if (value === null || !Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

// The texts of ticks, as short as can be; on a linear axis all of them count in the same thousands or millions.
function formatTicks(ticks, isLog = false) {
  const largest = Math.max(...ticks.map(Math.abs));
  return ticks.map((tick) => formatTick(tick, isLog ? Math.abs(tick) : largest));
}

function formatTick(value, size) {
  if (Math.abs(value) < size * 1e-12 || value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(6))} M`.replace("-", "−");
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(6))} k`.replace("-", "−");
  const text = size < 0.9999e-4 ? Number(value.toPrecision(6)).toExponential() : String(Number(value.toPrecision(6)));
  return text.replaceAll("-", "−");
}

function formatSeconds(seconds) {
  const [size, unit] = UNITS.find(([least]) => seconds >= least) || UNITS[3];
  const value = seconds / size;
  return `${value >= 100 ? Math.round(value) : Number(value.toFixed(1))} ${unit}`;
}

// The place of the value in a rising list that is nearest to x.
function nearest(values, x) {
  let [low, high] = [0, values.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - values[low - 1] <= values[low] - x ? low - 1 : low;
}

