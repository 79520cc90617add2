// The script of a report's page: values under the pointer, a part of a chart drawn large, and losses smoothed or over a
// logarithmic axis.
const zooms = {};  // title of a chart -> the values at its left and right edge; kept while the page follows a run
const TOP = 10, BOTTOM = 34, LEFT = 62, RIGHT = 12;  // the margins of charts.py
const words = JSON.parse(document.body.dataset.words);  // in the language of the page
let choosing = false;  // whether the mouse is about to choose a part of a chart
let pointed = null;  // the title of the chart under the pointer and the place there; kept while the page follows a run
const smoothing = document.getElementById("smoothing"), logarithmic = document.getElementById("logarithmic");
let charts = [];  // a function for each chart that draws it again
for (const control of [smoothing, logarithmic]) control.addEventListener("input", () => charts.forEach(draw => draw()));
function round(value) {
  const size = Math.abs(value);
  if (size >= 1e12) return +(value / 1e12).toPrecision(4) + "T";
  if (size >= 1e9) return +(value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
  return size && size < 1e-3 ? value.toExponential(2) : (+value.toPrecision(4)).toLocaleString("en");
}
function ticks(low, high, count) {
  const rough = (high - low) / count, size = 10 ** Math.floor(Math.log10(rough)), found = [];
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * size).find(each => each >= rough * 0.999);
  for (let at = Math.ceil(low / step - 1e-9); at <= Math.floor(high / step + 1e-9); at++) found.push(at * step);
  return found;
}
function logTicks(low, high) {
  if (high / low < 8) return ticks(low, high, 5);
  const factors = high / low < 1000 ? [1, 2, 5] : [1], found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    found.push(...factors.map(each => each * 10 ** power).filter(each => each >= low && each <= high));
  return found;
}
function smoothed(values, weight) {  // a moving average whose beginning is corrected, as TensorBoard's
  let sum = 0;
  return values.map((value, at) => {
    sum = weight * sum + (1 - weight) * value;
    return sum / (1 - weight ** (at + 1));
  });
}
function followPointers() { charts = []; for (const svg of document.querySelectorAll("svg.chart")) {
  const whole = JSON.parse(svg.dataset.lines), [right, low, high] = JSON.parse(svg.dataset.range);
  const view = svg.viewBox.baseVal, title = svg.getAttribute("aria-label"), group = svg.querySelector(".pointer");
  const floor = view.height - BOTTOM, width = view.width - LEFT - RIGHT, drawn = svg.querySelector(".drawn");
  const untouched = drawn.innerHTML, isLoss = svg.closest("figure").classList.contains("losses");
  const measured = whole.map(line => line.value.map(Number)), isPositive = measured.flat().every(value => value > 0);
  let lines = whole, pressed = null;
  const make = (parent, name, attributes, text) => {
    const made = parent.appendChild(document.createElementNS(svg.namespaceURI, name));
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text) made.textContent = text;
    return made;
  };
  const isShown = line => { const box = document.getElementById("run" + line.run); return !box || box.checked; };
  const place = event => {
    const box = svg.getBoundingClientRect();
    return (event.clientX - box.left) / box.width * view.width;
  };
  const valueAt = x => {
    const [from, to] = zooms[title] || [0, right];
    return from + Math.min(1, Math.max(0, (x - LEFT) / width)) * (to - from);
  };
  const draw = () => {
    drawn.innerHTML = untouched;
    lines = whole;
    const weight = isLoss ? Number(smoothing.value) : 0, isLog = isLoss && logarithmic.checked && isPositive;
    if (!zooms[title] && !weight && !isLog) return;
    const [from, to] = zooms[title] || [0, right];
    const first = LEFT + from / right * width, last = LEFT + to / right * width;
    const curves = [...drawn.querySelectorAll(".curve")];
    const scale = value => isLog ? Math.log10(value) : Math.min(high, Math.max(low, value));
    const values = measured.map((each, at) => weight && !curves[at].matches(".check") ? smoothed(each, weight) : each);
    let bottom = low, top = high;
    if (zooms[title] || isLog) {
      const seen = whole.flatMap((line, at) => isShown(line) ? values[at].filter((value, each) =>
        line.x[each] >= first && line.x[each] <= last) : []);
      const heights = (seen.length ? seen : values.flat()).map(scale);
      [bottom, top] = [Math.min(...heights), Math.max(...heights)];
      const margin = 0.05 * (top - bottom) || 0.05 * Math.abs(top) || 1;
      bottom -= margin; top += margin;
    }
    const xOf = x => LEFT + (x - first) / (last - first) * width;
    const yOf = value => floor - (scale(value) - bottom) / (top - bottom) * (floor - TOP);
    lines = whole.map((line, at) => ({...line, x: line.x.map(xOf), y: values[at].map(yOf), drawn: values[at]}));
    const pathOf = (line, heights) => line.x.map((x, at) => x.toFixed(1) + "," + heights[at].toFixed(1)).join(" ");
    curves.forEach((curve, at) => {
      const points = lines[at].x.map((x, each) => [x, lines[at].y[each]]);
      const path = curve.querySelector("polyline");
      if (path && values[at] !== measured[at]) {
        const behind = curve.insertBefore(path.cloneNode(), path);
        behind.setAttribute("class", "measured");
        behind.setAttribute("points", pathOf(lines[at], measured[at].map(yOf)));
      }
      if (path) path.setAttribute("points", pathOf(lines[at], lines[at].y));
      curve.querySelectorAll("circle").forEach((dot, each) => {
        dot.setAttribute("cx", points[each][0]);
        dot.setAttribute("cy", points[each][1]);
      });
    });
    for (const mark of drawn.querySelectorAll("[data-x]")) {
      const x = Number(mark.dataset.x), shift = xOf(x) - x;
      mark.setAttribute("transform", "translate(" + shift.toFixed(1) + ",0)");
      if (x < first || x > last) mark.remove();
    }
    const axis = drawn.querySelector(".ticks");
    axis.replaceChildren();
    for (const value of isLog ? logTicks(10 ** bottom, 10 ** top) : ticks(bottom, top, 5)) {
      const y = floor - ((isLog ? Math.log10(value) : value) - bottom) / (top - bottom) * (floor - TOP);
      make(axis, "line", {class: "grid", x1: LEFT, x2: view.width - RIGHT, y1: y, y2: y});
      make(axis, "text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, round(value));
    }
    for (const value of ticks(from, to, 6)) {
      const x = LEFT + (value - from) / (to - from) * width;
      make(axis, "text", {x, y: floor + 16, "text-anchor": x > view.width - 40 ? "end" : "middle"}, round(value));
    }
  };
  const point = x => {
    const near = [];
    for (const line of lines) {
      if (!line.x.length || !isShown(line)) continue;
      let best = 0;
      line.x.forEach((place, at) => { if (Math.abs(place - x) < Math.abs(line.x[best] - x)) best = at; });
      near.push([line, best]);
    }
    if (!near.length) return;
    const values = near.map(([line, at]) => line.name + " "
      + words.point.replace("VALUE", line.value[at]).replace("PLACE", line.at[at])
      + (line.drawn && String(line.drawn[at]) !== String(Number(line.value[at]))
        ? ", " + words.smoothed + " " + +line.drawn[at].toPrecision(5) : ""));
    const widthOf = text => [...text].reduce((sum, letter) => sum + (letter > "\u2e80" ? 12.5 : 6.4), 0);
    const wide = Math.max(...values.map(widthOf)) + 24;
    const left = x > view.width / 2 ? x - wide - 8 : x + 8;
    make(group, "line", {x1: x, x2: x, y1: TOP, y2: floor});
    near.forEach(([line, at]) => make(group, "circle", {cx: line.x[at], cy: line.y[at], r: 3.5,
      class: "run" + line.run % 8, fill: "var(--colour)"}));
    make(group, "rect", {x: left, y: 12, width: wide, height: values.length * 16 + 8, rx: 4});
    values.forEach((word, row) => {
      const kind = "run" + near[row][0].run % 8;
      make(group, "circle", {cx: left + 10, cy: 24 + row * 16, r: 4, class: kind, fill: "var(--colour)"});
      make(group, "text", {x: left + 19, y: 28 + row * 16}, word);
    });
  };
  svg.addEventListener("pointerleave", () => {
    if (!svg.isConnected) return;  // the page has replaced it, and the pointer is still there
    group.replaceChildren();
    pressed = pointed = null;
    choosing = false;
  });
  svg.addEventListener("pointerdown", event => { pressed = place(event); choosing = true; });
  svg.addEventListener("pointermove", event => {
    const x = place(event);
    group.replaceChildren();
    pointed = {title, x};
    if (pressed === null) return point(x);
    const box = {x: Math.min(x, pressed), width: Math.abs(x - pressed), y: TOP, height: floor - TOP};
    make(group, "rect", {...box, class: "chosen"});
  });
  svg.addEventListener("pointerup", event => {
    const from = pressed, to = place(event);
    pressed = null;
    choosing = false;
    group.replaceChildren();
    if (from === null || Math.abs(to - from) < 8) return;
    zooms[title] = [valueAt(Math.min(from, to)), valueAt(Math.max(from, to))];
    draw();
  });
  svg.addEventListener("dblclick", () => { delete zooms[title]; draw(); });
  charts.push(draw);
  draw();
  if (pointed && pointed.title === title) point(pointed.x);
} }
followPointers();
