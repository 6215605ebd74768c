"use strict";
// Axes: where the ticks of a range are, how numbers are written, and what pixel a value is at.

// A scale maps [low, high] to [from, to], by factors if `log`; `invert` maps back.
function makeScale(low, high, from, to, log) {
  const place = log ? Math.log10 : (value) => value;
  const value = log ? (position) => 10 ** position : (position) => position;
  const start = place(low), factor = (to - from) / (place(high) - start);
  const scale = (v) => from + (place(v) - start) * factor;
  scale.invert = (pixel) => value(start + (pixel - from) / factor);
  return Object.assign(scale, { low, high, log });
}

// About `count` multiples of 1, 2 or 5 times a power of ten.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

// Powers of ten with their 2 and 5 where there is room; less than a decade is like a linear axis.
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

// Six digits at most; a real minus sign.
function writeNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) {
    return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "\u2212");
  }
  return String(Number(value.toPrecision(6))).replace("-", "\u2212");
}

// Below this no number is left between two pixels.
const TINY = 1e-290;

// Whether a value has a place on an axis: by factors, only what is above zero.
const fits = (value, log) => !log || value > TINY;

// The smallest and the largest of `values`, with a margin for the eye; never empty.
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
