// Draws the curves of a report and reacts to its controls; needs no library.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const state = {smoothing: 0, logX: false, logY: false, range: null};
const hidden = new Set();  // Indices of runs that are switched off.
const WIDTH = 460, HEIGHT = 280;
const LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 36;
const tip = document.getElementById("tip");

function element(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function format(value) {
  if (value === null || !isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(3).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size && size < 0.001) return (+value.toPrecision(4)).toExponential();
  return String(+value.toPrecision(4));
}

function axisLabel(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= 10 * unit) return +(value / unit).toPrecision(4) + letter;
  }
  if (size >= 1000) return value.toLocaleString("en-US");
  if (size && size < 0.001) {
    return value.toExponential().replace(/(\.\d\d)\d*/, "$1");
  }
  return String(+value.toPrecision(6));
}

// An average with weights that decay exponentially into the past, divided by
// their sum, so that it is right from the first value on.
function smooth(values) {
  const keep = state.smoothing;
  if (!keep) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + 1 - keep;
    return sum / weight;
  });
}

function ticks(low, high, isLog, count) {
  const result = [];
  if (isLog) {
    const decades = Math.log10(high / low);
    const every = Math.ceil(decades / count);
    const factors = decades < 1.5 ? [1, 2, 5] : [1];
    const first = Math.floor(Math.log10(low));
    for (let e = first; e <= Math.log10(high); e += every) {
      for (const factor of factors) {
        const value = +(factor * 10 ** e).toPrecision(3);
        if (value >= low && value <= high) result.push(value);
      }
    }
    if (result.length > 1) return result;
    result.length = 0;
  }
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((s) => s >= raw);
  for (let i = Math.ceil(low / step); i <= high / step + 1e-9; i++) {
    result.push(+(i * step).toPrecision(12));
  }
  return result;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// Maps values to pixels. Logarithmic only if there are positive values.
function scale(values, isLog, from, to, zero) {
  const usable = values.filter((v) => v !== null && (!isLog || v > 0));
  if (isLog && !usable.length) return scale(values, false, from, to, zero);
  let [low, high] = usable.length ? extent(usable) : [0, 1];
  if (zero && !isLog) low = Math.min(low, 0);
  if (low === high) {
    const margin = Math.abs(low) * 0.1 || 1;
    [low, high] = isLog ? [low / 2, high * 2] : [low - margin, high + margin];
  }
  const map = isLog ? Math.log : (v) => v;
  const [a, b] = [map(low), map(high)];
  const toPixel = (v) => from + (to - from) * (map(v) - a) / (b - a);
  const fromPixel = (p) => {
    const v = a + (b - a) * (p - from) / (to - from);
    return isLog ? Math.exp(v) : v;
  };
  return {
    at: toPixel, back: fromPixel, low, high, isLog,
    accepts: (v) => v !== null && (!isLog || v > 0),
  };
}

function path(x, y, xs, ys) {
  let text = "", pen = "M";
  xs.forEach((step, i) => {
    if (!x.accepts(step) || !y.accepts(ys[i])) { pen = "M"; return; }
    text += `${pen}${x.at(step).toFixed(1)} ${y.at(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return text;
}

function shown(panel) {
  return panel.series.filter((s) => !hidden.has(s.run)).map((s) => {
    const averaged = smooth(s.y);
    if (!state.range) return {...s, raw: s.y, y: averaged};
    const [low, high] = state.range;
    const inside = s.x.map((step) => step >= low && step <= high);
    const cut = (values) => values.filter((_, i) => inside[i]);
    return {...s, x: cut(s.x), raw: cut(s.y), y: cut(averaged)};
  });
}

function draw(panel, index) {
  const svg = document.getElementById(`chart-${index}`);
  svg.replaceChildren();
  const series = shown(panel);
  const steps = series.flatMap((s) => s.x);
  const values = series.flatMap((s) => s.raw);
  const x = scale(steps, state.logX, LEFT, WIDTH - RIGHT, false);
  const y = scale(values, state.logY, HEIGHT - BOTTOM, TOP + 6, panel.zero);
  for (const value of ticks(y.low, y.high, y.isLog, 5)) {
    const at = y.at(value);
    element(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at,
      class: "rule"});
    element(svg, "text", {x: LEFT - 7, y: at + 4, "text-anchor": "end"},
      axisLabel(value));
  }
  for (const value of ticks(x.low, x.high, x.isLog, 5)) {
    const at = x.at(value);
    element(svg, "line", {x1: at, x2: at, y1: HEIGHT - BOTTOM,
      y2: HEIGHT - BOTTOM + 4, class: "tick"});
    element(svg, "text", {x: at, y: HEIGHT - BOTTOM + 17,
      "text-anchor": "middle"}, axisLabel(value));
  }
  element(svg, "line", {x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM,
    y2: HEIGHT - BOTTOM, class: "tick"});
  element(svg, "text", {x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4,
    "text-anchor": "middle"}, "step");
  element(svg, "text", {x: 12, y: (TOP + HEIGHT - BOTTOM) / 2,
    "text-anchor": "middle", transform:
    `rotate(-90 12 ${(TOP + HEIGHT - BOTTOM) / 2})`}, panel.unit);
  for (const s of series) {
    if (state.smoothing) {
      element(svg, "path", {d: path(x, y, s.x, s.raw), stroke: s.color,
        class: "curve faint"});
    }
    element(svg, "path", {d: path(x, y, s.x, s.y), stroke: s.color,
      "stroke-dasharray": s.dash, class: "curve", "data-run": s.run});
    if (s.x.length <= 30) {
      s.x.forEach((step, i) => {
        if (x.accepts(step) && y.accepts(s.y[i])) {
          element(svg, "circle", {cx: x.at(step), cy: y.at(s.y[i]), r: 2.6,
            fill: s.color});
        }
      });
    }
  }
  if (!values.length) {
    element(svg, "text", {x: WIDTH / 2, y: HEIGHT / 2,
      "text-anchor": "middle"}, "no values");
  }
  const line = element(svg, "line", {y1: TOP, y2: HEIGHT - BOTTOM,
    class: "cursor"});
  const box = element(svg, "rect", {y: TOP, height: HEIGHT - BOTTOM - TOP,
    class: "zoom"});
  listen(svg, x, series, line, box);
}

// Hovering shows the values of the nearest step; dragging zooms all charts.
function listen(svg, x, series, line, box) {
  const pixel = (event) => {
    const bounds = svg.getBoundingClientRect();
    return (event.clientX - bounds.left) / bounds.width * WIDTH;
  };
  let start = null;
  svg.onpointerdown = (event) => { start = pixel(event); };
  svg.onpointermove = (event) => {
    const at = pixel(event);
    if (start !== null) {
      box.setAttribute("x", Math.min(start, at));
      box.setAttribute("width", Math.abs(at - start));
    }
    hover(event, x.back(at), x, series, line);
  };
  svg.onpointerleave = () => {
    tip.hidden = true;
    line.style.visibility = "hidden";
    start = null;
    box.setAttribute("width", 0);
  };
  svg.onpointerup = (event) => {
    const end = pixel(event);
    if (start !== null && Math.abs(end - start) > 8) {
      state.range = [x.back(start), x.back(end)].sort((a, b) => a - b);
      tip.hidden = true;
      drawAll();
    }
    start = null;
  };
  svg.ondblclick = () => { state.range = null; drawAll(); };
}

function hover(event, target, x, series, line) {
  let nearest = null;
  for (const s of series) {
    for (const step of s.x) {
      if (!x.accepts(step)) continue;
      if (nearest === null ||
          Math.abs(step - target) < Math.abs(nearest - target)) {
        nearest = step;
      }
    }
  }
  if (nearest === null) return;
  line.setAttribute("x1", x.at(nearest));
  line.setAttribute("x2", x.at(nearest));
  line.style.visibility = "visible";
  tip.replaceChildren();
  const head = document.createElement("div");
  head.textContent = `step ${nearest.toLocaleString("en-US")}`;
  tip.appendChild(head);
  for (const s of series) {
    // The series' own newest value at or before the step.
    let i = -1;
    while (i + 1 < s.x.length && s.x[i + 1] <= nearest) i++;
    if (i < 0) continue;
    const row = document.createElement("div");
    const dot = document.createElement("span");
    dot.className = "dot";
    dot.style.background = s.color;
    const averaged = state.smoothing ? ` (smoothed ${format(s.y[i])})` : "";
    const when = s.x[i] === nearest ? "" : ` at step ${s.x[i]}`;
    row.append(dot, `${s.label} ${format(s.raw[i])}${averaged}${when}`);
    tip.appendChild(row);
  }
  tip.hidden = false;
  const isRight = event.pageX > document.documentElement.clientWidth / 2;
  const left = event.pageX + (isRight ? -tip.offsetWidth - 14 : 14);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${event.pageY + 14}px`;
}

function drawAll() { data.panels.forEach(draw); }

function toggle(run, on) {
  if (on) hidden.delete(run); else hidden.add(run);
  for (const node of document.querySelectorAll(`.of-run-${run}`)) {
    node.hidden = !on;
  }
}

const slider = document.getElementById("smoothing");
slider.oninput = () => {
  state.smoothing = +slider.value;
  document.getElementById("smoothing-value").textContent = slider.value;
  drawAll();
};
for (const [id, key] of [["log-x", "logX"], ["log-y", "logY"]]) {
  document.getElementById(id).onchange = (event) => {
    state[key] = event.target.checked;
    drawAll();
  };
}
document.getElementById("reset").onclick = () => {
  state.range = null;
  drawAll();
};
const switches = [...document.querySelectorAll("input.switch")];
for (const input of switches) {
  input.onchange = () => {
    toggle(+input.value, input.checked);
    drawAll();
  };
  if (!input.checked) toggle(+input.value, false);  // After a reload.
}
for (const [id, on] of [["all", true], ["none", false]]) {
  const button = document.getElementById(id);
  if (button) button.onclick = () => {
    for (const input of switches) {
      input.checked = on;
      toggle(+input.value, on);
    }
    drawAll();
  };
}
// A reloaded page keeps the values of its inputs.
state.smoothing = +slider.value;
document.getElementById("smoothing-value").textContent = slider.value;
state.logX = document.getElementById("log-x").checked;
state.logY = document.getElementById("log-y").checked;
drawAll();
})();
