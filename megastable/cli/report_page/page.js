"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const COLORS = ["#3b82f6", "#e8833a"];
  const OTHER_COLORS = ["#8b95a1", "#b99a7d"];
  const PLAN_COLOR = "#9a6bd8";
  const EVENT_COLORS = ["#d93a4a", "#8a5cd6", "#0f9d8a", "#c78a00", "#d6468f", "#6b8e23", "#4a7fb5", "#a0522d"];
  const ROWS_AT_ONCE = 200;
  const PANEL_PIXELS = 190;
  const VIEW_SHARE = 0.1;
  // Plotly's bar has a button that sends the data to its makers' servers, unless it is told not to.
  const CONFIG = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };

  // Plotly reads a few HTML tags in its texts: none of a run's own text may be one.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, most) => (text.length > most ? text.slice(0, most) + " …" : text);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isNarrow = () => window.innerWidth < 640;
  const add = (parent, tag, text) => {
    const child = document.createElement(tag);
    if (text !== undefined) child.textContent = text;
    parent.append(child);
    return child;
  };

  let axis = data.axes[0].key;
  let range = null; // of the axis; null for the whole run
  let chosen = null; // index of an event

  const kinds = [...new Set(data.events.map((event) => event.kind))];
  const kindColor = (kind) => EVENT_COLORS[kinds.indexOf(kind) % EVENT_COLORS.length];
  const axisLabel = () => data.axes.find((each) => each.key === axis).label;
  const run = data.runs[0];
  const sources = [...data.runs.map((each) => each.lines), data.plan.lines];
  const panels = data.panels.filter((panel) => panel.lines.some((line) => sources.some((lines) => lines[line.key])));

  // Curves

  function trace(curve, panel, index, name, color, dash) {
    const suffix = index === 0 ? "" : index + 1;
    const isSparse = curve.y.length < 60;
    return {
      type: "scatter", x: curve.x[axis], y: curve.y, yaxis: "y" + suffix, legend: "legend" + suffix, name: plain(name),
      // consumed_samples counts to the end of a step, so that its value reaches back to the step before.
      mode: isSparse ? "lines+markers" : "lines", marker: { size: 4 }, connectgaps: false,
      line: { color, width: 1.5, dash, shape: panel.stepped ? "vh" : "linear" },
    };
  }

  function curveTraces() {
    const traces = [];
    panels.forEach((panel, index) => {
      panel.lines.forEach((line, place) => {
        data.runs.forEach((each, number) => {
          const curve = each.lines[line.key];
          if (!curve) return;
          const name = number === 0 ? line.name : `${cut(each.name, 20)}: ${line.name}`;
          const color = (number === 0 ? COLORS : OTHER_COLORS)[place];
          traces.push(trace(curve, panel, index, name, color, number === 0 ? "solid" : "dash"));
        });
        const curve = data.plan.lines[line.key];
        if (curve && curve.x[axis]) {
          const planned = trace(curve, panel, index, "planned", PLAN_COLOR, "dot");
          traces.push({ ...planned, mode: "lines" });
        }
      });
    });
    return panels.length > 0 ? [...traces, ...eventTraces()] : traces;
  }

  function valueAt(x) {
    const curve = run.lines[panels[0].lines[0].key];
    if (!curve) return 0;
    let value = null;
    for (let i = 0; i < curve.y.length; i++) {
      if (curve.x[axis][i] > x && value !== null) break;
      if (curve.y[i] !== null) value = curve.y[i];
    }
    return value;
  }

  function eventTraces() {
    return kinds.map((kind) => {
      const events = data.events.map((event, index) => ({ ...event, index })).filter((event) => event.kind === kind && event.x);
      return {
        type: "scatter", mode: "markers", showlegend: false, name: plain(kind), hoverinfo: "text",
        x: events.map((event) => event.x[axis]), y: events.map((event) => valueAt(event.x[axis])),
        text: events.map((event) => plain(`${event.kind}: ${cut(event.text, 100)}`)),
        customdata: events.map((event) => event.index),
        marker: { color: kindColor(kind), size: 10, symbol: "diamond", line: { width: 1, color: css("--ground") } },
      };
    });
  }

  function baseLayout(height) {
    return {
      height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: isNarrow() ? "pan" : "zoom",
      font: { color: css("--text"), size: 12 }, hoverlabel: { bgcolor: css("--ground"), font: { color: css("--text") } },
      margin: { l: isNarrow() ? 48 : 70, r: isNarrow() ? 8 : 20, t: 80, b: 45 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--accent") },
      xaxis: {
        title: { text: axisLabel() }, gridcolor: css("--line"), zeroline: false, nticks: isNarrow() ? 4 : 10,
        ...(range ? { range: [...range] } : { autorange: true }),
      },
      shapes: chosen === null ? [] : [{
        type: "line", yref: "paper", y0: 0, y1: 1, x0: data.events[chosen].x[axis], x1: data.events[chosen].x[axis],
        line: { color: kindColor(data.events[chosen].kind), width: 1.5, dash: "dot" },
      }],
    };
  }

  function curveLayout() {
    const height = panels.length * PANEL_PIXELS + 125;
    const layout = { ...baseLayout(height), hovermode: "closest", annotations: [] };
    const gap = 55 / (PANEL_PIXELS * panels.length);
    panels.forEach((panel, index) => {
      const suffix = index === 0 ? "" : index + 1;
      const top = 1 - index / panels.length;
      const bottom = 1 - (index + 1) / panels.length + (index + 1 < panels.length ? gap : 0);
      layout["yaxis" + suffix] = {
        domain: [Math.max(0, bottom), top], type: panel.log ? "log" : "linear", gridcolor: css("--line"), zeroline: false,
        nticks: 5, exponentformat: "power",
      };
      layout["legend" + suffix] = {
        orientation: "h", x: isNarrow() ? 0 : 1, xanchor: isNarrow() ? "left" : "right", y: top, yanchor: "bottom",
        font: { size: 11 }, bgcolor: "rgba(0,0,0,0)",
      };
      layout.annotations.push({
        text: `<b>${plain(panel.title)}</b>`, showarrow: false, xref: "paper", x: 0, xanchor: "left", yref: "paper", y: top,
        yanchor: "bottom", yshift: isNarrow() ? 20 : 4,
      });
    });
    layout.xaxis.anchor = "y" + (panels.length > 1 ? panels.length : "");
    return layout;
  }

  // Layers

  function heatTraces() {
    const map = data.heat_map.maps[element("value").selectedIndex];
    const x = data.heat_map.x[axis];
    const layers = data.heat_map.layers.map((name) => plain(cut(name, 40)));
    const isNumber = (cell) => typeof cell === "number" && cell > 0;
    const z = map.cells.map((line) => line.map((cell) => (isNumber(cell) ? Math.log10(cell) : null)));
    const known = z.flat().filter((value) => value !== null);
    const low = known.reduce((least, value) => Math.min(least, value), Infinity);
    const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
    const ticks = known.length === 0 ? [] : [0, 1, 2, 3].map((part) => low + ((high - low) * part) / 3);
    const text = map.cells.map((line, row) => line.map((cell, column) =>
      `${layers[row]}<br>${plain(axisLabel())} ${x[column]}<br>${plain(map.title)} ${cell === null ? "not measured" : cell}`));
    const crosses = { x: [], y: [] };
    map.cells.forEach((line, row) => line.forEach((cell, column) => {
      if (cell !== "not finite") return;
      crosses.x.push(x[column]);
      crosses.y.push(layers[row]);
    }));
    const bar = isNarrow()
      ? { orientation: "h", y: 1, yanchor: "bottom", thickness: 10, len: 0.9 }
      : { thickness: 14 };
    return [
      {
        type: "heatmap", x, y: layers, z, text, hoverinfo: "text", colorscale: "Viridis",
        colorbar: { ...bar, tickvals: ticks, ticktext: ticks.map((value) => (10 ** value).toPrecision(2)) },
      },
      {
        type: "scatter", mode: "markers", ...crosses, showlegend: false, hoverinfo: "skip",
        marker: { symbol: "x", color: "#ef4444", size: 8 },
      },
    ];
  }

  function heatLayout() {
    const layout = baseLayout(Math.max(220, data.heat_map.layers.length * 22 + 125));
    layout.yaxis = { type: "category", autorange: "reversed", automargin: true, tickfont: { size: 11 }, gridcolor: css("--line") };
    return layout;
  }

  const hasLayers = data.heat_map.maps.length > 0;

  function draw() {
    if (panels.length > 0) Plotly.react("curves", curveTraces(), curveLayout(), CONFIG);
    if (hasLayers) Plotly.react("heat", heatTraces(), heatLayout(), CONFIG);
  }

  function follow(change) {
    // The other plot follows a zoom or a pan of this one.
    if (change["xaxis.autorange"]) range = null;
    else if ("xaxis.range[0]" in change) range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else return;
    draw();
  }

  // Events

  function span() {
    const ends = Object.values(run.lines).map((curve) => curve.x[axis]);
    const last = Math.max(...ends.map((x) => x[x.length - 1]));
    return last - Math.min(...ends.map((x) => x[0])) || 1;
  }

  function goTo(index) {
    const event = data.events[index];
    if (!event.x) return;
    chosen = index;
    const half = (span() * VIEW_SHARE) / 2;
    range = [event.x[axis] - half, event.x[axis] + half];
    draw();
    document.querySelectorAll("#rows tr").forEach((row) => row.classList.toggle("chosen", row.dataset.event === String(index)));
  }

  let shownRows = ROWS_AT_ONCE;

  function fillEvents() {
    const kind = element("kind").value;
    const wanted = data.events.map((event, index) => ({ ...event, index }))
      .filter((event) => kind === "" || kinds[Number(kind)] === event.kind);
    element("rows").replaceChildren();
    wanted.slice(0, shownRows).forEach((event) => {
      const row = add(element("rows"), "tr");
      row.dataset.event = event.index;
      const step = event.step === null ? "-" : event.step.toLocaleString("en");
      const first = add(row, "td");
      if (event.x) {
        const button = add(first, "button", step);
        button.type = "button";
        // A click on the button, which the keyboard reaches, comes to the row as well.
        row.className = "leads";
        row.addEventListener("click", () => { goTo(event.index); element("curves").scrollIntoView({ block: "start" }); });
      } else first.textContent = step;
      const second = add(row, "td");
      const dot = add(second, "span", "");
      dot.className = "dot";
      dot.style.background = kindColor(event.kind);
      second.append(cut(event.kind, 60));
      const third = add(row, "td");
      add(third, "span", event.text);
      row.classList.toggle("chosen", event.index === chosen);
      if (event.data) add(third, "small", event.data);
    });
    element("more").hidden = wanted.length <= shownRows;
    element("more").textContent = `more (${(wanted.length - shownRows).toLocaleString("en")})`;
  }

  // The page

  function option(select, value, text) {
    add(select, "option", text).value = value;
  }

  element("name").textContent = run.name;
  element("status").textContent = data.status;
  data.notes.forEach((note) => add(element("notes"), "li", note));
  data.axes.forEach((each) => option(element("axis"), each.key, each.label));
  data.heat_map.maps.forEach((map, index) => option(element("value"), index, map.title));
  option(element("kind"), "", "all");
  kinds.forEach((kind, index) => option(element("kind"), index, cut(kind, 60)));
  element("layers").hidden = !hasLayers;
  element("events").hidden = data.events.length === 0;
  element("no-events").hidden = data.events.length > 0;
  element("config").textContent = data.config;
  element("plan-note").textContent = data.plan.note;
  element("plan").hidden = data.plan.rows.length === 0;
  data.plan.rows.forEach((values) => {
    const row = add(element("plan-rows"), "tr");
    values.forEach((value) => add(row, "td", value));
  });
  if (data.runs.length > 1) {
    element("compared").hidden = false;
    element("compared").textContent = `Dashed: ${data.runs[1].name}.`;
  }
  if (panels.length === 0) element("curves").textContent = "No step yet.";

  draw();
  fillEvents();
  if (panels.length > 0) {
    element("curves").on("plotly_relayout", follow);
    element("curves").on("plotly_click", (click) => {
      const index = click.points[0].customdata;
      if (index !== undefined) goTo(index);
    });
  }
  if (hasLayers) element("heat").on("plotly_relayout", follow);
  element("axis").addEventListener("change", () => {
    axis = element("axis").value;
    range = null; // its numbers were those of the axis before
    draw();
  });
  element("value").addEventListener("change", draw);
  element("whole").addEventListener("click", () => { range = null; chosen = null; draw(); fillEvents(); });
  element("kind").addEventListener("change", () => { shownRows = ROWS_AT_ONCE; fillEvents(); });
  element("more").addEventListener("click", () => { shownRows += ROWS_AT_ONCE; fillEvents(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    // A phone's address bar changes the height alone.
    if (window.innerWidth !== width) { width = window.innerWidth; draw(); }
  });
})();
