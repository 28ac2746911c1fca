// Zooms into an interval of steps or of time, in all charts that share the axis: a drag or the keys + - arrows Esc.
// A chart is an element with data-axis, data-from and data-to. Its lines are in nested <svg> elements, which are 2,000
// units wide; the texts below are in <g class="x">, those of a scale of values, data-low to data-high, in <g class="y">,
// and its lines in <g class="rules">.
(() => {
  "use strict";
  const WIDTH = 2000, HEIGHT = 1000, FINEST = 1 / 1000;
  const UNITS = [["s", 0, 1], ["min", 180, 60], ["h", 10800, 3600]];
  const charts = [...document.querySelectorAll("[data-axis]")].map(read);
  const shown = {};
  const bar = document.querySelector("main").appendChild(document.createElement("div"));
  const words = bar.appendChild(document.createElement("span"));
  const button = bar.appendChild(document.createElement("button"));

  function read(box) {
    const data = box.dataset;
    const drawings = [...box.querySelectorAll("svg svg")];
    return {
      box, drawings, axis: data.axis, from: Number(data.from), to: Number(data.to), log: "log" in data,
      heights: drawings.map((one) => one.viewBox.baseVal.height),
      low: Number(data.low), high: Number(data.high),
      lines: "low" in data ? [...box.querySelectorAll(".curve, .band")].map(points) : null,
      marks: ["x", "y", "rules"].map((name) => box.querySelector("g." + name)).map((group) => [group, group && [...group.childNodes]]),
    };
  }

  // The corners of a path: absolute after M, then relative.
  function points(path) {
    return path.getAttribute("d").split("M").slice(1).map((piece) => {
      const found = piece.match(/[+-]?\d+/g).map(Number);
      const corners = [found.slice(0, 2)];
      for (let at = 2; at + 1 < found.length; at += 2) {
        const [x, y] = corners[corners.length - 1];
        corners.push([x + found[at], y + found[at + 1]]);
      }
      return corners;
    });
  }

  function whole(axis) {
    const own = charts.filter((chart) => chart.axis === axis);
    return [Math.min(...own.map((chart) => chart.from)), Math.max(...own.map((chart) => chart.to))];
  }

  function zoom(axis, low, high) {
    const [least, most] = whole(axis);
    const size = Math.min(Math.max(high - low, (most - least) * FINEST), most - least);
    const begin = Math.min(Math.max(low, least), most - size);
    if (size < most - least) shown[axis] = [begin, begin + size];
    else delete shown[axis];
    charts.filter((chart) => chart.axis === axis).forEach(draw);
    const parts = Object.entries(shown).map(([name, [a, b]]) =>
      name === "steps" ? `steps ${number(a)} to ${number(b)}` : `${moment(a, b - a)} to ${moment(b, b - a)}`);
    words.textContent = parts.length ? `Shown: ${parts.join("; ")}` : "";
    button.hidden = !parts.length;
    bar.classList.toggle("on", parts.length > 0);
  }

  function draw(chart) {
    const [low, high] = shown[chart.axis] ?? [chart.from, chart.to];
    const scale = WIDTH / (chart.to - chart.from);
    const left = (low - chart.from) * scale, width = (high - low) * scale;
    const [top, height] = shown[chart.axis] && chart.lines ? visible(chart.lines, left, left + width) : [0, HEIGHT];
    chart.drawings.forEach((one, place) => {
      const rows = chart.lines ? `${top} ${width} ${height}` : `0 ${width} ${chart.heights[place]}`;
      one.setAttribute("viewBox", `${left} ${rows}`);
    });
    chart.box.classList.toggle("zoomed", chart.axis in shown);
    const [[x, ofX], [y], [rules]] = chart.marks;
    if (!(chart.axis in shown)) {
      chart.marks.forEach(([group, old]) => group?.replaceChildren(...old));
      return;
    }
    if (x) below(chart, x, ofX, low, high);
    if (y) beside(chart, y, rules, top, height);
  }

  // The top and the height of what lies between two places of a chart, with a margin.
  function visible(lines, left, right) {
    const found = lines.flat().flatMap((line) => line.filter(([x], at) =>
      (line[at + 1]?.[0] ?? x) >= left && (line[at - 1]?.[0] ?? x) <= right)).map(([, y]) => y);
    if (!found.length) return [0, HEIGHT];
    const low = Math.min(...found), size = Math.max(Math.max(...found) - low, HEIGHT / 100);
    return [low - 0.05 * size, 1.1 * size];
  }

  function below(chart, group, old, low, high) {
    const time = chart.axis !== "steps";
    const unit = time ? UNITS.findLast(([, least]) => high - low >= least)[2] : 1;
    const found = round(low / unit, high / unit, 3).filter((value) => time || Number.isInteger(value));
    group.replaceChildren(...found.map((value) => {
      const share = (value * unit - low) / (high - low);
      const anchor = share < 0.1 ? "start" : share > 0.9 ? "end" : "middle";
      const text = time ? moment(value * unit, high - low) : number(value);
      return mark(text, { x: `${100 * share}%`, y: old.at(-1)?.getAttribute("y") ?? 17, "text-anchor": anchor });
    }));
  }

  function beside(chart, texts, rules, top, height) {
    const [from, to] = chart.log ? [Math.log10(chart.low), Math.log10(chart.high)] : [chart.low, chart.high];
    const value = (at) => { const own = from + (to - from) * (1 - at / HEIGHT); return chart.log ? 10 ** own : own; };
    const low = value(top + height), high = value(top);
    const powers = Array.from({ length: 40 }, (_, at) => 10 ** (Math.floor(Math.log10(low)) + at));
    const decades = chart.log && high / low > 30 ? powers.filter((own) => own > low && own < high) : null;
    const plot = chart.drawings[0], above = plot.y.baseVal.value, pixels = plot.height.baseVal.value;
    const found = (decades ?? round(low, high, 4)).map((own) => {
      const share = (to - (chart.log ? Math.log10(own) : own)) / (to - from);
      return [own, above + pixels * (share * HEIGHT - top) / height];
    });
    texts.replaceChildren(...found.map(([own, y]) => mark(number(own), { x: -6, y: y + 4, "text-anchor": "end" })));
    const ends = { class: "grid", x1: 0, x2: "100%" };
    rules.replaceChildren(...found.map(([, y]) => mark("", { ...ends, y1: y, y2: y }, "line")));
  }

  function mark(text, attributes, name = "text") {
    const made = document.createElementNS(document.querySelector("svg").namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  }

  // Round values between two, about so many.
  function round(low, high, most) {
    const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * 0.999);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => Number(((first + at) * step).toPrecision(12)));
  }

  function number(value) {
    const size = Math.abs(value);
    if (value && (size < 1e-3 || size >= 1e7)) return String(Number(value.toPrecision(5)).toExponential()).replace("e+", "e");
    return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 6 : size < 1000 ? 4 : 0 });
  }

  // A time, as precisely as an interval of so many seconds needs it.
  function moment(seconds, span) {
    const whole = span < 180 ? Number(seconds.toFixed(span < 20 ? 1 : 0)) : 60 * Math.round(seconds / 60);
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60, rest = Number((whole % 60).toFixed(1));
    const parts = [hours && `${hours.toLocaleString("en")} h`, minutes && `${minutes} min`, rest && `${rest} s`];
    return parts.filter(Boolean).join(" ") || "0";
  }

  // Where a chart is drawn: its texts about values are in the padding.
  function inside(drawing) {
    const { left, top, width, height } = drawing.getBoundingClientRect();
    const padding = parseFloat(getComputedStyle(drawing).paddingLeft);
    return new DOMRect(left + padding, top, width - padding, height);
  }

  function reset() {
    Object.keys(shown).forEach((axis) => zoom(axis, -Infinity, Infinity));
  }

  function listen(chart) {
    const { box, axis } = chart;
    let drag = null;
    box.tabIndex = 0;
    box.setAttribute("aria-keyshortcuts", "+ - ArrowLeft ArrowRight Escape");
    box.addEventListener("keydown", (event) => {
      const [low, high] = shown[axis] ?? whole(axis), size = high - low;
      const moves = {
        "+": [size / 4, -size / 4], "=": [size / 4, -size / 4], "-": [-size / 2, size / 2],
        ArrowLeft: [-size / 4, -size / 4], ArrowRight: [size / 4, size / 4],
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
      event.preventDefault();
      zoom(axis, low + moves[event.key][0], high + moves[event.key][1]);
    });
    box.addEventListener("dblclick", reset);
    box.addEventListener("pointerdown", (event) => {
      const drawing = event.button === 0 && event.target.closest("svg:not(svg svg)");
      if (drawing) drag = { at: event.clientX, place: inside(drawing) };
    });
    box.addEventListener("pointermove", (event) => {
      if (!drag || Math.abs(event.clientX - drag.at) < 4) return;
      drag.frame ??= document.body.appendChild(document.createElement("div"));
      box.setPointerCapture(event.pointerId);
      const [left, right] = ends(event);
      drag.frame.className = "drag";
      Object.assign(drag.frame.style, {
        left: `${left}px`, width: `${right - left}px`, top: `${drag.place.top}px`, height: `${drag.place.height}px`,
      });
    });
    const stop = (event) => {
      if (drag?.frame) {
        drag.frame.remove();
        const [low, high] = shown[axis] ?? [chart.from, chart.to];
        const value = (x) => low + (high - low) * (x - drag.place.left) / drag.place.width;
        if (event.type === "pointerup") zoom(axis, ...ends(event).map(value));
      }
      drag = null;
    };
    const ends = (event) => {
      const x = Math.min(Math.max(event.clientX, drag.place.left), drag.place.right);
      return [Math.min(x, drag.at), Math.max(x, drag.at)];
    };
    box.addEventListener("pointerup", stop);
    box.addEventListener("pointercancel", stop);
  }

  // Of several runs, the one whose entry of the legend is pointed at is shown alone.
  function pick(run) {
    document.querySelectorAll(".curve[data-run]").forEach((line) =>
      line.classList.toggle("away", run !== undefined && line.dataset.run !== run));
  }

  document.querySelectorAll("li[data-run]").forEach((entry) => {
    entry.tabIndex = 0;
    ["pointerenter", "focus"].forEach((name) => entry.addEventListener(name, () => pick(entry.dataset.run)));
    ["pointerleave", "blur"].forEach((name) => entry.addEventListener(name, () => pick()));
  });
  bar.className = "zoombar";
  button.hidden = true;
  words.setAttribute("role", "status");
  button.textContent = "Show all";
  button.addEventListener("click", reset);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") reset(); });
  charts.forEach(listen);
  document.querySelectorAll(".hint").forEach((hint) => { hint.hidden = !charts.length; });
})();
