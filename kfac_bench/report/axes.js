"use strict";
// Axes: the ticks of a range, the text of a number, and the pixel of a value.

// A scale maps values from [low, high] to pixels in [from, to]; `invert` maps pixels to values.
// With `log` equal factors of the value are equal distances.
function makeScale(low, high, from, to, log) {
  const place = log ? Math.log10 : (value) => value;
  const value = log ? (position) => 10 ** position : (position) => position;
  const start = place(low), factor = (to - from) / (place(high) - start);
  const scale = (v) => from + (place(v) - start) * factor;
  scale.invert = (pixel) => value(start + (pixel - from) / factor);
  return Object.assign(scale, { low, high, log });
}

// Return about `count` ticks: multiples of 1, 2 or 5 times a power of ten.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

// Return powers of ten, with 2 and 5 between them if there is room. A range of less than a decade
// has the ticks of a linear axis.
function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / count));
  const among = (factors) => {
    const ticks = [];
    for (let p = first; p <= last; p += every) ticks.push(...factors.map((f) => f * 10 ** p));
    return ticks.filter((tick) => tick >= low * 0.999999 && tick <= high * 1.000001);
  };
  const fine = every === 1 ? among([1, 2, 5]) : [];
  if (fine.length >= 3 && fine.length <= 1.5 * count) return fine;
  const coarse = among([1]);
  return coarse.length >= 3 ? coarse : linearTicks(low, high, count);
}

// Write a number with six digits at most, and with a real minus sign.
function writeNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) {
    return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "\u2212");
  }
  return String(Number(value.toPrecision(6))).replace("-", "\u2212");
}

// Below this size floating-point numbers become too coarse to calculate pixels from.
const TINY = 1e-290;

// Whether an axis can show a value. A logarithmic axis shows only values above zero.
const fits = (value, log) => !log || value > TINY;

// Return the range of `values` with a margin at both ends. The range is never empty.
function extent(values, log, margin) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!fits(value, log)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) {
    const wider = 10 ** Math.max((Math.log10(high) - Math.log10(low)) * margin, 0.01);
    return [low / wider, high * wider];
  }
  const more = (high - low) * margin || Math.abs(high) * margin;
  const wider = more > TINY ? more : 1;
  return [low - wider, high + wider];
}
